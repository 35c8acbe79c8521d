//! The encoded form of a Christoffel grid: blocks of columns, compressed and checksummed one by one, that are read when a
//! problem needs them.
//!
//! All positions of a geodesic of one dimension are at one wavelength, so a solver needs one block. Blocks are read at
//! their offset into a bounded cache, instead of from a memory map: compressed pages can not be used in place, a read
//! error is an error instead of a signal, and a map of a file that another process may truncate is not safe Rust.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use xxhash_rust::xxh3::xxh3_128;

use crate::error::{Error, increasing};
use crate::grid::{ChristoffelGrid, GridColumns, GridSource, MAX_KNOTS, MAX_VALUES, left_column};

const MAGIC: &[u8; 8] = b"GEOGRD02";
/// zstd level of a block: the default.
const LEVEL: i32 = 3;
/// Magic number, metric version, knots, columns, columns per block.
const FIXED: usize = 8 + 16 + 3 * 8;
/// Length and checksum of a block.
const ENTRY: usize = 8 + 16;
const CHECKSUM: usize = 16;
/// Bytes of a block before compression: 8 columns of 2,000 knots.
const BLOCK_BYTES: usize = 256 << 10;
/// Bytes of Gamma and its derivative at a knot.
const KNOT_BYTES: usize = 16;

/// Reads at positions.
pub trait ReadAt: std::fmt::Debug + Sync {
    /// Fills `buffer` with the bytes from `offset` on.
    ///
    /// # Errors
    /// If they can not be read, or there are fewer.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for std::fs::File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, buffer, offset)
    }
}

impl ReadAt for Vec<u8> {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|at| self.get(at..)?.get(..buffer.len()));
        buffer.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Where a block is, and its checksum.
#[derive(Debug, Clone, Copy)]
struct BlockEntry {
    offset: u64,
    length: usize,
    checksum: u128,
}

/// Blocks in memory, least recently used first.
#[derive(Debug)]
struct BlockCache {
    blocks: Vec<(usize, Arc<GridColumns>)>,
    capacity: usize,
    hits: u64,
    misses: u64,
}

impl BlockCache {
    fn get(&mut self, block: usize) -> Option<Arc<GridColumns>> {
        let Some(at) = self.blocks.iter().position(|(number, _)| *number == block) else {
            self.misses += 1;
            return None;
        };
        self.hits += 1;
        let found = self.blocks.remove(at);
        let columns = Arc::clone(&found.1);
        self.blocks.push(found);
        Some(columns)
    }

    fn insert(&mut self, block: usize, columns: Arc<GridColumns>) {
        // Another thread may have read it in the meantime.
        self.blocks.retain(|(number, _)| *number != block);
        if self.blocks.len() == self.capacity {
            self.blocks.remove(0);
        }
        self.blocks.push((block, columns));
    }
}

/// A grid of which only the index is in memory, and at most a given number of blocks. Any number of threads may use it.
#[derive(Debug)]
pub struct GridFile<S> {
    source: S,
    version: u128,
    knots: Arc<[f64]>,
    columns: usize,
    block_columns: usize,
    index: Vec<BlockEntry>,
    cache: Mutex<BlockCache>,
}

/// Columns between the first columns of two blocks. A block also has the first column of the next one, so that both
/// neighbours of every wavelength are in one block.
fn block_columns(rows: usize, columns: usize) -> usize {
    (BLOCK_BYTES / (KNOT_BYTES * rows)).saturating_sub(1).clamp(1, columns - 1)
}

/// Number of blocks.
const fn blocks(columns: usize, block_columns: usize) -> usize {
    (columns - 1).div_ceil(block_columns)
}

fn damaged(problem: impl Into<String>) -> Error {
    Error::Encoding { object: "christoffel grid", problem: problem.into() }
}

