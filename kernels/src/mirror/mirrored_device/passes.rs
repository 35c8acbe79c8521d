//! The passes of a mirrored device: changes on the host, large reads on the mirrors.

use super::{MirroredDevice, merge};
use crate::mirror::Mirror;
use crate::recall::{RecallMatch, RecallRequest};
use crate::{
    Device, DigestRequest, Error, GroupUpdate, Info, MirrorStatus, RankRequest, Scope, Segment, SegmentId, Slot, Tile,
    TileId, Update,
};
use engram_memory::{Digest, Group, Histogram, QualityVector};

/// Returns the segment of a segment scope.
const fn segment_of(scope: Scope) -> Option<SegmentId> {
    match scope {
        Scope::Segment(segment) => Some(segment),
        Scope::All | Scope::Group(_) => None,
    }
}

impl<M: Mirror> Device for MirroredDevice<M> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn mirror_status(&self) -> Option<&MirrorStatus> {
        Some(&self.status)
    }

    fn reserve(&mut self, tiles: u32) -> Result<(), Error> {
        self.host.reserve(tiles)?;
        self.tiles.resize(self.tiles.len().max(tiles as usize), Tile::default());
        self.locations.resize(self.tiles.len(), None);
        self.note(|changes, tiles| changes.reserve(tiles.len()));
        Ok(())
    }

    fn map_tile(&mut self, tile: TileId, entry: Tile) {
        self.host.map_tile(tile, entry);
        self.tiles[tile as usize] = entry;
        self.note(|changes, _| changes.mark_mapped(tile));
        self.placement_stale = true;
    }

    fn write(&mut self, rows: &[(Slot, u32, Group)]) -> Result<(), Error> {
        self.host.write(rows)?;
        self.note(|changes, _| rows.iter().for_each(|row| changes.mark_written(row.0)));
        Ok(())
    }

    fn read(&mut self, slots: &[Slot], out: &mut Vec<(u32, Group)>) -> Result<(), Error> {
        self.host.read(slots, out)
    }

    fn update(&mut self, segments: &[Segment], updates: &[Update]) -> Result<(), Error> {
        self.host.update(segments, updates)?;
        self.note_updates(segments, updates);
        Ok(())
    }

    fn update_groups(
        &mut self,
        segments: &[Segment],
        updates: &[GroupUpdate],
        changed: &mut Vec<u64>,
    ) -> Result<(), Error> {
        self.host.update_groups(segments, updates, changed)?;
        let mut is_changed: Vec<bool> = segments.iter().map(|segment| segment.fold > 0).collect();
        updates.iter().for_each(|update| is_changed[update.segment as usize] = true);
        self.note_segments(|segment| is_changed[segment as usize]);
        Ok(())
    }

    fn epoch(&mut self, segments: &[Segment], updates: &[Update], out: &mut Vec<QualityVector>) -> Result<(), Error> {
        let memories = self.all();
        if !self.is_large(memories) {
            // In one pass.
            self.host.epoch(segments, updates, out)?;
            self.note_updates(segments, updates);
            return Ok(());
        }
        self.update(segments, updates)?;
        let folded: Vec<Segment> = segments.iter().map(|segment| Segment { fold: 0, ..*segment }).collect();
        let parts = self.run_offloaded(segments.len(), memories, None, |device| {
            let mut output = Vec::new();
            device.epoch(&folded, &[], &mut output).map(|()| output)
        })?;
        let Some(parts) = parts else { return self.host.epoch(&folded, &[], out) };
        for part in &parts {
            if let Some(device) = part.device {
                self.placement.record_pass(device, self.status.devices[device].memories, part.elapsed);
            }
        }
        merge::merge_qualities(parts.into_iter().map(|part| part.output).collect(), out);
        Ok(())
    }

    fn histogram(&mut self, segments: &[Segment], bits: u32) -> Result<Histogram, Error> {
        let parts = self.run_offloaded(segments.len(), self.all(), None, |device| device.histogram(segments, bits))?;
        let parts = parts.map(|parts| parts.into_iter().map(|part| part.output).collect());
        parts.and_then(merge::merge_histograms).map_or_else(|| self.host.histogram(segments, bits), Ok)
    }

    fn rank(&mut self, request: &RankRequest<'_>, out: &mut Vec<(Slot, u32)>) -> Result<(), Error> {
        let RankRequest { segments, ids, scope, order, limit } = *request;
        let memories = self.memories(segments, scope);
        let parts = self.run_offloaded(segments.len(), memories, segment_of(scope), |device| {
            let mut output = Vec::new();
            device.rank(request, &mut output).map(|()| output)
        })?;
        let Some(mut parts) = parts else { return self.host.rank(request, out) };
        for part in &mut parts {
            if let Some(device) = part.device {
                part.output.iter_mut().for_each(|entry| entry.0 = self.mirrors[device].origin(entry.0));
            }
        }
        merge::merge_rankings(parts.into_iter().map(|part| part.output).collect(), order, limit, ids, out);
        Ok(())
    }

    fn recall(&mut self, request: &RecallRequest<'_>, out: &mut Vec<RecallMatch>) -> Result<(), Error> {
        let RecallRequest { segments, ids, scope, limit, .. } = *request;
        let memories = self.memories(segments, scope);
        self.note_dimension(request.features.dimension);
        let parts = self.run_offloaded(segments.len(), memories, segment_of(scope), |device| {
            let mut output = Vec::new();
            device.recall(request, &mut output).map(|()| output)
        })?;
        let Some(mut parts) = parts else { return self.host.recall(request, out) };
        for part in &mut parts {
            if let Some(device) = part.device {
                part.output.iter_mut().for_each(|entry| entry.slot = self.mirrors[device].origin(entry.slot));
            }
        }
        merge::merge_matches(parts.into_iter().map(|part| part.output).collect(), limit, ids, out);
        Ok(())
    }

    fn digest(&mut self, request: &DigestRequest<'_>, out: &mut Vec<Digest>) -> Result<(), Error> {
        let parts = self.run_offloaded(request.segments.len(), self.all(), None, |device| {
            let mut output = Vec::new();
            device.digest(request, &mut output).map(|()| output)
        })?;
        let Some(parts) = parts else { return self.host.digest(request, out) };
        merge::merge_digests(parts.into_iter().map(|part| part.output).collect(), out);
        Ok(())
    }

    fn export(&mut self, tile: TileId, potentials: &mut Vec<u32>, groups: &mut Vec<u8>) -> Result<(), Error> {
        self.host.export(tile, potentials, groups)
    }

    fn bytes(&self) -> u64 {
        self.host.bytes()
    }
}
