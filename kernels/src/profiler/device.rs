//! A device wrapper that records passes.

use super::{Kind, Recorder};
use crate::recall::{RecallMatch, RecallRequest};
use crate::{
    Device, DigestRequest, Error, GroupUpdate, Info, MirrorStatus, RankRequest, Segment, Slot, Tile, TileId, Update,
};
use engram_memory::{Digest, Group, Histogram, QualityVector};

/// Records each pass of a device as a span: a copy for rows to or from it, a wait for passes of its GPUs ([`Device::mirror_status`]), a kernel
/// otherwise.
///
/// For a [`Gpu`](crate::Gpu), [`ProfiledDriver`](super::ProfiledDriver) records more detail.
///
/// ```
/// use engram_kernels::profiler::{Bottleneck, ProfiledDevice, Recorder, analyse, chrome_trace};
/// use engram_kernels::{Cpu, Device, Segment, Tile};
/// use engram_memory::Group;
/// use std::time::Instant;
///
/// let cpu = Cpu::new(1);
/// let recorder = Recorder::new(cpu.info().name.clone(), Instant::now(), 1_000);
/// let mut device = ProfiledDevice::new(cpu, recorder.clone());
/// device.reserve(1)?;
/// device.map_tile(0, Tile { segment: 0, count: 2 });
/// device.write(&[(0, 7, Group(0)), (1, 8, Group(1))])?;
/// device.epoch(&[Segment::default()], &[], &mut Vec::new())?;
///
/// let track = recorder.take();
/// assert_eq!(track.spans.iter().map(|span| span.name).collect::<Vec<_>>(), ["write", "epoch"]);
/// assert!(chrome_trace(&[track]).contains(r#""cat":"copy","name":"write""#));
/// # Ok::<(), engram_kernels::Error>(())
/// ```
pub struct ProfiledDevice<D> {
    device: D,
    recorder: Recorder,
}

impl<D: Device> ProfiledDevice<D> {
    /// Wraps a device.
    pub const fn new(device: D, recorder: Recorder) -> Self {
        Self { device, recorder }
    }

    fn pass<T>(&mut self, name: &'static str, pass: impl FnOnce(&mut D) -> T) -> T {
        let Self { device, recorder } = self;
        recorder.span_of(name, || {
            let of_gpus = |device: &D| device.mirror_status().map_or(0, |standing| standing.passes);
            let before = of_gpus(device);
            let result = pass(device);
            let kind = if of_gpus(device) > before { Kind::Wait } else { Kind::Kernel };
            (result, kind)
        })
    }
}

impl<D: Device> Device for ProfiledDevice<D> {
    fn info(&self) -> &Info {
        self.device.info()
    }

    fn mirror_status(&self) -> Option<&MirrorStatus> {
        self.device.mirror_status()
    }

    fn reserve(&mut self, tiles: u32) -> Result<(), Error> {
        self.device.reserve(tiles)
    }

    fn map_tile(&mut self, tile: TileId, entry: Tile) {
        self.device.map_tile(tile, entry);
    }

    fn write(&mut self, rows: &[(Slot, u32, Group)]) -> Result<(), Error> {
        self.recorder.span(Kind::Copy, "write", || self.device.write(rows))
    }

    fn read(&mut self, slots: &[Slot], out: &mut Vec<(u32, Group)>) -> Result<(), Error> {
        self.recorder.span(Kind::Copy, "read", || self.device.read(slots, out))
    }

    fn update(&mut self, segments: &[Segment], updates: &[Update]) -> Result<(), Error> {
        self.pass("update", |device| device.update(segments, updates))
    }

    fn update_groups(
        &mut self,
        segments: &[Segment],
        updates: &[GroupUpdate],
        changed: &mut Vec<u64>,
    ) -> Result<(), Error> {
        self.pass("update_groups", |device| device.update_groups(segments, updates, changed))
    }

    fn epoch(&mut self, segments: &[Segment], updates: &[Update], out: &mut Vec<QualityVector>) -> Result<(), Error> {
        self.pass("epoch", |device| device.epoch(segments, updates, out))
    }

    fn histogram(&mut self, segments: &[Segment], bits: u32) -> Result<Histogram, Error> {
        self.pass("histogram", |device| device.histogram(segments, bits))
    }

    fn rank(&mut self, request: &RankRequest<'_>, out: &mut Vec<(Slot, u32)>) -> Result<(), Error> {
        self.pass("rank", |device| device.rank(request, out))
    }

    fn recall(&mut self, request: &RecallRequest<'_>, out: &mut Vec<RecallMatch>) -> Result<(), Error> {
        self.pass("recall", |device| device.recall(request, out))
    }

    fn digest(&mut self, request: &DigestRequest<'_>, out: &mut Vec<Digest>) -> Result<(), Error> {
        self.pass("digest", |device| device.digest(request, out))
    }

    fn export(&mut self, tile: TileId, potentials: &mut Vec<u32>, groups: &mut Vec<u8>) -> Result<(), Error> {
        self.recorder.span(Kind::Copy, "export", || self.device.export(tile, potentials, groups))
    }

    fn bytes(&self) -> u64 {
        self.device.bytes()
    }
}