impl ChristoffelGrid {
    /// The grid as bytes, for [`GridFile::open`]. Equal grids have equal bytes.
    pub fn encode(&self) -> Vec<u8> {
        let all = self.all();
        let (rows, columns) = (all.knots.len(), all.total);
        let width = block_columns(rows, columns);
        let mut out = MAGIC.to_vec();
        out.extend(self.version().to_le_bytes());
        [rows, columns, width].iter().for_each(|count| out.extend((*count as u64).to_le_bytes()));
        all.knots.iter().for_each(|knot| out.extend(knot.to_bits().to_le_bytes()));
        let mut body = Vec::new();
        for block in 0..blocks(columns, width) {
            let part = all.part(block * width, (width + 1).min(columns - block * width));
            let values = part.gamma.iter().chain(&part.slope);
            let raw: Vec<u8> = values.flat_map(|x| x.to_bits().to_le_bytes()).collect();
            let compressed = zstd::bulk::compress(&raw, LEVEL).expect("compression into memory does not fail");
            out.extend((compressed.len() as u64).to_le_bytes());
            out.extend(xxh3_128(&compressed).to_le_bytes());
            body.extend(compressed);
        }
        out.extend(xxh3_128(&out).to_le_bytes());
        out.extend(body);
        out
    }
}

impl<S: ReadAt> GridFile<S> {
    /// Opens an encoded grid: reads its index, and no block. At most `capacity` (at least 1) blocks, of about 256 KiB each
    /// in the grid of the reference, stay in memory.
    ///
    /// # Errors
    /// [`Error::Encoding`] if the index is damaged or can not be read.
    pub fn open(source: S, capacity: usize) -> Result<Self, Error> {
        let fixed = read(&source, FIXED, 0)?;
        let word = |at: usize| u64::from_le_bytes(fixed[at..at + 8].try_into().expect("8 bytes")) as usize;
        let (rows, columns, width) = (word(24), word(32), word(40));
        if !fixed.starts_with(MAGIC) {
            return Err(damaged("the magic number is wrong"));
        }
        let is_axis = |count: usize| (2..=MAX_KNOTS).contains(&count);
        if !is_axis(rows) || !is_axis(columns) || rows * columns > MAX_VALUES || width != block_columns(rows, columns) {
            return Err(damaged("the shape is out of range"));
        }
        let count = blocks(columns, width);
        let length = FIXED + 8 * rows + ENTRY * count;
        let header = read(&source, length + CHECKSUM, 0)?;
        let (header, checksum) = header.split_at(length);
        if xxh3_128(header).to_le_bytes() != checksum {
            return Err(damaged("checksum mismatch of the index"));
        }
        let (knots, entries) = header[FIXED..].split_at(8 * rows);
        let knots: Arc<[f64]> = knots.chunks_exact(8).map(number).collect();
        increasing("knots", &knots, 2)?;
        let mut offset = (length + CHECKSUM) as u64;
        let entry = |bytes: &[u8]| {
            let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
            let checksum = u128::from_le_bytes(bytes[8..].try_into().expect("16 bytes"));
            let block = BlockEntry { offset, length: length as usize, checksum };
            offset = offset.saturating_add(length);
            block
        };
        let index: Vec<BlockEntry> = entries.chunks_exact(ENTRY).map(entry).collect();
        let most = zstd::zstd_safe::compress_bound(KNOT_BYTES * rows * (width + 1));
        if index.iter().any(|block| block.length > most) {
            return Err(damaged("a block is longer than its values"));
        }
        let version = u128::from_le_bytes(header[8..24].try_into().expect("16 bytes"));
        let capacity = capacity.max(1);
        let cache = Mutex::new(BlockCache { blocks: Vec::new(), capacity, hits: 0, misses: 0 });
        Ok(Self { source, version, knots, columns, block_columns: width, index, cache })
    }

    /// Knots in c.
    pub fn knots(&self) -> &[f64] {
        &self.knots
    }

    /// Lookups that found their block in memory, and lookups that read it.
    pub fn hits_and_misses(&self) -> (u64, u64) {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        (cache.hits, cache.misses)
    }

