use super::*;
use engram_testing::tokens::{Signer, encode};
use serde_json::{Value, json};

const NOW: u64 = 1_800_000_000;
const HERE: &str = "engram/0000000000000000000000000000002a";
const ISSUER: &str = "https://kubernetes.default.svc";

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(NOW)
}

fn signer() -> Signer {
    Signer::new("first")
}

fn issuer(signer: &Signer) -> Issuer {
    parsed(&signer.keys()).unwrap()
}

fn parsed(keys: &Value) -> Result<Issuer, Error> {
    Issuer::parse(format!("{ISSUER}\n").as_bytes(), keys.to_string().as_bytes())
}

fn body() -> Value {
    json!({
        "iss": ISSUER, "aud": [HERE], "sub": "system:serviceaccount:research:trainer",
        "iat": NOW - 10, "nbf": NOW - 10, "exp": NOW + 600,
        "kubernetes.io": { "namespace": "research", "pod": { "name": "trainer-0", "uid": "7d" } },
    })
}

#[test]
fn valid_token_names_its_account_and_its_pod() {
    let signer = signer();
    let claims = issuer(&signer).verify(&signer.token(&body()), HERE, now()).unwrap();
    assert_eq!(claims.account, Account { namespace: "research".into(), name: "trainer".into() });
    assert_eq!(claims.pod, Some(BoundPod { name: "trainer-0".into(), uid: "7d".into() }));
    assert_eq!(claims.until, now() + Duration::from_secs(600));
    let mut loose = body();
    (loose["aud"], loose["nbf"], loose["kubernetes.io"]) = (json!(HERE), Value::Null, Value::Null);
    assert!(issuer(&signer).verify(&signer.token(&loose), HERE, now()).is_ok(), "one audience is one");
}

#[test]
fn each_fault_has_its_own_rejection() {
    let signer = signer();
    let issuer = issuer(&signer);
    let why = |token: &str| issuer.verify(token, HERE, now()).unwrap_err();
    let rejection = |change: &dyn Fn(&mut Value)| {
        let mut body = body();
        change(&mut body);
        let error = why(&signer.token(&body));
        (error.reason, error.text)
    };
    for (change, reason, needed) in [
        (
            &(|it: &mut Value| it["iss"] = json!("https://elsewhere")) as &dyn Fn(&mut Value),
            Reason::TokenIssuer,
            ISSUER,
        ),
        (&|it| it["iss"] = Value::Null, Reason::TokenIssuer, ISSUER),
        (&|it| it["aud"] = json!(["engram/0000000000000000000000000000002b"]), Reason::TokenAudience, HERE),
        (&|it| it["aud"] = json!([]), Reason::TokenAudience, HERE),
        (&|it| it["aud"] = Value::Null, Reason::TokenAudience, HERE),
        (&|it| it["exp"] = json!(NOW), Reason::TokenExpired, "new one"),
        (&|it| it["exp"] = json!(NOW - 3_600), Reason::TokenExpired, "3600 s ago"),
        (&|it| it["exp"] = Value::Null, Reason::TokenMalformed, "exp"),
        (&|it| it["exp"] = json!(-1), Reason::TokenMalformed, "exp"),
        (&|it| it["nbf"] = json!(NOW + 61), Reason::TokenNotYetValid, "clocks"),
        (&|it| it["nbf"] = json!(1e300), Reason::TokenNotYetValid, "clocks"),
        (&|it| it["sub"] = json!("ann"), Reason::TokenAccount, "ServiceAccount"),
        (&|it| it["sub"] = json!("system:serviceaccount:research:"), Reason::TokenAccount, "ServiceAccount"),
        (&|it| it["sub"] = Value::Null, Reason::TokenAccount, "ServiceAccount"),
        (&|it| *it = json!([]), Reason::TokenMalformed, "token"),
    ] {
        let (found, text) = rejection(change);
        assert_eq!(found, reason, "{text}");
        assert!(text.contains(needed), "{text}");
    }
    let mut early = body();
    early["nbf"] = json!(NOW + 60);
    assert!(issuer.verify(&signer.token(&early), HERE, now()).is_ok(), "clocks differ");
}

