//! The driver's C types and the functions that this crate calls, with the names and layouts of `cuda.h` (CUDA 12 and 13).

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::abi::assert_layout;

pub type CuResult = c_int;
pub type CuDevice = c_int;
pub type CuContext = *mut c_void;
pub type CuModule = *mut c_void;
pub type CuFunction = *mut c_void;
pub type CuStream = *mut c_void;

pub const CUDA_SUCCESS: CuResult = 0;
pub const CUDA_ERROR_INVALID_VALUE: CuResult = 1;
pub const CUDA_ERROR_NO_DEVICE: CuResult = 100;
pub const ATTRIBUTE_SM_COUNT: c_int = 16;
pub const ATTRIBUTE_CC_MAJOR: c_int = 75;
pub const ATTRIBUTE_CC_MINOR: c_int = 76;
pub const ATTRIBUTE_SHARED_OPTIN: c_int = 97;
pub const FUNC_MAX_DYNAMIC_SHARED: c_int = 8;
/// `CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`, in per cent of the maximum.
pub const FUNC_CARVEOUT: c_int = 9;
/// `CU_SHAREDMEM_CARVEOUT_DEFAULT`: the driver chooses.
pub const CARVEOUT_DEFAULT: c_int = -1;
pub const CAPTURE_MODE_RELAXED: c_int = 2;
/// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`
pub const LAUNCH_CLUSTER: c_int = 4;
/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`
pub const LAUNCH_PROGRAMMATIC: c_int = 6;

/// `CUlaunchAttribute`: a tag, padding to 8 bytes, a union of 64 bytes.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct LaunchAttribute {
    pub id: c_int,
    pub pad: [u8; 4],
    pub value: [u32; 16],
}

assert_layout!(LaunchAttribute, probe::CUlaunchAttribute, { id, pad, value });

/// `CUlaunchConfig`
#[repr(C)]
pub struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: CuStream,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: c_uint,
}

assert_layout!(LaunchConfig, probe::CUlaunchConfig, {
    grid as gridDimX,
    block as blockDimX,
    shared_bytes as sharedMemBytes,
    stream as hStream,
    attributes as attrs,
    attribute_count as numAttrs,
});

/// Declare the function table and its resolution from one list of names. The `optional` ones may be missing.
macro_rules! functions {
    (
        required { $($field:ident = $symbol:literal ($($arg:ty),*);)* }
        optional { $($other:ident = $name:literal ($($given:ty),*);)* }
    ) => {
        /// Resolved entry points. They stay valid because the library is never closed.
        pub struct Functions {
            $(pub $field: unsafe extern "C" fn($($arg),*) -> CuResult,)*
            $(pub $other: Option<unsafe extern "C" fn($($given),*) -> CuResult>,)*
        }

        impl Functions {
            /// Resolve every function; the error names the first one that is missing and not optional.
            pub fn resolve(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self { $($field: {
                    // SAFETY: the signature is the one `cuda.h` declares for this symbol.
                    let symbol = unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> CuResult>(concat!($symbol, "\0").as_bytes())
                    };
                    *symbol.map_err(|_| $symbol)?
                },)* $($other: {
                    // SAFETY: as above.
                    let symbol = unsafe {
                        library.get::<unsafe extern "C" fn($($given),*) -> CuResult>(concat!($name, "\0").as_bytes())
                    };
                    symbol.ok().map(|symbol| *symbol)
                },)* })
            }
        }
    };
}

functions! {
    required {
        init = "cuInit" (c_uint);
        driver_version = "cuDriverGetVersion" (*mut c_int);
        device_count = "cuDeviceGetCount" (*mut c_int);
        device_get = "cuDeviceGet" (*mut CuDevice, c_int);
        device_name = "cuDeviceGetName" (*mut c_char, c_int, CuDevice);
        device_memory = "cuDeviceTotalMem_v2" (*mut usize, CuDevice);
        device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, CuDevice);
        primary_retain = "cuDevicePrimaryCtxRetain" (*mut CuContext, CuDevice);
        context_current = "cuCtxGetCurrent" (*mut CuContext);
        context_push = "cuCtxPushCurrent_v2" (CuContext);
        context_pop = "cuCtxPopCurrent_v2" (*mut CuContext);
        module_load = "cuModuleLoadData" (*mut CuModule, *const c_void);
        module_function = "cuModuleGetFunction" (*mut CuFunction, CuModule, *const c_char);
        function_attribute = "cuFuncSetAttribute" (CuFunction, c_int, c_int);
        launch = "cuLaunchKernelEx" (*const LaunchConfig, CuFunction, *mut *mut c_void, *mut *mut c_void);
        copy_to_device = "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, CuStream);
        stream_context = "cuStreamGetCtx" (CuStream, *mut CuContext);
        capture_mode = "cuThreadExchangeStreamCaptureMode" (*mut c_int);
        error_name = "cuGetErrorName" (CuResult, *mut *const c_char);
        error_text = "cuGetErrorString" (CuResult, *mut *const c_char);
    }
    optional {
        parameter_info = "cuFuncGetParamInfo" (CuFunction, usize, *mut usize, *mut usize);
    }
}
