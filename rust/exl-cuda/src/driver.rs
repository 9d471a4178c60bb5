//! Opening of the NVIDIA driver at run time.

use std::ffi::{CStr, c_int};
use std::sync::OnceLock;

use crate::ffi::{CUDA_ERROR_NO_DEVICE, CUDA_SUCCESS, CuResult, Functions};
use crate::images;

/// The reason why CUDA cannot be used here. The text is complete: it says what is missing and how to fix it.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Reason {
    #[error("this build holds no CUDA kernels: {0}")]
    NotBuilt(String),
    #[error(
        "no NVIDIA driver: {library} cannot be opened ({detail}); install the NVIDIA driver, or use device \"cpu\""
    )]
    NoDriver { library: String, detail: String },
    #[error("the NVIDIA driver lacks {symbol}: update it to {needed} or newer")]
    Incomplete { symbol: String, needed: String },
    #[error(
        "the NVIDIA driver is too old: it supports CUDA {found}, these kernels need CUDA {needed} or newer; update the driver"
    )]
    TooOld { found: String, needed: String },
    #[error("the NVIDIA driver sees no GPU ({detail}); check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    NoDevice { detail: String },
    #[error("the NVIDIA driver does not start: {detail}")]
    Init { detail: String },
}

/// The opened driver.
pub struct Driver {
    pub(crate) functions: Functions,
    version: i32,
    count: u32,
}

static DRIVER: OnceLock<Result<Driver, Reason>> = OnceLock::new();

#[cfg(target_os = "windows")]
const LIBRARY: &str = "nvcuda.dll";
#[cfg(not(target_os = "windows"))]
const LIBRARY: &str = "libcuda.so.1";

impl Driver {
    /// The driver, opened at the first call; later calls give the same answer. Importing the module does not call it, so that a process may
    /// fork first.
    pub fn get() -> Result<&'static Self, &'static Reason> {
        DRIVER.get_or_init(|| Self::open(LIBRARY)).as_ref()
    }

    /// CUDA version the driver supports, as (major, minor).
    pub fn version(&self) -> (i32, i32) {
        (self.version / 1000, self.version % 1000 / 10)
    }

    /// Number of visible GPUs, at least one.
    pub fn device_count(&self) -> u32 {
        self.count
    }

    /// Name and text of a driver error.
    pub(crate) fn describe(&self, code: CuResult) -> (String, String) {
        describe(&self.functions, code)
    }

    fn open(library: &str) -> Result<Self, Reason> {
        if images::FATBINS.is_empty() {
            return Err(Reason::NotBuilt(images::NOTE.to_owned()));
        }
        // SAFETY: loading the driver runs its initializers, as in every CUDA program.
        let handle =
            unsafe { libloading::Library::new(library) }.map_err(|e| Reason::NoDriver {
                library: library.to_owned(),
                detail: e.to_string(),
            })?;
        let functions = Functions::resolve(&handle).map_err(|symbol| Reason::Incomplete {
            symbol: symbol.to_owned(),
            needed: format!("one for CUDA {}", toolkit_major()),
        })?;
        // Never closed: function pointers and torch live as long as the process.
        std::mem::forget(handle);
        let mut version: c_int = 0;
        // SAFETY: writes one int.
        let code = unsafe { (functions.driver_version)(&raw mut version) };
        if code != CUDA_SUCCESS {
            return Err(init_error(&functions, code));
        }
        if version < toolkit_major() * 1000 {
            return Err(Reason::TooOld {
                found: format!("{}.{}", version / 1000, version % 1000 / 10),
                needed: format!("{}.0", toolkit_major()),
            });
        }
        // SAFETY: takes a flag word that must be zero.
        let code = unsafe { (functions.init)(0) };
        if code != CUDA_SUCCESS {
            return Err(init_error(&functions, code));
        }
        let mut count: c_int = 0;
        // SAFETY: writes one int.
        let code = unsafe { (functions.device_count)(&raw mut count) };
        if code != CUDA_SUCCESS {
            return Err(init_error(&functions, code));
        }
        if count < 1 {
            return Err(Reason::NoDevice {
                detail: "0 devices".to_owned(),
            });
        }
        Ok(Self {
            functions,
            version,
            count: count as u32,
        })
    }
}

/// A cubin runs on every driver of its CUDA major version, so the major version is the minimum.
fn toolkit_major() -> i32 {
    let digits: String = images::TOOLKIT
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    digits.parse().unwrap_or(13)
}

fn init_error(functions: &Functions, code: CuResult) -> Reason {
    let (name, text) = describe(functions, code);
    if code == CUDA_ERROR_NO_DEVICE {
        return Reason::NoDevice {
            detail: format!("{name}: {text}"),
        };
    }
    Reason::Init {
        detail: format!("{name}: {text}"),
    }
}

fn describe(functions: &Functions, code: CuResult) -> (String, String) {
    let read = |get: unsafe extern "C" fn(CuResult, *mut *const std::ffi::c_char) -> CuResult| {
        let mut text = std::ptr::null();
        // SAFETY: writes a pointer to a static string, or leaves null for an unknown code.
        unsafe {
            get(code, &raw mut text);
            if text.is_null() {
                return format!("CUDA error {code}");
            }
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    };
    (read(functions.error_name), read(functions.error_text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_a_remedy() {
        if images::FATBINS.is_empty() {
            return;
        }
        let reason = Driver::open("libnot-a-driver.so.9")
            .err()
            .expect("no such library");
        let text = reason.to_string();
        assert!(matches!(reason, Reason::NoDriver { .. }));
        assert!(
            text.contains("libnot-a-driver.so.9") && text.contains("install"),
            "{text}"
        );
    }

    #[test]
    fn a_library_without_the_functions_is_named() {
        if images::FATBINS.is_empty() || !cfg!(target_os = "linux") {
            return;
        }
        let reason = Driver::open("libc.so.6").err().expect("not a driver");
        assert!(
            matches!(&reason, Reason::Incomplete { symbol, .. } if symbol == "cuInit"),
            "{reason}"
        );
    }

    #[test]
    fn opening_twice_gives_the_same_answer() {
        let one = Driver::get().err().map(ToString::to_string);
        let two = Driver::get().err().map(ToString::to_string);
        assert_eq!(one, two);
    }
}
