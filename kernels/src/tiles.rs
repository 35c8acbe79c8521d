//! A column cut into tiles, so that growth never moves or doubles it.

/// Slots of a tile.
pub const TILE: usize = 4_096;

/// One value per slot, in tiles of [`TILE`].
#[derive(Debug, Clone, Default)]
pub struct Tiles<T> {
    tiles: Vec<Box<Lines<T>>>,
}

/// A tile that begins at a cache line, so that no vector load of a pass straddles two.
#[derive(Debug, Clone)]
#[repr(align(64))]
struct Lines<T>([T; TILE]);

impl<T: Copy + Default> Tiles<T> {
    /// A column without tiles.
    pub const fn new() -> Self {
        Self { tiles: Vec::new() }
    }

    /// Grows to at least `tiles` tiles of default values.
    pub fn reserve(&mut self, tiles: usize) {
        while self.tiles.len() < tiles {
            self.tiles.push(Box::new(Lines([T::default(); TILE])));
        }
    }

    /// Number of tiles.
    pub fn len(&self) -> usize {
        self.tiles.len()
    }

    /// Whether there is no tile.
    pub fn is_empty(&self) -> bool {
        self.tiles.is_empty()
    }

    /// One tile.
    pub fn tile(&self, tile: usize) -> &[T; TILE] {
        &self.tiles[tile].0
    }

    /// One tile, to be changed.
    pub fn tile_mut(&mut self, tile: usize) -> &mut [T; TILE] {
        &mut self.tiles[tile].0
    }

    /// All tiles in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[T; TILE]> {
        self.tiles.iter().map(|tile| &tile.0)
    }

    /// All tiles in order, to be changed side by side.
    pub fn iter_mut(&mut self) -> impl ExactSizeIterator<Item = &mut [T; TILE]> {
        self.tiles.iter_mut().map(|tile| &mut tile.0)
    }

    /// The value at `slot`.
    pub fn get(&self, slot: u32) -> T {
        self.tiles[slot as usize / TILE].0[slot as usize % TILE]
    }

    /// Has the processor fetch the value at `slot`, which will be asked for soon.
    pub(crate) fn prefetch(&self, slot: u32) {
        prefetch(&self.tiles[slot as usize / TILE].0[slot as usize % TILE]);
    }

    /// Replaces the value at `slot`.
    pub fn set(&mut self, slot: u32, value: T) {
        self.tiles[slot as usize / TILE].0[slot as usize % TILE] = value;
    }

    /// Parts of `tiles` consecutive tiles, to be changed by several threads.
    pub(crate) fn parts_mut(&mut self, tiles: usize) -> impl ExactSizeIterator<Item = TilesMut<'_, T>> {
        self.tiles.chunks_mut(tiles).map(TilesMut)
    }
}

/// Has the processor fetch a value.
#[inline(always)]
pub(crate) fn prefetch<T>(value: &T) {
    prefetch_behind(value, 0);
}

/// Has the processor fetch what lies so many values behind this one, whatever that is.
#[inline(always)]
#[allow(unsafe_code)] // A hint.
pub(crate) fn prefetch_behind<T>(value: &T, by: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is in every x86-64, and any address may be asked for.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).wrapping_add(by).cast()) };
    }
    let _ = (value, by);
}

/// Some consecutive tiles of a column.
pub(crate) struct TilesMut<'a, T>(&'a mut [Box<Lines<T>>]);

impl<T> TilesMut<'_, T> {
    /// The tile at `index`, from the first of these.
    pub(crate) fn tile_mut(&mut self, index: usize) -> &mut [T; TILE] {
        &mut self.0[index].0
    }
}
