//! Host columns by slot: ids and, only where they exist, keys, features, payloads and update counts.
//!
//! Columns share the tiles of the device's arena. Invariant: a column that some memory uses has a value for every used slot of
//! every tile; an unused column takes no memory.

use engram_kernels::recall::{FeatureColumn, inverse_norm_of_bytes};
use engram_kernels::{Slot, TILE, TileId, Tiles};
use engram_memory::hash::content_hash;
use engram_memory::{FeatureShape, FeatureType, MemoryId};

use crate::payload::{Reference, References};

/// The host's columns.
#[derive(Debug)]
pub(crate) struct Columns {
    shape: FeatureShape,
    /// Tiles of every present column.
    tiles: usize,
    ids: Tiles<MemoryId>,
    keys: Blobs,
    payloads: Blobs,
    /// Payloads of items, which are on disk.
    references: References,
    /// Feature bits, `TILE` vectors per tile; empty if the cluster has no features.
    features: Vec<Box<[u8]>>,
    /// Inverse norm of each f16 vector, for recall.
    inverse_norms: Tiles<f32>,
    /// Change counter of each tile's vectors.
    changes: Vec<u64>,
    /// Content hashes; `None` while every one is 0.
    content: Option<Tiles<u128>>,
    /// Content hash of a new memory: zero features and no payload.
    bare: u128,
    /// Update counts; `None` while no partition counts updates.
    updates: Option<Tiles<u16>>,
}

impl Columns {
    pub(crate) fn new(shape: FeatureShape) -> Self {
        let zeros = vec![0; shape.bytes()];
        let bare = content_hash(Some((shape.dtype, &zeros)), &[]);
        Self {
            shape,
            tiles: 0,
            ids: Tiles::new(),
            keys: Blobs::default(),
            payloads: Blobs::default(),
            references: References::default(),
            features: Vec::new(),
            inverse_norms: Tiles::new(),
            changes: Vec::new(),
            content: (bare != 0).then(Tiles::new),
            bare,
            updates: None,
        }
    }

    /// Grows every present column to at least `tiles` tiles.
    pub(crate) fn reserve(&mut self, tiles: usize) {
        self.tiles = self.tiles.max(tiles);
        self.ids.reserve(self.tiles);
        if let Some(content) = &mut self.content {
            content.reserve(self.tiles);
        }
        if let Some(updates) = &mut self.updates {
            updates.reserve(self.tiles);
        }
        if self.shape.dimension > 0 {
            let width = self.shape.bytes() * TILE;
            self.features.resize_with(self.tiles, || vec![0; width].into_boxed_slice());
        }
        if self.recalls() {
            self.inverse_norms.reserve(self.tiles);
            self.changes.resize(self.tiles, 0);
        }
    }

    /// Initializes `slot` as a new memory: zero features, no payload, no updates.
    pub(crate) fn create(&mut self, slot: Slot, id: MemoryId, key: &[u8]) {
        self.ids.set(slot, id);
        self.keys.set(slot, key);
        self.payloads.set(slot, &[]);
        if let Some(content) = &mut self.content {
            content.set(slot, self.bare);
        }
        if let Some(updates) = &mut self.updates {
            updates.set(slot, 0);
        }
        self.features_mut(slot).fill(0);
        self.set_inverse_norm(slot, 0.0);
    }

    /// Copies the memory at `from` over the one at `to`.
    pub(crate) fn relocate(&mut self, from: Slot, to: Slot) {
        self.ids.set(to, self.ids.get(from));
        self.keys.relocate(from, to);
        self.payloads.relocate(from, to);
        if let Some(reference) = self.references.remove(from) {
            self.references.set(to, reference);
        }
        if let Some(content) = &mut self.content {
            content.set(to, content.get(from));
        }
        if let Some(updates) = &mut self.updates {
            updates.set(to, updates.get(from));
        }
        if self.shape.dimension > 0 {
            let features = self.features(from).to_vec();
            self.features_mut(to).copy_from_slice(&features);
        }
        if self.recalls() {
            self.set_inverse_norm(to, self.inverse_norms.get(from));
        }
    }

