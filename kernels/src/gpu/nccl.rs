//! NCCL, loaded at run time: sums of `f32` vectors over GPUs of several processes.
//!
//! Communicators do not block: every call is polled, so that a rank that died or hangs ends with the caller's limit. A communicator is always
//! aborted, never destroyed: destruction is a collective call that would wait for ranks that are gone.
#![allow(unsafe_code)] // Calls of NCCL and the driver.

use super::cuda::{self, OpenError};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use libloading::Library;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// Names under which systems install it; the first is that of its packages.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Oldest version: it introduced communicators that do not block.
const OLDEST: c_int = 21_400;
/// Bytes of an id.
const ID_BYTES: usize = 128;
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// `ncclFloat32` and `ncclSum`.
const FLOAT: c_int = 7;
const SUM: c_int = 0;

/// Names a communicator; one rank makes it and sends it to the others.
pub type UniqueId = [u8; ID_BYTES];
type Handle = *mut c_void;

/// Why NCCL cannot be used, or a sum failed.
#[derive(Debug, thiserror::Error)]
pub enum NcclError {
    /// There is no library.
    #[error("nccl: not found")]
    NotFound,
    /// The library lacks a call.
    #[error("nccl: the library has no {0}")]
    Symbol(&'static str),
    /// The library is too old.
    #[error("nccl: version {found} is too old; allowed: {OLDEST} or newer")]
    OldVersion {
        /// Its version: 10,000 times the major version, 100 times the minor one, and the patch.
        found: c_int,
    },
    /// A call of NCCL failed.
    #[error("nccl: failed to {call} (code {code})")]
    Failed {
        /// Operation that failed.
        call: &'static str,
        /// Its code.
        code: c_int,
    },
    /// The other ranks made no progress.
    #[error("nccl: gave up waiting to {0}")]
    GaveUp(&'static str),
    /// The GPU cannot be used.
    #[error("nccl: {0}")]
    Device(#[from] OpenError),
}

/// The version of `ncclConfig_t` that introduced communicators that do not block; newer libraries accept it.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; ID_BYTES]);

type AllReduce = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, sys::CUstream) -> c_int;

/// The loaded library.
pub struct Nccl {
    version: c_int,
    get_unique_id: unsafe extern "C" fn(*mut Id) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Handle, c_int, Id, c_int, *mut Config) -> c_int,
    all_reduce: AllReduce,
    async_error: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    abort: unsafe extern "C" fn(Handle) -> c_int,
}

impl Nccl {
    /// Loads the library and checks its version.
    ///
    /// # Errors
    /// [`NcclError::NotFound`], [`NcclError::Symbol`], [`NcclError::OldVersion`].
    pub fn load() -> Result<Self, NcclError> {
        // SAFETY: NCCL has no initializers with requirements.
        let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok()).ok_or(NcclError::NotFound)?;
        // SAFETY: the types are those of nccl.h.
        let own = unsafe {
            let get_version: unsafe extern "C" fn(*mut c_int) -> c_int = symbol(&library, "ncclGetVersion")?;
            let mut version = 0;
            checked("read the version", get_version(&raw mut version))?;
            if version < OLDEST {
                return Err(NcclError::OldVersion { found: version });
            }
            Self {
                version,
                get_unique_id: symbol(&library, "ncclGetUniqueId")?,
                init_rank: symbol(&library, "ncclCommInitRankConfig")?,
                all_reduce: symbol(&library, "ncclAllReduce")?,
                async_error: symbol(&library, "ncclCommGetAsyncError")?,
                abort: symbol(&library, "ncclCommAbort")?,
            }
        };
        // It has threads of its own: it is never unloaded, so that its functions stay valid.
        std::mem::forget(library);
        Ok(own)
    }

    /// Returns the version: 10,000 times the major version, 100 times the minor one, and the patch.
    pub const fn version(&self) -> i32 {
        self.version
    }

    /// Makes the id of a new communicator.
    ///
    /// # Errors
    /// [`NcclError::Failed`].
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = Id([0; ID_BYTES]);
        // SAFETY: the call writes an id.
        checked("make an id", unsafe { (self.get_unique_id)(&raw mut id) })?;
        Ok(id.0)
    }
}

