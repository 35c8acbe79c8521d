//! Tokens of Kubernetes' ServiceAccounts, verified with the issuer's public keys and without asking anybody: an API server that is away
//! locks nobody out, and a token stays good until it ends.
//!
//! Invariant: the algorithm is that of the key, never what the token says of itself.

use crate::refusal::Reason;
use crate::{Error, Followed};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use engram_memory::ClusterId;
use ring::signature::{ECDSA_P256_SHA256_FIXED, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// A token may begin so much later than now: clocks of machines differ. None is good past its end.
const SKEW: Duration = Duration::from_secs(60);
/// Good tokens that are remembered: their signatures need not be checked again.
const REMEMBERED: usize = 1_024;
/// How the subject of a ServiceAccount begins.
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// What a token must be for, to be taken by a cluster. One that was deleted and made again under the same name is another.
pub fn audience(cluster: ClusterId) -> String {
    format!("{AUDIENCE}{cluster}")
}

const AUDIENCE: &str = "engram/";

/// Which cluster a token is for, by what it says of itself: for whoever carries it, and must know whom to show it to. Nothing is
/// verified.
pub fn cluster_of(token: &str) -> Option<ClusterId> {
    let body: Body = decoded(token.trim().split('.').nth(1)?)?;
    let ids = body.aud?.into_iter().filter_map(|audience| audience.strip_prefix(AUDIENCE)?.parse().ok());
    let ids: Vec<ClusterId> = ids.collect();
    // For several clusters it is for none in particular.
    if let [id] = ids[..] { Some(id) } else { None }
}

/// Until when a token says that it is good, and since when. Nothing is verified.
pub fn life_of(token: &str) -> Option<(Option<SystemTime>, SystemTime)> {
    let body: Body = decoded(token.trim().split('.').nth(1)?)?;
    Some((body.iat.and_then(time), time(body.exp?)?))
}

/// Where the issuer of tokens is described.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct IssuerFiles {
    /// Its public keys, as a JSON Web Key Set.
    pub keys: PathBuf,
    /// Its name: what tokens have as `iss`.
    pub issuer: PathBuf,
}

/// A ServiceAccount.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Account {
    /// Its namespace.
    pub namespace: String,
    /// Its name in it.
    pub name: String,
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServiceAccount {}/{}", self.namespace, self.name)
    }
}

/// A pod that a token is bound to.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Bound {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

/// What a verified token says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// Whose it is.
    pub account: Account,
    /// The pod that it was given to, if it was.
    pub pod: Option<Bound>,
    /// Until when it is good.
    pub until: SystemTime,
}

/// Why a token is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Refused {
    /// For metrics.
    pub reason: Reason,
    /// For people: what is wrong and what is needed.
    pub text: String,
}

fn refused(reason: Reason, text: impl Into<String>) -> Refused {
    Refused { reason, text: text.into() }
}

/// Whose tokens are believed, as it is described now, and for which audience.
#[derive(Debug)]
pub struct Tokens {
    issuer: Arc<Followed<Known>>,
    audience: String,
}

/// An issuer, and which of its tokens were found good.
#[derive(Default)]
struct Known {
    issuer: Option<Issuer>,
    taken: Mutex<HashMap<String, Claims>>,
}

impl Tokens {
    /// Of the issuer that `files` describe. Until they are there, and good, no token is taken.
    pub fn open(files: &IssuerFiles, audience: String) -> Self {
        let parse = |contents: &[Vec<u8>]| {
            let issuer = Issuer::parse(&contents[0], &contents[1])?;
            Ok(Known { issuer: Some(issuer), taken: Mutex::default() })
        };
        let files = vec![files.issuer.clone(), files.keys.clone()];
        Self { issuer: Followed::open_or("keys of the issuer of tokens", files, parse, Known::default()), audience }
    }

    /// Looks at the files again and again. Needs a runtime.
    pub fn follow(&self) {
        self.issuer.follow();
    }

    /// How often a look found files of no use.
    pub fn failures(&self) -> u64 {
        self.issuer.failures()
    }

