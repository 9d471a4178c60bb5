//! Sixteen lanes of 32 bits for every instruction set.
//!
//! A kernel is written once over [`Simd`]. A lane is an output column, and lanes never mix. Every lane operation is an exact integer
//! operation or one correctly rounded float operation. So all instruction sets give bitwise identical results.
//!
//! The methods are `inline(always)` and have no target feature themselves. They are sound only inside a function compiled with the features
//! of their instruction set, so all of them are `unsafe`.
#![allow(clippy::missing_safety_doc)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
pub use scalar::Scalar;

/// Lanes of a vector.
pub const LANES: usize = 16;

/// Vector operations of one instruction set. Safety of all methods: the processor has the set; pointers are valid for the lanes that they
/// name (no alignment needed).
pub trait Simd: Copy {
    /// Sixteen 32-bit integers.
    type I: Copy;
    /// Sixteen float32.
    type F: Copy;

    /// Prefetch the cache line at `p`, which may be outside any allocation.
    unsafe fn prefetch(p: *const u32);
    unsafe fn load_i(p: *const u32) -> Self::I;
    unsafe fn splat_i(x: u32) -> Self::I;
    unsafe fn and_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn or_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn shr_i(a: Self::I, n: u32) -> Self::I;
    unsafe fn shl_i(a: Self::I, n: u32) -> Self::I;
    /// Sixteen bytes, zero-extended.
    unsafe fn load_u8(p: *const u8) -> Self::I;
    /// `acc + sum_j u8(codes, j) * i8(acts, j)`, exact in 32 bits, over the four bytes of each lane. `CODE_BITS` bounds the codes.
    unsafe fn dot_u8<const CODE_BITS: u32>(
        acc: Self::I,
        codes: &[Self::I; 8],
        acts: *const u32,
    ) -> Self::I;
    /// `acc + sum_j i16(a, j) * i16(b, j)` over the two halves of each lane.
    unsafe fn dot_i16(acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// Signed integers to float32, round to nearest even.
    unsafe fn to_f(x: Self::I) -> Self::F;
    /// The same 32 bits, read as float32.
    unsafe fn cast_f(x: Self::I) -> Self::F;

    unsafe fn load_f(p: *const f32) -> Self::F;
    unsafe fn store_f(p: *mut f32, x: Self::F);
    unsafe fn splat_f(x: f32) -> Self::F;
    unsafe fn add_f(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub_f(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul_f(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma_f(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a * b - c`, rounded once.
    unsafe fn fms_f(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Round to IEEE half (nearest even, subnormals kept) and back.
    unsafe fn round_half(x: Self::F) -> Self::F;
    /// Sixteen halves, widened.
    unsafe fn load_half(p: *const u16) -> Self::F;
    /// Sixteen bfloat16, widened.
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    /// `table[index & 15]` in each lane, table of 16 floats.
    unsafe fn lookup16(table: *const f32, index: Self::I) -> Self::F;
}