    /// Frees the heap memory of a removed memory; its reference was taken before.
    pub(crate) fn release(&mut self, slot: Slot) {
        self.keys.set(slot, &[]);
        self.payloads.set(slot, &[]);
    }

    pub(crate) const fn ids(&self) -> &Tiles<MemoryId> {
        &self.ids
    }

    pub(crate) fn id(&self, slot: Slot) -> MemoryId {
        self.ids.get(slot)
    }

    pub(crate) const fn content(&self) -> Option<&Tiles<u128>> {
        self.content.as_ref()
    }

    pub(crate) fn key(&self, slot: Slot) -> &[u8] {
        self.keys.get(slot)
    }

    pub(crate) fn set_key(&mut self, slot: Slot, key: &[u8]) {
        self.keys.set(slot, key);
    }

    pub(crate) fn payload(&self, slot: Slot) -> &[u8] {
        self.payloads.get(slot)
    }

    pub(crate) fn features(&self, slot: Slot) -> &[u8] {
        let width = self.shape.bytes();
        self.features.get(slot as usize / TILE).map_or(&[], |tile| &tile[slot as usize % TILE * width..][..width])
    }

    /// Returns the reference to a payload on disk.
    pub(crate) fn reference(&self, slot: Slot) -> Option<&Reference> {
        self.references.get(slot)
    }

    /// Removes and returns the reference to a payload on disk.
    pub(crate) fn take_reference(&mut self, slot: Slot) -> Option<Reference> {
        self.references.remove(slot)
    }

    /// Sets the reference to a payload on disk; the content hash does not change.
    pub(crate) fn set_reference(&mut self, slot: Slot, reference: Reference) {
        self.references.set(slot, reference);
    }

    /// Sets the content hash to that of the features and a payload on disk.
    pub(crate) fn hash_payload(&mut self, slot: Slot, payload: &[u8]) {
        let hash = content_hash(Some((self.shape.dtype, self.features(slot))), payload);
        self.set_hash(slot, hash);
    }

    /// Replaces features and payload unless empty, and their hash, which does not cover a payload on disk.
    pub(crate) fn set_content(&mut self, slot: Slot, features: &[u8], payload: &[u8]) {
        if !features.is_empty() {
            self.features_mut(slot).copy_from_slice(features);
            if self.recalls() {
                self.set_inverse_norm(slot, inverse_norm_of_bytes(features));
            }
        }
        if !payload.is_empty() {
            self.payloads.set(slot, payload);
        }
        if !features.is_empty() || !payload.is_empty() {
            let hash = content_hash(Some((self.shape.dtype, self.features(slot))), self.payload(slot));
            self.set_hash(slot, hash);
        }
    }

    /// Counts one update of the memory at `slot`, saturating.
    pub(crate) fn count_update(&mut self, slot: Slot) {
        let updates = self.updates_mut();
        updates.set(slot, updates.get(slot).saturating_add(1));
    }

    pub(crate) fn updates(&self, slot: Slot) -> u16 {
        self.updates.as_ref().map_or(0, |updates| updates.get(slot))
    }

    pub(crate) fn set_updates(&mut self, slot: Slot, count: u16) {
        if count > 0 || self.updates.is_some() {
            self.updates_mut().set(slot, count);
        }
    }

    pub(crate) const fn has_keys(&self) -> bool {
        !self.keys.tiles.is_empty()
    }

    pub(crate) const fn has_payloads(&self) -> bool {
        !self.payloads.tiles.is_empty()
    }

    pub(crate) const fn has_updates(&self) -> bool {
        self.updates.is_some()
    }

