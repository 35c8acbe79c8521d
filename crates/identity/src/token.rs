//! Kubernetes ServiceAccount tokens, verified offline with the issuer's public keys: an outage of the API server locks
//! no caller out, and a token stays valid until it expires.
//!
//! Invariant: the algorithm is that of the key, never the one that the token claims.

use crate::refusal::Reason;
use crate::{Error, WatchedFiles};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use engram_memory::ClusterId;
use parking_lot::Mutex;
use ring::signature::{ECDSA_P256_SHA256_FIXED, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// A token may be valid from so much later than now: clocks of machines differ. None is valid past its end.
const SKEW: Duration = Duration::from_secs(60);
/// Cached valid tokens, whose signatures need not be checked again.
const REMEMBERED: usize = 1_024;
/// Prefix of the subject of a ServiceAccount.
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// Returns the audience that a token must have for a cluster. A cluster recreated under the same name has another one.
pub fn audience(cluster: ClusterId) -> String {
    format!("{AUDIENCE}{cluster}")
}

const AUDIENCE: &str = "engram/";

/// Returns the cluster that an unverified token is for: its bearer needs it to choose the server.
pub fn cluster_of(token: &str) -> Option<ClusterId> {
    let body: Body = decode(token.trim().split('.').nth(1)?)?;
    let ids = body.aud?.into_iter().filter_map(|audience| audience.strip_prefix(AUDIENCE)?.parse().ok());
    let ids: Vec<ClusterId> = ids.collect();
    // A token for several clusters names none in particular.
    if let [id] = ids[..] { Some(id) } else { None }
}

/// Returns the start and end of validity of an unverified token.
pub fn life_of(token: &str) -> Option<(Option<SystemTime>, SystemTime)> {
    let body: Body = decode(token.trim().split('.').nth(1)?)?;
    Some((body.iat.and_then(time), time(body.exp?)?))
}

/// Files that describe the issuer of tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct IssuerFiles {
    /// Its public keys, as a JSON Web Key Set.
    pub keys: PathBuf,
    /// Its name: the `iss` claim.
    pub issuer: PathBuf,
}

/// A ServiceAccount.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Account {
    /// Namespace.
    pub namespace: String,
    /// Name in the namespace.
    pub name: String,
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServiceAccount {}/{}", self.namespace, self.name)
    }
}

/// The pod that a token is bound to.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct BoundPod {
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
}

/// Claims of a verified token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// Its account.
    pub account: Account,
    /// The pod that it is bound to, if any.
    pub pod: Option<BoundPod>,
    /// End of validity.
    pub until: SystemTime,
}

/// Why a token is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct TokenRejection {
    /// For metrics.
    pub reason: Reason,
    /// For users: what is wrong and what is needed.
    pub text: String,
}

fn rejection(reason: Reason, text: impl Into<String>) -> TokenRejection {
    TokenRejection { reason, text: text.into() }
}

/// Verifies tokens of an issuer for one audience.
#[derive(Debug)]
pub struct Tokens {
    issuer: Arc<WatchedFiles<IssuerState>>,
    audience: String,
}

/// An issuer, and the cache of its verified tokens.
#[derive(Default)]
struct IssuerState {
    issuer: Option<Issuer>,
    verified: Mutex<HashMap<String, Claims>>,
}

impl Tokens {
    /// Opens the issuer that `files` describe. Until they exist and are valid, no token is accepted.
    pub fn open(files: &IssuerFiles, audience: String) -> Self {
        let parse = |contents: &[Vec<u8>]| {
            let issuer = Issuer::parse(&contents[0], &contents[1])?;
            Ok(IssuerState { issuer: Some(issuer), verified: Mutex::default() })
        };
        let files = vec![files.issuer.clone(), files.keys.clone()];
        Self { issuer: WatchedFiles::open_or("token issuer keys", files, parse, IssuerState::default()), audience }
    }

    /// Reloads the files periodically. Needs a runtime.
    pub fn watch(&self) {
        self.issuer.watch();
    }

    /// Returns how often a reload failed.
    pub fn failures(&self) -> u64 {
        self.issuer.failures()
    }

    /// Verifies a token.
    ///
    /// # Errors
    /// It is of another issuer or audience, not currently valid, or signed with an unknown key.
    pub fn verify(&self, token: &str, now: SystemTime) -> Result<Claims, TokenRejection> {
        let state = self.issuer.current();
        let Some(issuer) = &state.issuer else {
            return Err(rejection(Reason::TokenKey, "the keys of the token issuer are not available yet"));
        };
        let mut verified = state.verified.lock();
        if let Some(claims) = verified.get(token).filter(|claims| claims.until > now) {
            return Ok(claims.clone());
        }
        drop(verified);
        let claims = issuer.verify(token, &self.audience, now)?;
        verified = state.verified.lock();
        if verified.len() >= REMEMBERED {
            verified.retain(|_, claims| claims.until > now);
        }
        if verified.len() < REMEMBERED {
            verified.insert(token.to_owned(), claims.clone());
        }
        Ok(claims)
    }
}

/// An issuer of tokens.
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
    /// An uncompressed point.
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
    pod: Option<BoundPod>,
}

