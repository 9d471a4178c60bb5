//! Weight memory: zeroed, aligned to cache lines, and in huge pages if the system provides them.
//!
//! A matrix is read once a token from end to end, so its address translations never stay in the TLB: with 4 KiB pages they would
//! limit the bandwidth. Huge pages must be requested before the memory is touched, so buffers have their own mappings. Matrices smaller than a
//! huge page, such as those of experts, share a mapping.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// Size of a huge page, and the smallest size of a buffer with a separate mapping.
const HUGE: usize = 2 << 20;
/// Smallest size of a buffer in a shared mapping; smaller ones come from the allocator.
const SMALL: usize = 64 << 10;
/// Size of a shared mapping. Its address range is freed with the last of its buffers, a buffer's memory with the buffer.
const SLAB: usize = 8 * HUGE;
/// Size of a page, the unit in which a shared mapping gives memory back.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
const PAGE: usize = 4096;
/// Attempts to lock the shared mapping.
const ATTEMPTS: usize = 1000;
/// Alignment of buffers: a cache line.
const LINE: usize = 64;

/// A fixed block of `T`s (plain numbers; all-zero bits are a valid value).
pub struct Buffer<T: Copy> {
    ptr: NonNull<T>,
    len: usize,
    /// The mapping that contains the buffer; None for a small buffer, which comes from the allocator.
    mapping: Option<Arc<Mapping>>,
}

/// Memory from the system.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
struct Mapping {
    raw: NonNull<u8>,
    len: usize,
    /// The first huge page boundary in it.
    start: NonNull<u8>,
}

// SAFETY: no other object owns the memory of the mapping.
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing is read or written through it.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        unmap(self.raw, self.len);
    }
}

/// A shared mapping and how many of its bytes are used; None before the first one.
type Slab = Option<(Arc<Mapping>, usize)>;

/// The shared mapping from which buffers are cut.
static SLAB_IN_USE: Mutex<Slab> = Mutex::new(None);

/// Locks the shared mapping. None if another thread holds the lock for long: in a forked child this thread may not exist.
fn slab_in_use() -> Option<MutexGuard<'static, Slab>> {
    for _ in 0..ATTEMPTS {
        match SLAB_IN_USE.try_lock() {
            Ok(slab) => return Some(slab),
            Err(TryLockError::Poisoned(error)) => return Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    None
}

/// Zeroed memory in huge pages and its mapping; None if the system provides none or they are not worth it.
fn huge(bytes: usize) -> Option<(Arc<Mapping>, NonNull<u8>)> {
    if bytes >= HUGE {
        let mapping = map_huge(bytes)?;
        let start = mapping.start;
        return Some((Arc::new(mapping), start));
    }
    if bytes < SMALL {
        return None;
    }
    let mut slab = slab_in_use()?;
    if slab.as_ref().is_none_or(|(_, used)| used + bytes > SLAB) {
        *slab = Some((Arc::new(map_huge(SLAB)?), 0));
    }
    let (mapping, used) = slab.as_mut()?;
    // SAFETY: `used + bytes` is at most the size of the slab.
    let start = unsafe { mapping.start.add(*used) };
    *used += bytes.next_multiple_of(LINE);
    Some((Arc::clone(mapping), start))
}

// SAFETY: the buffer owns its memory like a `Box<[T]>`.
unsafe impl<T: Copy + Send> Send for Buffer<T> {}
// SAFETY: as above.
unsafe impl<T: Copy + Sync> Sync for Buffer<T> {}

impl<T: Copy> Buffer<T> {
    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len.max(1) * size_of::<T>(), LINE)
            .expect("the size of a matrix fits the address space")
    }

    /// `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        let layout = Self::layout(len);
        if let Some((mapping, start)) = huge(layout.size()) {
            return Self {
                ptr: start.cast(),
                len,
                mapping: Some(mapping),
            };
        }
        // SAFETY: the layout is not empty.
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(raw.cast::<T>()) else {
            handle_alloc_error(layout)
        };
        Self {
            ptr,
            len,
            mapping: None,
        }
    }

    pub fn as_ptr(&self) -> *const T {
        self.ptr.as_ptr()
    }

    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.ptr.as_ptr()
    }

    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }
}

impl<T: Copy> std::ops::Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised (zeroed or written) elements.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }
}

impl<T: Copy> std::ops::DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len) }
    }
}

impl<T: Copy> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.mapping.is_some() {
            // A range of a shared mapping is not used again, so its pages would stay until the last buffer is dropped.
            if self.bytes() < HUGE {
                give_back(self.ptr.cast(), self.bytes());
            }
            return;
        }
        // SAFETY: allocated with this very layout.
        unsafe { dealloc(self.ptr.as_ptr().cast(), Self::layout(self.len)) }
    }
}

impl<T: Copy> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes())
    }
}

#[cfg(target_os = "linux")]
mod system {
    use core::ffi::c_void;

    pub const READ_WRITE: i32 = 3;
    pub const PRIVATE_ANONYMOUS: i32 = 0x22;
    pub const ADVISE_HUGE_PAGE: i32 = 14;
    pub const ADVISE_UNUSED: i32 = 4;

    unsafe extern "C" {
        pub fn mmap(
            addr: *mut c_void,
            len: usize,
            prot: i32,
            flags: i32,
            fd: i32,
            offset: i64,
        ) -> *mut c_void;
        pub fn munmap(addr: *mut c_void, len: usize) -> i32;
        pub fn madvise(addr: *mut c_void, len: usize, advice: i32) -> i32;
    }
}

