//! AVX2, FMA and F16C: two registers hold the sixteen lanes.

#[allow(clippy::wildcard_imports)]
use std::arch::x86_64::*;

use super::Simd;

/// AVX2 with FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2;

/// The same operation on both registers.
macro_rules! both {
    ($f:expr; $($x:expr),+) => {
        unsafe { [$f($($x[0]),+), $f($($x[1]),+)] }
    };
}

/// Depth of sums of pairs of products that fit 16 bits: 2 * 127 * (2^bits - 1) * depth < 32768.
const fn depth(code_bits: u32) -> usize {
    match code_bits {
        0..=4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

// SAFETY (whole block): the trait's contract; only the caller's pointers access memory.
impl Simd for Avx2 {
    type I = [__m256i; 2];
    type F = [__m256; 2];

    #[inline(always)]
    unsafe fn prefetch(p: *const u32) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_i(p: *const u32) -> Self::I {
        unsafe {
            [
                _mm256_loadu_si256(p.cast()),
                _mm256_loadu_si256(p.add(8).cast()),
            ]
        }
    }
    #[inline(always)]
    unsafe fn splat_i(x: u32) -> Self::I {
        unsafe { [_mm256_set1_epi32(x as i32); 2] }
    }
    #[inline(always)]
    unsafe fn and_i(a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_and_si256; a, b)
    }
    #[inline(always)]
    unsafe fn or_i(a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_or_si256; a, b)
    }
    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_add_epi32; a, b)
    }
    #[inline(always)]
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_sub_epi32; a, b)
    }
    #[inline(always)]
    unsafe fn shr_i(a: Self::I, n: u32) -> Self::I {
        unsafe {
            let n = _mm256_set1_epi32(n as i32);
            [_mm256_srlv_epi32(a[0], n), _mm256_srlv_epi32(a[1], n)]
        }
    }
    #[inline(always)]
    unsafe fn shl_i(a: Self::I, n: u32) -> Self::I {
        unsafe {
            let n = _mm256_set1_epi32(n as i32);
            [_mm256_sllv_epi32(a[0], n), _mm256_sllv_epi32(a[1], n)]
        }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::I {
        unsafe {
            [
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())),
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast())),
            ]
        }
    }
    #[inline(always)]
    unsafe fn dot_u8<const CODE_BITS: u32>(
        acc: Self::I,
        codes: &[Self::I; 8],
        acts: *const u32,
    ) -> Self::I {
        if CODE_BITS > 7 {
            // 8-bit codes would saturate maddubs, so even and odd bytes are multiplied as 16-bit integers.
            return unsafe { dot_wide(acc, codes, acts) };
        }
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let mut acc = acc;
            let depth = depth(CODE_BITS);
            let mut i = 0;
            while i < 8 {
                let mut sums = [_mm256_setzero_si256(); 2];
                for d in 0..depth {
                    let act = _mm256_set1_epi32(acts.add(i + d).cast::<i32>().read_unaligned());
                    for h in 0..2 {
                        let pairs = _mm256_maddubs_epi16(codes[i + d][h], act);
                        sums[h] = if d == 0 {
                            pairs
                        } else {
                            _mm256_add_epi16(sums[h], pairs)
                        };
                    }
                }
                for h in 0..2 {
                    acc[h] = _mm256_add_epi32(acc[h], _mm256_madd_epi16(sums[h], ones));
                }
                i += depth;
            }
            acc
        }
    }
    #[inline(always)]
    unsafe fn dot_i16(acc: Self::I, a: Self::I, b: Self::I) -> Self::I {
        unsafe {
            [
                _mm256_add_epi32(acc[0], _mm256_madd_epi16(a[0], b[0])),
                _mm256_add_epi32(acc[1], _mm256_madd_epi16(a[1], b[1])),
            ]
        }
    }
    #[inline(always)]
    unsafe fn to_f(x: Self::I) -> Self::F {
        both!(_mm256_cvtepi32_ps; x)
    }
    #[inline(always)]
    unsafe fn cast_f(x: Self::I) -> Self::F {
        both!(_mm256_castsi256_ps; x)
    }

    #[inline(always)]
    unsafe fn load_f(p: *const f32) -> Self::F {
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn store_f(p: *mut f32, x: Self::F) {
        unsafe {
            _mm256_storeu_ps(p, x[0]);
            _mm256_storeu_ps(p.add(8), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn splat_f(x: f32) -> Self::F {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn add_f(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps; a, b)
    }
    #[inline(always)]
    unsafe fn sub_f(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps; a, b)
    }
    #[inline(always)]
    unsafe fn mul_f(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps; a, b)
    }
    #[inline(always)]
    unsafe fn fma_f(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps; a, b, c)
    }
    #[inline(always)]
    unsafe fn fms_f(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmsub_ps; a, b, c)
    }
    #[inline(always)]
    unsafe fn round_half(x: Self::F) -> Self::F {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        unsafe {
            [
                _mm256_cvtph_ps(_mm256_cvtps_ph::<NEAREST>(x[0])),
                _mm256_cvtph_ps(_mm256_cvtps_ph::<NEAREST>(x[1])),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_half(p: *const u16) -> Self::F {
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::F {
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn lookup16(table: *const f32, index: Self::I) -> Self::F {
        unsafe {
            let (low, high) = (_mm256_loadu_ps(table), _mm256_loadu_ps(table.add(8)));
            [lookup8(low, high, index[0]), lookup8(low, high, index[1])]
        }
    }
}

/// Bit 3 of the index selects the half of the table.
#[inline(always)]
unsafe fn lookup8(low: __m256, high: __m256, index: __m256i) -> __m256 {
    unsafe {
        let upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index));
        let (a, b) = (
            _mm256_permutevar8x32_ps(low, index),
            _mm256_permutevar8x32_ps(high, index),
        );
        _mm256_blendv_ps(a, b, upper)
    }
}

#[inline(always)]
unsafe fn dot_wide(
    mut acc: [__m256i; 2],
    codes: &[[__m256i; 2]; 8],
    acts: *const u32,
) -> [__m256i; 2] {
    unsafe {
        let low = _mm256_set1_epi16(0xff);
        for (i, codes) in codes.iter().enumerate() {
            let act = _mm256_set1_epi32(acts.add(i).cast::<i32>().read_unaligned());
            let act_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(act));
            let act_odd = _mm256_srai_epi16::<8>(act);
            for h in 0..2 {
                let even = _mm256_madd_epi16(_mm256_and_si256(codes[h], low), act_even);
                let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(codes[h]), act_odd);
                acc[h] = _mm256_add_epi32(acc[h], _mm256_add_epi32(even, odd));
            }
        }
        acc
    }
}
