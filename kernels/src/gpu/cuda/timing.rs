//! Durations on a device by its own clock: between two events of its stream.
#![allow(unsafe_code)] // Driver calls.

use super::Cuda;
use crate::Error;
use crate::gpu::Driver;
use cudarc::driver::sys::{self, CUevent_flags};
use cudarc::driver::{DriverError, result};

/// Duration of one operation on a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceTiming {
    /// The kernel, or `upload`, `download`, `copy`, `fill`.
    pub name: &'static str,
    /// Milliseconds since the start of the first operation.
    pub begin_ms: f64,
    /// As `begin_ms`.
    pub end_ms: f64,
}

/// The events before and after an operation.
pub(super) struct EventPair {
    name: &'static str,
    begin: sys::CUevent,
    end: sys::CUevent,
}

impl Cuda {
    /// Starts timing all operations of the device, until [`Cuda::timings`]; adds about 2 us to each.
    pub fn time(&mut self) {
        self.marks.get_or_insert_default();
    }

    /// Waits, stops timing, and returns the operations since [`Cuda::time`] in call order.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn timings(&mut self) -> Result<Vec<DeviceTiming>, Error> {
        self.wait()?;
        let marks = self.marks.take().unwrap_or_default();
        let Some(first) = marks.first().map(|mark| mark.begin) else { return Ok(Vec::new()) };
        // SAFETY: both were recorded on the one stream, whose work is complete.
        let since = |event| unsafe { result::event::elapsed(first, event) }.map(f64::from);
        let timed = marks
            .iter()
            .map(|mark| Ok(DeviceTiming { name: mark.name, begin_ms: since(mark.begin)?, end_ms: since(mark.end)? }));
        let timed: Result<Vec<_>, DriverError> = timed.collect();
        for mark in &marks {
            // SAFETY: created by `on_stream`, and destroyed once.
            unsafe {
                let _ = result::event::destroy(mark.begin);
                let _ = result::event::destroy(mark.end);
            }
        }
        self.check("timings", timed)
    }

    /// Enqueues an operation, between two events while timing is on.
    pub(super) fn on_stream(
        &mut self,
        name: &'static str,
        stream: sys::CUstream,
        call: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<(), Error> {
        let outcome = match &mut self.marks {
            None => call(),
            Some(marks) => record(name, stream, call).map(|mark| marks.push(mark)),
        };
        self.check(name, outcome)
    }
}

fn record(
    name: &'static str,
    stream: sys::CUstream,
    call: impl FnOnce() -> Result<(), DriverError>,
) -> Result<EventPair, DriverError> {
    let event = || result::event::create(CUevent_flags::CU_EVENT_DEFAULT);
    let mark = EventPair { name, begin: event()?, end: event()? };
    // SAFETY: events of the bound context, and its stream.
    unsafe { result::event::record(mark.begin, stream) }?;
    call()?;
    // SAFETY: as above.
    unsafe { result::event::record(mark.end, stream) }?;
    Ok(mark)
}
