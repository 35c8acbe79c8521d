//! The fixed sequence of an epoch: one upload, its launches, one download, on permanent buffers. A driver runs it as one call (a graph).

use super::update::quality_arguments;
use crate::gpu::driver::{Argument, Driver, Step};
use crate::gpu::plain::{bytes, bytes_mut};
use crate::gpu::{Gpu, Memory, THREADS};
use crate::{Error, Segment, Update};

/// Capacity of a bucket in updates (`BUCKET` of epoch.cu), and the bytes of each.
const BUCKET: usize = 128;
const BUCKET_ENTRY_BYTES: usize = 12;
/// Above half of the buckets' capacity, evenly spread updates overflow a bucket now and then: use the sorted path.
const UPDATES_PER_TILE: usize = BUCKET / 2;
/// Words of a segment: clock, fold, hidden.
const SEGMENT_WORDS: usize = 3;
/// Alignment of parts in words: 16 bytes.
const ALIGNMENT: usize = 4;
/// Words before the totals: the overflow flag.
const HEAD: usize = ALIGNMENT;
/// Words of a total (`Quality` of quality.cuh).
const TOTAL_WORDS: usize = 6;
/// Minimum update capacity; it grows in steps of an eighth of the next power of two.
const LEAST_ROOM: usize = 256;

/// Dimensions that a sequence was built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    segments: usize,
    groups: usize,
    tiles: usize,
    /// Update capacity; 0 = no updates and no buckets.
    room: usize,
}

/// Buffers of a sequence, and the driver's cached form. Dropped when the columns move.
pub(in crate::gpu) struct EpochSequence<D: Driver> {
    shape: Shape,
    /// Segments; number of updates; their slots; their deltas.
    input: D::Buffer,
    /// The overflow flag; a total for each segment and group.
    output: D::Buffer,
    /// Fill level of each bucket, which the kernel resets to zero, and the buckets.
    buckets: Option<(D::Buffer, D::Buffer)>,
    up: Vec<u32>,
    back: Vec<u32>,
    graph: Option<D::Graph>,
}

/// The sequences of a device, with updates and without.
pub(in crate::gpu) struct EpochSequences<D: Driver>([Option<EpochSequence<D>>; 2]);

impl<D: Driver> Default for EpochSequences<D> {
    fn default() -> Self {
        Self([None, None])
    }
}

impl Shape {
    /// Returns the word index of the number of updates in the upload.
    fn updates(&self) -> usize {
        (self.segments * SEGMENT_WORDS).next_multiple_of(ALIGNMENT)
    }

    fn up(&self) -> usize {
        if self.room == 0 { self.updates() } else { self.updates() + ALIGNMENT + 2 * self.room }
    }

    fn back(&self) -> usize {
        HEAD + self.segments * self.groups * TOTAL_WORDS
    }
}

/// Returns the capacity for a number of updates.
fn room_for(updates: usize) -> usize {
    if updates == 0 { 0 } else { updates.next_multiple_of((updates.next_power_of_two() / 8).max(LEAST_ROOM)) }
}

impl<D: Driver> EpochSequence<D> {
    fn new(memory: &mut Memory<D>, shape: Shape) -> Result<Self, Error> {
        let input = memory.undefined::<u32>(shape.up())?;
        let output = memory.undefined::<u32>(shape.back())?;
        let buckets = (shape.room > 0).then(|| {
            let counts = memory.zeroed::<u32>(shape.tiles)?;
            Ok((counts, memory.undefined::<u8>(shape.tiles * BUCKET * BUCKET_ENTRY_BYTES)?))
        });
        let (up, back) = (vec![0; shape.up()], vec![0; shape.back()]);
        Ok(Self { shape, input, output, buckets: buckets.transpose()?, up, back, graph: None })
    }
}