    /// Bytes of the columns, with keys and payloads.
    pub(crate) fn bytes(&self) -> u64 {
        let content = self.content.as_ref().map_or(0, Tiles::len) * 16;
        let updates = self.updates.as_ref().map_or(0, Tiles::len) * 2;
        let features = self.features.len() * self.shape.bytes() + self.inverse_norms.len() * 4;
        let blobs = (self.keys.present() + self.payloads.present()) * size_of::<Box<[u8]>>();
        let columns = (self.ids.len() * 8 + content + updates + features + blobs) * TILE;
        columns as u64 + self.keys.bytes + self.payloads.bytes + self.references.bytes()
    }

    /// The feature column for recall; `None` unless features are f16.
    pub(crate) fn feature_column(&self) -> Option<FeatureColumn<'_>> {
        let Self { shape, features, inverse_norms, changes, .. } = self;
        let dimension = shape.dimension as usize;
        self.recalls().then_some(FeatureColumn { dimension, bits: features, inverse_norms, changes })
    }

    fn recalls(&self) -> bool {
        self.shape.dimension > 0 && self.shape.dtype == FeatureType::F16
    }

    /// Sets the inverse norm and counts the change.
    fn set_inverse_norm(&mut self, slot: Slot, inverse_norm: f32) {
        if self.recalls() {
            self.inverse_norms.set(slot, inverse_norm);
            self.changes[slot as usize / TILE] += 1;
        }
    }

    pub(crate) fn set_hash(&mut self, slot: Slot, hash: u128) {
        let tiles = self.tiles;
        let content = self.content.get_or_insert_with(|| {
            let mut content = Tiles::new();
            content.reserve(tiles);
            content
        });
        content.set(slot, hash);
    }

    fn updates_mut(&mut self) -> &mut Tiles<u16> {
        let tiles = self.tiles;
        self.updates.get_or_insert_with(|| {
            let mut updates = Tiles::new();
            updates.reserve(tiles);
            updates
        })
    }

    fn features_mut(&mut self, slot: Slot) -> &mut [u8] {
        let width = self.shape.bytes();
        match self.features.get_mut(slot as usize / TILE) {
            Some(tile) => &mut tile[slot as usize % TILE * width..][..width],
            None => &mut [],
        }
    }
}

/// A sparse column of byte strings.
#[derive(Debug, Default)]
struct Blobs {
    tiles: Vec<TileOfBlobs>,
    /// Bytes of all strings.
    bytes: u64,
}

impl Blobs {
    fn get(&self, slot: Slot) -> &[u8] {
        match self.tiles.get(slot as usize / TILE) {
            Some(Some(tile)) => &tile[slot as usize % TILE],
            _ => &[],
        }
    }

    fn set(&mut self, slot: Slot, bytes: &[u8]) {
        self.put(slot, || bytes.into(), bytes.is_empty());
    }

    fn relocate(&mut self, from: Slot, to: Slot) {
        let moved = match self.tiles.get_mut(from as usize / TILE) {
            Some(Some(tile)) => std::mem::take(&mut tile[from as usize % TILE]),
            _ => Box::default(),
        };
        self.bytes -= moved.len() as u64;
        let empty = moved.is_empty();
        self.put(to, || moved, empty);
    }

    /// Allocated tiles.
    fn present(&self) -> usize {
        self.tiles.iter().flatten().count()
    }

    fn put(&mut self, slot: Slot, bytes: impl FnOnce() -> Box<[u8]>, empty: bool) {
        let tile = slot as usize / TILE;
        if empty && !matches!(self.tiles.get(tile), Some(Some(_))) {
            return;
        }
        if self.tiles.len() <= tile {
            self.tiles.resize_with(tile + 1, || None);
        }
        let values = self.tiles[tile].get_or_insert_with(|| vec![Box::default(); TILE].into_boxed_slice());
        let value = &mut values[slot as usize % TILE];
        self.bytes -= value.len() as u64;
        *value = bytes();
        self.bytes += value.len() as u64;
    }
}

/// One byte string per slot; `None` = all are empty.
type TileOfBlobs = Option<Box<[Box<[u8]>]>>;

/// The slot at `offset` of `tile`.
pub(crate) const fn slot_at(tile: TileId, offset: u32) -> Slot {
    tile * TILE as u32 + offset
}
