//! Ask the NVIDIA driver for the GPUs of this machine. This needs neither a toolkit nor nvidia-smi.

#[cfg(target_os = "linux")]
pub fn compute_capabilities() -> Result<Vec<(i32, i32)>, String> {
    use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

    const NOW: c_int = 2;
    const CC_MAJOR: c_int = 75;
    const CC_MINOR: c_int = 76;
    unsafe extern "C" {
        fn dlopen(name: *const c_char, mode: c_int) -> *mut c_void;
        fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    }
    type Init = unsafe extern "C" fn(c_uint) -> c_int;
    type Count = unsafe extern "C" fn(*mut c_int) -> c_int;
    type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    type Attribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;

    // SAFETY: no other thread runs yet. Hidden GPUs of this process must not change the architectures of the checkout.
    unsafe { std::env::remove_var("CUDA_VISIBLE_DEVICES") };
    // SAFETY: a terminated name and a documented mode.
    let library = unsafe { dlopen(c"libcuda.so.1".as_ptr(), NOW) };
    if library.is_null() {
        return Err("libcuda.so.1 cannot be opened".to_owned());
    }
    let symbol = |name: &CStr| {
        // SAFETY: a library that stays open and a terminated name.
        let found = unsafe { dlsym(library, name.as_ptr()) };
        let missing = || format!("libcuda.so.1 lacks {}", name.to_string_lossy());
        (!found.is_null()).then_some(found).ok_or_else(missing)
    };
    let (init, count) = (symbol(c"cuInit")?, symbol(c"cuDeviceGetCount")?);
    let (get, attribute) = (symbol(c"cuDeviceGet")?, symbol(c"cuDeviceGetAttribute")?);
    // SAFETY: the signatures that cuda.h declares for these symbols; each call writes one int.
    unsafe {
        let init: Init = std::mem::transmute(init);
        let count: Count = std::mem::transmute(count);
        let get: Get = std::mem::transmute(get);
        let attribute: Attribute = std::mem::transmute(attribute);
        let code = init(0);
        if code != 0 {
            return Err(format!("cuInit fails with error {code}"));
        }
        let mut devices = 0;
        let code = count(&raw mut devices);
        if code != 0 {
            return Err(format!("cuDeviceGetCount fails with error {code}"));
        }
        let of = |which, index| {
            let (mut device, mut value) = (0, 0);
            (get(&raw mut device, index) == 0 && attribute(&raw mut value, which, device) == 0)
                .then_some(value)
        };
        Ok((0..devices)
            .filter_map(|index| Some((of(CC_MAJOR, index)?, of(CC_MINOR, index)?)))
            .collect())
    }
}

#[cfg(not(target_os = "linux"))]
pub fn compute_capabilities() -> Result<Vec<(i32, i32)>, String> {
    Err("kernels are built on Linux only".to_owned())
}
