//! An issuer of tokens for tests: signs whatever it is told.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData as _, SigningKey as _};
use serde_json::{Value, json};

/// An issuer with one key, of ES256.
#[derive(Debug)]
pub struct Signer {
    key: KeyPair,
    /// The key's id.
    pub id: String,
}

impl Signer {
    /// One with a new key of this id.
    ///
    /// # Panics
    /// The machine has no randomness to give.
    pub fn new(id: &str) -> Self {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("there is randomness");
        Self { key, id: id.to_owned() }
    }

    /// Its public key, as it is published.
    pub fn jwk(&self) -> Value {
        let point = self.key.der_bytes();
        json!({ "use": "sig", "kty": "EC", "kid": self.id, "crv": "P-256", "alg": "ES256",
            "x": coded(&point[1..33]), "y": coded(&point[33..]) })
    }

    /// A set of its key alone.
    pub fn keys(&self) -> Value {
        json!({ "keys": [self.jwk()] })
    }

    /// A token that says `body`.
    pub fn token(&self, body: &Value) -> String {
        self.sign(&json!({ "alg": "ES256", "kid": self.id }), body)
    }

    /// The same with any head.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn sign(&self, head: &Value, body: &Value) -> String {
        self.sign_bytes(head.to_string().as_bytes(), body.to_string().as_bytes())
    }

    /// The same with any bytes.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn sign_bytes(&self, head: &[u8], body: &[u8]) -> String {
        let signed = format!("{}.{}", coded(head), coded(body));
        let signature = fixed(&self.key.sign(signed.as_bytes()).expect("there is randomness"));
        format!("{signed}.{}", coded(signature))
    }
}

/// A part of a token.
pub fn coded(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// The bytes of a part of a token; `None` where it is none.
pub fn decoded(part: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(part).ok()
}

/// Both numbers of a signature in 32 bytes each, from the encoding that certificates have.
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
