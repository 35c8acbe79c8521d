//! Stable radix sort of pairs.

use crate::Error;
use crate::gpu::driver::{Argument, Driver};
use crate::gpu::{Memory, THREADS, firsts};

const DIGITS: usize = 256;
const PLACES: usize = 4;
/// Items per block.
const ITEMS: usize = THREADS * 16;
/// Maximum blocks of the histogram: each adds 1,024 numbers to global memory.
const MOST_HISTOGRAM_BLOCKS: usize = 1_024;

/// Keys and values in sort order.
pub(in crate::gpu) struct SortedPairs<B> {
    pub(in crate::gpu) keys: B,
    pub(in crate::gpu) values: B,
}

impl<D: Driver> Memory<D> {
    /// Sorts `count` (at least 1) pairs of u32 stably by key. Without `values` they are 0, 1, 2, ...
    pub(in crate::gpu) fn sort(
        &mut self,
        keys: D::Buffer,
        values: Option<D::Buffer>,
        count: usize,
    ) -> Result<SortedPairs<D::Buffer>, Error> {
        let bins = self.zeroed::<u32>(PLACES * DIGITS)?;
        let arguments = [Argument::Buffer(&keys), Argument::U32(count as u32), Argument::Buffer(&bins)];
        let per_block = ITEMS.max(count.div_ceil(MOST_HISTOGRAM_BLOCKS));
        self.launch("radix_histogram", count, per_block, &arguments)?;
        let bins = self.downloaded::<u32>(&bins, PLACES * DIGITS)?;

        // A digit that all keys share changes nothing: equal keys need no pass at all.
        let mut places: Vec<_> = bins.chunks(DIGITS).enumerate().collect();
        places.retain(|(_, bins)| bins.iter().all(|&bin| (bin as usize) < count));
        if values.is_none() && places.is_empty() {
            places.push((0, &bins[..DIGITS])); // One pass that creates the values.
        }
        let blocks = count.div_ceil(ITEMS);
        let mut sorted = (keys, values);
        for (place, bins) in places {
            let offsets = self.uploaded(&firsts(bins.iter().copied())[..DIGITS])?;
            let status = self.zeroed::<u32>(blocks * DIGITS)?;
            let ticket = self.zeroed::<u32>(1)?;
            let (keys, values) = (self.undefined::<u32>(count)?, self.undefined::<u32>(count)?);
            let arguments = [
                Argument::Buffer(&sorted.0),
                sorted.1.as_ref().map_or(Argument::Null, Argument::Buffer),
                Argument::Buffer(&keys),
                Argument::Buffer(&values),
                Argument::U32(count as u32),
                Argument::U32(8 * place as u32),
                Argument::Buffer(&offsets),
                Argument::Buffer(&status),
                Argument::Buffer(&ticket),
            ];
            self.launch("radix_pass", count, ITEMS, &arguments)?;
            sorted = (keys, Some(values));
        }
        Ok(SortedPairs { keys: sorted.0, values: sorted.1.expect("values are passed in or created by the first pass") })
    }
}
