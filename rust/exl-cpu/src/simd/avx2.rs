//! Eight lanes: AVX2, FMA and F16C.

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
pub(crate) struct Avx2(__m256);

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// The lanes of each mask, lowest first.
static CHOSEN: [[u32; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut lane, mut at) = (0, 0);
        while lane < 8 {
            if mask >> lane & 1 == 1 {
                table[mask][at] = lane as u32;
                at += 1;
            }
            lane += 1;
        }
        mask += 1;
    }
    table
};

/// Finite values clamped to the range of half; infinities and NaN unchanged.
#[inline(always)]
fn saturate(x: __m256) -> __m256 {
    unsafe {
        let limit = _mm256_set1_ps(65504.0);
        let clamped = _mm256_max_ps(
            _mm256_sub_ps(_mm256_setzero_ps(), limit),
            _mm256_min_ps(limit, x),
        );
        let magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0), x);
        let infinite = _mm256_cmp_ps::<_CMP_EQ_OQ>(magnitude, _mm256_set1_ps(f32::INFINITY));
        _mm256_blendv_ps(clamped, x, infinite)
    }
}

impl Lanes for Avx2 {
    const LANES: usize = 8;
    const COLUMNS: usize = 2;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self(unsafe { _mm256_set1_ps(x) })
    }
    #[inline(always)]
    fn splat_f16(bits: u16) -> Self {
        Self(unsafe { _mm256_cvtph_ps(_mm_set1_epi16(bits as i16)) })
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(unsafe { _mm256_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(unsafe { _mm256_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(unsafe { _mm256_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(unsafe { _mm256_div_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        Self(unsafe { _mm256_fmadd_ps(self.0, a.0, b.0) })
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Self(unsafe { _mm256_min_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self(unsafe { _mm256_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(unsafe { _mm256_round_ps::<NEAREST>(self.0) })
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        Self(unsafe {
            let n = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n))
        })
    }
    #[inline(always)]
    fn zero_below(self, x: Self, limit: f32) -> Self {
        Self(unsafe {
            let keep = _mm256_cmp_ps::<_CMP_NLT_UQ>(x.0, _mm256_set1_ps(limit));
            _mm256_and_ps(self.0, keep)
        })
    }
    #[inline(always)]
    fn within(self, low: f32, high: f32) -> u32 {
        unsafe {
            let above = _mm256_cmp_ps::<_CMP_GE_OQ>(self.0, _mm256_set1_ps(low));
            let below = _mm256_cmp_ps::<_CMP_LE_OQ>(self.0, _mm256_set1_ps(high));
            _mm256_movemask_ps(_mm256_and_ps(above, below)) as u32
        }
    }
    #[inline(always)]
    fn round_half(self) -> Self {
        Self(unsafe {
            _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(saturate(
                self.0,
            )))
        })
    }
    #[inline(always)]
    fn swap<const S: usize>(self) -> Self {
        Self(unsafe {
            match S {
                2 => _mm256_permute_ps::<0x4E>(self.0),
                4 => _mm256_permute2f128_ps::<1>(self.0, self.0),
                _ => self.0,
            }
        })
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe {
            let x = _mm_add_ps(
                _mm256_castps256_ps128(self.0),
                _mm256_extractf128_ps::<1>(self.0),
            );
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        unsafe {
            let x = _mm_max_ps(
                _mm256_castps256_ps128(self.0),
                _mm256_extractf128_ps::<1>(self.0),
            );
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Self(unsafe { _mm256_loadu_ps(p) })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm256_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn store_chosen(self, mask: u32, p: *mut f32) {
        unsafe {
            let order = CHOSEN[mask as usize & 255].as_ptr();
            let order = _mm256_loadu_si256(order.cast());
            _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(self.0, order));
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) })
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        unsafe {
            _mm_storeu_si128(
                p.cast(),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(saturate(self.0)),
            );
        }
    }
    #[inline(always)]
    unsafe fn load_e5m2(p: *const u8) -> Self {
        Self(unsafe {
            let bytes = _mm_loadl_epi64(p.cast());
            _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes))
        })
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        Self(unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))) })
    }
    #[inline(always)]
    unsafe fn load_u4(p: *const u8) -> Self {
        Self(unsafe {
            let bytes = _mm_cvtsi32_si128(p.cast::<i32>().read_unaligned());
            let mask = _mm_set1_epi8(15);
            let low = _mm_and_si128(bytes, mask);
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)))
        })
    }
    #[inline(always)]
    unsafe fn store_columns(rows: &[Self; MAX_LANES], dst: *mut f32, stride: usize) {
        unsafe {
            // Pairs of rows, then pairs of pairs, then halves.
            let mut a = [_mm256_setzero_ps(); 8];
            for i in 0..4 {
                a[2 * i] = _mm256_unpacklo_ps(rows[2 * i].0, rows[2 * i + 1].0);
                a[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i].0, rows[2 * i + 1].0);
            }
            let mut b = [_mm256_setzero_ps(); 8];
            for i in 0..2 {
                for j in 0..2 {
                    b[4 * i + 2 * j] = _mm256_shuffle_ps::<0x44>(a[4 * i + j], a[4 * i + 2 + j]);
                    b[4 * i + 2 * j + 1] =
                        _mm256_shuffle_ps::<0xEE>(a[4 * i + j], a[4 * i + 2 + j]);
                }
            }
            for i in 0..4 {
                let low = _mm256_permute2f128_ps::<0x20>(b[i], b[4 + i]);
                let high = _mm256_permute2f128_ps::<0x31>(b[i], b[4 + i]);
                _mm256_storeu_ps(dst.add(i * stride), low);
                _mm256_storeu_ps(dst.add((4 + i) * stride), high);
            }
        }
    }
}
