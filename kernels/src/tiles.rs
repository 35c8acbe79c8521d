//! A column divided into tiles, so that growth never moves data or doubles memory.

/// Slots per tile.
pub const TILE: usize = 4_096;

/// One value per slot, in tiles of [`TILE`].
#[derive(Debug, Clone, Default)]
pub struct Tiles<T> {
    tiles: Vec<Box<Lines<T>>>,
}

/// A tile aligned to a cache line, so that no vector load straddles two.
#[derive(Debug, Clone)]
#[repr(align(64))]
struct Lines<T>([T; TILE]);

impl<T: Copy + Default> Tiles<T> {
    /// Creates a column without tiles.
    pub const fn new() -> Self {
        Self { tiles: Vec::new() }
    }

    /// Grows to at least `tiles` tiles of default values.
    pub fn reserve(&mut self, tiles: usize) {
        while self.tiles.len() < tiles {
            self.tiles.push(Box::new(Lines([T::default(); TILE])));
        }
    }

    /// Returns the number of tiles.
    pub fn len(&self) -> usize {
        self.tiles.len()
    }

    /// Returns whether there are no tiles.
    pub fn is_empty(&self) -> bool {
        self.tiles.is_empty()
    }

    /// Returns one tile.
    pub fn tile(&self, tile: usize) -> &[T; TILE] {
        &self.tiles[tile].0
    }

    /// Returns one tile for writing.
    pub fn tile_mut(&mut self, tile: usize) -> &mut [T; TILE] {
        &mut self.tiles[tile].0
    }

    /// Returns all tiles in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[T; TILE]> {
        self.tiles.iter().map(|tile| &tile.0)
    }

    /// Returns all tiles in order for writing.
    pub fn iter_mut(&mut self) -> impl ExactSizeIterator<Item = &mut [T; TILE]> {
        self.tiles.iter_mut().map(|tile| &mut tile.0)
    }

    /// Returns the value at `slot`.
    pub fn get(&self, slot: u32) -> T {
        self.tiles[slot as usize / TILE].0[slot as usize % TILE]
    }

    /// Prefetches the value at `slot`.
    pub(crate) fn prefetch(&self, slot: u32) {
        prefetch(&self.tiles[slot as usize / TILE].0[slot as usize % TILE]);
    }

    /// Replaces the value at `slot`.
    pub fn set(&mut self, slot: u32, value: T) {
        self.tiles[slot as usize / TILE].0[slot as usize % TILE] = value;
    }

    /// Splits the column into parts of `tiles` consecutive tiles for writing by several threads.
    pub(crate) fn parts_mut(&mut self, tiles: usize) -> impl ExactSizeIterator<Item = TilesMut<'_, T>> {
        self.tiles.chunks_mut(tiles).map(TilesMut)
    }
}

/// Prefetches a value.
#[inline(always)]
pub(crate) fn prefetch<T>(value: &T) {
    prefetch_behind(value, 0);
}

/// Prefetches the memory that many values behind this one.
#[inline(always)]
#[allow(unsafe_code)] // A prefetch hint.
pub(crate) fn prefetch_behind<T>(value: &T, by: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has SSE, and the prefetch accepts any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).wrapping_add(by).cast()) };
    }
    let _ = (value, by);
}

/// Consecutive tiles of a column.
pub(crate) struct TilesMut<'a, T>(&'a mut [Box<Lines<T>>]);

impl<T> TilesMut<'_, T> {
    /// Returns the tile at `index`, relative to the first.
    pub(crate) fn tile_mut(&mut self, index: usize) -> &mut [T; TILE] {
        &mut self.0[index].0
    }
}
