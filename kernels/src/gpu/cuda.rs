//! NVIDIA's driver as a [`Driver`]: its library is opened at run time, so that one binary runs with and without a GPU.
//!
//! Everything goes to one stream, in call order; nothing is on the default stream, and cudarc's own tracking of events is off. Bytes go to
//! the device and come back through pinned memory, a piece at a time (`cuda/staging.rs`).
//! Every wait polls with a deadline: a device that died or hangs is noticed. After the first error that is not of memory the device
//! counts as lost, and every later call gives that error again.
#![allow(unsafe_code)] // Calls of the driver.

mod graph;
mod staging;
mod timing;

pub use graph::Graph;
pub use timing::Timed;

use super::driver::{Argument, Driver, Step, THREADS};
use super::images::IMAGES;
use crate::Error;
use cudarc::driver::sys::{self, CUdevice_attribute, CUmemPool_attribute, CUresult};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use staging::Staging;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use timing::Mark;

/// Code compiled by CUDA 13.0 needs a driver of that version: 580 or newer.
const OLDEST_DRIVER: i32 = 13_000;
/// How long work on the device may take, unless said otherwise: a pass over a full device takes milliseconds.
pub const DEADLINE: Duration = Duration::from_secs(2);

/// Why a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The library of the driver is not there.
    #[error("there is no CUDA driver: libcuda could not be loaded")]
    NoDriver,
    /// The driver has no such device.
    #[error("there is no device {ordinal}: the driver has {devices}")]
    NoDevice {
        /// Asked for.
        ordinal: usize,
        /// There are.
        devices: usize,
    },
    /// The driver does not know the code that was compiled.
    #[error("the driver is too old: it is of CUDA {}.{}, and 13.0 (driver 580) or newer is needed", found / 1_000, found % 1_000 / 10)]
    OldDriver {
        /// As the driver says it: 1,000 times the major version plus 10 times the minor one.
        found: i32,
    },
    /// No part of a fatbin is for this device.
    #[error("fatbin '{image}' is nothing for a device of compute capability {major}.{minor} (code {code})")]
    Image {
        /// Name.
        image: &'static str,
        /// Compute capability.
        major: i32,
        /// Compute capability.
        minor: i32,
        /// The driver's code.
        code: i32,
    },
    /// Another call failed.
    #[error("the driver failed to {call} (code {code})")]
    Failed {
        /// What it was asked.
        call: &'static str,
        /// Its code.
        code: i32,
    },
}

/// How many devices there are; 0 without a driver, and without a device. Never panics.
///
/// # Errors
/// [`OpenError::Failed`].
pub fn devices() -> Result<usize, OpenError> {
    // Every other call panics without the library.
    // SAFETY: the library is opened and closed.
    if !unsafe { sys::is_culib_present() } {
        return Ok(0);
    }
    let counted = result::init().and_then(|()| result::device::get_count());
    match counted {
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(0),
        counted => Ok(counted.map_err(failed("count devices"))? as usize),
    }
}

/// Whether there is a driver that knows the code that was compiled, and how many devices it has, at least 1. Takes nothing of any of them,
/// so that what [`Cuda::open`] says of one is still to be heard. Never panics.
///
/// # Errors
/// Why no device can be used.
pub fn probe() -> Result<usize, OpenError> {
    let version = version()?;
    if version < OLDEST_DRIVER {
        return Err(OpenError::OldDriver { found: version });
    }
    match devices()? {
        0 => Err(OpenError::NoDevice { ordinal: 0, devices: 0 }),
        devices => Ok(devices),
    }
}

