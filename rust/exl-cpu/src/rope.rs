//! Rotary position embedding in place.

use crate::isa::Isa;
use crate::pool;
use crate::simd::{Kernel, Lanes, dispatch};

const PARALLEL_FROM: usize = 1 << 15;

/// Cosines and sines [positions, half], half = rotated dimensions / 2.
#[derive(Clone, Copy, Debug)]
pub struct Tables<'a> {
    pub cos: &'a [f32],
    pub sin: &'a [f32],
    pub half: usize,
    /// Pairs are neighbours (2i, 2i + 1) instead of (i, i + half).
    pub interleaved: bool,
}

/// Errors of [`apply`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RopeError {
    #[error(
        "position {position} outside the tables' 0..{rows}; build the tables for more positions or shorten the context"
    )]
    Position { position: i64, rows: usize },
    #[error("x, tables and positions do not match")]
    Shape,
}

/// Rotate the first `2 * half` dimensions of each head of `x` [tokens, heads, dim] by the tables' row of the token's position.
pub fn apply(
    x: &mut [f32],
    heads: usize,
    dim: usize,
    tables: Tables<'_>,
    positions: &[i64],
) -> Result<(), RopeError> {
    let Tables { cos, sin, half, .. } = tables;
    let per_token = heads * dim;
    if x.len() != positions.len() * per_token || cos.len() != sin.len() || 2 * half > dim {
        return Err(RopeError::Shape);
    }
    if half == 0 || x.is_empty() {
        return Ok(());
    }
    let rows = cos.len() / half;
    if let Some(&position) = positions.iter().find(|&&p| p < 0 || p as usize >= rows) {
        return Err(RopeError::Position { position, rows });
    }
    let tokens = positions.len();
    let per_task = if x.len() < PARALLEL_FROM {
        tokens
    } else {
        (PARALLEL_FROM / 4 / per_token).max(1)
    };
    let (isa, base) = (Isa::current(), x.as_mut_ptr() as usize);
    pool::run(tokens.div_ceil(per_task), &|task| {
        for t in task * per_task..((task + 1) * per_task).min(tokens) {
            let row = positions[t] as usize * half;
            // SAFETY: token `t` lies within `x`, and only this task uses it.
            let token = unsafe {
                std::slice::from_raw_parts_mut((base as *mut f32).add(t * per_token), per_token)
            };
            dispatch(
                isa,
                Token {
                    x: token,
                    dim,
                    cos: &cos[row..row + half],
                    sin: &sin[row..row + half],
                    interleaved: tables.interleaved,
                },
            );
        }
    });
    Ok(())
}

struct Token<'a> {
    x: &'a mut [f32],
    dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    interleaved: bool,
}

impl Kernel for Token<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        for head in self.x.chunks_exact_mut(self.dim) {
            if self.interleaved {
                for (pair, (&c, &s)) in head.chunks_exact_mut(2).zip(self.cos.iter().zip(self.sin))
                {
                    let (a, b) = (pair[0], pair[1]);
                    pair[0] = a * c - b * s;
                    pair[1] = b * c + a * s;
                }
            } else {
                let (first, second) = head.split_at_mut(self.cos.len());
                halves::<V>(first, second, self.cos, self.sin);
            }
        }
    }
}

#[inline(always)]
fn halves<V: Lanes>(first: &mut [f32], second: &mut [f32], cos: &[f32], sin: &[f32]) {
    let n = cos.len();
    let mut i = 0;
    while i + V::LANES <= n {
        // SAFETY: `first`, `cos` and `sin` have n elements, `second` at least n.
        unsafe {
            let (a, b) = (
                V::load(first.as_ptr().add(i)),
                V::load(second.as_ptr().add(i)),
            );
            let (c, s) = (V::load(cos.as_ptr().add(i)), V::load(sin.as_ptr().add(i)));
            a.mul(c).sub(b.mul(s)).store(first.as_mut_ptr().add(i));
            b.mul(c).add(a.mul(s)).store(second.as_mut_ptr().add(i));
        }
        i += V::LANES;
    }
    for i in i..n {
        let (a, b) = (first[i], second[i]);
        first[i] = a * cos[i] - b * sin[i];
        second[i] = b * cos[i] + a * sin[i];
    }
}
