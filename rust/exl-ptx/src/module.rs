//! A loaded module: the PTX of an image, its variables in memory, and its kernels, decoded when they are first used.

use std::collections::HashMap;
use std::io::Read;
use std::sync::{Arc, Mutex};

use crate::code::Kernel;
use crate::decode::decode;
use crate::memory::Ranges;
use crate::parse::{self, Source, Space};

const MAGIC: u32 = 0xba55_ed50;

pub struct Module {
    source: Source,
    lines: Arc<Vec<String>>,
    globals: HashMap<String, u64>,
    kernels: Mutex<HashMap<String, Arc<Kernel>>>,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<u64, String> {
    let part = bytes.get(at..at + N).ok_or("the image ends early")?;
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(part);
    Ok(u64::from_le_bytes(wide))
}

/// The PTX of an image that the driver gets: text, or a fat binary.
///
/// # Safety
/// `image` points to a terminated text or to a complete fat binary.
pub unsafe fn text_of(image: *const u8) -> Result<String, String> {
    // SAFETY: this function's contract; either kind has four bytes.
    let magic = unsafe { image.cast::<u32>().read_unaligned() };
    if magic != MAGIC {
        // SAFETY: a terminated text.
        let text = unsafe { std::ffi::CStr::from_ptr(image.cast()) };
        return Ok(text.to_string_lossy().into_owned());
    }
    // SAFETY: the header of a fat binary states its size.
    let bytes = unsafe {
        let header = u64::from(image.add(6).cast::<u16>().read_unaligned());
        let size = image.add(8).cast::<u64>().read_unaligned();
        std::slice::from_raw_parts(image, (header + size) as usize)
    };
    of_fat_binary(bytes)
}

/// The PTX of the newest architecture in a fat binary.
fn of_fat_binary(bytes: &[u8]) -> Result<String, String> {
    let mut at = number::<2>(bytes, 6)? as usize;
    let mut best: Option<(u64, &[u8], u64)> = None;
    while at + 64 <= bytes.len() {
        let kind = number::<2>(bytes, at)?;
        let header = number::<4>(bytes, at + 4)? as usize;
        let padded = number::<8>(bytes, at + 8)? as usize;
        let packed = number::<4>(bytes, at + 16)? as usize;
        let arch = number::<4>(bytes, at + 28)?;
        let plain = number::<8>(bytes, at + 48)?;
        let start = at + header;
        let used = if packed > 0 { packed } else { padded };
        let data = bytes
            .get(start..start + used)
            .ok_or("the image ends early")?;
        if kind == 1 && best.is_none_or(|(known, ..)| arch > known) {
            best = Some((arch, data, plain));
        }
        at = start + padded;
    }
    let (_, data, _) =
        best.ok_or("the image holds no PTX: build with EXL_CUDA_ARCHS such as 80+ptx")?;
    let plain = if data.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        let mut out = Vec::new();
        let mut decoder = ruzstd::decoding::StreamingDecoder::new(data)
            .map_err(|e| format!("the image's PTX: {e}"))?;
        decoder
            .read_to_end(&mut out)
            .map_err(|e| format!("the image's PTX: {e}"))?;
        out
    } else if data.is_ascii() {
        data.to_vec()
    } else {
        return Err(
            "the image's PTX has an unknown compression: compile with --compress-mode=size, balance or none"
                .to_owned(),
        );
    };
    Ok(String::from_utf8_lossy(&plain).into_owned())
}

impl Module {
    /// Parse a module and place its variables in memory.
    pub fn load(text: &str, ranges: &mut Ranges) -> Result<Self, String> {
        let source = parse::parse(text)?;
        let mut globals = HashMap::new();
        for variable in &source.variables {
            if matches!(variable.space, Space::Global | Space::Const) && variable.size > 0 {
                let words = vec![0u128; variable.size.div_ceil(16)].leak();
                let start = words.as_mut_ptr().cast::<u8>();
                // SAFETY: the allocation has at least `size` bytes, and initial values are not longer.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        variable.bytes.as_ptr(),
                        start,
                        variable.bytes.len(),
                    );
                };
                ranges.add(start as u64, variable.size as u64);
                globals.insert(variable.name.clone(), start as u64);
            }
        }
        Ok(Self {
            source,
            lines: Arc::new(text.lines().map(str::to_owned).collect()),
            globals,
            kernels: Mutex::new(HashMap::new()),
        })
    }

    pub fn has(&self, name: &str) -> bool {
        self.source
            .functions
            .iter()
            .any(|f| f.is_entry && f.name == name)
    }

    /// Names of all entries.
    pub fn entries(&self) -> Vec<&str> {
        self.source
            .functions
            .iter()
            .filter(|f| f.is_entry)
            .map(|f| f.name.as_str())
            .collect()
    }

    /// A kernel, decoded at its first use.
    pub fn kernel(&self, name: &str) -> Result<Arc<Kernel>, String> {
        let mut kernels = self
            .kernels
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(known) = kernels.get(name) {
            return Ok(Arc::clone(known));
        }
        let kernel = Arc::new(decode(&self.source, name, &self.globals, &self.lines)?);
        kernels.insert(name.to_owned(), Arc::clone(&kernel));
        Ok(kernel)
    }
}
