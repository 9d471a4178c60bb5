//! Plain arrays: the reference for the other instruction sets, and the path of all other processors.

use half::{bf16, f16};

use super::{LANES, Simd};

/// No special instructions.
#[derive(Clone, Copy, Debug)]
pub struct Scalar;

#[inline(always)]
fn map<A: Copy, B: Copy, C: Default + Copy>(
    a: [A; LANES],
    b: [B; LANES],
    f: impl Fn(A, B) -> C,
) -> [C; LANES] {
    let mut out = [C::default(); LANES];
    for lane in 0..LANES {
        out[lane] = f(a[lane], b[lane]);
    }
    out
}

impl Simd for Scalar {
    type I = [u32; LANES];
    type F = [f32; LANES];

    #[inline(always)]
    unsafe fn prefetch(_p: *const u32) {}
    #[inline(always)]
    unsafe fn load_i(p: *const u32) -> Self::I {
        // SAFETY: the caller's pointer is valid for 16 lanes.
        unsafe { p.cast::<Self::I>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn splat_i(x: u32) -> Self::I {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn and_i(a: Self::I, b: Self::I) -> Self::I {
        map(a, b, |a, b| a & b)
    }
    #[inline(always)]
    unsafe fn or_i(a: Self::I, b: Self::I) -> Self::I {
        map(a, b, |a, b| a | b)
    }
    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        map(a, b, u32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I {
        map(a, b, u32::wrapping_sub)
    }
    #[inline(always)]
    unsafe fn shr_i(a: Self::I, n: u32) -> Self::I {
        a.map(|x| x >> n)
    }
    #[inline(always)]
    unsafe fn shl_i(a: Self::I, n: u32) -> Self::I {
        a.map(|x| x << n)
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::I {
        // SAFETY: the caller's pointer is valid for 16 bytes.
        unsafe { p.cast::<[u8; LANES]>().read_unaligned() }.map(u32::from)
    }
    #[inline(always)]
    unsafe fn dot_u8<const CODE_BITS: u32>(
        mut acc: Self::I,
        codes: &[Self::I; 8],
        acts: *const u32,
    ) -> Self::I {
        for (i, codes) in codes.iter().enumerate() {
            // SAFETY: the caller's pointer is valid for 8 words.
            let act = unsafe { acts.add(i).read_unaligned() }
                .to_le_bytes()
                .map(|b| b as i8 as i32);
            for lane in 0..LANES {
                let code = codes[lane].to_le_bytes();
                let mut sum = acc[lane] as i32;
                for j in 0..4 {
                    sum += code[j] as i32 * act[j];
                }
                acc[lane] = sum as u32;
            }
        }
        acc
    }
    #[inline(always)]
    unsafe fn dot_i16(acc: Self::I, a: Self::I, b: Self::I) -> Self::I {
        let product = map(a, b, |a, b| {
            let low = (a as i16 as i32) * (b as i16 as i32);
            let high = ((a >> 16) as i16 as i32) * ((b >> 16) as i16 as i32);
            low.wrapping_add(high) as u32
        });
        map(acc, product, u32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn to_f(x: Self::I) -> Self::F {
        x.map(|x| x as i32 as f32)
    }
    #[inline(always)]
    unsafe fn cast_f(x: Self::I) -> Self::F {
        x.map(f32::from_bits)
    }

    #[inline(always)]
    unsafe fn load_f(p: *const f32) -> Self::F {
        // SAFETY: the caller's pointer is valid for 16 lanes.
        unsafe { p.cast::<Self::F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_f(p: *mut f32, x: Self::F) {
        // SAFETY: as above.
        unsafe { p.cast::<Self::F>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn splat_f(x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn add_f(a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub_f(a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul_f(a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn fma_f(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut out = [0.0; LANES];
        for lane in 0..LANES {
            out[lane] = a[lane].mul_add(b[lane], c[lane]);
        }
        out
    }
    #[inline(always)]
    unsafe fn fms_f(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut out = [0.0; LANES];
        for lane in 0..LANES {
            out[lane] = a[lane].mul_add(b[lane], -c[lane]);
        }
        out
    }
    #[inline(always)]
    unsafe fn round_half(x: Self::F) -> Self::F {
        x.map(|x| f16::from_f32(x).to_f32())
    }
    #[inline(always)]
    unsafe fn load_half(p: *const u16) -> Self::F {
        // SAFETY: the caller's pointer is valid for 16 halves.
        unsafe { p.cast::<[u16; LANES]>().read_unaligned() }.map(|x| f16::from_bits(x).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::F {
        // SAFETY: as above.
        unsafe { p.cast::<[u16; LANES]>().read_unaligned() }.map(|x| bf16::from_bits(x).to_f32())
    }
    #[inline(always)]
    unsafe fn lookup16(table: *const f32, index: Self::I) -> Self::F {
        // SAFETY: the table holds 16 floats and the index is masked.
        index.map(|i| unsafe { *table.add(i as usize & 15) })
    }
}
