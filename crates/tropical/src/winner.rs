//! Winners as one integer: the pair (value, lowest index) whose maximum is the reduction over shards.
//!
//! The upper half holds bits that order like the value, the lower half the complement of the index: the maximum of two packed pairs is the
//! larger value, and on a tie the lower index. An all-reduce with the operation MAX on `u64` therefore keeps the tie rule.

const SIGN: u32 = 1 << 31;

/// Packs a value without NaN and its index.
pub const fn pack(value: f32, index: u32) -> u64 {
    // +0 and -0 are equal values.
    let bits = if value == 0.0 { 0 } else { value.to_bits() };
    let ordered = if bits & SIGN == 0 { bits | SIGN } else { !bits };
    ((ordered as u64) << 32) | !index as u64
}

/// Unpacks a pair.
pub const fn unpack(packed: u64) -> (f32, u32) {
    let ordered = (packed >> 32) as u32;
    let bits = if ordered & SIGN == 0 { !ordered } else { ordered & !SIGN };
    (f32::from_bits(bits), !(packed as u32))
}

/// Combines the winners of two shards element by element.
///
/// # Panics
/// The slices have different lengths.
pub fn combine(into: &mut [u64], other: &[u64]) {
    assert_eq!(into.len(), other.len(), "shards have one winner per element");
    for (winner, other) in into.iter_mut().zip(other) {
        *winner = (*winner).max(*other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn order_follows_value_then_lowest_index() {
        let values = [f32::NEG_INFINITY, -1e30, -1.0, -1e-30, 0.0, 1e-30, 1.0, 1e30];
        assert!(values.windows(2).all(|pair| pack(pair[0], 0) < pack(pair[1], u32::MAX)));
        assert!(pack(1.0, 3) > pack(1.0, 4), "the lower index wins a tie");
        assert_eq!(pack(-0.0, 7), pack(0.0, 7));
    }

    proptest! {
        #[test]
        fn packing_is_reversible(value in proptest::num::f32::NORMAL | proptest::num::f32::ZERO, index: u32) {
            let (again, at) = unpack(pack(value, index));
            prop_assert!(again == value && at == index);
        }
    }

    #[test]
    fn shards_combine_by_maximum_never_by_mean() {
        let mut whole = vec![pack(-5.0, 2), pack(3.0, 0)];
        combine(&mut whole, &[pack(-4.0, 900), pack(3.0, 1)]);
        assert_eq!(whole.iter().map(|&it| unpack(it)).collect::<Vec<_>>(), [(-4.0, 900), (3.0, 0)]);
    }
}
