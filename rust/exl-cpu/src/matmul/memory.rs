//! Weight memory: 64-byte aligned, zeroed, in huge pages where the system has them.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

const HUGE: usize = 2 << 20;

/// A fixed block of `T`s (plain numbers; all-zero bits are a valid value).
pub struct Buffer<T: Copy> {
    ptr: NonNull<T>,
    len: usize,
}

// SAFETY: the buffer owns its memory like a `Box<[T]>`.
unsafe impl<T: Copy + Send> Send for Buffer<T> {}
// SAFETY: as above.
unsafe impl<T: Copy + Sync> Sync for Buffer<T> {}

impl<T: Copy> Buffer<T> {
    fn layout(len: usize) -> Layout {
        let bytes = len.max(1) * size_of::<T>();
        let align = if bytes >= HUGE { HUGE } else { 64 };
        Layout::from_size_align(bytes, align).expect("the size of a matrix fits the address space")
    }

    /// `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the layout is not empty.
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(raw.cast::<T>()) else {
            handle_alloc_error(layout)
        };
        if layout.align() == HUGE {
            advise_huge_pages(raw, layout.size() & !(HUGE - 1));
        }
        Self { ptr, len }
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
        // SAFETY: allocated with this very layout.
        unsafe { dealloc(self.ptr.as_ptr().cast(), Self::layout(self.len)) }
    }
}

impl<T: Copy> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes())
    }
}

/// A pointer that several pool tasks write through, each to places of its own.
#[derive(Clone, Copy, Debug)]
pub struct Shared<T>(*mut T);

// SAFETY: the tasks that share it write disjoint elements; `pool::run` orders them before the caller goes on.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub fn new(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr())
    }

    /// # Safety
    /// `offset..offset + len` lies in the slice this was made from and no other task touches it meanwhile.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice(&self, offset: usize, len: usize) -> &mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(offset), len) }
    }
}

#[cfg(target_os = "linux")]
fn advise_huge_pages(ptr: *mut u8, len: usize) {
    const MADV_HUGEPAGE: i32 = 14;
    unsafe extern "C" {
        fn madvise(addr: *mut core::ffi::c_void, len: usize, advice: i32) -> i32;
    }
    // SAFETY: advice about our own fresh allocation; a refusal changes nothing but speed.
    unsafe { madvise(ptr.cast(), len, MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_ptr: *mut u8, _len: usize) {}
