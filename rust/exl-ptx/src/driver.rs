//! The functions of `libcuda.so.1` that the project calls, on the interpreter; and functions for the tests' harness.
//!
//! `EXL_PTX_CARD` names the card (3090), `EXL_PTX_DEVICES` the number of cards (1), `EXL_PTX_SEED` the order of warps and of asynchronous
//! copies (0: copies land as late as the program allows; 1: each by chance; 2: at once; other seeds repeat these three with other orders).
//! `EXL_PTX_UNWRITTEN=error` rejects loads of shared memory that was never written; without it they give NaN.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::card::Card;
use crate::grid::{Launch, run};
use crate::memory::Ranges;
use crate::module::{Module, text_of};

const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const NO_DEVICE: c_int = 100;
const INVALID_DEVICE: c_int = 101;
const INVALID_IMAGE: c_int = 200;
const NOT_FOUND: c_int = 500;
const LAUNCH_FAILED: c_int = 719;

/// Streams of device `d` that the harness makes are `STREAMS + d * 4096 + n`.
const STREAMS: usize = 0x5eed_0000;

#[derive(Default)]
struct State {
    ranges: Ranges,
    launches: u64,
    instructions: u64,
    last_error: CString,
    seed: u64,
}

fn state() -> MutexGuard<'static, State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    let made = || {
        let seed = std::env::var("EXL_PTX_SEED")
            .ok()
            .and_then(|s| s.parse().ok())
            .unwrap_or(0);
        Mutex::new(State {
            seed,
            ..State::default()
        })
    };
    STATE
        .get_or_init(made)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// Remember and print an error.
fn report(code: c_int, text: &str) -> c_int {
    eprintln!("exl-ptx: {text}");
    state().last_error = CString::new(text.replace('\0', "")).unwrap_or_default();
    code
}

fn card() -> Option<&'static Card> {
    static CARD: OnceLock<Option<Card>> = OnceLock::new();
    let made = || Card::named(&std::env::var("EXL_PTX_CARD").unwrap_or_else(|_| "3090".to_owned()));
    CARD.get_or_init(made).as_ref()
}

