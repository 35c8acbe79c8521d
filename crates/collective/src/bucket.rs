//! Buckets: gradients are reduced in pieces that start while the backward pass still runs.

use std::ops::Range;

/// Smallest bucket in bytes.
pub const MIN_BYTES: usize = 256 << 10;
/// Largest bucket in bytes.
pub const MAX_BYTES: usize = 25 << 20;
/// Largest size of the bucket that is ready last, in bytes: nothing hides its reduction.
pub const LAST_BYTES: usize = 1 << 20;

/// A bucket: a run of parameters in the order in which their gradients become ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Indices into the ready order.
    pub parameters: Range<usize>,
    /// Number of elements.
    pub elements: usize,
}

/// Returns the buckets for parameters of `elements` f32 elements, given in ready order, with buckets of about `target_bytes` (clamped to
/// [`MIN_BYTES`] and [`MAX_BYTES`]). A parameter is never split; the last bucket has at most [`LAST_BYTES`] unless one parameter alone exceeds it.
///
/// The result of a reduction does not depend on the buckets: each element is added on its own.
pub fn plan(elements: &[usize], target_bytes: usize) -> Vec<Bucket> {
    let bytes = |range: Range<usize>| 4 * elements[range].iter().sum::<usize>();
    let target = target_bytes.clamp(MIN_BYTES, MAX_BYTES);
    let mut buckets = Vec::new();
    let mut end = elements.len();
    // The last bucket first: as many parameters as fit.
    let mut start = end.saturating_sub(1);
    while start > 0 && bytes(start - 1..end) <= LAST_BYTES.min(target) {
        start -= 1;
    }
    let last = start..end;
    end = start;
    let mut first = 0;
    while first < end {
        let mut next = first + 1;
        while next < end && bytes(first..next + 1) <= target {
            next += 1;
        }
        buckets.push(first..next);
        first = next;
    }
    if !last.is_empty() {
        buckets.push(last);
    }
    let bucket = |parameters: Range<usize>| Bucket { elements: bytes(parameters.clone()) / 4, parameters };
    buckets.into_iter().map(bucket).collect()
}

/// Returns the exposed communication of a step in seconds: the part that the backward pass does not hide. `ready` and `took` are, per bucket in ready
/// order, when its gradients were ready and how long its reduction takes; reductions run one after another.
pub fn exposed_seconds(ready: &[f64], took: &[f64], backward_end: f64) -> f64 {
    let finished = ready.iter().zip(took).fold(0.0_f64, |free, (ready, took)| free.max(*ready) + took);
    (finished - backward_end).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn buckets_cover_the_parameters_in_order_within_their_size(
            elements in proptest::collection::vec(1_usize..1_000_000, 0..60), target in 0_usize..40_000_000,
        ) {
            let buckets = plan(&elements, target);
            let mut next = 0;
            for (index, bucket) in buckets.iter().enumerate() {
                prop_assert_eq!(bucket.parameters.start, next);
                next = bucket.parameters.end;
                prop_assert_eq!(bucket.elements, elements[bucket.parameters.clone()].iter().sum::<usize>());
                let limit = if index + 1 == buckets.len() { LAST_BYTES } else { target.clamp(MIN_BYTES, MAX_BYTES) };
                prop_assert!(4 * bucket.elements <= limit || bucket.parameters.len() == 1);
            }
            prop_assert_eq!(next, elements.len());
        }
    }

    #[test]
    fn model_of_0_6_million_parameters_has_two_or_three_buckets() {
        let layers = [128_000, 256, 65_536, 256, 262_144, 256, 131_072, 512];
        let buckets = plan(&layers, 1_600_000).len();
        assert!((2..=3).contains(&buckets), "{buckets}");
    }

    #[test]
    fn only_what_backward_does_not_hide_is_exposed() {
        assert_eq!(exposed_seconds(&[1.0, 2.0, 3.0], &[0.5, 0.5, 0.5], 3.0), 0.5);
        assert_eq!(exposed_seconds(&[1.0, 2.0, 3.0], &[3.0, 1.0, 1.0], 3.0), 3.0);
        assert_eq!(exposed_seconds(&[1.0], &[0.5], 2.0), 0.0);
    }
}