    /// Reads the whole grid, which also checks every block.
    ///
    /// # Errors
    /// [`Error::Encoding`] if a block is damaged or can not be read.
    pub fn load(&self) -> Result<ChristoffelGrid, Error> {
        let rows = self.knots.len();
        let mut all = GridColumns {
            knots: Arc::clone(&self.knots),
            first: 0,
            count: self.columns,
            total: self.columns,
            gamma: vec![0.0; rows * self.columns],
            slope: vec![0.0; rows * self.columns],
        };
        for block in 0..self.index.len() {
            let part = self.read_block(block)?;
            let tables = [(&mut all.gamma, &part.gamma), (&mut all.slope, &part.slope)];
            for (to, from) in tables {
                for (row, values) in from.chunks_exact(part.count).enumerate() {
                    let at = row * self.columns + part.first;
                    to[at..at + part.count].copy_from_slice(values);
                }
            }
        }
        Ok(ChristoffelGrid::from_columns(self.version, all))
    }

    fn read_block(&self, block: usize) -> Result<GridColumns, Error> {
        let BlockEntry { offset, length, checksum } = self.index[block];
        let compressed = read(&self.source, length, offset)?;
        if xxh3_128(&compressed) != checksum {
            return Err(damaged(format!("checksum mismatch of block {block}")));
        }
        let first = block * self.block_columns;
        let count = (self.block_columns + 1).min(self.columns - first);
        let values = self.knots.len() * count;
        let raw = zstd::bulk::decompress(&compressed, KNOT_BYTES * values).map_err(|e| damaged(e.to_string()))?;
        if raw.len() != KNOT_BYTES * values {
            return Err(damaged(format!("block {block} has {} bytes instead of {}", raw.len(), KNOT_BYTES * values)));
        }
        let (gamma, slope) = raw.split_at(8 * values);
        Ok(GridColumns {
            knots: Arc::clone(&self.knots),
            first,
            count,
            total: self.columns,
            gamma: gamma.chunks_exact(8).map(number).collect(),
            slope: slope.chunks_exact(8).map(number).collect(),
        })
    }
}

impl<S: ReadAt> GridSource for GridFile<S> {
    fn version(&self) -> u128 {
        self.version
    }

    fn columns_at(&self, l: f64) -> Result<Arc<GridColumns>, Error> {
        let block = left_column(self.columns, l) / self.block_columns;
        let cache = || self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(columns) = cache().get(block) {
            return Ok(columns);
        }
        // Not under the lock: other threads use blocks in memory meanwhile.
        let columns = Arc::new(self.read_block(block)?);
        cache().insert(block, Arc::clone(&columns));
        Ok(columns)
    }
}

fn number(bytes: &[u8]) -> f64 {
    f64::from_bits(u64::from_le_bytes(bytes.try_into().expect("8 bytes")))
}