/// # Safety
/// `T` must be the type of the function.
unsafe fn symbol<T: Copy>(library: &Library, name: &'static str) -> Result<T, NcclError> {
    // SAFETY: by contract.
    unsafe { library.get::<T>(name.as_bytes()) }.map(|it| *it).map_err(|_| NcclError::Symbol(name))
}

fn checked(call: &'static str, code: c_int) -> Result<(), NcclError> {
    if code == SUCCESS || code == IN_PROGRESS { Ok(()) } else { Err(NcclError::Failed { call, code }) }
}

fn device_failed(call: &'static str) -> impl Fn(DriverError) -> NcclError {
    move |DriverError(code)| OpenError::Failed { call, code: code as i32 }.into()
}

/// Returns the UUID of a GPU, which names it among all GPUs of all hosts.
///
/// # Errors
/// The GPU cannot be used.
pub fn device_uuid(ordinal: usize) -> Result<[u8; 16], NcclError> {
    let uuid = context(ordinal)?.uuid().map_err(device_failed("read the device UUID"))?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// Returns the context of a GPU, which the passes of this process share.
fn context(ordinal: usize) -> Result<Arc<CudaContext>, NcclError> {
    let devices = cuda::devices()?;
    if ordinal >= devices {
        return Err(OpenError::NoDevice { ordinal, devices }.into());
    }
    CudaContext::new(ordinal).map_err(device_failed("create a context"))
}

/// Memory of a GPU for input and output of a sum.
#[derive(Clone, Copy)]
struct Buffers {
    input: sys::CUdeviceptr,
    output: sys::CUdeviceptr,
    elements: usize,
}

/// One rank of a communicator. It must be dropped after an error.
pub struct Communicator {
    nccl: Arc<Nccl>,
    handle: Handle,
    stream: Arc<CudaStream>,
    buffers: Option<Buffers>,
    /// A failed sum may still run on the GPU, so its memory is leaked.
    failed: bool,
}

// SAFETY: handle, stream and memory may be used by any thread that has bound the context; every call here binds it.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins a communicator of `ranks` ranks on a GPU of this process; waits for all others. `keep_waiting` is polled meanwhile.
    ///
    /// # Errors
    /// The GPU or NCCL failed, or `keep_waiting` returned false.
    pub fn join(
        nccl: &Arc<Nccl>,
        id: &UniqueId,
        (rank, ranks): (usize, usize),
        ordinal: usize,
        keep_waiting: &mut dyn FnMut() -> bool,
    ) -> Result<Self, NcclError> {
        const CALL: &str = "join the communicator";
        let context = context(ordinal)?;
        context.bind_to_thread().map_err(device_failed("bind a context"))?;
        let stream = context.new_stream().map_err(device_failed("create a stream"))?;
        let mut config = Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: OLDEST as u32, blocking: 0 };
        let mut own =
            Self { nccl: Arc::clone(nccl), handle: std::ptr::null_mut(), stream, buffers: None, failed: false };
        // SAFETY: the call writes a handle and reads the configuration of the size that it states.
        let code =
            unsafe { (nccl.init_rank)(&raw mut own.handle, ranks as c_int, Id(*id), rank as c_int, &raw mut config) };
        own.failed = true;
        checked(CALL, code)?;
        own.settle(CALL, keep_waiting)?;
        own.failed = false;
        Ok(own)
    }

    /// Sums vectors of all ranks. The additions have no order that is documented. `keep_waiting` is polled meanwhile.
    ///
    /// # Errors
    /// As [`Self::join`].
    ///
    /// # Panics
    /// Input and output have other lengths.
    pub fn all_reduce(
        &mut self,
        input: &[f32],
        output: &mut [f32],
        keep_waiting: &mut dyn FnMut() -> bool,
    ) -> Result<(), NcclError> {
        assert_eq!(input.len(), output.len(), "elements of input and output");
        if input.is_empty() {
            return Ok(());
        }
        let outcome = self.sum(input, output, keep_waiting);
        self.failed |= outcome.is_err();
        outcome
    }

    fn sum(
        &mut self,
        input: &[f32],
        output: &mut [f32],
        keep_waiting: &mut dyn FnMut() -> bool,
    ) -> Result<(), NcclError> {
        const CALL: &str = "sum";
        self.stream.context().bind_to_thread().map_err(device_failed("bind a context"))?;
        let buffers = self.reserve(input.len())?;
        let stream = self.stream.cu_stream();
        // SAFETY: the buffers have the length of the input; pageable memory is read before the call returns.
        unsafe { result::memcpy_htod_async(buffers.input, input, stream) }.map_err(device_failed("upload"))?;
        // SAFETY: buffers, communicator and stream belong to the same GPU, and live until the stream is idle or are leaked.
        let code = unsafe {
            let (from, to) = (buffers.input as *const c_void, buffers.output as *mut c_void);
            (self.nccl.all_reduce)(from, to, input.len(), FLOAT, SUM, self.handle, stream)
        };
        checked(CALL, code)?;
        self.settle(CALL, keep_waiting)?;
        self.wait(CALL, keep_waiting)?;
        // A download to pageable memory waits for the stream: it is idle.
        // SAFETY: the output has the length of the buffer.
        unsafe { result::memcpy_dtoh_async(output, buffers.output, stream) }.map_err(device_failed("download"))?;
        self.wait(CALL, keep_waiting)
    }

    /// Returns memory for so many elements; it grows to the largest sum.
    fn reserve(&mut self, elements: usize) -> Result<Buffers, NcclError> {
        if let Some(buffers) = self.buffers.filter(|it| it.elements >= elements) {
            return Ok(buffers);
        }
        self.free();
        let allocate = || {
            // SAFETY: the content is written before it is read.
            unsafe { result::malloc_async(self.stream.cu_stream(), size_of::<f32>() * elements) }
                .map_err(device_failed("allocate"))
        };
        let buffers = Buffers { input: allocate()?, output: allocate()?, elements };
        self.buffers = Some(buffers);
        Ok(buffers)
    }

    fn free(&mut self) {
        for address in self.buffers.take().into_iter().flat_map(|it| [it.input, it.output]) {
            // SAFETY: allocated on this stream, which is idle, and freed once.
            let _ = unsafe { result::free_async(address, self.stream.cu_stream()) };
        }
    }

    /// Waits until the communicator has accepted the last call.
    fn settle(&self, call: &'static str, keep_waiting: &mut dyn FnMut() -> bool) -> Result<(), NcclError> {
        loop {
            match self.state(call)? {
                IN_PROGRESS if keep_waiting() => std::thread::yield_now(),
                IN_PROGRESS => return Err(NcclError::GaveUp(call)),
                _ => return Ok(()),
            }
        }
    }

    /// Waits until the stream is idle.
    fn wait(&self, call: &'static str, keep_waiting: &mut dyn FnMut() -> bool) -> Result<(), NcclError> {
        loop {
            // SAFETY: the stream is alive.
            match unsafe { sys::cuStreamQuery(self.stream.cu_stream()) } {
                CUresult::CUDA_SUCCESS => return Ok(()),
                CUresult::CUDA_ERROR_NOT_READY if keep_waiting() => std::thread::yield_now(),
                CUresult::CUDA_ERROR_NOT_READY => return Err(NcclError::GaveUp(call)),
                code => return Err(device_failed(call)(DriverError(code))),
            }
            self.state(call)?;
        }
    }

    /// Returns whether the last call is in progress.
    fn state(&self, call: &'static str) -> Result<c_int, NcclError> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive, and the call writes its state.
        checked(call, unsafe { (self.nccl.async_error)(self.handle, &raw mut state) })?;
        checked(call, state).map(|()| state)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.stream.context().bind_to_thread().is_err() {
            return;
        }
        if !self.failed {
            self.free();
        }
        if !self.handle.is_null() {
            // SAFETY: the handle is aborted once. It ends kernels that wait for other ranks.
            let _ = unsafe { (self.nccl.abort)(self.handle) };
        }
    }
}