    /// Verifies a token.
    ///
    /// # Errors
    /// It is of another issuer or audience, not good now, or signed by nobody who is known.
    pub fn verify(&self, token: &str, now: SystemTime) -> Result<Claims, Refused> {
        let known = self.issuer.current();
        let Some(issuer) = &known.issuer else {
            return Err(refused(Reason::TokenKey, "no keys of an issuer of tokens are known here yet"));
        };
        let mut taken = known.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(claims) = taken.get(token).filter(|claims| claims.until > now) {
            return Ok(claims.clone());
        }
        drop(taken);
        let claims = issuer.verify(token, &self.audience, now)?;
        taken = known.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.len() >= REMEMBERED {
            taken.retain(|_, claims| claims.until > now);
        }
        if taken.len() < REMEMBERED {
            taken.insert(token.to_owned(), claims.clone());
        }
        Ok(claims)
    }
}

/// Who signs tokens.
#[derive(Debug)]
pub struct Issuer {
    name: String,
    keys: HashMap<String, Key>,
}

#[derive(Debug)]
enum Key {
    Rsa {
        modulus: Vec<u8>,
        exponent: Vec<u8>,
    },
    /// A point, uncompressed.
    P256(Vec<u8>),
}

#[derive(Deserialize)]
struct Set {
    keys: Vec<Jwk>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Jwk {
    kid: String,
    kty: String,
    alg: Option<String>,
    crv: String,
    n: String,
    e: String,
    x: String,
    y: String,
}

#[derive(Deserialize)]
struct Head {
    alg: String,
    kid: Option<String>,
}

#[derive(Deserialize)]
struct Body {
    iss: Option<String>,
    sub: Option<String>,
    #[serde(default, deserialize_with = "one_or_several")]
    aud: Option<Vec<String>>,
    exp: Option<f64>,
    nbf: Option<f64>,
    iat: Option<f64>,
    #[serde(rename = "kubernetes.io")]
    kubernetes: Option<Kubernetes>,
}

#[derive(Deserialize)]
struct Kubernetes {
    pod: Option<Bound>,
}

impl Issuer {
    /// Reads its name and its public keys, as an API server publishes them.
    ///
    /// # Errors
    /// There is no name, or no key of an algorithm that is known (RS256, ES256).
    pub fn parse(name: &[u8], keys: &[u8]) -> Result<Self, Error> {
        let name = String::from_utf8_lossy(name).trim().to_owned();
        if name.is_empty() {
            return Err(Error::unusable("the name of the issuer of tokens is empty"));
        }
        let set: Set = serde_json::from_slice(keys)
            .map_err(|error| Error::unusable(format!("the issuer's keys are no JSON Web Key Set: {error}")))?;
        let keys: HashMap<String, Key> = set.keys.iter().filter_map(|jwk| Some((jwk.kid.clone(), key(jwk)?))).collect();
        if keys.is_empty() {
            return Err(Error::unusable("none of the issuer's keys is one for RS256 or ES256"));
        }
        Ok(Self { name, keys })
    }

    /// Verifies a token: signed by one of its keys, for this audience, good now, of a ServiceAccount.
    ///
    /// # Errors
    /// It is not.
    pub fn verify(&self, token: &str, audience: &str, now: SystemTime) -> Result<Claims, Refused> {
        let malformed =
            || refused(Reason::TokenMalformed, "this is no token; needed: three parts, as Kubernetes signs them");
        let (signed, signature) = token.rsplit_once('.').ok_or_else(malformed)?;
        let (head, body) = signed.split_once('.').filter(|(_, body)| !body.contains('.')).ok_or_else(malformed)?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| malformed())?;
        let head: Head = decoded(head).ok_or_else(malformed)?;
        let algorithms = ["RS256", "ES256"];
        if !algorithms.contains(&head.alg.as_str()) {
            let text = format!("the token's algorithm is '{}'; allowed: RS256, ES256", shortened(&head.alg));
            return Err(refused(Reason::TokenAlgorithm, text));
        }
        let unknown =
            || refused(Reason::TokenKey, "the token is signed with a key that its issuer does not have (any more)");
        let key = head.kid.and_then(|id| self.keys.get(&id)).ok_or_else(unknown)?;
        if key.algorithm() != head.alg {
            let text = format!("the token's algorithm is {}, that of its key {}", head.alg, key.algorithm());
            return Err(refused(Reason::TokenAlgorithm, text));
        }
        if !key.has_signed(signed.as_bytes(), &signature) {
            return Err(refused(Reason::TokenSignature, "the token's signature is wrong"));
        }
        let body: Body = decoded(body).ok_or_else(malformed)?;
        self.check(body, audience, now)
    }

