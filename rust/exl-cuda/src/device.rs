//! A GPU: its properties, its primary context and the kernels loaded into it.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once, OnceLock};

use crate::capabilities::{Capabilities, LIMITS_VARIABLE, chosen, own_arch};
use crate::driver::{Driver, Reason};
use crate::ffi::{self, CUDA_SUCCESS, CuContext, CuDevice, CuFunction, CuModule};
use crate::images;
use crate::launch::{CudaError, check};
use crate::parameters::Expected;

/// Properties that a GPU reports.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    pub index: u32,
    pub name: String,
    pub memory_bytes: usize,
    /// Its compute capability.
    pub compute: (i32, i32),
    /// Features that its kernels may use, and the sizes that launches are planned for.
    pub caps: Capabilities,
    /// The card that `EXL_CUDA_LIMITS` names, as which this GPU is treated.
    pub treated_as: Option<&'static str>,
    /// The architecture of this build whose code the GPU runs; `None` if there is none.
    pub arch: Option<&'static str>,
    /// The reason why this build's kernels do not run on it; `None` if they do.
    pub unsupported: Option<String>,
}

/// A GPU in use: the context that torch uses too, and this crate's kernels in it.
///
/// The image of a file is loaded when the first of its kernels is used. If the driver compiles PTX, a process then waits only for the files
/// that its model uses.
pub struct Device {
    pub info: DeviceInfo,
    pub(crate) driver: &'static Driver,
    pub(crate) context: CuContext,
    modules: HashMap<&'static str, Module>,
    functions: HashMap<String, Function>,
    ordered: Once,
}

/// Kernels that are loaded before any other: those of a step of one sequence. The driver loads a kernel when it is first looked up, and
/// places code in that order; with other code between these two the same launches take longer (docs/design/gemv-ring.md).
const FIRST: [&str; 2] = ["attention_fp16_f16_128_few1", "gemv_ring_exl2_128"];

/// Shared memory that the driver takes of each block.
pub(crate) const BLOCK_RESERVED: usize = 1024;

/// The image of a file of kernels, loaded or not yet.
struct Module {
    image: &'static [u8],
    loaded: Mutex<Option<Loaded>>,
}

#[derive(Clone, Copy)]
struct Loaded {
    module: CuModule,
    /// Whether the image came from the folder that `EXL_CUDA_IMAGES` names.
    replaced: bool,
}

/// A kernel, its parameters, its current limit of dynamic shared memory, and the number of its launches.
pub(crate) struct Function {
    file: &'static str,
    pub(crate) parameters: Expected,
    handle: OnceLock<CuFunction>,
    shared: Mutex<u32>,
    /// Share of an SM's memory that was last asked for as shared memory, in per cent.
    carveout: Mutex<c_int>,
    pub(crate) launches: AtomicU64,
}

// SAFETY: contexts and functions are process-wide handles; the driver allows their use from any thread.
unsafe impl Send for Device {}
// SAFETY: as above; the only mutable state is behind mutexes.
unsafe impl Sync for Device {}

static DEVICES: OnceLock<Vec<OnceLock<Result<Device, CudaError>>>> = OnceLock::new();

/// Every visible GPU, or the reason why none can be used.
pub fn devices() -> Result<Vec<DeviceInfo>, &'static Reason> {
    let driver = Driver::get()?;
    Ok((0..driver.device_count())
        .filter_map(|i| describe(driver, i).ok().map(|(_, info)| info))
        .collect())
}

/// Names of all kernels of the GPUs in use and the number of times that this process has launched each. A captured launch counts once.
/// Empty before the first use of a GPU. For tools that report the kernels of a run.
pub fn launches() -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for device in DEVICES.get().into_iter().flatten() {
        let Some(Ok(device)) = device.get() else {
            continue;
        };
        for (name, function) in &device.functions {
            *all.entry(name.clone()).or_default() += function.launches.load(Ordering::Relaxed);
        }
    }
    all
}

