//! Batch sizes proportional to throughput, with a constant global batch.
//!
//! Sizes do not change what is learned: members reduce sums and counts, so every sample of the global batch has the
//! same weight whatever the member that computes it.

use thiserror::Error;

use crate::throughput::TimeModel;

/// Predicted gain below which a plan is kept: changing sizes costs buffers and caches.
const MIN_GAIN: f64 = 0.03;
/// Smallest batches that are tried to meet the ratio limit.
const CANDIDATES: usize = 200;

/// A member as the planner sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Capacity {
    /// Its time model.
    pub time: TimeModel,
    /// Largest batch that fits its memory.
    pub max_samples: usize,
}

/// Limits of a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Largest batch divided by the smallest, before rounding; at least 1. The reference default is 2.
    pub max_ratio: f64,
    /// Batches are multiples of this, except where the global batch is not; 8 on GPUs, 1 on CPUs.
    pub granule: usize,
}

/// A global batch that cannot be planned.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum BalanceError {
    /// There are no members.
    #[error("members: none, at least one is required")]
    NoMembers,
    /// The members' memory or the ratio limit does not allow the batch.
    #[error("global batch is {batch} samples, but the members can take at most {capacity} with maxRatio {max_ratio}")]
    Capacity {
        /// Samples of the global batch.
        batch: usize,
        /// Samples that fit.
        capacity: usize,
        /// The ratio limit.
        max_ratio: f64,
    },
    /// A limit out of range.
    #[error("{field} is {value}, allowed: at least 1")]
    Limit {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
    },
}

/// Samples for each member, with sum `batch`, that minimize the time of the slowest member within the limits.
///
/// # Errors
/// There are no members, a limit is out of range, or the batch does not fit.
pub fn plan(batch: usize, members: &[Capacity], limits: Limits) -> Result<Vec<usize>, BalanceError> {
    if members.is_empty() {
        return Err(BalanceError::NoMembers);
    }
    if limits.max_ratio.is_nan() || limits.max_ratio < 1.0 {
        return Err(BalanceError::Limit { field: "maxRatio", value: limits.max_ratio.to_string() });
    }
    if limits.granule == 0 {
        return Err(BalanceError::Limit { field: "granule", value: "0".to_owned() });
    }
    let share = batch as f64 / members.len() as f64;
    let mut best: Option<(f64, Vec<f64>)> = None;
    for i in 0..=CANDIDATES {
        // The smallest batch lies between share / ratio and share.
        let low = share * limits.max_ratio.powf(i as f64 / CANDIDATES as f64 - 1.0);
        let Some(sizes) = fill(batch as f64, members, low, low * limits.max_ratio) else { continue };
        let slowest = sizes.iter().zip(members).map(|(b, m)| seconds(m, *b)).fold(0.0, f64::max);
        if best.as_ref().is_none_or(|(time, _)| slowest < *time) {
            best = Some((slowest, sizes));
        }
    }
    let Some((_, sizes)) = best else {
        let smallest = members.iter().map(|m| m.max_samples).min().unwrap_or(0) as f64;
        let limit = smallest * limits.max_ratio;
        let capacity = members.iter().map(|m| (m.max_samples as f64).min(limit) as usize).sum();
        return Err(BalanceError::Capacity { batch, capacity, max_ratio: limits.max_ratio });
    };
    Ok(round(batch, &sizes, members, limits.granule))
}

fn seconds(member: &Capacity, samples: f64) -> f64 {
    member.time.overhead_seconds + samples / member.time.samples_per_second
}

/// Sizes within `low..=high` and the members' memory with the given sum and equal times where no bound holds. `None`
/// if the bounds do not allow the sum.
fn fill(batch: f64, members: &[Capacity], low: f64, high: f64) -> Option<Vec<f64>> {
    let bounds: Vec<(f64, f64)> = members.iter().map(|m| (low, high.min(m.max_samples as f64))).collect();
    if bounds.iter().any(|(low, high)| low > high) {
        return None;
    }
    let tolerance = 1e-9 * batch.max(1.0);
    let (least, most) = bounds.iter().fold((0.0, 0.0), |(a, b), (low, high)| (a + low, b + high));
    if batch < least - tolerance || batch > most + tolerance {
        return None;
    }
    let at = |time: f64| -> Vec<f64> {
        let size = |(m, (low, high)): (&Capacity, &(f64, f64))| {
            (m.time.samples_per_second * (time - m.time.overhead_seconds)).clamp(*low, *high)
        };
        members.iter().zip(&bounds).map(size).collect()
    };
    let mut right = members.iter().map(|m| seconds(m, batch)).fold(0.0, f64::max);
    let mut left = 0.0;
    for _ in 0..100 {
        let middle = 0.5 * (left + right);
        if at(middle).iter().sum::<f64>() < batch { left = middle } else { right = middle }
    }
    Some(at(right))
}