    /// Checks what a token says that this issuer has signed.
    fn check(&self, body: Body, audience: &str, now: SystemTime) -> Result<Claims, Refused> {
        let found = body.iss.unwrap_or_default();
        if found != self.name {
            let text = format!("the token's issuer is '{}'; needed: '{}'", shortened(&found), self.name);
            return Err(refused(Reason::TokenIssuer, text));
        }
        let audiences = body.aud.unwrap_or_default();
        if !audiences.iter().any(|found| found == audience) {
            let text = format!("the token's audience is '{}'; needed: '{audience}'", shortened(&audiences.join(", ")));
            return Err(refused(Reason::TokenAudience, text));
        }
        let endless = || refused(Reason::TokenMalformed, "the token has no end; needed: exp");
        let until = body.exp.and_then(time).ok_or_else(endless)?;
        if until <= now {
            let late = now.duration_since(until).unwrap_or_default().as_secs();
            return Err(refused(Reason::TokenExpired, format!("the token expired {late} s ago; ask for a new one")));
        }
        // In seconds: a time beyond what a clock can show is not one that has come.
        let seconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        if let Some(early) = body.nbf.map(|from| from - seconds).filter(|early| *early > SKEW.as_secs_f64()) {
            let text = format!("the token is good in {} s only; are the clocks right?", early as u64);
            return Err(refused(Reason::TokenNotYetValid, text));
        }
        let subject = body.sub.unwrap_or_default();
        let account = subject.strip_prefix(SERVICE_ACCOUNT).and_then(|rest| rest.split_once(':'));
        let Some((namespace, name)) = account.filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty())
        else {
            let text = format!("the token is of '{}'; needed: one of a ServiceAccount", shortened(&subject));
            return Err(refused(Reason::TokenAccount, text));
        };
        let account = Account { namespace: namespace.to_owned(), name: name.to_owned() };
        Ok(Claims { account, pod: body.kubernetes.and_then(|kubernetes| kubernetes.pod), until })
    }
}

impl Key {
    const fn algorithm(&self) -> &'static str {
        match self {
            Self::Rsa { .. } => "RS256",
            Self::P256(_) => "ES256",
        }
    }

    fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        match self {
            Self::Rsa { modulus: n, exponent: e } => {
                RsaPublicKeyComponents { n, e }.verify(&RSA_PKCS1_2048_8192_SHA256, message, signature)
            }
            Self::P256(point) => UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point).verify(message, signature),
        }
        .is_ok()
    }
}

/// A key of a kind that is known; others are passed over.
fn key(jwk: &Jwk) -> Option<Key> {
    let bytes = |text: &str| URL_SAFE_NO_PAD.decode(text).ok().filter(|bytes| !bytes.is_empty());
    let is = |algorithm: &str| jwk.alg.as_deref().is_none_or(|found| found == algorithm);
    match (jwk.kty.as_str(), jwk.crv.as_str()) {
        ("RSA", _) if is("RS256") => {
            // Numbers, which the library wants without zeros before them.
            let number =
                |text: &str| bytes(text).map(|bytes| bytes.into_iter().skip_while(|byte| *byte == 0).collect());
            Some(Key::Rsa { modulus: number(&jwk.n)?, exponent: number(&jwk.e)? })
        }
        ("EC", "P-256") if is("ES256") => {
            let (x, y) = (bytes(&jwk.x)?, bytes(&jwk.y)?);
            (x.len() == 32 && y.len() == 32).then(|| Key::P256([&[4], &x[..], &y[..]].concat()))
        }
        _ => None,
    }
}

/// A part of a token.
fn decoded<T: for<'a> Deserialize<'a>>(part: &str) -> Option<T> {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).ok()?).ok()
}

/// Seconds since 1970, of which a token may name fractions.
fn time(seconds: f64) -> Option<SystemTime> {
    let since = Duration::try_from_secs_f64(seconds).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(since)
}

fn one_or_several<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Texts {
        One(String),
        Several(Vec<String>),
    }
    Ok(Option::<Texts>::deserialize(deserializer)?.map(|texts| match texts {
        Texts::One(text) => vec![text],
        Texts::Several(texts) => texts,
    }))
}

/// What an error may show of a text that anybody may have written.
fn shortened(text: &str) -> String {
    text.chars().take(128).flat_map(char::escape_default).collect()
}

#[cfg(test)]
mod tests;
