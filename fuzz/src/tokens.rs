//! Credentials that a client presents to a worker or coordinator: ServiceAccount tokens, and the files that they are checked against.

use engram_api::kubernetes_only::Right;
use engram_api::{AccessList, ManifestEnum as _, RequiredRight};
use engram_identity::token::{Claims, Issuer, TokenRejection, cluster_of, life_of};
use engram_testing::tokens::{Signer, encode};
use serde_json::{Map, Value, json};
use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

/// Required issuer of every token.
pub const ISSUER: &str = "https://kubernetes.default.svc";
/// Required audience.
pub const AUDIENCE: &str = "engram/0000000000000000000000000000002a";
/// Time of the check, in seconds since 1970.
pub const NOW: u64 = 1_800_000_000;
/// Allowed clock skew of a token's start, in seconds.
const SKEW: f64 = 60.0;
/// Maximum number of keys tried per set.
const MOST_KEYS: usize = 4;

/// The public half of a discarded key, and the only token that it has signed: no input can contain another one.
pub const KEYS: &str = r#"{"keys":[{"kty":"EC","crv":"P-256","alg":"ES256","kid":"first","use":"sig","x":"a87cacC7DSD6_D3bM0Iw8ChYbT9PlfemIIlIj2ZT5dw","y":"PSRIVoqNUEy0-2Az5pLu9u8bSzjvgxSk97dNIRBoCgc"}]}"#;
/// The token signed by the key in [`KEYS`].
pub const TOKEN: &str = concat!(
    "eyJhbGciOiJFUzI1NiIsImtpZCI6ImZpcnN0In0.eyJpc3MiOiJodHRwczovL2t1YmVybmV0ZXMuZGVmYXVsdC5zdmMiLCJhdWQiOlsiZW5ncm",
    "FtLzAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDJhIl0sInN1YiI6InN5c3RlbTpzZXJ2aWNlYWNjb3VudDpyZXNlYXJjaDp0cmFpbmVy",
    "IiwiaWF0IjoxNzk5OTk5OTkwLCJuYmYiOjE3OTk5OTk5OTAsImV4cCI6MTgwMDAwMDYwMCwia3ViZXJuZXRlcy5pbyI6eyJuYW1lc3BhY2UiOi",
    "JyZXNlYXJjaCIsInBvZCI6eyJuYW1lIjoidHJhaW5lci0wIiwidWlkIjoiN2QifX19.n5tV7cbdhBPZxhQ0O0ddSfzes_s3XxdsMOB6wysIU4P",
    "x-rLRVnuAaJAJKA5U7_OVQsIAhXTkSOH222srEuMW2g",
);

/// An issuer that signs any input.
static SIGNER: LazyLock<Signer> = LazyLock::new(|| Signer::new("first"));
/// Its parsed keys.
static SIGNING: LazyLock<Issuer> = LazyLock::new(|| parse_issuer(SIGNER.keys().to_string().as_bytes()));
/// Parsed [`KEYS`].
static SILENT: LazyLock<Issuer> = LazyLock::new(|| {
    let issuer = parse_issuer(KEYS.as_bytes());
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(NOW);
    issuer.verify(TOKEN, AUDIENCE, now).expect("the token is valid, otherwise this target checks nothing");
    issuer
});

fn parse_issuer(keys: &[u8]) -> Issuer {
    Issuer::parse(ISSUER.as_bytes(), keys).expect("the key is for ES256")
}

/// The first byte selects the kind of the rest.
pub(crate) fn account(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    match kind % 5 {
        0 => token(&String::from_utf8_lossy(bytes)),
        1 => body(bytes),
        2 => head(bytes),
        3 => keys(bytes),
        _ => access(bytes),
    }
}

fn verify(issuer: &Issuer, token: &str) -> Result<Claims, TokenRejection> {
    // The bearer parses the token as well.
    let _ = (cluster_of(token), life_of(token));
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(NOW);
    let found = issuer.verify(token, AUDIENCE, now);
    match &found {
        Ok(claims) => {
            assert!(claims.until > now);
            assert!(
                !claims.account.namespace.is_empty() && !claims.account.name.is_empty(),
                "{claims:?} has no account"
            );
            assert!(issuer.verify(token, AUDIENCE, claims.until).is_err(), "the token expires");
            assert!(
                issuer.verify(token, "engram/0000000000000000000000000000002b", now).is_err(),
                "the token is valid for one audience only"
            );
        }
        Err(refused) => assert!(!refused.text.is_empty() && refused.text.len() < 4_096, "{}", refused.text),
    }
    found
}

/// Text as a token of an issuer that has signed one.
fn token(text: &str) {
    if verify(&SILENT, text).is_ok() {
        assert_eq!(signed_part(text), signed_part(TOKEN), "the token is not signed");
    }
}

fn signed_part(token: &str) -> Option<&str> {
    token.rsplit_once('.').map(|(signed, _)| signed)
}

