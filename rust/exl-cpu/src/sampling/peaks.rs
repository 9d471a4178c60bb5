//! Block maxima, to find the largest logits of a long row without sorting it.

use crate::isa::Isa;
use crate::simd::{Kernel, Lanes, dispatch};

/// Logits a block.
pub const BLOCK: usize = 64;

const NEG_INF: i32 = key(f32::NEG_INFINITY);

/// An integer with the order of the number; -0 and 0 are equal.
#[inline(always)]
pub const fn key(x: f32) -> i32 {
    let bits = (x + 0.0).to_bits() as i32;
    bits ^ ((bits >> 31) as u32 >> 1) as i32
}

/// Ascending: logit descending, then id ascending.
#[inline(always)]
pub fn place(x: f32, id: u32) -> u64 {
    let falling = !(key(x) as u32 ^ 0x8000_0000);
    u64::from(falling) << 32 | u64::from(id)
}

/// Fill `maxima` with the largest key of each block. Returns true if a logit is NaN or +inf.
pub fn block_maxima(isa: Isa, x: &[f32], maxima: &mut Vec<i32>) -> bool {
    maxima.clear();
    maxima.resize(x.len().div_ceil(BLOCK), NEG_INF);
    dispatch(isa, Maxima { x, maxima })
}

struct Maxima<'a> {
    x: &'a [f32],
    maxima: &'a mut [i32],
}

impl Kernel for Maxima<'_> {
    type Output = bool;
    #[inline(always)]
    fn run<V: Lanes>(self) -> bool {
        const INF: i32 = 0x7f80_0000;
        let mut bad = false;
        for (slot, block) in self.maxima.iter_mut().zip(self.x.chunks(BLOCK)) {
            let (mut high, mut wide) = (i32::MIN, 0i32);
            for &v in block {
                high = high.max(key(v));
                // +inf and every NaN, but not -inf
                let bits = v.to_bits() as i32;
                let odd = bits & 0x7fff_ffff;
                wide = wide.max(if bits == INF { INF + 1 } else { odd });
            }
            *slot = high;
            bad |= wide > INF;
        }
        bad
    }
}

/// The `count`-th largest maximum, so that at least `count` logits are no smaller. The smallest maximum if there are fewer blocks.
pub fn border(maxima: &[i32], count: usize, scratch: &mut Vec<i32>) -> i32 {
    if count >= maxima.len() {
        return NEG_INF;
    }
    scratch.clear();
    scratch.extend_from_slice(maxima);
    *scratch.select_nth_unstable_by(count - 1, |a, b| b.cmp(a)).1
}

/// Whether a key belongs to a logit above -inf.
#[inline(always)]
pub fn finite(key: i32) -> bool {
    key > NEG_INF
}
