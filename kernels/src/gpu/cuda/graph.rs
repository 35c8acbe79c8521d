//! A sequence as a graph: captured from its calls once, then asked for by one call, which costs what one launch does.
//!
//! What goes up and comes back lies in pinned memory of the graph's own, since the copies in it always are of the same addresses. Each run waits
//! for its end, so that nobody else uses that memory.
#![allow(unsafe_code)] // Calls of the driver, on memory of its own.

use super::{Buffer, Cuda};
use crate::Error;
use crate::gpu::driver::{Step, in_turn};
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaStream, DriverError, result};
use std::sync::Arc;

const PASS: &str = "sequence";
/// What is pinned for a step begins where a line of the processor's cache does.
const ALIGNMENT: usize = 64;

/// A captured sequence.
pub struct Graph {
    executable: sys::CUgraphExec,
    pinned: *mut u8,
    stream: Arc<CudaStream>,
}

// SAFETY: all of it is the driver's, which takes calls from any thread that has bound the context, as those that use it do.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.stream.context().bind_to_thread().is_err() {
            return;
        }
        // SAFETY: made by `capture` of this context. Of a stream that is not through, or lost, copies may still use the memory, which then
        // stays with the context.
        unsafe {
            if sys::cuStreamQuery(self.stream.cu_stream()) == CUresult::CUDA_SUCCESS {
                let _ = result::graph::exec_destroy(self.executable);
                let _ = result::free_host(self.pinned.cast());
            }
        }
    }
}

/// How much a step brings or fetches.
fn bytes_of(step: &Step<'_, Buffer>) -> usize {
    match step {
        Step::Upload(_, bytes) => bytes.len(),
        Step::Download(_, out) => out.len(),
        Step::Fill(..) | Step::Launch(..) => 0,
    }
}

impl Cuda {
    /// Runs the steps and waits for them; from the second time on by one call.
    pub(super) fn run(&mut self, kept: &mut Option<Graph>, steps: &mut [Step<'_, Buffer>]) -> Result<(), Error> {
        let stream = self.enter(PASS)?;
        if self.marks.is_some() {
            // Each is timed.
            in_turn(self, steps)?;
            return self.wait_for(PASS, stream);
        }
        let graph = match kept {
            Some(graph) => graph,
            None => kept.insert(self.capture(stream, steps)?),
        };
        let (executable, mut at) = (graph.executable, graph.pinned);
        for step in &*steps {
            if let Step::Upload(_, bytes) = step {
                // SAFETY: pinned for this step by `capture`, which was given as many bytes by contract; the run before has been waited for.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
            }
            // SAFETY: within what is pinned, or just behind it.
            at = unsafe { at.add(bytes_of(step).next_multiple_of(ALIGNMENT)) };
        }
        // SAFETY: of this context, and its buffers are those of the steps.
        let launched = unsafe { result::graph::launch(executable, stream) };
        self.check(PASS, launched)?;
        self.wait_for(PASS, stream)?;
        let mut at = graph.pinned;
        for step in steps {
            let bytes = bytes_of(step);
            if let Step::Download(_, out) = step {
                // SAFETY: as above, and the copy into it is done.
                unsafe { std::ptr::copy_nonoverlapping(at, out.as_mut_ptr(), bytes) };
            }
            // SAFETY: as above.
            at = unsafe { at.add(bytes.next_multiple_of(ALIGNMENT)) };
        }
        Ok(())
    }

    fn capture(&mut self, stream: sys::CUstream, steps: &[Step<'_, Buffer>]) -> Result<Graph, Error> {
        let bytes: usize = steps.iter().map(|step| bytes_of(step).next_multiple_of(ALIGNMENT)).sum();
        // SAFETY: given back by the graph; flags 0, since results are read by the host.
        let pinned = match unsafe { result::malloc_host(bytes.max(1), 0) } {
            Ok(pinned) => pinned.cast::<u8>(),
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                return Err(Error::Full { missing_bytes: bytes as u64 });
            }
            Err(error) => return self.check(PASS, Err(error)),
        };
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream of the bound context that captures nothing yet; what is captured is ended below, whatever fails in it.
        let begun = unsafe { result::stream::begin_capture(stream, mode) };
        self.check(PASS, begun)?;
        let asked = self.ask_for(stream, pinned, steps);
        // SAFETY: begun above.
        let captured = unsafe { result::stream::end_capture(stream) };
        asked?;
        let captured = self.check(PASS, captured)?;
        // SAFETY: a graph that was captured whole; what is made of it stands for itself.
        let executable = unsafe {
            let made = result::graph::instantiate(captured, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(captured);
            made
        };
        let executable = self.check(PASS, executable)?;
        Ok(Graph { executable, pinned, stream: Arc::clone(&self.stream) })
    }

    /// Asks for the steps, with copies from and to what is pinned.
    fn ask_for(&mut self, stream: sys::CUstream, pinned: *mut u8, steps: &[Step<'_, Buffer>]) -> Result<(), Error> {
        use super::Driver as _;
        let mut at = pinned;
        for step in steps {
            let bytes = bytes_of(step);
            // SAFETY: as many bytes are pinned for this step.
            let own = unsafe { std::slice::from_raw_parts_mut(at, bytes) };
            match step {
                Step::Fill(buffer, range, byte) => self.fill(buffer, range.clone(), *byte)?,
                Step::Launch(kernel, blocks, arguments) => self.launch(kernel, *blocks, arguments)?,
                Step::Upload(buffer, _) => {
                    // SAFETY: within the buffer by contract; the memory lives as long as the graph.
                    let asked = unsafe { result::memcpy_htod_async(buffer.address, own, stream) };
                    self.check(PASS, asked)?;
                }
                Step::Download(buffer, _) => {
                    // SAFETY: as above.
                    let asked = unsafe { result::memcpy_dtoh_async(own, buffer.address, stream) };
                    self.check(PASS, asked)?;
                }
            }
            // SAFETY: within what is pinned, or just behind it.
            at = unsafe { at.add(bytes.next_multiple_of(ALIGNMENT)) };
        }
        Ok(())
    }
}