/// The CUDA of the driver: 1,000 times the major version plus 10 times the minor one. Never panics.
///
/// # Errors
/// [`OpenError::NoDriver`], [`OpenError::Failed`].
pub fn version() -> Result<i32, OpenError> {
    // SAFETY: as in `devices`.
    if !unsafe { sys::is_culib_present() } {
        return Err(OpenError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: it writes a number.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(failed("tell its version"))?;
    Ok(version)
}

fn failed(call: &'static str) -> impl Fn(DriverError) -> OpenError {
    move |DriverError(code)| OpenError::Failed { call, code: code as i32 }
}

/// One device of the driver.
pub struct Cuda {
    name: String,
    capability: (i32, i32),
    functions: HashMap<&'static str, sys::CUfunction>,
    modules: Vec<sys::CUmodule>,
    staging: Staging,
    /// What is timed, while it is.
    marks: Option<Vec<Mark>>,
    deadline: Duration,
    /// The first error that ended it.
    lost: Option<i32>,
    stream: Arc<CudaStream>,
}

// SAFETY: functions, modules and pinned memory are the driver's, which takes calls from any thread that has bound the context; every
// call here binds it.
unsafe impl Send for Cuda {}

/// Memory of the device.
pub struct Buffer {
    address: sys::CUdeviceptr,
    stream: Arc<CudaStream>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // On a lost device the memory went with its context.
        if self.stream.context().bind_to_thread().is_ok() {
            // SAFETY: allocated on this stream, and given back once; earlier work of the stream runs before.
            let _ = unsafe { result::free_async(self.address, self.stream.cu_stream()) };
        }
    }
}

impl Cuda {
    /// Opens a device and loads all kernels; work on it is given up after `deadline`.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn open(ordinal: usize, deadline: Duration) -> Result<Self, OpenError> {
        let devices = probe()?;
        if ordinal >= devices {
            return Err(OpenError::NoDevice { ordinal, devices });
        }
        let context = CudaContext::new(ordinal).map_err(failed("make a context"))?;
        // SAFETY: no memory of cudarc's own types is used, so there is nothing to track.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed("make a stream"))?;
        keep_memory(context.cu_device())?;
        let staging = Staging::new().map_err(failed("pin memory"))?;
        let name = context.name().map_err(failed("tell a name"))?;
        let (functions, modules) = (HashMap::new(), Vec::new());
        let mut own =
            Self { name, capability: (0, 0), functions, modules, staging, marks: None, deadline, lost: None, stream };
        own.load(&context)?;
        Ok(own)
    }

    /// What the vendor calls the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// By what the device is known wherever it is: as `nvidia-smi -L` writes it.
    ///
    /// # Errors
    /// [`OpenError::Failed`].
    pub fn uuid(&self) -> Result<String, OpenError> {
        let uuid = self.stream.context().uuid().map_err(failed("tell a uuid"))?;
        let hex: String = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
        Ok(format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
    }

    /// Compute capability: major, minor.
    pub const fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Bytes of the device that are free, and all of them.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn memory(&mut self) -> Result<(u64, u64), Error> {
        self.enter("memory")?;
        let (free, all) = self.check("memory", result::mem_get_info())?;
        Ok((free as u64, all as u64))
    }

    fn load(&mut self, context: &CudaContext) -> Result<(), OpenError> {
        let attribute = |it| context.attribute(it).map_err(failed("tell its compute capability"));
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        self.capability = (major, minor);
        for (image, bytes, kernels) in IMAGES {
            // SAFETY: a whole fatbin, which the driver copies.
            let module = unsafe { result::module::load_data(bytes.as_ptr().cast()) }
                .map_err(|DriverError(code)| OpenError::Image { image, major, minor, code: code as i32 })?;
            self.modules.push(module);
            for &kernel in kernels {
                let name = CString::new(kernel).expect("names of kernels have no zero");
                // SAFETY: a module that was loaded, above.
                let function =
                    unsafe { result::module::get_function(module, name) }.map_err(failed("find a kernel"))?;
                // A driver that is not told to loads a kernel at its first launch, when the device may be full.
                // SAFETY: a kernel of that module.
                unsafe { sys::cuFuncLoad(function) }.result().map_err(failed("load a kernel"))?;
                self.functions.insert(kernel, function);
            }
        }
        Ok(())
    }

    /// Binds the context, unless the device was lost.
    fn enter(&self, pass: &'static str) -> Result<sys::CUstream, Error> {
        match self.lost {
            Some(code) => Err(Error::Failed { pass, code }),
            None => match self.stream.context().bind_to_thread() {
                Ok(()) => Ok(self.stream.cu_stream()),
                Err(DriverError(code)) => Err(Error::Failed { pass, code: code as i32 }),
            },
        }
    }

    fn check<T>(&mut self, pass: &'static str, outcome: Result<T, DriverError>) -> Result<T, Error> {
        outcome.map_err(|DriverError(code)| {
            self.lost = Some(code as i32);
            Error::Failed { pass, code: code as i32 }
        })
    }

    /// Waits for all work so far.
    fn wait_for(&mut self, pass: &'static str, stream: sys::CUstream) -> Result<(), Error> {
        let begin = Instant::now();
        loop {
            // SAFETY: a stream that lives.
            match unsafe { sys::cuStreamQuery(stream) } {
                CUresult::CUDA_SUCCESS => {
                    self.staging.settle();
                    return Ok(());
                }
                CUresult::CUDA_ERROR_NOT_READY if begin.elapsed() < self.deadline => std::hint::spin_loop(),
                CUresult::CUDA_ERROR_NOT_READY => {
                    return self.check(pass, Err(DriverError(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT)));
                }
                code => return self.check(pass, Err(DriverError(code))),
            }
        }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Of a lost device work may still be under way into the pinned memory, which then stays.
        if self.lost.is_none() && self.stream.context().bind_to_thread().is_ok() {
            // SAFETY: nothing is under way any more after the wait, and all of it is given back once.
            unsafe {
                let _ = result::stream::synchronize(self.stream.cu_stream());
                for &module in &self.modules {
                    let _ = result::module::unload(module);
                }
                self.staging.give_back();
            }
        }
    }
}

/// Freed memory stays with the process: without this every wait would give it back, and every pass take it anew.
fn keep_memory(device: sys::CUdevice) -> Result<(), OpenError> {
    let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let mut all = u64::MAX;
    // SAFETY: the attribute is a number of 64 bits.
    let kept = unsafe {
        result::device::get_default_mem_pool(device)
            .and_then(|pool| result::mem_pool::set_attribute(pool, threshold, (&raw mut all).cast()))
    };
    kept.map_err(failed("keep memory"))
}

impl Driver for Cuda {
    type Buffer = Buffer;
    type Graph = Graph;

    fn allocate(&mut self, bytes: usize) -> Result<Buffer, Error> {
        let stream = self.enter("allocate")?;
        // SAFETY: any content is a content.
        match unsafe { result::malloc_async(stream, bytes) } {
            Ok(address) => Ok(Buffer { address, stream: Arc::clone(&self.stream) }),
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Err(Error::Full { missing_bytes: bytes as u64 }),
            Err(error) => self.check("allocate", Err(error)),
        }
    }

    fn upload(&mut self, buffer: &Buffer, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        self.send(buffer.address + offset as u64, bytes)
    }

    fn download(&mut self, buffer: &Buffer, offset: usize, out: &mut [u8]) -> Result<(), Error> {
        self.fetch(buffer.address + offset as u64, out)
    }

    fn copy(&mut self, from: &Buffer, to: &Buffer, bytes: usize) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        let stream = self.enter("copy")?;
        let (from, to) = (from.address, to.address);
        // SAFETY: within both buffers by contract.
        self.on_stream("copy", stream, || unsafe { result::memcpy_dtod_async(to, from, bytes, stream) })
    }

    fn fill(&mut self, buffer: &Buffer, range: Range<usize>, byte: u8) -> Result<(), Error> {
        if range.is_empty() {
            return Ok(());
        }
        let stream = self.enter("fill")?;
        let to = buffer.address + range.start as u64;
        // SAFETY: within the buffer by contract.
        self.on_stream("fill", stream, || unsafe { result::memset_d8_async(to, byte, range.len(), stream) })
    }

    fn launch(&mut self, kernel: &'static str, blocks: u32, arguments: &[Argument<'_, Buffer>]) -> Result<(), Error> {
        let stream = self.enter(kernel)?;
        let function = self.functions[kernel];
        // Little-endian: the first bytes of a number are the number of fewer bits.
        let mut values: Vec<u64> = arguments
            .iter()
            .map(|argument| match *argument {
                Argument::Buffer(buffer) => buffer.address,
                Argument::Inside(buffer, offset) => buffer.address + offset as u64,
                Argument::Null => 0,
                Argument::U32(number) => u64::from(number),
                Argument::U64(number) => number,
                Argument::F32(number) => u64::from(number.to_bits()),
            })
            .collect();
        let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|value| (&raw mut *value).cast()).collect();
        let block = (THREADS as u32, 1, 1);
        self.on_stream(kernel, stream, || {
            // SAFETY: the arguments are those of the kernel by contract, and are copied before the call returns.
            unsafe { result::launch_kernel(function, (blocks, 1, 1), block, 0, stream, &mut pointers) }
        })
    }

    fn wait(&mut self) -> Result<(), Error> {
        let stream = self.enter("wait")?;
        self.wait_for("wait", stream)
    }

    fn sequence(&mut self, kept: &mut Option<Graph>, steps: &mut [Step<'_, Buffer>]) -> Result<(), Error> {
        self.run(kept, steps)
    }
}
