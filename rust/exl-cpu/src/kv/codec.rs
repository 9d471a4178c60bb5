//! The codecs, for one row (a head of a token) at a time.

use std::ptr;

use super::{BLOCK, Codec, Plane, RUN};
use crate::simd::{Kernel, Lanes};

/// Encodes the heads of one token into consecutive rows from `first_row`.
pub(super) struct EncodeToken<'a> {
    pub plane: &'a Plane,
    pub first_row: usize,
    pub x: &'a [f32],
}

impl Kernel for EncodeToken<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        for (h, x) in self.x.chunks_exact(self.plane.head_dim).enumerate() {
            let (data, scales) = self.plane.row(self.first_row + h);
            let (data, scales) = (data.cast_mut(), scales.cast_mut());
            // SAFETY: the row lies within the plane (slots are checked), and this token is stored by one task.
            unsafe {
                match self.plane.codec {
                    Codec::F16 => encode_f16::<V>(x, data.cast()),
                    Codec::E5M2 => encode_e5m2::<V>(x, data),
                    Codec::Hadamard8 => encode_hadamard::<V, 8>(x, data, scales),
                    Codec::Hadamard4 => encode_hadamard::<V, 4>(x, data, scales),
                }
            }
        }
    }
}

/// Decodes the heads of one token, with the format's roundings to half.
pub(super) struct DecodeToken<'a> {
    pub plane: &'a Plane,
    pub first_row: usize,
    pub out: &'a mut [f32],
}

impl Kernel for DecodeToken<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let dim = self.plane.head_dim;
        let mut row = [0.0f32; BLOCK];
        for (h, out) in self.out.chunks_exact_mut(dim).enumerate() {
            let (data, scales) = self.plane.row(self.first_row + h);
            for (b, out) in out.chunks_mut(BLOCK).enumerate() {
                let n = out.len();
                // SAFETY: the row lies within the plane (slots are checked).
                unsafe {
                    let data = data.add(b * self.plane.codec.row_bytes(BLOCK));
                    let scales = scales.wrapping_add(b * self.plane.codec.row_scales(BLOCK));
                    let row = row.as_mut_ptr();
                    match self.plane.codec {
                        Codec::F16 => decode_row::<V, HalfRow>(data, scales, n, row),
                        Codec::E5M2 => decode_row::<V, E5M2Row>(data, scales, n, row),
                        Codec::Hadamard8 => decode_row::<V, CodeRow<8>>(data, scales, n, row),
                        Codec::Hadamard4 => decode_row::<V, CodeRow<4>>(data, scales, n, row),
                    }
                }
                if self.plane.codec.is_hadamard() {
                    round_all::<V>(&mut row);
                    butterflies::<V, true>(&mut row);
                    for x in &mut row {
                        *x *= 1.0 / 32.0;
                    }
                    round_all::<V>(&mut row);
                }
                out.copy_from_slice(&row[..n]);
            }
        }
    }
}

/// Conversion of a row's elements to floats: halves and bytes unchanged, Hadamard codes as (code - m) * scale, still transformed and
/// without rounding to half.
pub(crate) trait RowFormat {
    /// Number of elements of `n` that whole vectors may read; `load_tail` reads the rest.
    fn whole<V: Lanes>(n: usize) -> usize;

    /// Elements `e..e + LANES`.
    /// # Safety
    /// A row of this format, `e` a multiple of `LANES` below `whole(n)`.
    unsafe fn load<V: Lanes>(data: *const u8, scales: *const u16, e: usize) -> V;

    /// The last elements `e..n` of a row, followed by zeros.
    /// # Safety
    /// A row of this format with `n` elements, `e` = `whole(n)` < `n`.
    unsafe fn load_tail<V: Lanes>(data: *const u8, e: usize, n: usize) -> V;
}

/// `Codec::F16`
pub(crate) struct HalfRow;
/// `Codec::E5M2`
pub(crate) struct E5M2Row;
/// `Codec::Hadamard8` and `Codec::Hadamard4`
pub(crate) struct CodeRow<const BITS: usize>;

#[inline(always)]
unsafe fn load_through_copy<V: Lanes, F: RowFormat>(data: *const u8, bytes: usize) -> V {
    let mut tail = [0u8; 2 * crate::simd::MAX_LANES];
    // SAFETY: the caller has `bytes` bytes, fewer than a vector's.
    unsafe {
        ptr::copy_nonoverlapping(data, tail.as_mut_ptr(), bytes);
        F::load::<V>(tail.as_ptr(), ptr::null(), 0)
    }
}

impl RowFormat for HalfRow {
    #[inline(always)]
    fn whole<V: Lanes>(n: usize) -> usize {
        n - n % V::LANES
    }
    #[inline(always)]
    // Loads of halves need no alignment, and torch aligns tensors to the size of their elements.
    #[allow(clippy::cast_ptr_alignment)]
    unsafe fn load<V: Lanes>(data: *const u8, _: *const u16, e: usize) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load_f16(data.add(2 * e).cast()) }
    }
    #[inline(always)]
    unsafe fn load_tail<V: Lanes>(data: *const u8, e: usize, n: usize) -> V {
        // SAFETY: the caller's contract.
        unsafe { load_through_copy::<V, Self>(data.add(2 * e), 2 * (n - e)) }
    }
}