impl Device {
    /// The GPU `index` (torch's numbering). The first call loads its kernels.
    pub fn get(index: u32) -> Result<&'static Self, CudaError> {
        let driver = Driver::get().map_err(|reason| CudaError::Unavailable(reason.to_string()))?;
        let slots = DEVICES.get_or_init(|| {
            (0..driver.device_count())
                .map(|_| OnceLock::new())
                .collect()
        });
        let slot = slots.get(index as usize).ok_or(CudaError::NoSuchDevice {
            index,
            count: driver.device_count(),
        })?;
        slot.get_or_init(|| Self::open(driver, index))
            .as_ref()
            .map_err(Clone::clone)
    }

    /// The handle of kernel `name`, which may use `shared` bytes of dynamic shared memory. This device's context must be current.
    pub(crate) fn function(
        &self,
        name: &str,
        shared: u32,
    ) -> Result<(&Function, CuFunction), CudaError> {
        self.ordered.call_once(|| self.load_first());
        let function = self
            .functions
            .get(name)
            .ok_or_else(|| CudaError::NoKernel(name.to_owned()))?;
        let handle = if let Some(&handle) = function.handle.get() {
            handle
        } else {
            let found = with_relaxed_capture(self.driver, || self.resolve(name, function))?;
            *function.handle.get_or_init(|| found)
        };
        // From 48 KB on, a kernel's own static memory included, the attribute is needed; the limit only grows.
        if shared > 0 {
            let mut allowed = function
                .shared
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            if *allowed < shared {
                // SAFETY: a live function handle and a documented attribute.
                let code = unsafe {
                    (self.driver.functions.function_attribute)(
                        handle,
                        ffi::FUNC_MAX_DYNAMIC_SHARED,
                        shared as c_int,
                    )
                };
                check(self.driver, code, "cuFuncSetAttribute", name)?;
                *allowed = shared;
            }
        }
        Ok((function, handle))
    }

    /// Ask for `bytes` of each SM's memory as shared memory while kernel `name` runs; the rest caches global memory. The driver rounds up to
    /// a size that the card has; it chooses itself if there is no number. This device's context must be current.
    pub(crate) fn set_carveout(&self, name: &str, bytes: Option<usize>) -> Result<(), CudaError> {
        let (function, handle) = self.function(name, 0)?;
        let whole = self.info.caps.shared_per_block + BLOCK_RESERVED;
        let percent = bytes.map_or(ffi::CARVEOUT_DEFAULT, |bytes| {
            (100 * bytes).div_ceil(whole).min(100) as c_int
        });
        let mut current = function
            .carveout
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if *current != percent {
            // SAFETY: a live function handle and a documented attribute.
            let code = unsafe {
                (self.driver.functions.function_attribute)(handle, ffi::FUNC_CARVEOUT, percent)
            };
            check(self.driver, code, "cuFuncSetAttribute", name)?;
            *current = percent;
        }
        Ok(())
    }

    /// Find a kernel in the image of its file. The first call loads the image.
    fn resolve(&self, name: &str, function: &Function) -> Result<CuFunction, CudaError> {
        let functions = &self.driver.functions;
        let image = self.modules[function.file].get(self.driver, function.file)?;
        let mut handle: CuFunction = std::ptr::null_mut();
        let symbol = CString::new(name).map_err(|_| CudaError::NoKernel(name.to_owned()))?;
        // SAFETY: a loaded module and a zero-terminated name.
        let code =
            unsafe { (functions.module_function)(&raw mut handle, image.module, symbol.as_ptr()) };
        check(self.driver, code, "cuModuleGetFunction", name)?;
        // The build's own image has the parameters of its sources.
        if image.replaced
            && let Some(found) = self.parameter_sizes(handle)
        {
            function.parameters.check_image(name, &found)?;
        }
        // Kernels of a step that run on an SM at the same time must agree on its shared-memory carveout. Two blocks of `sample_wide` must
        // fit on an SM.
        if ["gemv_ring_", "gemm_few_", "attention_", "sample_wide"]
            .iter()
            .any(|start| name.starts_with(start))
        {
            // SAFETY: a live function handle and a documented attribute.
            let code = unsafe { (functions.function_attribute)(handle, ffi::FUNC_CARVEOUT, 100) };
            check(self.driver, code, "cuFuncSetAttribute", name)?;
        }
        Ok(handle)
    }

    /// Sizes of the parameters of a loaded kernel; `None` if the driver does not tell: before CUDA 12.4 it does not.
    fn parameter_sizes(&self, handle: CuFunction) -> Option<Vec<usize>> {
        let ask = self.driver.functions.parameter_info?;
        let mut sizes = Vec::new();
        loop {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: a live function handle; writes two sizes.
            let code = unsafe { ask(handle, sizes.len(), &raw mut offset, &raw mut size) };
            match code {
                CUDA_SUCCESS => sizes.push(size),
                // There is no parameter of this number.
                ffi::CUDA_ERROR_INVALID_VALUE => return Some(sizes),
                _ => return None,
            }
        }
    }

    /// Load the kernels of [`FIRST`]. PTX is left alone, since the driver would compile what the model may not use.
    fn load_first(&self) {
        let native = self.info.arch.is_some_and(|arch| !arch.ends_with("+ptx"));
        for name in FIRST.into_iter().filter(|_| native) {
            if let Some(function) = self.functions.get(name) {
                // A kernel that cannot be loaded is reported to those who use it.
                let found = with_relaxed_capture(self.driver, || self.resolve(name, function));
                if let Ok(handle) = found {
                    let _ = function.handle.set(handle);
                }
            }
        }
    }

    /// Run `work` with this device's context current, and restore the caller's context afterwards.
    pub(crate) fn in_context<T>(
        &self,
        work: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let functions = &self.driver.functions;
        let mut current: CuContext = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let code = unsafe { (functions.context_current)(&raw mut current) };
        check(self.driver, code, "cuCtxGetCurrent", "")?;
        if current == self.context {
            return work();
        }
        // SAFETY: the primary context is retained for the life of the process.
        let code = unsafe { (functions.context_push)(self.context) };
        check(self.driver, code, "cuCtxPushCurrent", "")?;
        let answer = work();
        let mut popped: CuContext = std::ptr::null_mut();
        // SAFETY: pops what was pushed above.
        unsafe { (functions.context_pop)(&raw mut popped) };
        answer
    }

    fn open(driver: &'static Driver, index: u32) -> Result<Self, CudaError> {
        let (handle, info) = describe(driver, index)?;
        if let Some(why) = &info.unsupported {
            return Err(CudaError::Unavailable(why.clone()));
        }
        let mut context: CuContext = std::ptr::null_mut();
        // SAFETY: writes one pointer. Never released: torch holds the same context as long as the process lives.
        let code = unsafe { (driver.functions.primary_retain)(&raw mut context, handle) };
        check(driver, code, "cuDevicePrimaryCtxRetain", &info.name)?;
        let modules = images_for(&info);
        let kernels = modules.keys().flat_map(|&file| {
            crate::ops::kernels_of(file)
                .into_iter()
                .map(move |k| (k, file))
        });
        let functions = kernels.filter_map(|(name, file)| {
            let parameters = Expected::of(&name, file)?;
            Some((name, Function::of(file, parameters)))
        });
        Ok(Self {
            functions: functions.collect(),
            ordered: Once::new(),
            modules,
            info,
            driver,
            context,
        })
    }
}

