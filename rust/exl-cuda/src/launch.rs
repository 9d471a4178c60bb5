//! Launching of one kernel on a stream that the caller owns.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use crate::device::Device;
use crate::driver::Driver;
use crate::ffi::{self, CUDA_SUCCESS, CuContext, CuResult};
use crate::parameters::{Parameter, Parameters};

/// Most blocks of a launch along its second and its third dimension.
pub const MOST_GRID_ROWS: u32 = 65_535;

/// Errors between a checked call and the GPU.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CudaError {
    #[error("CUDA cannot be used: {0}")]
    Unavailable(String),
    #[error("cuda:{index} does not exist: {count} GPU(s) are visible")]
    NoSuchDevice { index: u32, count: u32 },
    #[error("no kernel {0:?} in this build")]
    NoKernel(String),
    #[error("{what}: {limit}")]
    Argument { what: String, limit: String },
    #[error("kernel {kernel} takes ({takes}), and a launch passes ({passed})")]
    Parameters {
        kernel: String,
        takes: String,
        passed: String,
    },
    #[error(
        "the stream belongs to another GPU than cuda:{index}, where the tensors are: make it current with torch.cuda.device"
    )]
    ForeignStream { index: u32 },
    #[error(
        "kernel {kernel} of the loaded image takes parameters of {found:?} bytes, in this build's sources of {sizes:?}: compile the image from these sources"
    )]
    Image {
        kernel: String,
        found: Vec<usize>,
        sizes: Vec<usize>,
    },
    #[error("{call} failed for {what}: {name} ({text}){remedy}")]
    Driver {
        call: &'static str,
        what: String,
        name: String,
        text: String,
        remedy: &'static str,
    },
}

/// Turn a driver code into an error with a remedy.
pub(crate) fn check(
    driver: &Driver,
    code: CuResult,
    call: &'static str,
    what: &str,
) -> Result<(), CudaError> {
    if code == CUDA_SUCCESS {
        return Ok(());
    }
    let (name, text) = driver.describe(code);
    let remedy = match code {
        2 => "; free GPU memory, or use a smaller model, cache or batch",
        // 700 illegal address, 710 assertion, 719 launch failure, 46/999 device lost: the context is gone.
        46 | 700 | 710 | 714..=719 | 999 => "; the GPU context is lost: restart the process",
        _ => "",
    };
    Err(CudaError::Driver {
        call,
        what: what.to_owned(),
        name,
        text,
        remedy,
    })
}

/// One launch: the kernel, its shape and the stream. Arguments are passed to [`Launch::run`].
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    pub kernel: &'a str,
    pub grid: [u32; 3],
    pub block: u32,
    pub shared_bytes: u32,
    /// `torch.cuda.current_stream().cuda_stream`; 0 is the legacy default stream.
    pub stream: usize,
    /// Request programmatic dependent launch: the kernel may begin while its predecessor drains. Only for kernels that wait before they
    /// access data of a predecessor. Ignored if the card runs code older than sm_90, which does not wait.
    pub programmatic: bool,
}