fn read(source: &dyn ReadAt, length: usize, offset: u64) -> Result<Vec<u8>, Error> {
    let mut buffer = vec![0; length];
    source.read_at(&mut buffer, offset).map_err(|error| damaged(format!("failed to read: {error}")))?;
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::engine::{Closed1D, GeodesicBvp, GridEngine};
    use crate::grid::Interpolation;
    use crate::metric::{LinearRootMetric, Metric, MetricNetwork};
    use crate::shooting::BatchedShooting;
    use crate::trajectory::Problem;

    /// Bytes that count how many of them were read.
    #[derive(Debug)]
    struct Counted(Vec<u8>, AtomicU64);

    impl ReadAt for Counted {
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            self.1.fetch_add(buffer.len() as u64, Ordering::Relaxed);
            self.0.read_at(buffer, offset)
        }
    }

    #[test]
    fn opened_grids_equal_rebuilt_ones_and_stale_or_damaged_ones_are_refused() {
        let mut metric = MetricNetwork::stress(3);
        // Wide enough for three blocks, the last one smaller.
        let (rows, columns) = (1_100, 40);
        let grid = ChristoffelGrid::build(&metric, rows, columns).unwrap();
        assert_eq!(blocks(columns, block_columns(rows, columns)), 3);
        let bytes = grid.encode();
        assert_eq!(ChristoffelGrid::build(&metric, rows, columns).unwrap().encode(), bytes);
        assert_eq!(GridFile::open(bytes.clone(), 1).unwrap().load().unwrap(), grid);
        let blocks_begin = FIXED + 8 * rows + 3 * ENTRY + CHECKSUM;
        for at in [0, 9, 30, FIXED + 5, blocks_begin - ENTRY, blocks_begin, bytes.len() - 1] {
            let mut damaged = bytes.clone();
            damaged[at] ^= 4;
            let found = GridFile::open(damaged, 1).and_then(|file| file.load());
            assert!(matches!(found, Err(Error::Encoding { .. })), "byte {at}");
        }
        let shorter = bytes[..bytes.len() - 1].to_vec();
        assert!(matches!(GridFile::open(shorter, 1).unwrap().load(), Err(Error::Encoding { .. })));
        let weight = &mut metric.parameters_mut()[17];
        *weight = weight.next_up();
        let file = GridFile::open(bytes, 1).unwrap();
        assert!(matches!(file.check_version(&metric), Err(Error::Stale { .. })));
        assert!(matches!(grid.check_version(&metric), Err(Error::Stale { .. })));
    }

    #[test]
    fn problems_read_only_their_blocks_and_get_the_values_of_the_whole_grid() {
        let metric = LinearRootMetric { depth: 0.8 };
        let grid = ChristoffelGrid::build(&metric, 1_100, 201).unwrap();
        let bytes = grid.encode();
        let size = bytes.len() as u64;
        let file = GridFile::open(Counted(bytes, AtomicU64::new(0)), 2).unwrap();
        let index = file.source.1.load(Ordering::Relaxed);
        assert!(index < size / 4, "{index} of {size} bytes for the index");
        for i in 0..=400 {
            // Every column, every middle, both borders and outside.
            let l = -1.01 + 2.02 * f64::from(i) / 400.0;
            let columns = file.columns_at(l).unwrap();
            for interpolation in [Interpolation::Bilinear, Interpolation::Hermite] {
                for c in [-1.5, -1.0, -0.337, 0.6, 1.0] {
                    assert_eq!(columns.value(c, l, interpolation), grid.value(c, l, interpolation), "{c} {l}");
                }
            }
        }
        let count = file.index.len() as u64;
        assert_eq!(file.hits_and_misses(), (401 - count, count), "in order, every block is read once");
        assert_eq!(file.cache.lock().unwrap().blocks.len(), 2, "the cache is bounded");

        let file = GridFile::open(Counted(grid.encode(), AtomicU64::new(0)), 2).unwrap();
        let before = file.source.1.load(Ordering::Relaxed);
        let problem = Problem { start: -0.9, end: 0.8, wavelength: 0.25 };
        let loose = BatchedShooting { tolerance: 1e-9, residual: 1e-8, ..BatchedShooting::default() };
        let solve = |source: &dyn GridSource| {
            let engine = GridEngine::new(source, &metric, Interpolation::Hermite, loose).unwrap();
            engine.solve(problem, &[0.5]).unwrap()
        };
        let found = solve(&file);
        assert!(found.converged && found == solve(&grid));
        let exact = Closed1D { metric: &metric as &dyn Metric }.solve(problem, &[0.5]).unwrap();
        assert!((found.c[0] - exact.c[0]).abs() < 1e-4, "{found:?} {exact:?}");
        let block = file.source.1.load(Ordering::Relaxed) - before;
        assert_eq!(block, file.index[100 * 125 / 100 / file.block_columns].length as u64, "a problem reads one block");
    }

    #[test]
    fn threads_share_a_file() {
        let metric = LinearRootMetric { depth: 0.8 };
        let grid = ChristoffelGrid::build(&metric, 1_100, 101).unwrap();
        let file = GridFile::open(grid.encode(), 2).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4_u32 {
                let (file, grid) = (&file, &grid);
                scope.spawn(move || {
                    for i in 0..200_u32 {
                        let l = f64::from(i.wrapping_mul(37 + thread) % 101) / 50.0 - 1.0;
                        let found = file.columns_at(l).unwrap().value(0.3, l, Interpolation::Hermite);
                        assert_eq!(found, grid.value(0.3, l, Interpolation::Hermite));
                    }
                });
            }
        });
        let (hits, misses) = file.hits_and_misses();
        assert_eq!(hits + misses, 800);
    }
}