fn describe(driver: &Driver, index: u32) -> Result<(CuDevice, DeviceInfo), CudaError> {
    let functions = &driver.functions;
    let mut handle: CuDevice = 0;
    // SAFETY: writes one int.
    let code = unsafe { (functions.device_get)(&raw mut handle, index as c_int) };
    check(driver, code, "cuDeviceGet", &index.to_string())?;
    let attribute = |which: c_int| {
        let mut value: c_int = 0;
        // SAFETY: writes one int; an attribute the driver does not know leaves it zero.
        unsafe { (functions.device_attribute)(&raw mut value, which, handle) };
        value
    };
    let mut name = [0u8; 256];
    let mut memory = 0usize;
    // SAFETY: writes at most 256 bytes with a terminating zero, and one size.
    unsafe {
        (functions.device_name)(name.as_mut_ptr().cast(), 256, handle);
        (functions.device_memory)(&raw mut memory, handle);
    }
    let end = name.iter().position(|&b| b == 0).unwrap_or(256);
    let name = String::from_utf8_lossy(&name[..end]).into_owned();
    let compute = (
        attribute(ffi::ATTRIBUTE_CC_MAJOR),
        attribute(ffi::ATTRIBUTE_CC_MINOR),
    );
    let caps = Capabilities::of(
        compute,
        usize::try_from(attribute(ffi::ATTRIBUTE_SM_COUNT)).unwrap_or(0),
        usize::try_from(attribute(ffi::ATTRIBUTE_SHARED_OPTIN)).unwrap_or(0),
        images::ARCHS,
    );
    let mut info = DeviceInfo {
        index,
        memory_bytes: memory,
        arch: chosen(images::ARCHS, compute),
        unsupported: (!caps.runs()).then(|| not_built_for(&name, compute)),
        compute,
        caps,
        treated_as: None,
        name,
    };
    if let Some(named) = std::env::var(LIMITS_VARIABLE)
        .ok()
        .filter(|named| caps.runs() && !named.trim().is_empty())
    {
        match caps.within(&named, images::ARCHS) {
            Ok((limited, card)) => (info.caps, info.treated_as) = (limited, Some(card.name)),
            Err(why) => info.unsupported = Some(why),
        }
    }
    Ok((handle, info))
}

