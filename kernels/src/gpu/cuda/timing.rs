//! How long things take on a device by its own clock: between two events of its stream.
#![allow(unsafe_code)] // Calls of the driver.

use super::Cuda;
use crate::Error;
use crate::gpu::Driver;
use cudarc::driver::sys::{self, CUevent_flags};
use cudarc::driver::{DriverError, result};

/// Something that a device did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timed {
    /// The kernel, or `upload`, `download`, `copy`, `fill`.
    pub name: &'static str,
    /// Milliseconds from the begin of the first of them.
    pub begin_ms: f64,
    /// As `begin_ms`.
    pub end_ms: f64,
}

/// The events around something.
pub(super) struct Mark {
    name: &'static str,
    begin: sys::CUevent,
    end: sys::CUevent,
}

impl Cuda {
    /// From now on all that the device does is timed, until [`Cuda::timings`]: about 2 us each on top.
    pub fn time(&mut self) {
        self.marks.get_or_insert_default();
    }

    /// Waits, and tells what the device did since [`Cuda::time`], in the order of calls. Nothing is timed any more.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn timings(&mut self) -> Result<Vec<Timed>, Error> {
        self.wait()?;
        let marks = self.marks.take().unwrap_or_default();
        let Some(first) = marks.first().map(|mark| mark.begin) else { return Ok(Vec::new()) };
        // SAFETY: both were recorded on the one stream, and all of it is done.
        let since = |event| unsafe { result::event::elapsed(first, event) }.map(f64::from);
        let timed = marks
            .iter()
            .map(|mark| Ok(Timed { name: mark.name, begin_ms: since(mark.begin)?, end_ms: since(mark.end)? }));
        let timed: Result<Vec<_>, DriverError> = timed.collect();
        for mark in &marks {
            // SAFETY: made by `on_stream`, and given back once.
            unsafe {
                let _ = result::event::destroy(mark.begin);
                let _ = result::event::destroy(mark.end);
            }
        }
        self.check("timings", timed)
    }

    /// Asks something of the stream; between two events while things are timed.
    pub(super) fn on_stream(
        &mut self,
        name: &'static str,
        stream: sys::CUstream,
        call: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<(), Error> {
        let outcome = match &mut self.marks {
            None => call(),
            Some(marks) => marked(name, stream, call).map(|mark| marks.push(mark)),
        };
        self.check(name, outcome)
    }
}

fn marked(
    name: &'static str,
    stream: sys::CUstream,
    call: impl FnOnce() -> Result<(), DriverError>,
) -> Result<Mark, DriverError> {
    let event = || result::event::create(CUevent_flags::CU_EVENT_DEFAULT);
    let mark = Mark { name, begin: event()?, end: event()? };
    // SAFETY: events of the bound context, and its stream.
    unsafe { result::event::record(mark.begin, stream) }?;
    call()?;
    // SAFETY: as above.
    unsafe { result::event::record(mark.end, stream) }?;
    Ok(mark)
}
