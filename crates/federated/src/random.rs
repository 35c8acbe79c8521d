//! Random numbers from seeds that the caller passes in: ChaCha20, one stream per purpose.

use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use ring::hkdf::{HKDF_SHA256, KeyType, Salt};

/// A 256-bit seed or key.
pub type Seed = [u8; 32];

struct Length;

impl KeyType for Length {
    fn len(&self) -> usize {
        size_of::<Seed>()
    }
}

/// Derives a key from a secret by HKDF-SHA256; `info` is bound with the length of each part, so no two lists of parts are the same.
pub(crate) fn derive(secret: &[u8], info: &[&[u8]]) -> Seed {
    let mut bound = Vec::new();
    for part in info {
        bound.extend_from_slice(&(part.len() as u64).to_le_bytes());
        bound.extend_from_slice(part);
    }
    let pseudorandom = Salt::new(HKDF_SHA256, b"engram-federated-1").extract(secret);
    let mut key = [0; 32];
    let parts = [bound.as_slice()];
    let output = pseudorandom.expand(&parts, Length).expect("32 bytes are less than the limit of HKDF");
    output.fill(&mut key).expect("the buffer has the length that was asked for");
    key
}

/// Returns the stream of a purpose and a number.
pub(crate) fn stream(seed: &Seed, purpose: &str, number: u64) -> ChaCha20Rng {
    ChaCha20Rng::from_seed(derive(seed, &[purpose.as_bytes(), &number.to_le_bytes()]))
}

/// Draws an integer below `limit` without bias.
pub(crate) fn below(rng: &mut ChaCha20Rng, limit: u128) -> u128 {
    debug_assert!(limit > 0);
    let bits = 128 - (limit - 1).leading_zeros();
    loop {
        let value = match bits {
            0 => return 0,
            1..=64 => u128::from(rng.next_u64() >> (64 - bits)),
            _ => (u128::from(rng.next_u64()) << 64 | u128::from(rng.next_u64())) >> (128 - bits),
        };
        if value < limit {
            return value;
        }
    }
}

/// Draws a number in [0, 1) with 53 random bits.
pub(crate) fn unit(rng: &mut ChaCha20Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 * (-53_f64).exp2()
}

/// Draws one fair bit.
pub(crate) fn coin(rng: &mut ChaCha20Rng) -> bool {
    rng.next_u32() & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_below_a_limit_are_uniform() {
        let mut rng = stream(&[7; 32], "test", 0);
        let mut counts = [0_u32; 5];
        for _ in 0..50_000 {
            counts[below(&mut rng, 5) as usize] += 1;
        }
        assert!(counts.iter().all(|count| count.abs_diff(10_000) < 500), "{counts:?}");
        assert_eq!(below(&mut rng, 1), 0);
        assert!(below(&mut rng, u128::MAX) < u128::MAX);
    }

    #[test]
    fn parts_of_a_derivation_are_not_interchangeable() {
        assert_ne!(derive(b"s", &[b"ab", b"c"]), derive(b"s", &[b"a", b"bc"]));
        assert_ne!(derive(b"s", &[b"a"]), derive(b"t", &[b"a"]));
    }
}