#[test]
fn token_cannot_choose_its_algorithm_or_key() {
    let (signer, other) = (signer(), signer());
    let issuer = issuer(&signer);
    let why = |token: &str| issuer.verify(token, HERE, now()).unwrap_err().reason;
    let named = |alg: &str, kid: Value| signer.sign(&json!({ "alg": alg, "kid": kid }), &body());
    for alg in ["none", "HS256", "RS512", ""] {
        assert_eq!(why(&named(alg, json!("first"))), Reason::TokenAlgorithm, "{alg}");
    }
    assert_eq!(why(&named("RS256", json!("first"))), Reason::TokenAlgorithm, "it is not that of the key");
    assert_eq!(why(&named("ES256", json!("second"))), Reason::TokenKey);
    assert_eq!(why(&named("ES256", Value::Null)), Reason::TokenKey);
    assert_eq!(why(&other.token(&body())), Reason::TokenSignature);
    let unsigned = format!("{}.{}.", encode(json!({ "alg": "none" }).to_string()), encode(body().to_string()));
    assert_eq!(why(&unsigned), Reason::TokenAlgorithm);

    // Another payload with a valid signature.
    let good = signer.token(&body());
    let mut admin = body();
    admin["sub"] = json!("system:serviceaccount:research:admin");
    let parts: Vec<&str> = good.split('.').collect();
    let forged = format!("{}.{}.{}", parts[0], encode(admin.to_string()), parts[2]);
    assert_eq!(why(&forged), Reason::TokenSignature);
    for cut in ["", ".", "..", "a.b.c", &good[..good.len() - 4], &format!("{good}.x"), &good.replacen('.', "", 1)] {
        let reason = why(cut);
        assert!(matches!(reason, Reason::TokenMalformed | Reason::TokenSignature), "{cut}: {reason:?}");
    }
}

#[test]
fn keys_of_an_api_server_are_parsed_and_others_skipped() {
    let signer = signer();
    // A published RSA key, from a public example (RFC 7517, A.1).
    let rsa = json!({
        "kty": "RSA", "alg": "RS256", "kid": "2011-04-29", "e": "AQAB", "use": "sig",
        "n": "0vx7agoebGcQSuuPiLJXZptN9nndrQmbXEps2aiAFbWhM78LhWx4cbbfAAtVT86zwu1RK7aPFFxuhDR1L6tSoc_BJECPebWKRXjBZCiFV4n3oknjhMstn64tZ_2W-5JsGY4Hc5n9yBXArwl93lqt7_RN5w6Cf0h4QyQ5v-65YGjQR0_FDW2QvzqY368QQMicAtaSqzs8KJZgnYb9c7d0zgdAZHzu6qMQvRL5hajrn1n91CbOpbISD08qNLyrdkt-bFTWhAI4vMQFh6WeZu0fM4lFd2NcRwr3XPksINHaQ-G_xBniIqbw0Ls1jF44-csFCur-kEgU8awapJzKnqDKgw",
    });
    let issuer = parsed(&json!({ "keys": [rsa, signer.jwk(), { "kty": "oct", "k": "AA" }] })).unwrap();
    assert_eq!(issuer.keys.len(), 2);
    assert_eq!(issuer.keys["2011-04-29"].algorithm(), "RS256");
    let error = issuer.verify(&signer.sign(&json!({ "alg": "RS256", "kid": "2011-04-29" }), &body()), HERE, now());
    assert_eq!(error.unwrap_err().reason, Reason::TokenSignature);
    for none in [json!({ "keys": [] }), json!({ "keys": [{ "kty": "oct" }] }), json!({}), json!([])] {
        assert!(parsed(&none).is_err(), "{none}");
    }
    assert!(Issuer::parse(b" \n", json!({ "keys": [signer.jwk()] }).to_string().as_bytes()).is_err());
}

#[test]
fn new_keys_replace_old_ones_and_their_tokens() {
    let (old, new) = (signer(), Signer::new("second"));
    let folder = tempfile::tempdir().unwrap();
    let files = IssuerFiles { keys: folder.path().join("jwks.json"), issuer: folder.path().join("issuer") };
    let tokens = Tokens::open(&files, HERE.to_owned());
    let token = old.token(&body());
    let reason = |token: &str| tokens.verify(token, now()).map_err(|error| error.reason);
    assert_eq!(reason(&token), Err(Reason::TokenKey), "no key is known yet");
    let write = |keys: &Value| {
        std::fs::write(&files.issuer, ISSUER).unwrap();
        std::fs::write(&files.keys, keys.to_string()).unwrap();
        tokens.issuer.reload();
    };
    write(&json!({ "keys": [old.jwk()] }));
    assert!(reason(&token).is_ok());
    write(&json!({ "keys": "none" }));
    assert!(reason(&token).is_ok(), "invalid files change nothing");
    assert_eq!(tokens.failures(), 2);
    write(&json!({ "keys": [new.jwk()] }));
    assert_eq!(reason(&token), Err(Reason::TokenKey), "even if it was verified before");
    let later = new.token(&body());
    assert!(reason(&later).is_ok());
    let end = now() + Duration::from_secs(600);
    assert_eq!(tokens.verify(&later, end).unwrap_err().reason, Reason::TokenExpired, "cached tokens expire, too");
}

#[test]
fn unverified_token_names_its_cluster_and_lifetime() {
    let signer = signer();
    let token = signer.token(&body());
    assert_eq!(cluster_of(&token), Some(ClusterId(42)));
    assert_eq!(audience(ClusterId(42)), HERE);
    let begun = now() - Duration::from_secs(10);
    assert_eq!(life_of(&token), Some((Some(begun), now() + Duration::from_secs(600))));
    let mut both = body();
    both["aud"] = json!([HERE, "engram/0000000000000000000000000000002b"]);
    assert_eq!(cluster_of(&signer.token(&both)), None);
    assert_eq!(cluster_of("no token"), None);
}