impl RowFormat for E5M2Row {
    #[inline(always)]
    fn whole<V: Lanes>(n: usize) -> usize {
        n - n % V::LANES
    }
    #[inline(always)]
    unsafe fn load<V: Lanes>(data: *const u8, _: *const u16, e: usize) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load_e5m2(data.add(e)) }
    }
    #[inline(always)]
    unsafe fn load_tail<V: Lanes>(data: *const u8, e: usize, n: usize) -> V {
        // SAFETY: the caller's contract.
        unsafe { load_through_copy::<V, Self>(data.add(e), n - e) }
    }
}

impl<const BITS: usize> RowFormat for CodeRow<BITS> {
    #[inline(always)]
    fn whole<V: Lanes>(n: usize) -> usize {
        n.next_multiple_of(BLOCK)
    }
    #[inline(always)]
    unsafe fn load<V: Lanes>(data: *const u8, scales: *const u16, e: usize) -> V {
        // SAFETY: the caller's contract.
        unsafe {
            let scale = V::splat_f16(*scales.add(e / RUN));
            let codes = if BITS == 8 {
                V::load_u8(data.add(e))
            } else {
                V::load_u4(data.add(e / 2))
            };
            codes.sub(V::splat((1 << (BITS - 1)) as f32)).mul(scale)
        }
    }
    #[inline(always)]
    unsafe fn load_tail<V: Lanes>(_: *const u8, _: usize, _: usize) -> V {
        V::splat(0.0)
    }
}

/// Decode a row of `n` elements to `out`, with zeros up to the next multiple of `LANES` (of 64 for the Hadamard codecs).
///
/// # Safety
/// `data` and `scales` point at a row of the format with `n` elements; room for `n` rounded up as above at `out`.
#[inline(always)]
pub(crate) unsafe fn decode_row<V: Lanes, F: RowFormat>(
    data: *const u8,
    scales: *const u16,
    n: usize,
    out: *mut f32,
) {
    let whole = F::whole::<V>(n);
    let mut e = 0;
    // SAFETY: the caller's contract.
    unsafe {
        while e < whole {
            F::load::<V>(data, scales, e).store(out.add(e));
            e += V::LANES;
        }
        if e < n {
            F::load_tail::<V>(data, e, n).store(out.add(e));
        }
    }
}

#[inline(always)]
unsafe fn encode_f16<V: Lanes>(x: &[f32], out: *mut u16) {
    let whole = x.len() - x.len() % V::LANES;
    // SAFETY: the row at `out` has as many elements as `x`.
    unsafe {
        for e in (0..whole).step_by(V::LANES) {
            V::load(x.as_ptr().add(e)).store_f16(out.add(e));
        }
        let n = x.len() - whole;
        if n > 0 {
            let mut tail = [0u16; crate::simd::MAX_LANES];
            V::load_partial(x.as_ptr().add(whole), n).store_f16(tail.as_mut_ptr());
            ptr::copy_nonoverlapping(tail.as_ptr(), out.add(whole), n);
        }
    }
}

#[inline(always)]
unsafe fn encode_e5m2<V: Lanes>(x: &[f32], out: *mut u8) {
    let mut halves = [0u16; BLOCK];
    for (b, x) in x.chunks(BLOCK).enumerate() {
        // SAFETY: a chunk is no longer than `halves`, and the row at `out` is as long as `x`.
        unsafe {
            encode_f16::<V>(x, halves.as_mut_ptr());
            for (i, &h) in halves[..x.len()].iter().enumerate() {
                *out.add(b * BLOCK + i) = e5m2_from_half(h);
            }
        }
    }
}

/// Nearest E5M2, ties to even, saturating; infinities stay, and every NaN becomes the same quiet NaN.
#[inline(always)]
fn e5m2_from_half(bits: u16) -> u8 {
    let (sign, magnitude) = (bits & 0x8000, bits & 0x7fff);
    let rounded = match magnitude {
        0x7c00 => 0x7c,
        0x7c01.. => 0x7e,
        _ => ((magnitude + 0x7f + ((magnitude >> 8) & 1)) >> 8).min(0x7b),
    };
    ((sign >> 8) | rounded) as u8
}

