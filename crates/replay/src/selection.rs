//! Samplers without priorities: uniform, FIFO, LIFO, slices of trajectories, groups of n.
//!
//! Each is a pure function of (seed, step) and the items in order of insertion, so that any worker computes the same selection.

use engram_kernels::priority::Draws;

/// A sampler without priorities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sampler {
    /// Every item with the same probability, with replacement, stratified.
    Uniform,
    /// The oldest items.
    Fifo,
    /// The newest items.
    Lifo,
}

/// Why nothing was selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Fewer items than asked for.
    #[error("batch size: {wanted} is not allowed; allowed: 1 to {available}")]
    TooFew {
        /// Items asked for.
        wanted: usize,
        /// Items, slices or groups that exist.
        available: usize,
    },
    /// A length of 0.
    #[error("{0}: 0 is not allowed; allowed: at least 1")]
    Zero(&'static str),
}

impl Sampler {
    /// Returns the indices of a batch of `count` among `items` items.
    ///
    /// # Errors
    /// [`Error::TooFew`]; uniform draws need one item only.
    pub fn select(self, items: usize, count: usize, seed: u64, step: u64) -> Result<Vec<usize>, Error> {
        let least = if self == Self::Uniform { 1 } else { count };
        if count == 0 || items < least {
            return Err(Error::TooFew { wanted: count, available: items });
        }
        Ok(match self {
            Self::Uniform => uniform(items, count, seed, step),
            Self::Fifo => (0..count).collect(),
            Self::Lifo => (items - count..items).rev().collect(),
        })
    }
}

fn uniform(items: usize, count: usize, seed: u64, step: u64) -> Vec<usize> {
    let draws = Draws { seed, step, stream: 0, count: count as u32, total: items as u64 };
    (0..count as u32).map(|draw| draws.threshold(draw) as usize).collect()
}

/// Returns `count` slices of `length` consecutive items that lie within one trajectory, as ranges of indices; every slice that fits has the same
/// probability. `trajectories` holds the trajectory of each item; items of one trajectory are consecutive.
///
/// The cost is one pass over the borders of trajectories, not over the items: pass `borders` (ascending start indices, the first 0) and the number
/// of items.
///
/// # Errors
/// [`Error::Zero`]; [`Error::TooFew`] if no slice fits.
pub fn slices(
    borders: &[usize],
    items: usize,
    length: usize,
    count: usize,
    seed: u64,
    step: u64,
) -> Result<Vec<std::ops::Range<usize>>, Error> {
    if length == 0 {
        return Err(Error::Zero("slice length"));
    }
    // For each trajectory: the number of slices that begin in it and in those before.
    let mut ends = Vec::with_capacity(borders.len());
    let mut fitting = 0;
    for (index, &start) in borders.iter().enumerate() {
        let end = borders.get(index + 1).copied().unwrap_or(items);
        fitting += (end - start + 1).saturating_sub(length);
        ends.push(fitting);
    }
    if count == 0 || fitting == 0 {
        return Err(Error::TooFew { wanted: count, available: fitting });
    }
    let slice = |number: usize| {
        let trajectory = ends.partition_point(|&end| end <= number);
        let before = if trajectory == 0 { 0 } else { ends[trajectory - 1] };
        let start = borders[trajectory] + number - before;
        start..start + length
    };
    Ok(uniform(fitting, count, seed, step).into_iter().map(slice).collect())
}

/// Returns the first `count` groups that are complete, in order of their first item: each holds the indices of its `size` first items.
/// `groups` holds the group of each item.
///
/// # Errors
/// [`Error::Zero`]; [`Error::TooFew`] if fewer groups are complete.
pub fn groups(groups: &[u64], size: usize, count: usize) -> Result<Vec<Vec<usize>>, Error> {
    if size == 0 {
        return Err(Error::Zero("group size"));
    }
    let mut order = Vec::new();
    let mut members: std::collections::BTreeMap<u64, Vec<usize>> = std::collections::BTreeMap::new();
    for (index, &group) in groups.iter().enumerate() {
        let indices = members.entry(group).or_insert_with(|| {
            order.push(group);
            Vec::new()
        });
        if indices.len() < size {
            indices.push(index);
        }
    }
    let complete: Vec<Vec<usize>> =
        order.iter().filter_map(|group| members.remove(group)).filter(|indices| indices.len() == size).collect();
    if count == 0 || complete.len() < count {
        return Err(Error::TooFew { wanted: count, available: complete.len() });
    }
    Ok(complete.into_iter().take(count).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_take_their_end_and_uniform_draws_every_item_alike() {
        assert_eq!(Sampler::Fifo.select(5, 2, 1, 1).unwrap(), [0, 1]);
        assert_eq!(Sampler::Lifo.select(5, 2, 1, 1).unwrap(), [4, 3]);
        assert_eq!(Sampler::Fifo.select(1, 2, 1, 1), Err(Error::TooFew { wanted: 2, available: 1 }));
        let mut hits = [0_u32; 7];
        for step in 0..4_000 {
            for index in Sampler::Uniform.select(7, 5, 42, step).unwrap() {
                hits[index] += 1;
            }
        }
        let expected = 20_000.0 / 7.0;
        assert!(hits.iter().all(|&it| (f64::from(it) - expected).abs() < 0.06 * expected), "{hits:?}");
        assert_eq!(Sampler::Uniform.select(7, 5, 42, 3), Sampler::Uniform.select(7, 5, 42, 3));
    }

    #[test]
    fn slices_stay_within_a_trajectory_and_are_equally_likely() {
        // Trajectories of 3, 1 and 4 items: 2 + 0 + 3 slices of length 2.
        let mut hits = std::collections::BTreeMap::new();
        for step in 0..2_000 {
            for slice in slices(&[0, 3, 4], 8, 2, 5, 7, step).unwrap() {
                *hits.entry(slice.start).or_insert(0_u32) += 1;
            }
        }
        assert_eq!(hits.keys().copied().collect::<Vec<_>>(), [0, 1, 4, 5, 6]);
        assert!(hits.values().all(|&it| (it as i32 - 2_000).abs() < 150), "{hits:?}");
        assert_eq!(slices(&[0], 3, 4, 1, 0, 0), Err(Error::TooFew { wanted: 1, available: 0 }));
        assert!(slices(&[0], 3, 0, 1, 0, 0).is_err());
    }

    #[test]
    fn only_complete_groups_are_selected_in_order() {
        let of = [4, 9, 4, 7, 9, 4, 7];
        assert_eq!(groups(&of, 2, 3).unwrap(), [vec![0, 2], vec![1, 4], vec![3, 6]]);
        assert_eq!(groups(&of, 3, 2), Err(Error::TooFew { wanted: 2, available: 1 }));
        assert!(groups(&of, 0, 1).is_err());
    }
}