/// A new mapping with room for `bytes` from a huge page boundary on.
#[cfg(target_os = "linux")]
fn map_huge(bytes: usize) -> Option<Mapping> {
    let len = bytes.checked_add(HUGE)?;
    let null = std::ptr::null_mut();
    // SAFETY: a new anonymous mapping does not change existing memory; untouched pages of it cost nothing.
    let raw = unsafe {
        system::mmap(
            null,
            len,
            system::READ_WRITE,
            system::PRIVATE_ANONYMOUS,
            -1,
            0,
        )
    };
    if raw as isize == -1 {
        return None;
    }
    let raw = NonNull::new(raw.cast::<u8>())?;
    let offset = raw.as_ptr().align_offset(HUGE);
    // SAFETY: `offset` is below HUGE, so start and `bytes` are in the mapping.
    let start = unsafe { raw.add(offset) };
    // SAFETY: advice about our own mapping; a refusal only affects speed.
    unsafe { system::madvise(start.as_ptr().cast(), bytes, system::ADVISE_HUGE_PAGE) };
    Some(Mapping { raw, len, start })
}

#[cfg(target_os = "linux")]
fn unmap(raw: NonNull<u8>, len: usize) {
    // SAFETY: mapped by `map_huge`, and all buffers in it have been dropped.
    unsafe { system::munmap(raw.as_ptr().cast(), len) };
}

/// Give the whole pages of a range back to the system. Pages that the range shares with its neighbours stay.
#[cfg(target_os = "linux")]
fn give_back(start: NonNull<u8>, bytes: usize) {
    let first = start.as_ptr().align_offset(PAGE);
    if first >= bytes {
        return;
    }
    let len = (bytes - first) / PAGE * PAGE;
    // SAFETY: the pages are in the range, which nothing reads or writes any more; a refusal leaves them as they are.
    unsafe { system::madvise(start.as_ptr().add(first).cast(), len, system::ADVISE_UNUSED) };
}

#[cfg(not(target_os = "linux"))]
fn give_back(_start: NonNull<u8>, _bytes: usize) {}

#[cfg(not(target_os = "linux"))]
fn map_huge(_bytes: usize) -> Option<Mapping> {
    None
}

#[cfg(not(target_os = "linux"))]
fn unmap(_raw: NonNull<u8>, _len: usize) {}

/// A pointer through which several pool tasks write, each to separate places.
#[derive(Clone, Copy, Debug)]
pub struct Shared<T>(*mut T);

// SAFETY: the tasks that share it write disjoint elements; `pool::run` orders them before the caller continues.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub fn new(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr())
    }

    /// # Safety
    /// `offset..offset + len` must be in the slice that this was made from, and no other task may access it meanwhile.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice(&self, offset: usize, len: usize) -> &mut [T] {
        // SAFETY: the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(offset), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_every_size_class_are_zeroed_aligned_and_disjoint() {
        let sizes = [
            1,
            SMALL - 1,
            SMALL,
            SMALL + 1,
            HUGE - 1,
            HUGE,
            HUGE + 1,
            3 * HUGE,
        ];
        // Several slabs are filled.
        let mut buffers: Vec<Buffer<u8>> = (0..40)
            .map(|i| Buffer::zeroed(sizes[i % sizes.len()]))
            .collect();
        for (i, buffer) in buffers.iter_mut().enumerate() {
            assert_eq!(buffer.as_ptr() as usize % LINE, 0);
            assert!(buffer.iter().all(|&byte| byte == 0), "buffer {i}");
            buffer.fill(i as u8 + 1);
        }
        for (i, buffer) in buffers.iter().enumerate() {
            assert!(buffer.iter().all(|&byte| byte == i as u8 + 1), "buffer {i}");
        }
    }

    #[test]
    fn a_dropped_buffer_leaves_its_neighbours_alone() {
        let mut buffers: Vec<Buffer<u8>> =
            (0..64).map(|i| Buffer::zeroed(SMALL + 100 * i)).collect();
        for (i, buffer) in buffers.iter_mut().enumerate() {
            buffer.fill(i as u8 + 1);
        }
        let mut kept: Vec<(usize, Buffer<u8>)> = buffers.into_iter().enumerate().collect();
        kept.retain(|(i, _)| i % 3 == 1);
        for (i, buffer) in &kept {
            assert!(
                buffer.iter().all(|&byte| byte == *i as u8 + 1),
                "buffer {i}"
            );
        }
        assert!(Buffer::<u8>::zeroed(SMALL).iter().all(|&byte| byte == 0));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn one_small_buffer_holds_no_memory_of_dropped_ones() {
        fn resident() -> usize {
            let text = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
            let pages = text.split_whitespace().nth(1).expect("two numbers");
            pages.parse::<usize>().expect("a number") * PAGE
        }
        let before = resident();
        let mut kept = Vec::new();
        for _ in 0..16 {
            kept.push(Buffer::<u8>::zeroed(SMALL));
            let mut large: Vec<Buffer<u8>> = (0..14).map(|_| Buffer::zeroed(HUGE / 2)).collect();
            for buffer in &mut large {
                buffer.fill(1);
            }
        }
        // 16 rounds touched 14 MiB each; other tests of this process run at the same time.
        assert!(resident().saturating_sub(before) < 100 << 20);
    }
}
