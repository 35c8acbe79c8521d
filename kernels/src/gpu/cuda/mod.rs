//! NVIDIA's driver as a [`Driver`]; its library is loaded at run time, so that one binary runs with and without a GPU.
//!
//! All work goes to one stream, in call order; the default stream and cudarc's event tracking are not used. Transfers go through pinned memory,
//! one piece at a time (`cuda/staging.rs`). Every wait polls with a deadline, so that a device that died or hangs is detected. After the first
//! error other than out-of-memory the device counts as lost, and every later call returns that error.
#![allow(unsafe_code)] // Driver calls.

mod graph;
mod images;
mod staging;
mod timing;

pub use graph::Graph;
pub use timing::DeviceTiming;

use super::driver::{Argument, Driver, Step, THREADS};
use crate::Error;
use cudarc::driver::sys::{self, CUdevice_attribute, CUmemPool_attribute, CUresult};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use images::IMAGES;
use staging::Staging;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use timing::EventPair;

/// Minimum CUDA version of the driver (580): the kernels are compiled by CUDA 13.0.
const OLDEST_DRIVER: i32 = 13_000;
/// Default limit of work on the device: a pass over a full device takes milliseconds.
pub const DEADLINE: Duration = Duration::from_secs(2);

/// Reason why a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The driver library is missing.
    #[error("no CUDA driver found: failed to load libcuda")]
    NoDriver,
    /// The driver has no such device.
    #[error("no CUDA device {ordinal}: the driver reports {devices}")]
    NoDevice {
        /// Requested device.
        ordinal: usize,
        /// Number of devices.
        devices: usize,
    },
    /// The driver is too old for the compiled kernels.
    #[error("CUDA driver is too old: it supports CUDA {}.{}, but 13.0 (driver 580) or newer is required", found / 1_000, found % 1_000 / 10)]
    OldDriver {
        /// CUDA version of the driver: 1,000 times the major version plus 10 times the minor one.
        found: i32,
    },
    /// A fatbin has no code for this device.
    #[error("fatbin '{image}' does not support compute capability {major}.{minor} (driver code {code})")]
    Image {
        /// Name of the fatbin.
        image: &'static str,
        /// Compute capability, major version.
        major: i32,
        /// Compute capability, minor version.
        minor: i32,
        /// Error code of the driver.
        code: i32,
    },
    /// Another driver call failed.
    #[error("failed to {call} (driver code {code})")]
    Failed {
        /// Operation that failed.
        call: &'static str,
        /// Error code of the driver.
        code: i32,
    },
}

/// Returns the number of devices; 0 without a driver or device. Never panics.
///
/// # Errors
/// [`OpenError::Failed`].
pub fn devices() -> Result<usize, OpenError> {
    // Every other call panics without the library.
    // SAFETY: the library is loaded and unloaded.
    if !unsafe { sys::is_culib_present() } {
        return Ok(0);
    }
    let counted = result::init().and_then(|()| result::device::get_count());
    match counted {
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(0),
        counted => Ok(counted.map_err(failed("count devices"))? as usize),
    }
}

/// Returns the number of devices (at least 1) of a driver that supports the compiled kernels. Allocates nothing on them, so [`Cuda::open`] can
/// still fail. Never panics.
///
/// # Errors
/// The reason why no device can be used.
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

