//! AVX-512 F, BW, VL, DQ and VNNI: one register holds the sixteen lanes.

#[allow(clippy::wildcard_imports)]
use std::arch::x86_64::*;

use super::Simd;

/// AVX-512 with VNNI.
#[derive(Clone, Copy, Debug)]
pub struct Avx512;

// SAFETY (whole block): the trait's contract; only the caller's pointers access memory.
impl Simd for Avx512 {
    type I = __m512i;
    type F = __m512;

    #[inline(always)]
    unsafe fn prefetch(p: *const u32) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_i(p: *const u32) -> Self::I {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn splat_i(x: u32) -> Self::I {
        unsafe { _mm512_set1_epi32(x as i32) }
    }
    #[inline(always)]
    unsafe fn and_i(a: Self::I, b: Self::I) -> Self::I {
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn or_i(a: Self::I, b: Self::I) -> Self::I {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I {
        unsafe { _mm512_sub_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn shr_i(a: Self::I, n: u32) -> Self::I {
        unsafe { _mm512_srlv_epi32(a, _mm512_set1_epi32(n as i32)) }
    }
    #[inline(always)]
    unsafe fn shl_i(a: Self::I, n: u32) -> Self::I {
        unsafe { _mm512_sllv_epi32(a, _mm512_set1_epi32(n as i32)) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::I {
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn dot_u8<const CODE_BITS: u32>(
        acc: Self::I,
        codes: &[Self::I; 8],
        acts: *const u32,
    ) -> Self::I {
        unsafe {
            let mut even = acc;
            let mut odd = _mm512_setzero_si512();
            for i in 0..4 {
                let act = _mm512_set1_epi32(acts.add(2 * i).cast::<i32>().read_unaligned());
                even = _mm512_dpbusd_epi32(even, codes[2 * i], act);
                let act = _mm512_set1_epi32(acts.add(2 * i + 1).cast::<i32>().read_unaligned());
                odd = _mm512_dpbusd_epi32(odd, codes[2 * i + 1], act);
            }
            _mm512_add_epi32(even, odd)
        }
    }
    #[inline(always)]
    unsafe fn dot_i16(acc: Self::I, a: Self::I, b: Self::I) -> Self::I {
        unsafe { _mm512_dpwssd_epi32(acc, a, b) }
    }
    #[inline(always)]
    unsafe fn to_f(x: Self::I) -> Self::F {
        unsafe { _mm512_cvtepi32_ps(x) }
    }
    #[inline(always)]
    unsafe fn cast_f(x: Self::I) -> Self::F {
        unsafe { _mm512_castsi512_ps(x) }
    }

    #[inline(always)]
    unsafe fn load_f(p: *const f32) -> Self::F {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store_f(p: *mut f32, x: Self::F) {
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn splat_f(x: f32) -> Self::F {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn add_f(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub_f(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_f(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma_f(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn fms_f(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { _mm512_fmsub_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn round_half(x: Self::F) -> Self::F {
        unsafe {
            _mm512_cvtph_ps(_mm512_cvtps_ph::<
                { _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC },
            >(x))
        }
    }
    #[inline(always)]
    unsafe fn load_half(p: *const u16) -> Self::F {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::F {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn lookup16(table: *const f32, index: Self::I) -> Self::F {
        unsafe { _mm512_permutexvar_ps(index, _mm512_loadu_ps(table)) }
    }
}
