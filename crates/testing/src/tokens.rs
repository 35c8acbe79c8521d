//! A token issuer for tests: signs anything.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData as _, SigningKey as _};
use serde_json::{Value, json};

/// An issuer with one ES256 key.
#[derive(Debug)]
pub struct Signer {
    key: KeyPair,
    /// The key's id.
    pub id: String,
}

impl Signer {
    /// Creates an issuer with a new key of this id.
    ///
    /// # Panics
    /// The machine has no randomness to give.
    pub fn new(id: &str) -> Self {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("there is randomness");
        Self { key, id: id.to_owned() }
    }

    /// Returns its public key as a JSON Web Key.
    pub fn jwk(&self) -> Value {
        let point = self.key.der_bytes();
        json!({ "use": "sig", "kty": "EC", "kid": self.id, "crv": "P-256", "alg": "ES256",
            "x": encode(&point[1..33]), "y": encode(&point[33..]) })
    }

    /// Returns a key set with its key.
    pub fn keys(&self) -> Value {
        json!({ "keys": [self.jwk()] })
    }

    /// Returns a token with the claims `body`.
    pub fn token(&self, body: &Value) -> String {
        self.sign(&json!({ "alg": "ES256", "kid": self.id }), body)
    }

    /// Returns a token with any header.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn sign(&self, head: &Value, body: &Value) -> String {
        self.sign_bytes(head.to_string().as_bytes(), body.to_string().as_bytes())
    }

    /// Returns a token with any header and body bytes.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn sign_bytes(&self, head: &[u8], body: &[u8]) -> String {
        let signed = format!("{}.{}", encode(head), encode(body));
        let signature = fixed(&self.key.sign(signed.as_bytes()).expect("there is randomness"));
        format!("{signed}.{}", encode(signature))
    }
}

/// Encodes a part of a token.
pub fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Decodes a part of a token; `None` if it is malformed.
pub fn decode(part: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(part).ok()
}

/// Returns both numbers of a signature in 32 bytes each, from DER.
fn fixed(der: &[u8]) -> Vec<u8> {
    let (mut at, mut out) = (2, Vec::new());
    for _ in 0..2 {
        let length = usize::from(der[at + 1]);
        let number = &der[at + 2..at + 2 + length];
        let number = &number[number.len().saturating_sub(32)..];
        out.extend(std::iter::repeat_n(0, 32 - number.len()));
        out.extend_from_slice(number);
        at += 2 + length;
    }
    out
}