fn not_built_for(name: &str, compute @ (major, minor): (i32, i32)) -> String {
    format!(
        "this build's kernels are for {}, and {name} is sm_{major}{minor}: rebuild with EXL_CUDA_ARCHS={} (or `release`)",
        images::ARCHS
            .iter()
            .map(|a| format!("sm_{a}"))
            .collect::<Vec<_>>()
            .join(", "),
        own_arch(compute)
    )
}

/// The driver refuses to load code while another thread captures a graph in global mode, though loading does not disturb the capture. The
/// relaxed mode permits it.
fn with_relaxed_capture<T>(driver: &Driver, work: impl FnOnce() -> T) -> T {
    let mut mode = ffi::CAPTURE_MODE_RELAXED;
    // SAFETY: swaps this thread's mode, and back below.
    unsafe { (driver.functions.capture_mode)(&raw mut mode) };
    let answer = work();
    // SAFETY: as above.
    unsafe { (driver.functions.capture_mode)(&raw mut mode) };
    answer
}

/// A folder of images that replace those of the same names: kernels compiled differently, for tools.
const IMAGES_VARIABLE: &str = "EXL_CUDA_IMAGES";

/// The image of one file of kernels: the build's own, or `<file>.fatbin` from the folder that `EXL_CUDA_IMAGES` names.
fn image_of(
    file: &str,
    own: &'static [u8],
    folder: Option<&Path>,
) -> Result<Cow<'static, [u8]>, CudaError> {
    let Some(path) = folder.map(|folder| folder.join(format!("{file}.fatbin"))) else {
        return Ok(Cow::Borrowed(own));
    };
    match std::fs::read(&path) {
        Ok(image) => Ok(Cow::Owned(image)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Cow::Borrowed(own)),
        Err(error) => Err(CudaError::Unavailable(format!(
            "{IMAGES_VARIABLE}: {} cannot be read ({error})",
            path.display()
        ))),
    }
}

/// The images of the architecture whose code this card runs, without those of kernels that do not work on it. Launching any other kernel is
/// an error.
fn images_for(info: &DeviceInfo) -> HashMap<&'static str, Module> {
    let usable =
        |file: &str| crate::features::feature_of(file).is_none_or(|feature| info.caps.has(feature));
    images::FATBINS
        .iter()
        .filter(|(file, arch, _)| Some(*arch) == info.arch && usable(file))
        .map(|&(file, _, image)| {
            let loaded = Mutex::new(None);
            (file, Module { image, loaded })
        })
        .collect()
}

impl Function {
    fn of(file: &'static str, parameters: Expected) -> Self {
        Self {
            file,
            parameters,
            handle: OnceLock::new(),
            shared: Mutex::new(0),
            carveout: Mutex::new(ffi::CARVEOUT_DEFAULT),
            launches: AtomicU64::new(0),
        }
    }
}

impl Module {
    /// Load the image into the current context at the first call. A failure is not cached: memory may be free at the next call.
    fn get(&self, driver: &Driver, file: &str) -> Result<Loaded, CudaError> {
        let mut loaded = self
            .loaded
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(loaded) = *loaded {
            return Ok(loaded);
        }
        let folder = std::env::var_os(IMAGES_VARIABLE).map(PathBuf::from);
        let image = image_of(file, self.image, folder.as_deref())?;
        let mut module: CuModule = std::ptr::null_mut();
        // SAFETY: a complete fatbin made by nvcc; the driver copies it.
        let code = unsafe {
            (driver.functions.module_load)(&raw mut module, image.as_ptr().cast::<c_void>())
        };
        check(driver, code, "cuModuleLoadData", file)?;
        let replaced = matches!(image, Cow::Owned(_));
        Ok(*loaded.insert(Loaded { module, replaced }))
    }
}

#[cfg(test)]
mod tests {
    use super::image_of;

    #[test]
    fn an_image_of_a_folder_replaces_the_one_of_its_name() {
        let folder = std::env::temp_dir().join(format!("exl-images-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("odd.fatbin")).expect("a folder");
        std::fs::write(folder.join("ring.fatbin"), b"other").expect("a file");
        let of = |file: &str| image_of(file, b"own", Some(&folder));
        assert_eq!(of("ring").expect("read").as_ref(), b"other");
        assert_eq!(of("norm").expect("not there").as_ref(), b"own");
        assert_eq!(
            image_of("ring", b"own", None).expect("own").as_ref(),
            b"own"
        );
        let text = of("odd").expect_err("a folder is no image").to_string();
        assert!(
            text.contains("EXL_CUDA_IMAGES") && text.contains("odd.fatbin"),
            "{text}"
        );
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