impl Issuer {
    /// Parses its name and its public keys, as an API server publishes them.
    ///
    /// # Errors
    /// There is no name, or no key of a supported algorithm (RS256, ES256).
    pub fn parse(name: &[u8], keys: &[u8]) -> Result<Self, Error> {
        let name = String::from_utf8_lossy(name).trim().to_owned();
        if name.is_empty() {
            return Err(Error::unusable("the name of the token issuer is empty"));
        }
        let set: Set = serde_json::from_slice(keys)
            .map_err(|error| Error::unusable(format!("the issuer's keys are no JSON Web Key Set: {error}")))?;
        let keys: HashMap<String, Key> = set.keys.iter().filter_map(|jwk| Some((jwk.kid.clone(), key(jwk)?))).collect();
        if keys.is_empty() {
            return Err(Error::unusable("none of the issuer's keys is one for RS256 or ES256"));
        }
        Ok(Self { name, keys })
    }

    /// Verifies a token: signed by one of its keys, for this audience, currently valid, of a ServiceAccount.
    ///
    /// # Errors
    /// The reason for its rejection.
    pub fn verify(&self, token: &str, audience: &str, now: SystemTime) -> Result<Claims, TokenRejection> {
        let malformed =
            || rejection(Reason::TokenMalformed, "malformed token; needed: three parts, as signed by Kubernetes");
        let (signed, signature) = token.rsplit_once('.').ok_or_else(malformed)?;
        let (head, body) = signed.split_once('.').filter(|(_, body)| !body.contains('.')).ok_or_else(malformed)?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| malformed())?;
        let head: Head = decode(head).ok_or_else(malformed)?;
        let algorithms = ["RS256", "ES256"];
        if !algorithms.contains(&head.alg.as_str()) {
            let text = format!("the token's algorithm is '{}'; allowed: RS256, ES256", shortened(&head.alg));
            return Err(rejection(Reason::TokenAlgorithm, text));
        }
        let unknown = || rejection(Reason::TokenKey, "the token is signed with an unknown or retired key");
        let key = head.kid.and_then(|id| self.keys.get(&id)).ok_or_else(unknown)?;
        if key.algorithm() != head.alg {
            let text = format!("the token's algorithm is {}, that of its key {}", head.alg, key.algorithm());
            return Err(rejection(Reason::TokenAlgorithm, text));
        }
        if !key.has_signed(signed.as_bytes(), &signature) {
            return Err(rejection(Reason::TokenSignature, "the token's signature is wrong"));
        }
        let body: Body = decode(body).ok_or_else(malformed)?;
        self.check(body, audience, now)
    }

    /// Checks the claims of a token that this issuer has signed.
    fn check(&self, body: Body, audience: &str, now: SystemTime) -> Result<Claims, TokenRejection> {
        let issuer = body.iss.unwrap_or_default();
        if issuer != self.name {
            let text = format!("the token's issuer is '{}'; needed: '{}'", shortened(&issuer), self.name);
            return Err(rejection(Reason::TokenIssuer, text));
        }
        let audiences = body.aud.unwrap_or_default();
        if !audiences.iter().any(|candidate| candidate == audience) {
            let text = format!("the token's audience is '{}'; needed: '{audience}'", shortened(&audiences.join(", ")));
            return Err(rejection(Reason::TokenAudience, text));
        }
        let endless = || rejection(Reason::TokenMalformed, "the token has no expiry; needed: exp");
        let until = body.exp.and_then(time).ok_or_else(endless)?;
        if until <= now {
            let late = now.duration_since(until).unwrap_or_default().as_secs();
            return Err(rejection(Reason::TokenExpired, format!("the token expired {late} s ago; request a new one")));
        }
        // In seconds: a time beyond the range of a clock has not come.
        let seconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        if let Some(early) = body.nbf.map(|from| from - seconds).filter(|early| *early > SKEW.as_secs_f64()) {
            let text = format!("the token is not valid for another {} s; check the clocks", early as u64);
            return Err(rejection(Reason::TokenNotYetValid, text));
        }
        let subject = body.sub.unwrap_or_default();
        let account = subject.strip_prefix(SERVICE_ACCOUNT).and_then(|rest| rest.split_once(':'));
        let Some((namespace, name)) = account.filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty())
        else {
            let text = format!("the token's subject is '{}'; needed: a ServiceAccount", shortened(&subject));
            return Err(rejection(Reason::TokenAccount, text));
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

/// Parses a key of a supported type; others are skipped.
fn key(jwk: &Jwk) -> Option<Key> {
    let bytes = |text: &str| URL_SAFE_NO_PAD.decode(text).ok().filter(|bytes| !bytes.is_empty());
    let is = |algorithm: &str| jwk.alg.as_deref().is_none_or(|name| name == algorithm);
    match (jwk.kty.as_str(), jwk.crv.as_str()) {
        ("RSA", _) if is("RS256") => {
            // Numbers without leading zeros, as the library requires.
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

/// Decodes a part of a token.
fn decode<T: for<'a> Deserialize<'a>>(part: &str) -> Option<T> {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).ok()?).ok()
}

/// Seconds since 1970, with optional fractions.
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

/// Shortens and escapes untrusted text for errors.
fn shortened(text: &str) -> String {
    text.chars().take(128).flat_map(char::escape_default).collect()
}

#[cfg(test)]
mod tests;