impl<D: Driver> Gpu<D> {
    /// Applies the updates, folds and sums by tile into a total for each segment and group; `None`, with nothing changed, if a tile has too many
    /// updates. There are memories, and all slots and segments are in range.
    pub(in crate::gpu) fn epoch_by_tile(
        &mut self,
        segments: &[Segment],
        updates: &[Update],
        groups: usize,
    ) -> Result<Option<&[[u32; TOTAL_WORDS]]>, Error> {
        let tiles = self.tiles.len();
        if updates.len() > tiles * UPDATES_PER_TILE {
            return Ok(None);
        }
        let columns = self.columns.as_ref().expect("an arena with memories has columns");
        let kept = &mut self.sequences.0[usize::from(updates.is_empty())];
        let fits = |kept: &EpochSequence<D>| {
            // Uploading twice the necessary size takes longer than building a new sequence.
            let has_room = (updates.len()..=2 * updates.len().max(LEAST_ROOM)).contains(&kept.shape.room);
            has_room && kept.shape == Shape { segments: segments.len(), groups, tiles, room: kept.shape.room }
        };
        if !kept.as_ref().is_some_and(fits) {
            // Dropped first: memory may suffice for one only.
            *kept = None;
            let shape = Shape { segments: segments.len(), groups, tiles, room: room_for(updates.len()) };
            *kept = Some(EpochSequence::new(&mut self.memory, shape)?);
        }
        let EpochSequence { shape, input, output, buckets, up, back, graph } = kept.as_mut().expect("made above");
        for (words, segment) in up.chunks_exact_mut(SEGMENT_WORDS).zip(segments) {
            words.copy_from_slice(&[segment.clock.units(), segment.fold, u32::from(segment.hidden)]);
        }
        let at = shape.updates();
        if shape.room > 0 {
            up[at] = updates.len() as u32;
            let (slots, deltas) = up[at + ALIGNMENT..].split_at_mut(shape.room);
            for ((slot, delta), update) in slots.iter_mut().zip(deltas).zip(updates) {
                (*slot, *delta) = (update.slot, update.delta as u32);
            }
        }
        let (input, output) = (&*input, &*output);
        let there = |words: usize| Argument::Inside(input, words * size_of::<u32>());
        let totals = Argument::Inside(output, HEAD * size_of::<u32>());
        let quality = quality_arguments(columns, input, groups, totals);
        let blocks = tiles as u32;
        let mut steps = vec![Step::Upload(input, bytes(up)), Step::Fill(output, 0..shape.back() * size_of::<u32>(), 0)];
        let (by_tile, epoch);
        match buckets {
            None => steps.push(Step::Launch("fold_quality", blocks, &quality)),
            Some((counts, buckets)) => {
                let [counts, buckets, overflow] = [&*counts, &*buckets, output].map(Argument::Buffer);
                let (slots, deltas) = (there(at + ALIGNMENT), there(at + ALIGNMENT + shape.room));
                by_tile = [slots, deltas, there(at), counts, buckets, overflow];
                epoch = [&quality[..], &[counts, buckets, overflow]].concat();
                steps.push(Step::Launch("bucket_updates", shape.room.div_ceil(THREADS) as u32, &by_tile));
                steps.push(Step::Launch("epoch", blocks, &epoch));
            }
        }
        steps.push(Step::Download(output, bytes_mut(back)));
        self.memory.0.sequence(graph, &mut steps)?;
        drop(steps);
        let (totals, _) = back[HEAD..].as_chunks::<TOTAL_WORDS>();
        Ok((back[0] == 0).then_some(totals))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_enough_and_no_more_than_a_quarter_too_much() {
        assert_eq!([0, 1, 256, 257, 10_000, 16_384].map(room_for), [0, 256, 256, 512, 10_240, 16_384]);
        assert!((2_048..100_000).all(|updates| (updates..=updates + updates / 4).contains(&room_for(updates))));
    }

    #[test]
    fn parts_begin_where_words_of_sixteen_bytes_do() {
        for segments in 1..9 {
            let shape = Shape { segments, groups: 2, tiles: 7, room: 256 };
            assert!(shape.updates() >= 3 * segments && shape.updates().is_multiple_of(ALIGNMENT));
            assert_eq!(shape.up(), shape.updates() + 4 + 512);
            assert_eq!(Shape { room: 0, ..shape }.up(), shape.updates());
        }
    }
}