fn devices() -> usize {
    std::env::var("EXL_PTX_DEVICES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1)
}

thread_local! {
    /// The stack of current contexts of this thread.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The context of a device is its number plus one.
fn context(device: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(device + 1)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_: c_uint) -> c_int {
    if card().is_none() {
        return report(
            NO_DEVICE,
            &format!(
                "EXL_PTX_CARD names no known card; known are {}",
                Card::names()
            ),
        );
    }
    SUCCESS
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller's pointer.
    unsafe { version.write(13_000) };
    SUCCESS
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: the caller's pointer.
    unsafe { count.write(devices() as c_int) };
    SUCCESS
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    if ordinal < 0 || ordinal as usize >= devices() {
        return INVALID_DEVICE;
    }
    // SAFETY: the caller's pointer.
    unsafe { device.write(ordinal) };
    SUCCESS
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, _: c_int) -> c_int {
    let Some(card) = card() else { return NO_DEVICE };
    let text = format!("{} (interpreted)", card.name);
    let count = text.len().min((length.max(1) - 1) as usize);
    // SAFETY: the caller's buffer has `length` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), count);
        name.add(count).write(0);
    }
    SUCCESS
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _: c_int) -> c_int {
    let Some(card) = card() else { return NO_DEVICE };
    // SAFETY: the caller's pointer.
    unsafe { bytes.write(card.memory) };
    SUCCESS
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_int,
    _: c_int,
) -> c_int {
    let Some(card) = card() else { return NO_DEVICE };
    let found = match attribute {
        16 => card.sms as c_int,
        75 => card.compute.0,
        76 => card.compute.1,
        81 => card.shared_per_sm as c_int,
        97 => card.shared_per_block as c_int,
        _ => {
            return report(
                INVALID_VALUE,
                &format!("device attribute {attribute} is not known"),
            );
        }
    };
    // SAFETY: the caller's pointer.
    unsafe { value.write(found) };
    SUCCESS
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(to: *mut *mut c_void, device: c_int) -> c_int {
    // SAFETY: the caller's pointer.
    unsafe { to.write(context(device as usize)) };
    SUCCESS
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(to: *mut *mut c_void) -> c_int {
    let current = CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0));
    // SAFETY: the caller's pointer.
    unsafe { to.write(std::ptr::without_provenance_mut(current)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> c_int {
    CURRENT.with_borrow_mut(|stack| stack.push(context.addr()));
    SUCCESS
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(to: *mut *mut c_void) -> c_int {
    let popped = CURRENT.with_borrow_mut(Vec::pop).unwrap_or(0);
    if !to.is_null() {
        // SAFETY: the caller's pointer.
        unsafe { to.write(std::ptr::without_provenance_mut(popped)) };
    }
    SUCCESS
}

/// # Safety
/// As in `cuda.h`: a complete image.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(to: *mut *mut c_void, image: *const c_void) -> c_int {
    // SAFETY: this function's contract.
    let loaded =
        unsafe { text_of(image.cast()) }.and_then(|text| Module::load(&text, &mut state().ranges));
    match loaded {
        Ok(module) => {
            // SAFETY: the caller's pointer.
            unsafe { to.write(std::ptr::from_mut(Box::leak(Box::new(module))).cast()) };
            SUCCESS
        }
        Err(why) => report(INVALID_IMAGE, &why),
    }
}

/// A kernel's handle.
struct Function {
    module: &'static Module,
    name: String,
    dynamic_limit: Mutex<usize>,
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    to: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> c_int {
    // SAFETY: a module that this driver made and a terminated name.
    let (module, name) = unsafe {
        (
            &*module.cast::<Module>(),
            CStr::from_ptr(name).to_string_lossy(),
        )
    };
    if !module.has(&name) {
        return report(NOT_FOUND, &format!("no kernel {name} in this module"));
    }
    let function = Function {
        module,
        name: name.into_owned(),
        dynamic_limit: Mutex::new(48 << 10),
    };
    // SAFETY: the caller's pointer.
    unsafe { to.write(std::ptr::from_mut(Box::leak(Box::new(function))).cast()) };
    SUCCESS
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncSetAttribute(
    function: *mut c_void,
    attribute: c_int,
    value: c_int,
) -> c_int {
    // SAFETY: a function that this driver made.
    let function = unsafe { &*function.cast::<Function>() };
    let Some(card) = card() else { return NO_DEVICE };
    if attribute == 8 {
        if value < 0 || value as usize > card.shared_per_block {
            return report(
                INVALID_VALUE,
                &format!("{}: {value} bytes of dynamic shared memory", function.name),
            );
        }
        *function
            .dynamic_limit
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = value as usize;
    }
    SUCCESS
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetParamInfo(
    function: *mut c_void,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> c_int {
    // SAFETY: a function that this driver made.
    let function = unsafe { &*function.cast::<Function>() };
    let kernel = match function.module.kernel(&function.name) {
        Ok(kernel) => kernel,
        Err(why) => return report(LAUNCH_FAILED, &format!("{}: {why}", function.name)),
    };
    // An index past the last one is how callers find the number of parameters: it is not reported.
    let Some(&(at, bytes)) = kernel.params.get(index) else {
        return INVALID_VALUE;
    };
    // SAFETY: the caller's pointers.
    unsafe {
        offset.write(at);
        size.write(bytes);
    }
    SUCCESS
}

/// `CUlaunchAttribute`
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct LaunchAttribute {
    id: c_int,
    pad: [u8; 4],
    value: [u32; 16],
}

/// `CUlaunchConfig`
#[repr(C)]
pub struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: *mut c_void,
    attributes: *const LaunchAttribute,
    attribute_count: c_uint,
}

const CLUSTER: c_int = 4;

/// # Safety
/// As in `cuda.h`. The kernel runs to its end before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernelEx(
    config: *const LaunchConfig,
    function: *mut c_void,
    params: *mut *mut c_void,
    _: *mut *mut c_void,
) -> c_int {
    // SAFETY: this function's contract.
    let (config, function) = unsafe { (&*config, &*function.cast::<Function>()) };
    // SAFETY: as above.
    match unsafe { launch(config, function, params) } {
        Ok(()) => SUCCESS,
        Err(why) => report(LAUNCH_FAILED, &format!("{}: {why}", function.name)),
    }
}

unsafe fn launch(
    config: &LaunchConfig,
    function: &Function,
    params: *mut *mut c_void,
) -> Result<(), String> {
    let card = card().ok_or("no card")?;
    let kernel = function.module.kernel(&function.name)?;
    let limit = *function
        .dynamic_limit
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if config.shared_bytes as usize > limit {
        return Err(format!(
            "{} bytes of dynamic shared memory, but the function's limit is {limit}",
            config.shared_bytes
        ));
    }
    let mut values = vec![0u8; kernel.param_bytes];
    for (number, &(at, size)) in kernel.params.iter().enumerate() {
        // SAFETY: the caller passes a pointer to a value for each parameter.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (*params.add(number)).cast(),
                values.as_mut_ptr().add(at),
                size,
            );
        };
    }
    let mut cluster = None;
    for n in 0..config.attribute_count as usize {
        // SAFETY: the caller passes that many attributes.
        let attribute = unsafe { &*config.attributes.add(n) };
        if attribute.id == CLUSTER {
            cluster = Some([attribute.value[0], attribute.value[1], attribute.value[2]]);
        }
    }
    let mut state = state();
    state.launches += 1;
    let launch = Launch {
        grid: config.grid,
        block: config.block,
        cluster: cluster.unwrap_or([1; 3]),
        clustered: cluster.is_some(),
        shared_bytes: config.shared_bytes,
        params: values,
        number: state.launches,
        seed: state.seed,
        strict: std::env::var("EXL_PTX_UNWRITTEN").is_ok_and(|how| how == "error"),
    };
    if cluster.is_some() && card.compute.0 < 9 {
        return Err(format!("{} has no clusters", card.name));
    }
    let count = run(&kernel, &launch, card, &state.ranges)?;
    state.instructions += count.instructions;
    Ok(())
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    bytes: usize,
    _: *mut c_void,
) -> c_int {
    let known = state()
        .ranges
        .find(to)
        .is_some_and(|(_, end)| to + bytes as u64 <= end);
    if !known {
        return report(
            INVALID_VALUE,
            &format!("copy of {bytes} bytes to {to:#x}, which no allocation contains"),
        );
    }
    // SAFETY: the target is a known allocation; the source is the caller's.
    unsafe {
        std::ptr::copy(
            from.cast::<u8>(),
            std::ptr::with_exposed_provenance_mut(to as usize),
            bytes,
        );
    };
    SUCCESS
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCtx(stream: *mut c_void, to: *mut *mut c_void) -> c_int {
    let number = stream.addr();
    if number < STREAMS {
        // SAFETY: this function's contract.
        return unsafe { cuCtxGetCurrent(to) };
    }
    // SAFETY: the caller's pointer.
    unsafe { to.write(context((number - STREAMS) / 4096)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuThreadExchangeStreamCaptureMode(_: *mut c_int) -> c_int {
    SUCCESS
}

/// # Safety
/// As in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: c_int, to: *mut *const c_char) -> c_int {
    let name = match code {
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        INVALID_IMAGE => c"CUDA_ERROR_INVALID_IMAGE",
        NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
        LAUNCH_FAILED => c"CUDA_ERROR_LAUNCH_FAILED",
        _ => c"CUDA_ERROR_UNKNOWN",
    };
    // SAFETY: the caller's pointer.
    unsafe { to.write(name.as_ptr()) };
    SUCCESS
}

/// # Safety
/// As in `cuda.h`. The text of the last error stays valid until the process ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(_: c_int, to: *mut *const c_char) -> c_int {
    let text = state().last_error.clone();
    // SAFETY: the caller's pointer; errors are few, and their texts must outlive the call.
    unsafe { to.write(text.into_raw()) };
    SUCCESS
}

/// Make a range of host memory known as an allocation of the card.
#[unsafe(no_mangle)]
pub extern "C" fn exl_ptx_register(start: u64, bytes: u64) {
    state().ranges.add(start, bytes);
}

#[unsafe(no_mangle)]
pub extern "C" fn exl_ptx_unregister(start: u64) {
    state().ranges.remove(start);
}

/// Choose the order of later launches.
#[unsafe(no_mangle)]
pub extern "C" fn exl_ptx_seed(seed: u64) {
    state().seed = seed;
}

/// Instructions of warps that all launches have executed.
#[unsafe(no_mangle)]
pub extern "C" fn exl_ptx_instructions() -> u64 {
    state().instructions
}
