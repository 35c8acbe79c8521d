//! A column cut into tiles, so that growth never moves or doubles it.

/// Slots of a tile.
pub const TILE: usize = 4_096;

/// One value per slot, in tiles of [`TILE`].
#[derive(Debug, Clone, Default)]
pub struct Tiles<T> {
    tiles: Vec<Box<[T; TILE]>>,
}

impl<T: Copy + Default> Tiles<T> {
    /// A column without tiles.
    pub const fn new() -> Self {
        Self { tiles: Vec::new() }
    }

    /// Grows to at least `tiles` tiles of default values.
    pub fn reserve(&mut self, tiles: usize) {
        while self.tiles.len() < tiles {
            let tile: Box<[T]> = vec![T::default(); TILE].into_boxed_slice();
            let tile = tile.try_into().unwrap_or_else(|_| unreachable!("a tile has TILE slots"));
            self.tiles.push(tile);
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
        &self.tiles[tile]
    }

    /// One tile, to be changed.
    pub fn tile_mut(&mut self, tile: usize) -> &mut [T; TILE] {
        &mut self.tiles[tile]
    }

    /// All tiles, to be changed side by side.
    pub fn tiles_mut(&mut self) -> &mut [Box<[T; TILE]>] {
        &mut self.tiles
    }

    /// The value at `slot`.
    pub fn get(&self, slot: u32) -> T {
        self.tiles[slot as usize / TILE][slot as usize % TILE]
    }

    /// Replaces the value at `slot`.
    pub fn set(&mut self, slot: u32, value: T) {
        self.tiles[slot as usize / TILE][slot as usize % TILE] = value;
    }
}
