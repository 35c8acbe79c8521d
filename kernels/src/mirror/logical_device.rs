//! A logical device on the CPU with its own memory, for tests and benchmarks of several devices.

use crate::mirror::Mirror;
use crate::recall::{FeatureColumn, RecallMatch, RecallRequest};
use crate::{
    Cpu, Device, DigestRequest, Error, GroupUpdate, Info, RankRequest, Segment, Slot, TILE, Tile, TileId, Tiles, Update,
};
use engram_memory::{Digest, Group, Histogram, MemoryId, QualityVector};

/// A CPU device that mirrors tiles, ids and vectors of a host like a GPU.
pub struct LogicalDevice {
    cpu: Cpu,
    info: Info,
    /// Maximum number of tiles.
    most: u32,
    tiles: Vec<Tile>,
    /// The host tile that each tile mirrors.
    origins: Vec<TileId>,
    ids: Tiles<MemoryId>,
    stale_ids: Vec<bool>,
    vectors: Option<Vectors>,
}

/// The device's copy of a host's feature column.
struct Vectors {
    dimension: usize,
    bits: Vec<Box<[u8]>>,
    inverse_norms: Tiles<f32>,
    changes: Vec<u64>,
    /// The host's change counter when a tile was mirrored.
    mirrored_changes: Vec<Option<u64>>,
}

impl LogicalDevice {
    /// Creates a device without tiles, limited to `most` tiles, whose passes use `threads` threads.
    pub fn new(name: String, threads: usize, most: u32) -> Self {
        let cpu = Cpu::new(threads);
        let info = Info { kind: "logical", name, threads: cpu.info().threads };
        let (tiles, origins, stale_ids) = (Vec::new(), Vec::new(), Vec::new());
        Self { cpu, info, most, tiles, origins, ids: Tiles::new(), stale_ids, vectors: None }
    }

    /// Updates ids that may have changed.
    fn mirror_ids(&mut self, ids: &Tiles<MemoryId>) {
        for tile in 0..self.tiles.len() {
            if self.tiles[tile].count > 0 && std::mem::take(&mut self.stale_ids[tile]) {
                *self.ids.tile_mut(tile) = *ids.tile(self.origins[tile] as usize);
            }
        }
    }

    /// Updates vectors that changed.
    fn mirror_vectors(&mut self, column: FeatureColumn<'_>) {
        if self.vectors.as_ref().is_some_and(|own| own.dimension != column.dimension) {
            self.vectors = None;
        }
        let dimension = column.dimension;
        let own = self.vectors.get_or_insert_with(|| {
            let (bits, changes, mirrored_changes) = (Vec::new(), Vec::new(), Vec::new());
            Vectors { dimension, bits, inverse_norms: Tiles::new(), changes, mirrored_changes }
        });
        let tiles = self.tiles.len();
        own.bits.resize_with(tiles, || vec![0; TILE * dimension * size_of::<u16>()].into_boxed_slice());
        own.inverse_norms.reserve(tiles);
        own.changes.resize(tiles, 0);
        own.mirrored_changes.resize(tiles, None);
        for tile in (0..tiles).filter(|&tile| self.tiles[tile].count > 0) {
            let origin = self.origins[tile] as usize;
            let changes = Some(column.changes[origin]);
            if own.mirrored_changes[tile] != changes {
                own.bits[tile].copy_from_slice(&column.bits[origin]);
                *own.inverse_norms.tile_mut(tile) = *column.inverse_norms.tile(origin);
                own.mirrored_changes[tile] = changes;
            }
        }
    }
}

impl Mirror for LogicalDevice {
    fn tiles(&self) -> usize {
        self.tiles.len()
    }

    fn hold(&mut self, tile: TileId, entry: Tile, origin: TileId) {
        self.origins[tile as usize] = origin;
        if let Some(mirrored_changes) =
            self.vectors.as_mut().and_then(|own| own.mirrored_changes.get_mut(tile as usize))
        {
            *mirrored_changes = None;
        }
        self.map_tile(tile, entry);
    }

    fn touch(&mut self, tile: TileId) {
        self.stale_ids[tile as usize] = true;
        self.cpu.touch(tile);
    }

    fn refresh(&mut self, slots: &[Slot], rows: &[(u32, Group)]) -> Result<(), Error> {
        let rows: Vec<_> =
            slots.iter().zip(rows).map(|(&slot, &(potential, group))| (slot, potential, group)).collect();
        self.cpu.write(&rows)
    }

