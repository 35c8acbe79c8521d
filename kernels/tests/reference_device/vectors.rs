//! Feature column of a host.

use engram_kernels::recall::{FeatureColumn, inverse_norm};
use engram_kernels::{Slot, TILE, Tiles};

/// Vectors of f16 by slot, initially zero.
pub(crate) struct Vectors {
    dimension: usize,
    bits: Vec<Box<[u8]>>,
    inverse_norms: Tiles<f32>,
    changes: Vec<u64>,
}

impl Vectors {
    pub(crate) fn new(tiles: usize, dimension: usize) -> Self {
        let bits = (0..tiles).map(|_| vec![0; TILE * dimension * 2].into_boxed_slice()).collect();
        let mut inverse_norms = Tiles::new();
        inverse_norms.reserve(tiles);
        Self { dimension, bits, inverse_norms, changes: vec![0; tiles] }
    }

    pub(crate) fn set(&mut self, slot: Slot, vector: &[u16]) {
        let (tile, offset) = (slot as usize / TILE, slot as usize % TILE);
        let stored: Vec<u8> = vector.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        self.bits[tile][offset * stored.len()..][..stored.len()].copy_from_slice(&stored);
        self.inverse_norms.set(slot, inverse_norm(vector));
        self.changes[tile] += 1;
    }

    pub(crate) fn column(&self) -> FeatureColumn<'_> {
        let Self { dimension, bits, inverse_norms, changes } = self;
        FeatureColumn { dimension: *dimension, bits, inverse_norms, changes }
    }
}
