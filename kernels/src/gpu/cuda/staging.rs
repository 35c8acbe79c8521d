//! Pinned staging memory: the host fills or reads one piece while the device copies another.
//!
//! Uploads use the pieces of a ring in turn. Consecutive uploads fill a piece; an event after its last copy signals when the piece can be reused.
//! Downloads alternate between two pieces. All copies are on the device's single stream: a pass needs all earlier uploads and ends with its
//! results, so a second stream would have no kernel to overlap with.
#![allow(unsafe_code)] // Driver calls.

use super::Cuda;
use crate::Error;
use cudarc::driver::sys::{self, CUevent_flags, CUresult};
use cudarc::driver::{DriverError, result};
use std::time::Instant;

/// Bytes of a piece: at 50 GB/s a device copies it in 20 us, ten times the cost of enqueuing a copy.
pub(super) const PIECE_BYTES: usize = 1 << 20;
/// Number of upload pieces.
const UPLOADING: usize = 4;
/// Number of download pieces.
const DOWNLOADING: usize = 2;
/// Minimum free bytes of a piece for part of a larger upload: each part is a separate copy.
const LEAST_PART: usize = 64 << 10;
/// Alignment of parts in a piece: a cache line.
const ALIGNMENT: usize = 64;

/// Pinned memory and the event after its last copy.
#[derive(Clone, Copy)]
struct Piece {
    memory: *mut u8,
    event: sys::CUevent,
    /// Whether the event follows a copy that was not waited for.
    in_flight: bool,
}

/// The staging memory of one device.
pub(super) struct Staging {
    uploading: Vec<Piece>,
    downloading: Vec<Piece>,
    /// The current piece, and its fill level.
    filling: usize,
    filled: usize,
}

impl Staging {
    /// Allocates pinned memory in the bound context.
    ///
    /// # Errors
    /// When the driver fails to allocate; earlier pieces are leaked.
    pub(super) fn new() -> Result<Self, DriverError> {
        let pieces = |count: usize| -> Result<Vec<Piece>, DriverError> {
            (0..count)
                .map(|_| {
                    // SAFETY: freed in `free`; flags 0, since the host reads results.
                    let memory = unsafe { result::malloc_host(PIECE_BYTES, 0) }?.cast();
                    let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
                    Ok(Piece { memory, event, in_flight: false })
                })
                .collect()
        };
        Ok(Self { uploading: pieces(UPLOADING)?, downloading: pieces(DOWNLOADING)?, filling: 0, filled: 0 })
    }

    /// Marks all pieces as idle: all copies have completed.
    pub(super) fn mark_idle(&mut self) {
        self.uploading.iter_mut().for_each(|piece| piece.in_flight = false);
        self.filled = 0;
    }

    /// # Safety
    /// The context is bound, no copy is in flight, and nothing of this is used afterwards.
    pub(super) unsafe fn free(&self) {
        for piece in self.uploading.iter().chain(&self.downloading) {
            // SAFETY: both were created in `new`, and are freed once by contract.
            unsafe {
                let _ = result::event::destroy(piece.event);
                let _ = result::free_host(piece.memory.cast());
            }
        }
    }
}

impl Cuda {
    /// Copies bytes to a device address; the caller may reuse `bytes` when this returns.
    pub(super) fn send(&mut self, address: sys::CUdeviceptr, bytes: &[u8]) -> Result<(), Error> {
        const PASS: &str = "upload";
        let stream = self.enter(PASS)?;
        let (mut address, mut rest) = (address, bytes);
        while !rest.is_empty() {
            let room = PIECE_BYTES - self.staging.filled;
            if rest.len() > room && room < LEAST_PART {
                self.next_piece(PASS, stream)?;
                continue;
            }
            let (now, later) = rest.split_at(rest.len().min(room));
            let begin = self.staging.filled;
            let memory = self.staging.uploading[self.staging.filling].memory;
            // SAFETY: within the piece, after everything that copies in flight may still read.
            let staged = unsafe { std::slice::from_raw_parts_mut(memory.add(begin), now.len()) };
            staged.copy_from_slice(now);
            self.staging.filled = (begin + now.len()).next_multiple_of(ALIGNMENT).min(PIECE_BYTES);
            // SAFETY: within the buffer by contract of the caller; the piece is not overwritten before the copy completes.
            self.on_stream(PASS, stream, || unsafe { result::memcpy_htod_async(address, staged, stream) })?;
            address += now.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// Advances to the next piece and waits until the device has copied its content.
    fn next_piece(&mut self, pass: &'static str, stream: sys::CUstream) -> Result<(), Error> {
        let own = self.staging.filling;
        let event = self.staging.uploading[own].event;
        // SAFETY: an event of this context, on its stream.
        let recorded = unsafe { result::event::record(event, stream) };
        self.check(pass, recorded)?;
        self.staging.uploading[own].in_flight = true;
        let next = (own + 1) % UPLOADING;
        let Piece { event, in_flight, .. } = self.staging.uploading[next];
        if in_flight {
            self.wait_for_event(pass, event)?;
            self.staging.uploading[next].in_flight = false;
        }
        (self.staging.filling, self.staging.filled) = (next, 0);
        Ok(())
    }

    /// Fills `out` from a device address: one piece is read while the next is copied.
    pub(super) fn fetch(&mut self, address: sys::CUdeviceptr, out: &mut [u8]) -> Result<(), Error> {
        const PASS: &str = "download";
        let mut request: Option<(Piece, &mut [u8])> = None;
        for (turn, part) in out.chunks_mut(PIECE_BYTES).enumerate() {
            let stream = self.enter(PASS)?;
            let piece = self.staging.downloading[turn % DOWNLOADING];
            let from = address + (turn * PIECE_BYTES) as u64;
            // SAFETY: the piece is unused: its content was read two turns ago.
            let staged = unsafe { std::slice::from_raw_parts_mut(piece.memory, part.len()) };
            // SAFETY: within the buffer by contract of the caller.
            self.on_stream(PASS, stream, || unsafe { result::memcpy_dtoh_async(staged, from, stream) })?;
            // SAFETY: an event of this context, on its stream.
            let recorded = unsafe { result::event::record(piece.event, stream) };
            self.check(PASS, recorded)?;
            if let Some((piece, part)) = request.replace((piece, part)) {
                self.take_over(PASS, piece, part)?;
            }
        }
        if let Some((piece, part)) = request {
            self.take_over(PASS, piece, part)?;
            // One stream: earlier uploads are complete, too.
            self.staging.mark_idle();
        }
        Ok(())
    }

    fn take_over(&mut self, pass: &'static str, piece: Piece, out: &mut [u8]) -> Result<(), Error> {
        self.wait_for_event(pass, piece.event)?;
        // SAFETY: the copy into the piece is complete, and no other starts before its next turn.
        out.copy_from_slice(unsafe { std::slice::from_raw_parts(piece.memory, out.len()) });
        Ok(())
    }

    fn wait_for_event(&mut self, pass: &'static str, event: sys::CUevent) -> Result<(), Error> {
        let begin = Instant::now();
        loop {
            // SAFETY: the event is alive and was recorded.
            match unsafe { result::event::query(event) } {
                Ok(()) => return Ok(()),
                Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) if begin.elapsed() < self.deadline => {
                    std::hint::spin_loop();
                }
                Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => {
                    return self.check(pass, Err(DriverError(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT)));
                }
                Err(error) => return self.check(pass, Err(error)),
            }
        }
    }
}
