//! Shamir's secret sharing of 32-byte secrets over the prime field of order 2^61 - 1.

use chacha20::ChaCha20Rng;
use serde::{Deserialize, Serialize};

use super::SecureError;
use crate::random::{Seed, below};

/// The order of the field.
const PRIME: u64 = (1 << 61) - 1;
/// Bytes of the secret per field element.
const LIMB_BYTES: usize = 7;
/// Field elements per secret.
const LIMBS: usize = 32_usize.div_ceil(LIMB_BYTES);

/// One point of the polynomials of a secret.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Share {
    /// Coordinate, at least 1.
    pub(super) x: u32,
    y: [u64; LIMBS],
}

impl Share {
    /// Checks the ranges of a share that was received.
    pub(super) fn validate(&self, x: u32) -> Result<(), SecureError> {
        let valid = self.x == x && self.y.iter().all(|value| *value < PRIME);
        if valid { Ok(()) } else { Err(SecureError::InvalidShare) }
    }
}

/// Splits a secret into shares at the coordinates `xs`; any `threshold` of them determine it, and fewer are independent of it.
pub(super) fn split(secret: &Seed, threshold: usize, xs: &[u32], rng: &mut ChaCha20Rng) -> Vec<Share> {
    let polynomials: Vec<Vec<u64>> = limbs(secret)
        .into_iter()
        .map(|limb| {
            let random = (1..threshold).map(|_| below(rng, u128::from(PRIME)) as u64);
            std::iter::once(limb).chain(random).collect()
        })
        .collect();
    let share = |x: &u32| {
        let mut y = [0; LIMBS];
        for (y, coefficients) in y.iter_mut().zip(&polynomials) {
            *y = coefficients.iter().rev().fold(0, |sum, coefficient| add(multiply(sum, u64::from(*x)), *coefficient));
        }
        Share { x: *x, y }
    };
    xs.iter().map(share).collect()
}

/// Reconstructs a secret from the first `threshold` shares.
///
/// # Errors
/// When there are fewer shares, a coordinate repeats, or the result is no secret.
pub(super) fn combine(shares: &[Share], threshold: usize) -> Result<Seed, SecureError> {
    let shares = shares.get(..threshold).ok_or(SecureError::BelowThreshold)?;
    let mut limbs = [0; LIMBS];
    for share in shares {
        let mut weight = 1;
        for other in shares.iter().filter(|other| !std::ptr::eq(*other, share)) {
            // Lagrange's polynomial at 0: the product of x_j / (x_j - x_i).
            let difference = subtract(u64::from(other.x), u64::from(share.x));
            if difference == 0 {
                return Err(SecureError::InvalidShare);
            }
            weight = multiply(weight, multiply(u64::from(other.x), inverse(difference)));
        }
        for (limb, y) in limbs.iter_mut().zip(&share.y) {
            *limb = add(*limb, multiply(weight, *y));
        }
    }
    join(&limbs)
}

fn limbs(secret: &Seed) -> [u64; LIMBS] {
    let mut limbs = [0; LIMBS];
    for (limb, bytes) in limbs.iter_mut().zip(secret.chunks(LIMB_BYTES)) {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        *limb = u64::from_le_bytes(word);
    }
    limbs
}

fn join(limbs: &[u64; LIMBS]) -> Result<Seed, SecureError> {
    let mut secret = [0; 32];
    for (bytes, limb) in secret.chunks_mut(LIMB_BYTES).zip(limbs) {
        let word = limb.to_le_bytes();
        bytes.copy_from_slice(&word[..bytes.len()]);
        if word[bytes.len()..].iter().any(|byte| *byte != 0) {
            return Err(SecureError::InvalidShare);
        }
    }
    Ok(secret)
}

const fn add(a: u64, b: u64) -> u64 {
    (a + b) % PRIME
}

const fn subtract(a: u64, b: u64) -> u64 {
    (a + PRIME - b) % PRIME
}

const fn multiply(a: u64, b: u64) -> u64 {
    (a as u128 * b as u128 % PRIME as u128) as u64
}

/// `a^(PRIME - 2)`, by Fermat's theorem.
fn inverse(a: u64) -> u64 {
    let (mut base, mut exponent, mut result) = (a, PRIME - 2, 1);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = multiply(result, base);
        }
        base = multiply(base, base);
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::stream;

    #[test]
    fn threshold_shares_reconstruct_exactly_and_one_less_does_not() {
        let secret: Seed = std::array::from_fn(|i| 255 - i as u8);
        let xs = [1, 5, 9, 4_000, 7, 2];
        let shares = split(&secret, 4, &xs, &mut stream(&[1; 32], "shares", 0));
        assert_eq!(combine(&shares, 4).unwrap(), secret);
        assert_eq!(combine(&shares[2..], 4).unwrap(), secret);
        assert!(matches!(combine(&shares[..3], 4), Err(SecureError::BelowThreshold)));
        let mut repeated = shares[..4].to_vec();
        repeated[3] = repeated[0].clone();
        assert!(matches!(combine(&repeated, 4), Err(SecureError::InvalidShare)));
        assert!(!combine(&shares[..3], 3).is_ok_and(|wrong| wrong == secret));
        assert!(shares[0].validate(1).is_ok() && shares[0].validate(2).is_err());
        let large = Share { y: [PRIME; LIMBS], ..shares[0].clone() };
        assert!(large.validate(1).is_err());
    }

    #[test]
    fn shares_below_the_threshold_fit_every_secret() {
        let shares = split(&[3; 32], 3, &[1, 2], &mut stream(&[2; 32], "shares", 0));
        for guess in [[0; 32], [255; 32], [3; 32]] {
            // The point at x = 3 of the polynomial through the guess at 0 and both shares: y3 = g - 3 y1 + 3 y2.
            let mut third = Share { x: 3, y: limbs(&guess) };
            for (y, (one, two)) in third.y.iter_mut().zip(shares[0].y.iter().zip(&shares[1].y)) {
                *y = add(*y, subtract(multiply(3, *two), multiply(3, *one)));
            }
            let completed = [shares[0].clone(), shares[1].clone(), third];
            assert_eq!(combine(&completed, 3).unwrap(), guess);
        }
    }
}
