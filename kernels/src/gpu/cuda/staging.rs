//! Pinned memory between the host and a device: the one fills a piece, or takes it over, while the device copies another.
//!
//! Uploads take the pieces of a ring in turn. A piece is filled by one upload after the other; when it is full an event behind its last copy
//! tells when it may be filled again. Results come through two pieces in turn. All copies are of the one stream of the device: a pass needs all
//! that was sent before its first launch and ends with its results, so there is no kernel beside which a stream of their own could copy.
#![allow(unsafe_code)] // Calls of the driver, on memory of its own.

use super::Cuda;
use crate::Error;
use cudarc::driver::sys::{self, CUevent_flags, CUresult};
use cudarc::driver::{DriverError, result};
use std::time::Instant;

/// Bytes of a piece: at 50 GB/s a device copies it in 20 us, ten times what it takes to ask for a copy.
pub(super) const PIECE_BYTES: usize = 1 << 20;
/// Pieces that uploads take in turn.
const UPLOADING: usize = 4;
/// Pieces that results come through.
const DOWNLOADING: usize = 2;
/// A piece with less room than this takes no part of an upload that is larger: each part is a copy of its own.
const LEAST_PART: usize = 64 << 10;
/// Parts of a piece begin where a line of the processor's cache does.
const ALIGNMENT: usize = 64;

/// Pinned memory, and when the last copy that uses it is done.
#[derive(Clone, Copy)]
struct Piece {
    memory: *mut u8,
    event: sys::CUevent,
    /// The event stands behind a copy that nobody has waited for.
    under_way: bool,
}

/// All of it, of one device.
pub(super) struct Staging {
    uploading: Vec<Piece>,
    downloading: Vec<Piece>,
    /// The piece that is filled, and how far.
    filling: usize,
    filled: usize,
}

impl Staging {
    /// Pinned memory of the context that is bound.
    ///
    /// # Errors
    /// When the driver refuses it; what it gave before stays with the context.
    pub(super) fn new() -> Result<Self, DriverError> {
        let pieces = |count: usize| -> Result<Vec<Piece>, DriverError> {
            (0..count)
                .map(|_| {
                    // SAFETY: given back in `give_back`; flags 0, since results are read by the host.
                    let memory = unsafe { result::malloc_host(PIECE_BYTES, 0) }?.cast();
                    let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
                    Ok(Piece { memory, event, under_way: false })
                })
                .collect()
        };
        Ok(Self { uploading: pieces(UPLOADING)?, downloading: pieces(DOWNLOADING)?, filling: 0, filled: 0 })
    }

    /// All copies so far are done.
    pub(super) fn settle(&mut self) {
        self.uploading.iter_mut().for_each(|piece| piece.under_way = false);
        self.filled = 0;
    }

    /// # Safety
    /// The context is bound, no copy is under way, and nothing of this is used after.
    pub(super) unsafe fn give_back(&self) {
        for piece in self.uploading.iter().chain(&self.downloading) {
            // SAFETY: both were made in `new`, and are given back once by contract.
            unsafe {
                let _ = result::event::destroy(piece.event);
                let _ = result::free_host(piece.memory.cast());
            }
        }
    }
}

impl Cuda {
    /// Copies bytes to an address of the device; they are taken over when this returns.
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
            // SAFETY: within the piece, and behind all that copies under way may still read of it.
            let staged = unsafe { std::slice::from_raw_parts_mut(memory.add(begin), now.len()) };
            staged.copy_from_slice(now);
            self.staging.filled = (begin + now.len()).next_multiple_of(ALIGNMENT).min(PIECE_BYTES);
            // SAFETY: within the buffer by contract of the caller; the piece is not written here again before the copy is done.
            self.on_stream(PASS, stream, || unsafe { result::memcpy_htod_async(address, staged, stream) })?;
            address += now.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// Turns to the next piece, when the device is through with what it held.
    fn next_piece(&mut self, pass: &'static str, stream: sys::CUstream) -> Result<(), Error> {
        let own = self.staging.filling;
        let event = self.staging.uploading[own].event;
        // SAFETY: an event of this context, on its stream.
        let recorded = unsafe { result::event::record(event, stream) };
        self.check(pass, recorded)?;
        self.staging.uploading[own].under_way = true;
        let next = (own + 1) % UPLOADING;
        let Piece { event, under_way, .. } = self.staging.uploading[next];
        if under_way {
            self.wait_for_event(pass, event)?;
            self.staging.uploading[next].under_way = false;
        }
        (self.staging.filling, self.staging.filled) = (next, 0);
        Ok(())
    }

    /// Fills `out` from an address of the device: while one piece is taken over the next is on its way.
    pub(super) fn fetch(&mut self, address: sys::CUdeviceptr, out: &mut [u8]) -> Result<(), Error> {
        const PASS: &str = "download";
        let mut asked: Option<(Piece, &mut [u8])> = None;
        for (turn, part) in out.chunks_mut(PIECE_BYTES).enumerate() {
            let stream = self.enter(PASS)?;
            let piece = self.staging.downloading[turn % DOWNLOADING];
            let from = address + (turn * PIECE_BYTES) as u64;
            // SAFETY: a piece that nobody reads or writes: what it held was taken over, two turns ago.
            let staged = unsafe { std::slice::from_raw_parts_mut(piece.memory, part.len()) };
            // SAFETY: within the buffer by contract of the caller.
            self.on_stream(PASS, stream, || unsafe { result::memcpy_dtoh_async(staged, from, stream) })?;
            // SAFETY: an event of this context, on its stream.
            let recorded = unsafe { result::event::record(piece.event, stream) };
            self.check(PASS, recorded)?;
            if let Some((piece, part)) = asked.replace((piece, part)) {
                self.take_over(PASS, piece, part)?;
            }
        }
        if let Some((piece, part)) = asked {
            self.take_over(PASS, piece, part)?;
            // One stream: what was sent before is there, too.
            self.staging.settle();
        }
        Ok(())
    }

    fn take_over(&mut self, pass: &'static str, piece: Piece, out: &mut [u8]) -> Result<(), Error> {
        self.wait_for_event(pass, piece.event)?;
        // SAFETY: the copy into it is done, and there is no other before the next turn of the piece.
        out.copy_from_slice(unsafe { std::slice::from_raw_parts(piece.memory, out.len()) });
        Ok(())
    }

    fn wait_for_event(&mut self, pass: &'static str, event: sys::CUevent) -> Result<(), Error> {
        let begin = Instant::now();
        loop {
            // SAFETY: an event that lives, and was recorded.
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