    fn replace(&mut self, tile: TileId, potentials: &[u32], groups: &[u8]) -> Result<(), Error> {
        self.cpu.replace(tile, potentials, groups);
        Ok(())
    }

    fn clear(&mut self) {
        self.cpu = Cpu::new(self.info.threads);
        self.tiles.clear();
        self.origins.clear();
        self.ids = Tiles::new();
        self.stale_ids.clear();
        self.vectors = None;
    }
}

impl Device for LogicalDevice {
    fn info(&self) -> &Info {
        &self.info
    }

    fn reserve(&mut self, tiles: u32) -> Result<(), Error> {
        if tiles > self.most {
            return Err(Error::Full { missing_bytes: u64::from(tiles - self.most) * TILE as u64 });
        }
        self.cpu.reserve(tiles)?;
        let own = self.tiles.len() as TileId;
        self.tiles.resize(tiles.max(own) as usize, Tile::default());
        self.origins.extend(own..tiles);
        self.ids.reserve(self.tiles.len());
        self.stale_ids.resize(self.tiles.len(), true);
        Ok(())
    }

    fn map_tile(&mut self, tile: TileId, entry: Tile) {
        self.tiles[tile as usize] = entry;
        self.cpu.map_tile(tile, entry);
        self.touch(tile);
    }

    fn write(&mut self, rows: &[(Slot, u32, Group)]) -> Result<(), Error> {
        rows.iter().for_each(|row| self.touch(row.0 / TILE as u32));
        self.cpu.write(rows)
    }

    fn read(&mut self, slots: &[Slot], out: &mut Vec<(u32, Group)>) -> Result<(), Error> {
        self.cpu.read(slots, out)
    }

    fn update(&mut self, segments: &[Segment], updates: &[Update]) -> Result<(), Error> {
        self.cpu.update(segments, updates)
    }

    fn update_groups(
        &mut self,
        segments: &[Segment],
        updates: &[GroupUpdate],
        changed: &mut Vec<u64>,
    ) -> Result<(), Error> {
        self.cpu.update_groups(segments, updates, changed)
    }

    fn epoch(&mut self, segments: &[Segment], updates: &[Update], out: &mut Vec<QualityVector>) -> Result<(), Error> {
        self.cpu.epoch(segments, updates, out)
    }

    fn histogram(&mut self, segments: &[Segment], bits: u32) -> Result<Histogram, Error> {
        self.cpu.histogram(segments, bits)
    }

    fn rank(&mut self, request: &RankRequest<'_>, out: &mut Vec<(Slot, u32)>) -> Result<(), Error> {
        self.mirror_ids(request.ids);
        self.cpu.rank(&RankRequest { ids: &self.ids, ..*request }, out)
    }

    fn recall(&mut self, request: &RecallRequest<'_>, out: &mut Vec<RecallMatch>) -> Result<(), Error> {
        self.mirror_ids(request.ids);
        self.mirror_vectors(request.features);
        let Vectors { dimension, bits, inverse_norms, changes, .. } =
            self.vectors.as_ref().expect("the vectors were mirrored above");
        let features = FeatureColumn { dimension: *dimension, bits, inverse_norms, changes };
        self.cpu.recall(&RecallRequest { features, ids: &self.ids, ..*request }, out)
    }

    fn digest(&mut self, request: &DigestRequest<'_>, out: &mut Vec<Digest>) -> Result<(), Error> {
        self.mirror_ids(request.ids);
        let content = request.content.map(|content| {
            let mut own = Tiles::new();
            own.reserve(self.tiles.len());
            for tile in (0..self.tiles.len()).filter(|&tile| self.tiles[tile].count > 0) {
                *own.tile_mut(tile) = *content.tile(self.origins[tile] as usize);
            }
            own
        });
        self.cpu.digest(&DigestRequest { ids: &self.ids, content: content.as_ref(), ..*request }, out)
    }

    fn export(&mut self, tile: TileId, potentials: &mut Vec<u32>, groups: &mut Vec<u8>) -> Result<(), Error> {
        self.cpu.export(tile, potentials, groups)
    }

    fn bytes(&self) -> u64 {
        self.cpu.bytes()
    }
}
