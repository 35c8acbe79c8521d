//! Reductions that travel while the rest of a gradient is still computed.

use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

/// What became of the buckets of a gradient.
#[derive(Debug)]
pub struct Overlap<E> {
    /// Number of buckets that were reduced, or why the first that was not failed.
    pub reduced: Result<usize, E>,
    /// Time of reductions until the computation ended.
    pub hidden: Duration,
    /// Time of reductions after that.
    pub exposed: Duration,
}

/// Calls `compute` with a function that takes the next of at most `buckets` buckets, and `reduce` on another thread with the number and the values of each
/// one, in order. Returns when both have ended. A reduction that fails ends the reductions, not the computation.
pub fn overlap<T, E: Send>(
    buckets: usize,
    compute: impl FnOnce(&mut dyn FnMut(&[f32])) -> T,
    mut reduce: impl FnMut(usize, &[f32]) -> Result<(), E> + Send,
) -> (T, Overlap<E>) {
    // With room for all of them the computation never waits.
    let (sender, receiver) = sync_channel::<Vec<f32>>(buckets);
    let reduce_all = move || {
        let mut times = Vec::with_capacity(buckets);
        for (number, values) in receiver.iter().enumerate() {
            let started = Instant::now();
            let result = reduce(number, &values);
            times.push((started, Instant::now()));
            if let Err(error) = result {
                return (Err(error), times);
            }
        }
        (Ok(times.len()), times)
    };
    std::thread::scope(|scope| {
        let reduction = scope.spawn(reduce_all);
        // Without a receiver a reduction has failed: the caller repeats all of them.
        let computed = compute(&mut |values| drop(sender.send(values.to_vec())));
        drop(sender);
        let ended = Instant::now();
        let (reduced, times) = reduction.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let before =
            |(started, finished): &(Instant, Instant)| ended.min(*finished).saturating_duration_since(*started);
        let hidden = times.iter().map(before).sum();
        (computed, Overlap { reduced, hidden, exposed: ended.elapsed() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn buckets_are_reduced_in_order_while_the_rest_is_computed() {
        let (finished, reduced) = channel();
        let mut total = Vec::new();
        let (computed, overlap) = overlap(
            3,
            |announce| {
                for bucket in 0..3 {
                    announce(&[bucket as f32; 2]);
                    // The reduction of this bucket does not wait for the end of the computation.
                    assert_eq!(reduced.recv(), Ok(bucket));
                }
                "computed"
            },
            |number, values| {
                total.extend_from_slice(values);
                finished.send(number).map_err(|_| "the computation ended")
            },
        );
        assert_eq!((computed, overlap.reduced), ("computed", Ok(3)));
        assert!(overlap.hidden > Duration::ZERO);
        assert_eq!(total, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);
    }

    #[test]
    fn failed_reduction_ends_the_reductions_and_not_the_computation() {
        let mut reduced = Vec::new();
        let compute = |announce: &mut dyn FnMut(&[f32])| (0..5).map(|_| announce(&[1.0])).count();
        let (computed, overlap) = overlap(5, compute, |number, _| {
            reduced.push(number);
            if number == 1 { Err("peer failed") } else { Ok(()) }
        });
        assert_eq!((computed, overlap.reduced), (5, Err("peer failed")));
        assert_eq!(reduced, [0, 1]);
    }
}