/// Claims of a correctly signed token.
fn body(bytes: &[u8]) {
    let head = json!({ "alg": "ES256", "kid": SIGNER.id }).to_string();
    let Ok(claims) = verify(&SIGNING, &SIGNER.sign_bytes(head.as_bytes(), bytes)) else { return };
    // Reference: parses the same claims in another way, as far as JSON allows.
    let Ok(said) = serde_json::from_slice::<Map<String, Value>>(bytes) else { return };
    assert_eq!(said["iss"], ISSUER);
    let audiences = said["aud"].as_array().map_or(std::slice::from_ref(&said["aud"]), Vec::as_slice);
    assert!(audiences.contains(&json!(AUDIENCE)), "{audiences:?}");
    let account = &claims.account;
    assert_eq!(said["sub"], format!("system:serviceaccount:{}:{}", account.namespace, account.name));
    let number = |name: &str| said.get(name).and_then(Value::as_f64);
    assert!(number("exp").is_some_and(|end| end > NOW as f64), "the token has not expired");
    assert!(number("nbf").is_none_or(|begin| begin <= NOW as f64 + SKEW), "the token is already valid");
    if let Some(name) = said.get("kubernetes.io").and_then(|kubernetes| kubernetes.get("pod")?.get("name")) {
        assert_eq!(claims.pod.map(|pod| json!(pod.name)).as_ref(), Some(name));
    }
}

/// Header of a token, with a correct signature.
fn head(bytes: &[u8]) {
    let body = TOKEN.split('.').nth(1).and_then(engram_testing::tokens::decode).expect("the token was created here");
    if verify(&SIGNING, &SIGNER.sign_bytes(bytes, &body)).is_ok()
        && let Ok(said) = serde_json::from_slice::<Map<String, Value>>(bytes)
    {
        assert_eq!((&said["alg"], &said["kid"]), (&json!("ES256"), &json!(SIGNER.id)));
    }
}

/// Bytes as the keys of an issuer, none of which has signed the tokens made here.
fn keys(bytes: &[u8]) {
    let issuer = match Issuer::parse(ISSUER.as_bytes(), bytes) {
        Ok(issuer) => issuer,
        Err(error) => return assert!(!error.to_string().is_empty(), "the error has a text"),
    };
    // In the published form: serde also accepts arrays for structs.
    let set: Value = serde_json::from_slice(bytes).unwrap_or_default();
    let Some(keys) = set["keys"].as_array().filter(|keys| keys.iter().all(Value::is_object)) else { return };
    if verify(&issuer, TOKEN).is_ok() {
        let own: Value = serde_json::from_str(KEYS).expect("the keys are JSON");
        let is_own = |key: &&Value| ["kid", "x", "y"].iter().all(|field| key[field] == own["keys"][0][field]);
        assert!(keys.iter().any(|key| is_own(&key)), "the signature matches a foreign key");
    }
    let body = TOKEN.split('.').nth(1).expect("a token has three parts");
    for key in keys.iter().take(MOST_KEYS) {
        let modulus = key["n"].as_str().map_or(0, str::len) * 3 / 4;
        for (algorithm, signature) in [("ES256", vec![0; 64]), ("RS256", vec![0; modulus]), ("RS256", one(modulus))] {
            let head = encode(json!({ "alg": algorithm, "kid": key["kid"] }).to_string());
            assert!(
                verify(&issuer, &format!("{head}.{body}.{}", encode(signature))).is_err(),
                "the token is not signed"
            );
        }
    }
}

/// Returns the number one in this many bytes, which equals its own powers.
fn one(bytes: usize) -> Vec<u8> {
    let mut number = vec![0; bytes];
    number.last_mut().into_iter().for_each(|last| *last = 1);
    number
}

/// Bytes as an access list: each account has exactly the listed rights.
fn access(bytes: &[u8]) {
    let list = match AccessList::parse(bytes) {
        Ok(list) => list,
        Err(error) => return assert!(!error.is_empty(), "the error has a text"),
    };
    let entries = list.entries();
    let json = serde_json::to_vec(&entries).expect("the list is serializable");
    assert_eq!(AccessList::parse(&json).as_ref(), Ok(&list), "a list round-trips through its file");
    for entry in &entries {
        let namespace = entry.namespace.as_deref().expect("each entry has a namespace");
        for right in Right::ALL {
            let may = list.check(namespace, &entry.service_account, RequiredRight::One(*right)).is_ok();
            let has = entry.rights.contains(right) || entry.rights.contains(&Right::Admin);
            assert_eq!(may, has, "{right} of {entry:?}");
        }
        let stranger = format!("{}-", entry.service_account);
        let is_there = entries.iter().any(|it| it.service_account == stranger && it.namespace == entry.namespace);
        assert_eq!(list.check(namespace, &stranger, RequiredRight::Any).is_ok(), is_there);
    }
}