/// Returns the CUDA version of the driver: 1,000 times the major version plus 10 times the minor one. Never panics.
///
/// # Errors
/// [`OpenError::NoDriver`], [`OpenError::Failed`].
pub fn version() -> Result<i32, OpenError> {
    // SAFETY: as in `devices`.
    if !unsafe { sys::is_culib_present() } {
        return Err(OpenError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the call writes one number.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(failed("read the driver version"))?;
    Ok(version)
}

fn failed(call: &'static str) -> impl Fn(DriverError) -> OpenError {
    move |DriverError(code)| OpenError::Failed { call, code: code as i32 }
}

/// An open device.
pub struct Cuda {
    name: String,
    capability: (i32, i32),
    functions: HashMap<&'static str, sys::CUfunction>,
    modules: Vec<sys::CUmodule>,
    staging: Staging,
    /// Recorded events, while timing is on.
    marks: Option<Vec<EventPair>>,
    deadline: Duration,
    /// The error that ended the device.
    lost: Option<i32>,
    stream: Arc<CudaStream>,
}

// SAFETY: functions, modules and pinned memory belong to the driver, which accepts calls from any thread that has bound the context; every
// call here binds it.
unsafe impl Send for Cuda {}

/// Device memory.
pub struct Buffer {
    address: sys::CUdeviceptr,
    stream: Arc<CudaStream>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // The memory of a lost device was freed with its context.
        if self.stream.context().bind_to_thread().is_ok() {
            // SAFETY: allocated on this stream and freed once; earlier work of the stream runs before.
            let _ = unsafe { result::free_async(self.address, self.stream.cu_stream()) };
        }
    }
}

impl Cuda {
    /// Opens a device and loads all kernels; work that exceeds `deadline` fails.
    ///
    /// # Errors
    /// The reason why the device cannot be used.
    pub fn open(ordinal: usize, deadline: Duration) -> Result<Self, OpenError> {
        let devices = probe()?;
        if ordinal >= devices {
            return Err(OpenError::NoDevice { ordinal, devices });
        }
        let context = CudaContext::new(ordinal).map_err(failed("create a context"))?;
        // SAFETY: cudarc's own memory types are not used, so there is nothing to track.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed("create a stream"))?;
        keep_memory(context.cu_device())?;
        let staging = Staging::new().map_err(failed("allocate pinned memory"))?;
        let name = context.name().map_err(failed("read the device name"))?;
        let (functions, modules) = (HashMap::new(), Vec::new());
        let mut own =
            Self { name, capability: (0, 0), functions, modules, staging, marks: None, deadline, lost: None, stream };
        own.load(&context)?;
        Ok(own)
    }

    /// Returns the vendor's name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the UUID of the device as `nvidia-smi -L` prints it.
    ///
    /// # Errors
    /// [`OpenError::Failed`].
    pub fn uuid(&self) -> Result<String, OpenError> {
        let uuid = self.stream.context().uuid().map_err(failed("read the device UUID"))?;
        let hex: String = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
        Ok(format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
    }

    /// Returns the compute capability: major, minor.
    pub const fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Returns the free and total bytes of device memory.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn memory(&mut self) -> Result<(u64, u64), Error> {
        self.enter("memory")?;
        let (free, all) = self.check("memory", result::mem_get_info())?;
        Ok((free as u64, all as u64))
    }

    fn load(&mut self, context: &CudaContext) -> Result<(), OpenError> {
        let attribute = |it| context.attribute(it).map_err(failed("read the compute capability"));
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        self.capability = (major, minor);
        for (image, bytes, kernels) in IMAGES {
            // SAFETY: a complete fatbin, which the driver copies.
            let module = unsafe { result::module::load_data(bytes.as_ptr().cast()) }
                .map_err(|DriverError(code)| OpenError::Image { image, major, minor, code: code as i32 })?;
            self.modules.push(module);
            for &kernel in kernels {
                let name = CString::new(kernel).expect("kernel names contain no NUL");
                // SAFETY: the module was loaded above.
                let function =
                    unsafe { result::module::get_function(module, name) }.map_err(failed("find a kernel"))?;
                // By default the driver loads a kernel at its first launch, when the device may be full.
                // SAFETY: a kernel of that module.
                unsafe { sys::cuFuncLoad(function) }.result().map_err(failed("load a kernel"))?;
                self.functions.insert(kernel, function);
            }
        }
        Ok(())
    }

    /// Binds the context, unless the device is lost.
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

    /// Waits for all enqueued work.
    fn wait_for(&mut self, pass: &'static str, stream: sys::CUstream) -> Result<(), Error> {
        let begin = Instant::now();
        loop {
            // SAFETY: the stream is alive.
            match unsafe { sys::cuStreamQuery(stream) } {
                CUresult::CUDA_SUCCESS => {
                    self.staging.mark_idle();
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
        // A lost device may still access the pinned memory, which is leaked then.
        if self.lost.is_none() && self.stream.context().bind_to_thread().is_ok() {
            // SAFETY: no work is in flight after the wait, and everything is freed once.
            unsafe {
                let _ = result::stream::synchronize(self.stream.cu_stream());
                for &module in &self.modules {
                    let _ = result::module::unload(module);
                }
                self.staging.free();
            }
        }
    }
}

/// Keeps freed memory in the process's pool: otherwise every wait would release it and every pass allocate it again.
fn keep_memory(device: sys::CUdevice) -> Result<(), OpenError> {
    let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let mut all = u64::MAX;
    // SAFETY: the attribute is a 64-bit number.
    let kept = unsafe {
        result::device::get_default_mem_pool(device)
            .and_then(|pool| result::mem_pool::set_attribute(pool, threshold, (&raw mut all).cast()))
    };
    kept.map_err(failed("set the memory pool threshold"))
}

impl Driver for Cuda {
    type Buffer = Buffer;
    type Graph = Graph;

    fn allocate(&mut self, bytes: usize) -> Result<Buffer, Error> {
        let stream = self.enter("allocate")?;
        // SAFETY: the content is unspecified by contract.
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
        // Little-endian: the first bytes of a wide number are its low part.
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
            // SAFETY: the arguments match the kernel by contract, and the call copies them.
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
