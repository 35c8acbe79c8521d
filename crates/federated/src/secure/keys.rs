//! Keys of a client: signatures of its identity, X25519 agreement, sealed messages.

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use x25519_dalek::{PublicKey, StaticSecret};

use super::SecureError;
use crate::model::ClientId;
use crate::random::{Seed, derive};

/// An X25519 or Ed25519 public key.
pub type PublicKeyBytes = [u8; 32];

/// Returns the Ed25519 public key of a signing seed.
#[must_use]
pub fn verifying_key(signing: &Seed) -> PublicKeyBytes {
    let mut key = [0; 32];
    key.copy_from_slice(signing_pair(signing).public_key().as_ref());
    key
}

fn signing_pair(signing: &Seed) -> Ed25519KeyPair {
    Ed25519KeyPair::from_seed_unchecked(signing).expect("every 32-byte seed is an Ed25519 key")
}

/// Signs a message.
pub(crate) fn sign(signing: &Seed, message: &[u8]) -> Vec<u8> {
    signing_pair(signing).sign(message).as_ref().to_vec()
}

/// Checks a signature.
pub(crate) fn verify(key: &PublicKeyBytes, message: &[u8], signature: &[u8]) -> Result<(), SecureError> {
    UnparsedPublicKey::new(&ED25519, key).verify(message, signature).map_err(|_| SecureError::InvalidSignature)
}

/// The public key of an X25519 secret.
pub(super) fn public_key(secret: &Seed) -> PublicKeyBytes {
    PublicKey::from(&StaticSecret::from(*secret)).to_bytes()
}

/// The shared secret of two clients, bound to a purpose and the round: 256 bits, the same on both sides.
///
/// # Errors
/// When the other key is of low order, so that the secret would be known to everyone.
pub(super) fn agree(
    secret: &Seed,
    other: &PublicKeyBytes,
    round: u64,
    purpose: &[u8],
    pair: (ClientId, ClientId),
) -> Result<Seed, SecureError> {
    let shared = StaticSecret::from(*secret).diffie_hellman(&PublicKey::from(*other));
    if !shared.was_contributory() {
        return Err(SecureError::InvalidKey);
    }
    let (low, high) = (pair.0.min(pair.1), pair.0.max(pair.1));
    Ok(derive(shared.as_bytes(), &[purpose, &round.to_le_bytes(), &low.to_le_bytes(), &high.to_le_bytes()]))
}

/// Sender, receiver and round of a sealed message.
#[derive(Clone, Copy)]
pub(super) struct Envelope {
    pub(super) round: u64,
    pub(super) from: ClientId,
    pub(super) to: ClientId,
}

impl Envelope {
    fn bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.round.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.from.to_le_bytes());
        bytes[16..].copy_from_slice(&self.to.to_le_bytes());
        bytes
    }

    /// The key of this direction. It seals one message, so the nonce is constant.
    fn key(self, agreed: &Seed) -> LessSafeKey {
        let key = derive(agreed, &[b"seal", &self.bytes()]);
        LessSafeKey::new(UnboundKey::new(&CHACHA20_POLY1305, &key).expect("the key has 32 bytes"))
    }

    /// Encrypts a message with the key that both clients agreed on.
    pub(super) fn seal(self, agreed: &Seed, message: &[u8]) -> Vec<u8> {
        let mut sealed = message.to_vec();
        let nonce = Nonce::assume_unique_for_key([0; 12]);
        let result = self.key(agreed).seal_in_place_append_tag(nonce, Aad::from(self.bytes()), &mut sealed);
        result.expect("a share is shorter than the limit of the cipher");
        sealed
    }

    /// Decrypts a message.
    pub(super) fn open(self, agreed: &Seed, sealed: &[u8]) -> Result<Vec<u8>, SecureError> {
        let mut message = sealed.to_vec();
        let nonce = Nonce::assume_unique_for_key([0; 12]);
        let opened = self.key(agreed).open_in_place(nonce, Aad::from(self.bytes()), &mut message);
        let length = opened.map_err(|_| SecureError::InvalidSeal)?.len();
        message.truncate(length);
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_agree_and_the_secret_differs_in_every_round_and_purpose() {
        let (a, b) = ([1; 32], [2; 32]);
        let agreed = agree(&a, &public_key(&b), 5, b"mask", (1, 2)).unwrap();
        assert_eq!(agree(&b, &public_key(&a), 5, b"mask", (2, 1)).unwrap(), agreed);
        assert_eq!(agreed.len() * 8, 256, "masks have 256-bit keys");
        assert_ne!(agree(&a, &public_key(&b), 6, b"mask", (1, 2)).unwrap(), agreed);
        assert_ne!(agree(&a, &public_key(&b), 5, b"seal", (1, 2)).unwrap(), agreed);
        assert!(matches!(agree(&a, &[0; 32], 5, b"mask", (1, 2)), Err(SecureError::InvalidKey)));
    }

    #[test]
    fn sealed_messages_open_only_for_their_envelope() {
        let envelope = Envelope { round: 1, from: 2, to: 3 };
        let sealed = envelope.seal(&[7; 32], b"share");
        assert_eq!(envelope.open(&[7; 32], &sealed).unwrap(), b"share");
        assert!(envelope.open(&[8; 32], &sealed).is_err());
        assert!(Envelope { from: 3, to: 2, ..envelope }.open(&[7; 32], &sealed).is_err());
        assert!(Envelope { round: 2, ..envelope }.open(&[7; 32], &sealed).is_err());
        let mut damaged = sealed;
        damaged[0] ^= 1;
        assert!(envelope.open(&[7; 32], &damaged).is_err());
    }

    #[test]
    fn signatures_are_checked() {
        let key = verifying_key(&[1; 32]);
        let signature = sign(&[1; 32], b"message");
        assert!(verify(&key, b"message", &signature).is_ok());
        assert!(verify(&key, b"other", &signature).is_err());
        assert!(verify(&verifying_key(&[2; 32]), b"message", &signature).is_err());
    }
}