#[inline(always)]
unsafe fn encode_hadamard<V: Lanes, const BITS: u32>(x: &[f32], codes: *mut u8, scales: *mut u16) {
    let m = (1 << (BITS - 1)) as f32;
    for (b, x) in x.chunks(BLOCK).enumerate() {
        let mut t = [0.0f32; BLOCK];
        t[..x.len()].copy_from_slice(x);
        round_all::<V>(&mut t);
        butterflies::<V, true>(&mut t);
        for (r, run) in t.chunks_exact_mut(RUN).enumerate() {
            let peak = peak::<V>(run);
            quantize_run::<V>(run, peak, m);
            // SAFETY: block `b` lies within the row, which is padded to whole blocks.
            unsafe {
                *scales.add(b * (BLOCK / RUN) + r) = half::f16::from_f32(peak / m).to_bits();
                let first = b * BLOCK + r * RUN;
                if BITS == 8 {
                    for (i, &code) in run.iter().enumerate() {
                        *codes.add(first + i) = code as u8;
                    }
                } else {
                    for (i, pair) in run.chunks_exact(2).enumerate() {
                        *codes.add(first / 2 + i) = pair[0] as u8 | ((pair[1] as u8) << 4);
                    }
                }
            }
        }
    }
}

/// Largest magnitude of a run; NaN if any element is.
#[inline(always)]
fn peak<V: Lanes>(run: &[f32]) -> f32 {
    let (mut most, mut poison) = (V::splat(0.0), V::splat(0.0));
    let mut e = 0;
    while e < RUN {
        // SAFETY: a run has 32 elements, a multiple of every `LANES`.
        let x = unsafe { V::load(run.as_ptr().add(e)) };
        // `max` returns its second operand if either is NaN.
        most = x.max(V::splat(0.0).sub(x)).max(most);
        // 0 unless an element is infinite or NaN; no comparison would keep those.
        poison = poison.add(x.sub(x));
        e += V::LANES;
    }
    let most = most.largest();
    if most < f32::INFINITY && poison.sum().is_nan() {
        f32::NAN
    } else {
        most
    }
}

/// Quantize a run; every intermediate is a half. NaN ratios (an all-zero run) give code 0.
#[inline(always)]
fn quantize_run<V: Lanes>(run: &mut [f32], peak: f32, m: f32) {
    let (peak, m, zero) = (V::splat(peak), V::splat(m), V::splat(0.0));
    let top = m.add(m).sub(V::splat(1.0));
    for e in (0..RUN).step_by(V::LANES) {
        // SAFETY: a run has 32 elements, a multiple of every `LANES`.
        unsafe {
            let p = run.as_mut_ptr().add(e);
            let ratio = V::load(p).div(peak).round_half();
            let shifted = ratio.fma(m, m).round_half().round();
            // NaN comes first, because `max` then returns its second operand.
            shifted.max(zero).min(top).store(p);
        }
    }
}

#[inline(always)]
fn round_all<V: Lanes>(block: &mut [f32; BLOCK]) {
    for e in (0..BLOCK).step_by(V::LANES) {
        // SAFETY: 64 is a multiple of every `LANES`.
        unsafe {
            let p = block.as_mut_ptr().add(e);
            V::load(p).round_half().store(p);
        }
    }
}

/// Unnormalized Sylvester transforms of the even and of the odd elements: butterflies at strides 2, 4, 8, 16, 32 of the block. `HALF`:
/// every sum is rounded to half.
#[inline(always)]
fn butterflies<V: Lanes, const HALF: bool>(block: &mut [f32; BLOCK]) {
    stage::<V, 2, HALF>(block);
    stage::<V, 4, HALF>(block);
    stage::<V, 8, HALF>(block);
    stage::<V, 16, HALF>(block);
    stage::<V, 32, HALF>(block);
}

#[inline(always)]
fn finish<V: Lanes, const HALF: bool>(x: V) -> V {
    if HALF { x.round_half() } else { x }
}

#[inline(always)]
fn stage<V: Lanes, const S: usize, const HALF: bool>(block: &mut [f32; BLOCK]) {
    let p = block.as_mut_ptr();
    // SAFETY: every offset below is under 64.
    unsafe {
        if S < V::LANES {
            // Upper lanes take the difference: other - own.
            let mut signs = [1.0f32; crate::simd::MAX_LANES];
            for (i, sign) in signs.iter_mut().enumerate() {
                if i & S != 0 {
                    *sign = -1.0;
                }
            }
            let signs = V::load(signs.as_ptr());
            for e in (0..BLOCK).step_by(V::LANES) {
                let x = V::load(p.add(e));
                finish::<V, HALF>(x.swap::<S>().add(x.mul(signs))).store(p.add(e));
            }
        } else {
            for i in 0..BLOCK / V::LANES {
                let e = i * V::LANES;
                if e & S != 0 {
                    continue;
                }
                let (low, high) = (V::load(p.add(e)), V::load(p.add(e + S)));
                finish::<V, HALF>(low.add(high)).store(p.add(e));
                finish::<V, HALF>(low.sub(high)).store(p.add(e + S));
            }
        }
    }
}

/// Transform each block of 64 in float32 and multiply it by `factor`.
#[inline(always)]
pub(crate) fn hadamard_rows<V: Lanes>(rows: &mut [f32], factor: f32) {
    for block in rows.as_chunks_mut::<BLOCK>().0 {
        butterflies::<V, false>(block);
        for x in block {
            *x *= factor;
        }
    }
}