impl Launch<'_> {
    /// Launch with `arguments`. Parameters that the kernel does not take are an error.
    ///
    /// # Safety
    /// All device addresses among the arguments must be of memory of the size that the kernel expects, and stay valid until the stream has
    /// passed this launch.
    pub unsafe fn run<P: Parameters>(
        &self,
        device: &Device,
        arguments: &mut P,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract.
        unsafe { self.run_in_clusters(device, 0, arguments) }
    }

    /// As [`Launch::run`], with `bytes` of each SM as shared memory and the rest as a cache of global memory, or as the driver chooses.
    ///
    /// # Safety
    /// As [`Launch::run`].
    pub unsafe fn run_with_shared<P: Parameters>(
        &self,
        device: &Device,
        bytes: Option<usize>,
        arguments: &mut P,
    ) -> Result<(), CudaError> {
        device.in_context(|| device.set_carveout(self.kernel, bytes))?;
        // SAFETY: this function's contract.
        unsafe { self.run(device, arguments) }
    }

    /// Launch in clusters of `blocks` neighbours along the grid's last dimension (1, 2, 4 or 8; compute capability 9.0 and later). 0
    /// launches without clusters; cluster instructions are then illegal.
    ///
    /// # Safety
    /// As [`Launch::run`].
    pub unsafe fn run_in_clusters<P: Parameters>(
        &self,
        device: &Device,
        blocks: u32,
        arguments: &mut P,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract.
        unsafe { self.launch(device, blocks, P::LIST, arguments.addresses().as_mut()) }
    }

    /// Launch with the addresses of values for `parameters`.
    ///
    /// # Safety
    /// As [`Launch::run`].
    unsafe fn launch(
        &self,
        device: &Device,
        blocks: u32,
        parameters: &'static [Parameter],
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        if self.shared_bytes as usize > device.info.caps.shared_per_block {
            return Err(CudaError::Argument {
                what: format!(
                    "{}: {} bytes of shared memory",
                    self.kernel, self.shared_bytes
                ),
                limit: format!(
                    "a block of {} has {}",
                    device.info.name, device.info.caps.shared_per_block
                ),
            });
        }
        let [_, rows, layers] = self.grid;
        if rows.max(layers) > MOST_GRID_ROWS {
            return Err(CudaError::Argument {
                what: format!("{}: a grid of {:?} blocks", self.kernel, self.grid),
                limit: format!("at most {MOST_GRID_ROWS} in its second and third dimension"),
            });
        }
        let driver = device.driver;
        device.in_context(|| {
            let (function, handle) = device.function(self.kernel, self.shared_bytes)?;
            function.parameters.check(self.kernel, parameters)?;
            let mut owner: CuContext = std::ptr::null_mut();
            // SAFETY: the caller's stream handle; writes one pointer.
            let code = unsafe {
                (driver.functions.stream_context)(self.stream as ffi::CuStream, &raw mut owner)
            };
            check(driver, code, "cuStreamGetCtx", "the given stream")?;
            if owner != device.context {
                return Err(CudaError::ForeignStream {
                    index: device.info.index,
                });
            }
            let attribute = |id, values: [u32; 3]| ffi::LaunchAttribute {
                id,
                pad: [0; 4],
                value: std::array::from_fn(|i| values.get(i).copied().unwrap_or(0)),
            };
            let programmatic = self.programmatic && device.info.caps.programmatic();
            let cluster = attribute(ffi::LAUNCH_CLUSTER, [1, 1, blocks]);
            let early = attribute(ffi::LAUNCH_PROGRAMMATIC, [1, 0, 0]);
            let (attributes, count) = match (blocks > 0, programmatic) {
                (true, both) => ([cluster, early], 1 + u32::from(both)),
                (false, one) => ([early, early], u32::from(one)),
            };
            let config = ffi::LaunchConfig {
                grid: self.grid,
                block: [self.block, 1, 1],
                shared_bytes: self.shared_bytes,
                stream: self.stream as ffi::CuStream,
                attributes: attributes.as_ptr(),
                attribute_count: count,
            };
            // SAFETY: this function's contract, and the kernel takes these parameters; the driver copies the arguments before it returns.
            let code = unsafe {
                (driver.functions.launch)(
                    &raw const config,
                    handle,
                    arguments.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            };
            check(driver, code, "cuLaunchKernelEx", self.kernel)?;
            function.launches.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })
    }
}

/// Queue a copy of `bytes` bytes of pinned host memory at `from` to device memory at `to`, on a stream of this GPU.
///
/// # Safety
/// Both addresses must be valid for `bytes` bytes until the stream has passed the copy; the host memory must not change before.
pub unsafe fn copy_to_device(
    device: &Device,
    to: usize,
    from: usize,
    bytes: usize,
    stream: usize,
) -> Result<(), CudaError> {
    let driver = device.driver;
    device.in_context(|| {
        // SAFETY: this function's contract.
        let code = unsafe {
            (driver.functions.copy_to_device)(
                to as u64,
                from as *const c_void,
                bytes,
                stream as ffi::CuStream,
            )
        };
        check(driver, code, "cuMemcpyHtoDAsync", "the inputs of a launch")
    })
}
