//! Vectors of f32 lanes, one type for each instruction set, so that a kernel is written once and compiled for each.
//!
//! A kernel is a value of a [`Kernel`] type; [`dispatch`] runs it with the lanes of the chosen instruction set. All functions below
//! `Kernel::run` must be `#[inline(always)]`: only then is their code inside the function that enables the instructions.
//!
//! Lane types exist only inside [`dispatch`], which uses no set that the processor lacks. So their arithmetic is safe to call.

mod scalar;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod math;

pub(crate) use math::{exp, sigmoid, tanh};

use crate::isa::Isa;

/// Most lanes of any instruction set; scratch rows are padded to a multiple of it.
pub(crate) const MAX_LANES: usize = 16;

/// A vector of f32. Minimum and maximum return the second operand if either is NaN, as the x86 instructions do.
pub(crate) trait Lanes: Copy {
    const LANES: usize;
    /// Vectors of accumulators that a matrix kernel keeps in registers in addition to four rows.
    const COLUMNS: usize;

    fn splat(x: f32) -> Self;
    /// All lanes set to one half.
    fn splat_f16(bits: u16) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// self * a + b, fused if the instruction set supports it.
    fn fma(self, a: Self, b: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    /// To the nearest integer, ties to even.
    fn round(self) -> Self;
    /// 2^self for integral lanes within -126..=127.
    fn exp2_int(self) -> Self;
    /// Lanes of self where `x >= limit` or NaN, else zero.
    fn zero_below(self, x: Self, limit: f32) -> Self;
    /// One bit for each lane with `low <= x <= high`; the first lane has the lowest bit.
    fn within(self, low: f32, high: f32) -> u32;
    /// Rounded to half and back; finite values saturate at +-65504, infinities and NaN stay.
    fn round_half(self) -> Self;
    /// Lane i takes lane i ^ S; S is 2, 4 or 8 and below `LANES`.
    fn swap<const S: usize>(self) -> Self;
    /// Sum of the lanes, always in the same order.
    fn sum(self) -> f32;
    /// Largest lane (see above for NaN).
    fn largest(self) -> f32;

    /// # Safety
    /// `LANES` floats at `p`.
    unsafe fn load(p: *const f32) -> Self;
    /// # Safety
    /// Room for `LANES` floats at `p`.
    unsafe fn store(self, p: *mut f32);
    /// Store the lanes of `mask` contiguously, followed by undefined values up to `LANES` floats.
    /// # Safety
    /// Room for `LANES` floats at `p`.
    unsafe fn store_chosen(self, mask: u32, p: *mut f32);
    /// # Safety
    /// `LANES` halves at `p`.
    unsafe fn load_f16(p: *const u16) -> Self;
    /// Round to nearest even; finite values saturate.
    /// # Safety
    /// Room for `LANES` halves at `p`.
    unsafe fn store_f16(self, p: *mut u16);
    /// E5M2 bytes.
    /// # Safety
    /// `LANES` bytes at `p`.
    unsafe fn load_e5m2(p: *const u8) -> Self;
    /// Unsigned bytes as numbers.
    /// # Safety
    /// `LANES` bytes at `p`.
    unsafe fn load_u8(p: *const u8) -> Self;
    /// Nibbles as numbers, low nibble first.
    /// # Safety
    /// `LANES / 2` bytes at `p`.
    unsafe fn load_u4(p: *const u8) -> Self;
    /// dst[i * stride + j] = lane i of rows[j], for i, j < `LANES`; the other rows are not used.
    /// # Safety
    /// Room for `LANES` floats at each `dst + i * stride`.
    unsafe fn store_columns(rows: &[Self; MAX_LANES], dst: *mut f32, stride: usize);

    /// The first `n` floats at `p`, the other lanes zero.
    /// # Safety
    /// `n` floats at `p`, `n <= LANES`.
    #[inline(always)]
    unsafe fn load_partial(p: *const f32, n: usize) -> Self {
        let mut lanes = [0.0f32; MAX_LANES];
        // SAFETY: the caller guarantees `n` floats; the copy has room for `LANES`.
        unsafe {
            std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n);
            Self::load(lanes.as_ptr())
        }
    }

    /// Store the first `n` lanes.
    /// # Safety
    /// Room for `n` floats at `p`, `n <= LANES`.
    #[inline(always)]
    unsafe fn store_partial(self, p: *mut f32, n: usize) {
        let mut lanes = [0.0f32; MAX_LANES];
        // SAFETY: as above.
        unsafe {
            self.store(lanes.as_mut_ptr());
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n);
        }
    }
}

/// Work that [`dispatch`] compiles once for each instruction set.
pub(crate) trait Kernel {
    type Output;
    /// Implementations are `#[inline(always)]`.
    fn run<V: Lanes>(self) -> Self::Output;
}

/// Run `kernel` with the lanes of `isa`, which the caller got from [`Isa::current`].
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa {
        // SAFETY: `Isa::current` never returns an instruction set that the processor lacks.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { run_avx512(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { run_avx2(kernel) },
        _ => kernel.run::<scalar::Scalar>(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<avx512::Avx512>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<avx2::Avx2>()
}

/// Prefetch the cache line at `p`; any address is allowed.
#[inline(always)]
pub(crate) fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, and SSE is part of x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}
