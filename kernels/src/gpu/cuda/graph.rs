//! Sequences as CUDA graphs: captured once, then launched by one call that costs as much as one kernel launch.
//!
//! Uploads and results use pinned memory of the graph, since its copies have fixed addresses. Each run waits for completion, so the memory has
//! one user at a time.
#![allow(unsafe_code)] // Driver calls.

use super::{Buffer, Cuda};
use crate::Error;
use crate::gpu::driver::{Step, run_steps};
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaStream, DriverError, result};
use std::sync::Arc;

const PASS: &str = "sequence";
/// Alignment of each step's pinned memory: a cache line.
const ALIGNMENT: usize = 64;

/// A captured sequence.
pub struct Graph {
    executable: sys::CUgraphExec,
    pinned: *mut u8,
    stream: Arc<CudaStream>,
}

// SAFETY: all fields belong to the driver, which accepts calls from any thread that has bound the context, as every user does.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.stream.context().bind_to_thread().is_err() {
            return;
        }
        // SAFETY: created by `capture` in this context. While the stream is busy or lost, copies may still use the memory, which is leaked then.
        unsafe {
            if sys::cuStreamQuery(self.stream.cu_stream()) == CUresult::CUDA_SUCCESS {
                let _ = result::graph::exec_destroy(self.executable);
                let _ = result::free_host(self.pinned.cast());
            }
        }
    }
}

/// Returns the number of bytes that a step uploads or downloads.
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
            // While timing is on, each step is recorded.
            run_steps(self, steps)?;
            return self.wait_for(PASS, stream);
        }
        let graph = match kept {
            Some(graph) => graph,
            None => kept.insert(self.capture(stream, steps)?),
        };
        let (executable, mut at) = (graph.executable, graph.pinned);
        for step in &*steps {
            if let Step::Upload(_, bytes) = step {
                // SAFETY: `capture` pinned as many bytes for this step; the previous run has completed.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
            }
            // SAFETY: within the pinned memory, or at its end.
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
                // SAFETY: as above, and the copy into it is complete.
                unsafe { std::ptr::copy_nonoverlapping(at, out.as_mut_ptr(), bytes) };
            }
            // SAFETY: as above.
            at = unsafe { at.add(bytes.next_multiple_of(ALIGNMENT)) };
        }
        Ok(())
    }

    fn capture(&mut self, stream: sys::CUstream, steps: &[Step<'_, Buffer>]) -> Result<Graph, Error> {
        let bytes: usize = steps.iter().map(|step| bytes_of(step).next_multiple_of(ALIGNMENT)).sum();
        // SAFETY: freed by the graph; flags 0, since the host reads results.
        let pinned = match unsafe { result::malloc_host(bytes.max(1), 0) } {
            Ok(pinned) => pinned.cast::<u8>(),
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                return Err(Error::Full { missing_bytes: bytes as u64 });
            }
            Err(error) => return self.check(PASS, Err(error)),
        };
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream of the bound context without a capture in progress; the capture is ended below even if a step fails.
        let begun = unsafe { result::stream::begin_capture(stream, mode) };
        self.check(PASS, begun)?;
        let request = self.enqueue(stream, pinned, steps);
        // SAFETY: the capture began above.
        let captured = unsafe { result::stream::end_capture(stream) };
        request?;
        let captured = self.check(PASS, captured)?;
        // SAFETY: a completely captured graph; its instance is independent of it.
        let executable = unsafe {
            let made = result::graph::instantiate(captured, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(captured);
            made
        };
        let executable = self.check(PASS, executable)?;
        Ok(Graph { executable, pinned, stream: Arc::clone(&self.stream) })
    }

    /// Enqueues the steps with copies from and to the pinned memory.
    fn enqueue(&mut self, stream: sys::CUstream, pinned: *mut u8, steps: &[Step<'_, Buffer>]) -> Result<(), Error> {
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
                    let request = unsafe { result::memcpy_htod_async(buffer.address, own, stream) };
                    self.check(PASS, request)?;
                }
                Step::Download(buffer, _) => {
                    // SAFETY: as above.
                    let request = unsafe { result::memcpy_dtoh_async(own, buffer.address, stream) };
                    self.check(PASS, request)?;
                }
            }
            // SAFETY: within the pinned memory, or at its end.
            at = unsafe { at.add(bytes.next_multiple_of(ALIGNMENT)) };
        }
        Ok(())
    }
}
