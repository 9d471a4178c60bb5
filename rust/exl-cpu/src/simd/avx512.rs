//! Sixteen lanes: AVX-512 F, BW, VL and DQ.

// Values of this type exist only inside `dispatch`, which checks for the instructions. The caller of an unsafe method guarantees the
// memory. Both hold for every `unsafe` block below.
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::cast_ptr_alignment,
    clippy::wildcard_imports
)]

use std::arch::x86_64::*;

use super::{Lanes, MAX_LANES};

#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// Finite values clamped to the range of half; infinities and NaN unchanged.
#[inline(always)]
fn saturate(x: __m512) -> __m512 {
    unsafe {
        let limit = _mm512_set1_ps(65504.0);
        let finite =
            _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(_mm512_abs_ps(x), _mm512_set1_ps(f32::INFINITY));
        let below = _mm512_mask_min_ps(x, finite, limit, x);
        _mm512_mask_max_ps(below, finite, _mm512_set1_ps(-65504.0), below)
    }
}

impl Lanes for Avx512 {
    const LANES: usize = 16;
    const COLUMNS: usize = 4;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    fn splat_f16(bits: u16) -> Self {
        Self(unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(bits as i16)) })
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(unsafe { _mm512_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(unsafe { _mm512_div_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        Self(unsafe { _mm512_fmadd_ps(self.0, a.0, b.0) })
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Self(unsafe { _mm512_min_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self(unsafe { _mm512_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(unsafe { _mm512_roundscale_ps::<NEAREST>(self.0) })
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        Self(unsafe {
            let n = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(n))
        })
    }
    #[inline(always)]
    fn zero_below(self, x: Self, limit: f32) -> Self {
        Self(unsafe {
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x.0, _mm512_set1_ps(limit));
            _mm512_maskz_mov_ps(keep, self.0)
        })
    }
    #[inline(always)]
    fn within(self, low: f32, high: f32) -> u32 {
        unsafe {
            let above = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(self.0, _mm512_set1_ps(low));
            let both = _mm512_mask_cmp_ps_mask::<_CMP_LE_OQ>(above, self.0, _mm512_set1_ps(high));
            u32::from(both)
        }
    }
    #[inline(always)]
    fn round_half(self) -> Self {
        Self(unsafe { _mm512_cvtph_ps(_mm512_cvtps_ph::<NEAREST>(saturate(self.0))) })
    }
    #[inline(always)]
    fn swap<const S: usize>(self) -> Self {
        Self(unsafe {
            match S {
                2 => _mm512_permute_ps::<0x4E>(self.0),
                4 => _mm512_shuffle_f32x4::<0xB1>(self.0, self.0),
                8 => _mm512_shuffle_f32x4::<0x4E>(self.0, self.0),
                _ => self.0,
            }
        })
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe {
            let x = _mm256_add_ps(
                _mm512_castps512_ps256(self.0),
                _mm512_extractf32x8_ps::<1>(self.0),
            );
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        unsafe {
            let x = _mm256_max_ps(
                _mm512_castps512_ps256(self.0),
                _mm512_extractf32x8_ps::<1>(self.0),
            );
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Self(unsafe { _mm512_loadu_ps(p) })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm512_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn store_chosen(self, mask: u32, p: *mut f32) {
        unsafe { _mm512_storeu_ps(p, _mm512_maskz_compress_ps(mask as u16, self.0)) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) })
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<NEAREST>(saturate(self.0))) }
    }
    #[inline(always)]
    unsafe fn load_e5m2(p: *const u8) -> Self {
        Self(unsafe {
            let halves = _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast())));
            _mm512_cvtph_ps(halves)
        })
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        Self(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))) })
    }
    #[inline(always)]
    unsafe fn load_u4(p: *const u8) -> Self {
        Self(unsafe {
            let bytes = _mm_loadl_epi64(p.cast());
            let mask = _mm_set1_epi8(15);
            let low = _mm_and_si128(bytes, mask);
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)))
        })
    }
    #[inline(always)]
    unsafe fn store_columns(rows: &[Self; MAX_LANES], dst: *mut f32, stride: usize) {
        unsafe {
            macro_rules! put {
                ($i:expr, $x:expr) => {
                    _mm512_storeu_ps(dst.add(($i) * stride), $x)
                };
            }
            // Pairs of rows, then pairs of pairs, then 128-bit quarters in two steps.
            let mut a = [_mm512_setzero_ps(); 16];
            for i in 0..8 {
                a[2 * i] = _mm512_unpacklo_ps(rows[2 * i].0, rows[2 * i + 1].0);
                a[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i].0, rows[2 * i + 1].0);
            }
            // b[4 * i + c]: column c of each quarter, of rows 4 i .. 4 i + 3.
            let mut b = [_mm512_setzero_ps(); 16];
            for i in 0..4 {
                for j in 0..2 {
                    b[4 * i + 2 * j] = _mm512_shuffle_ps::<0x44>(a[4 * i + j], a[4 * i + 2 + j]);
                    b[4 * i + 2 * j + 1] =
                        _mm512_shuffle_ps::<0xEE>(a[4 * i + j], a[4 * i + 2 + j]);
                }
            }
            for c in 0..4 {
                let first_low = _mm512_shuffle_f32x4::<0x88>(b[c], b[4 + c]);
                let first_high = _mm512_shuffle_f32x4::<0xDD>(b[c], b[4 + c]);
                let last_low = _mm512_shuffle_f32x4::<0x88>(b[8 + c], b[12 + c]);
                let last_high = _mm512_shuffle_f32x4::<0xDD>(b[8 + c], b[12 + c]);
                put!(c, _mm512_shuffle_f32x4::<0x88>(first_low, last_low));
                put!(8 + c, _mm512_shuffle_f32x4::<0xDD>(first_low, last_low));
                put!(4 + c, _mm512_shuffle_f32x4::<0x88>(first_high, last_high));
                put!(12 + c, _mm512_shuffle_f32x4::<0xDD>(first_high, last_high));
            }
        }
    }
}