/// Rounds to multiples of the granule by largest remainders, within the members' memory. The rest of a batch that is no
/// multiple goes to the members with the most room.
fn round(batch: usize, sizes: &[f64], members: &[Capacity], granule: usize) -> Vec<usize> {
    let mut out: Vec<usize> =
        sizes.iter().zip(members).map(|(s, m)| ((s + 1e-6) as usize).min(m.max_samples) / granule * granule).collect();
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    let remainder = |i: usize, out: &[usize]| sizes[i] - out[i] as f64;
    order.sort_by(|&a, &b| remainder(b, &out).total_cmp(&remainder(a, &out)).then(a.cmp(&b)));
    let mut left = batch - out.iter().sum::<usize>().min(batch);
    for step in [granule, 1] {
        while left >= step {
            let mut given = false;
            for &i in &order {
                if left >= step && out[i] + step <= members[i].max_samples {
                    out[i] += step;
                    left -= step;
                    given = true;
                    // Single samples fill up one member's granule before the next.
                    if step == 1 {
                        let more = left.min(members[i].max_samples - out[i]).min(granule - 1);
                        out[i] += more;
                        left -= more;
                    }
                }
            }
            if !given {
                break;
            }
        }
    }
    out
}

/// Predicted time of a step: that of the slowest member.
pub fn step_seconds(sizes: &[usize], members: &[Capacity]) -> f64 {
    sizes.iter().zip(members).map(|(b, m)| m.time.seconds(*b)).fold(0.0, f64::max)
}

/// A new plan, or `None` if its predicted gain over `current` is 3 % or less.
///
/// # Errors
/// As [`plan`].
pub fn replan(current: &[usize], members: &[Capacity], limits: Limits) -> Result<Option<Vec<usize>>, BalanceError> {
    let next = plan(current.iter().sum(), members, limits)?;
    let gains = step_seconds(&next, members) < (1.0 - MIN_GAIN) * step_seconds(current, members);
    let same_members = current.len() == members.len();
    Ok((!same_members || gains).then_some(next))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(overhead_seconds: f64, samples_per_second: f64, max_samples: usize) -> Capacity {
        Capacity { time: TimeModel { overhead_seconds, samples_per_second }, max_samples }
    }

    const FREE: Limits = Limits { max_ratio: 100.0, granule: 1 };

    #[test]
    fn sizes_equalize_times_where_no_limit_holds() {
        let members = [member(0.0, 100.0, 9_999), member(0.0, 300.0, 9_999), member(0.1, 100.0, 9_999)];
        // tau = (500 + 10) / 500 = 1.02: sizes 102, 306, 92.
        assert_eq!(plan(500, &members, FREE).unwrap(), [102, 306, 92]);
    }

    #[test]
    fn sizes_are_the_best_within_limits_found_by_exhaustive_search() {
        for case in 0..40u32 {
            let w = engram_neural::philox(11, [case, 0, 0, 0]);
            let rate = |x: u32| 50.0 + f64::from(x % 1000);
            let members: Vec<_> = (0..3)
                .map(|i| member(f64::from(w[3] >> (i * 4) & 7) * 0.02, rate(w[i]), 40 + (w[i] >> 20) as usize % 40))
                .collect();
            let ratio = [1.5, 2.0, 4.0][case as usize % 3];
            let batch = 90;
            let mut best = f64::INFINITY;
            for a in 1..batch {
                for b in 1..batch - a {
                    let sizes = [a, b, batch - a - b];
                    let fits = sizes.iter().zip(&members).all(|(s, m)| *s <= m.max_samples);
                    let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
                    if fits && *most as f64 <= ratio * *least as f64 {
                        best = best.min(step_seconds(&sizes, &members));
                    }
                }
            }
            let sizes = plan(batch, &members, Limits { max_ratio: ratio, granule: 1 }).unwrap();
            assert_eq!(sizes.iter().sum::<usize>(), batch);
            assert!(sizes.iter().zip(&members).all(|(s, m)| *s <= m.max_samples), "{sizes:?} {members:?}");
            // Rounding may add one sample to the slowest member.
            let slack = members.iter().map(|m| 1.5 / m.time.samples_per_second).fold(0.0, f64::max);
            assert!(step_seconds(&sizes, &members) <= best + slack, "case {case}: {sizes:?}, best {best}, {members:?}");
        }
    }

    #[test]
    fn granules_memory_and_ratio_are_respected() {
        let members = [member(0.0, 100.0, 1_000), member(0.0, 1_000.0, 1_000)];
        let sizes = plan(300, &members, Limits { max_ratio: 2.0, granule: 8 }).unwrap();
        assert_eq!(sizes.iter().sum::<usize>(), 300);
        assert!(sizes.iter().filter(|s| *s % 8 != 0).count() <= 1, "{sizes:?}");
        assert!(sizes[1] as f64 / sizes[0] as f64 <= 2.2, "{sizes:?}");
        let small = [member(0.0, 100.0, 50), member(0.0, 100.0, 60)];
        assert_eq!(plan(110, &small, Limits { max_ratio: 2.0, granule: 1 }).unwrap(), [50, 60]);
        let error = plan(111, &small, Limits { max_ratio: 2.0, granule: 1 }).unwrap_err();
        assert_eq!(
            error.to_string(),
            "global batch is 111 samples, but the members can take at most 110 with maxRatio 2"
        );
        assert_eq!(plan(8, &[], FREE), Err(BalanceError::NoMembers));
    }

    #[test]
    fn plans_change_only_for_a_gain_above_three_percent_or_other_members() {
        let members = [member(0.0, 100.0, 999), member(0.0, 104.0, 999)];
        assert_eq!(replan(&[100, 100], &members, FREE).unwrap(), None);
        let members = [member(0.0, 100.0, 999), member(0.0, 150.0, 999)];
        assert_eq!(replan(&[100, 100], &members, FREE).unwrap(), Some(vec![80, 120]));
        assert_eq!(replan(&[100, 60, 40], &members, FREE).unwrap(), Some(vec![80, 120]));
    }
}
