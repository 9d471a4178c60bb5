//! Eight lanes in plain Rust: for processors without AVX2, and as the reference of the others.

use half::f16;

use super::{Lanes, MAX_LANES};

const N: usize = 8;

#[derive(Clone, Copy)]
pub(crate) struct Scalar([f32; N]);

impl Scalar {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

#[inline(always)]
fn to_half(x: f32) -> f16 {
    let x = if x.is_finite() {
        x.clamp(-65504.0, 65504.0)
    } else {
        x
    };
    f16::from_f32(x)
}

impl Lanes for Scalar {
    const LANES: usize = N;
    const COLUMNS: usize = 2;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; N])
    }
    #[inline(always)]
    fn splat_f16(bits: u16) -> Self {
        Self::splat(f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        // Not fused on purpose: without the instruction, a fused multiply-add is a library call.
        self.mul(a).add(b)
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn round(self) -> Self {
        // Adding and subtracting 1.5 * 2^23 rounds to even; larger values are integers already.
        const MAGIC: f32 = 12_582_912.0;
        Self(self.0.map(|x| {
            if x.abs() < 4_194_304.0 {
                (x + MAGIC) - MAGIC
            } else {
                x
            }
        }))
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        Self(
            self.0
                .map(|x| f32::from_bits(((x as i32 + 127) << 23) as u32)),
        )
    }
    #[inline(always)]
    fn zero_below(self, x: Self, limit: f32) -> Self {
        self.zip(x, |value, x| if x < limit { 0.0 } else { value })
    }
    #[inline(always)]
    fn within(self, low: f32, high: f32) -> u32 {
        let bit = |(i, &x): (usize, &f32)| u32::from(low <= x && x <= high) << i;
        self.0.iter().enumerate().map(bit).sum()
    }
    #[inline(always)]
    fn round_half(self) -> Self {
        Self(self.0.map(|x| to_half(x).to_f32()))
    }
    #[inline(always)]
    fn swap<const S: usize>(self) -> Self {
        Self(std::array::from_fn(|i| self.0[i ^ S]))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let a = self.0;
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        self.0
            .into_iter()
            .fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller guarantees the memory, here and below.
        Self(unsafe { p.cast::<[f32; N]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: see `load`.
        unsafe { p.cast::<[f32; N]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn store_chosen(self, mask: u32, p: *mut f32) {
        let mut chosen = [0.0; N];
        let mut at = 0;
        for (i, &x) in self.0.iter().enumerate() {
            if mask >> i & 1 == 1 {
                chosen[at] = x;
                at += 1;
            }
        }
        // SAFETY: the caller guarantees the room.
        unsafe { p.cast::<[f32; N]>().write_unaligned(chosen) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        // SAFETY: see `load`.
        let bits = unsafe { p.cast::<[u16; N]>().read_unaligned() };
        Self(bits.map(|b| f16::from_bits(b).to_f32()))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        // SAFETY: see `load`.
        unsafe {
            p.cast::<[u16; N]>()
                .write_unaligned(self.0.map(|x| to_half(x).to_bits()));
        }
    }
    #[inline(always)]
    unsafe fn load_e5m2(p: *const u8) -> Self {
        // SAFETY: see `load`.
        let bytes = unsafe { p.cast::<[u8; N]>().read() };
        Self(bytes.map(|b| f16::from_bits(u16::from(b) << 8).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        // SAFETY: see `load`.
        Self(unsafe { p.cast::<[u8; N]>().read() }.map(f32::from))
    }
    #[inline(always)]
    unsafe fn load_u4(p: *const u8) -> Self {
        // SAFETY: see `load`.
        let bytes = unsafe { p.cast::<[u8; N / 2]>().read() };
        Self(std::array::from_fn(|i| {
            f32::from((bytes[i / 2] >> (4 * (i % 2))) & 15)
        }))
    }
    #[inline(always)]
    unsafe fn store_columns(rows: &[Self; MAX_LANES], dst: *mut f32, stride: usize) {
        for i in 0..N {
            for j in 0..N {
                // SAFETY: see `load`.
                unsafe { *dst.add(i * stride + j) = rows[j].0[i] };
            }
        }
    }
}
