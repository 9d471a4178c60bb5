//! Whole sub-layers of a decoder in one call. They run the same kernels in the same order as separate calls, so results are bitwise
//! identical. One call avoids the way through Python between kernels, which for one token costs about as much as the small kernels.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use crate::activation::{Activation, activate_in_place};
use crate::attention::{Attention, AttentionError, paged_attention};
use crate::kv::{self, KvError, Pages};
use crate::matmul::{QuantMatrix, matmul_together};
use crate::norm::{Norm, normalize, normalize_in_place};
use crate::pool;
use crate::rope::{self, RopeError, Tables};

/// Rows (tokens) that go through a block together: more are not faster, and scratch memory grows in proportion.
pub const CHUNK_ROWS: usize = 512;
/// Elements of a residual sum that one task adds.
const PER_TASK: usize = 1 << 15;

/// Errors of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    #[error("{what}: {got}, expected {expected}")]
    Size {
        what: &'static str,
        got: usize,
        expected: usize,
    },
    #[error(transparent)]
    Rope(#[from] RopeError),
    #[error(transparent)]
    Kv(#[from] KvError),
    #[error(transparent)]
    Attention(#[from] AttentionError),
}

/// Places and visible keys of a call's tokens; the fields are those of the kernels.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// [batch, max_pages]
    pub block_table: &'a [i32],
    pub max_pages: usize,
    /// [tokens]
    pub rows: &'a [i32],
    /// [tokens]
    pub positions: &'a [i32],
    /// [tokens]
    pub slots: &'a [i64],
    /// [tokens], rows of the tables
    pub rope_positions: &'a [i64],
    pub tables: Tables<'a>,
    /// [batch, width]
    pub key_mask: Option<(&'a [f32], usize)>,
}

impl Tokens<'_> {
    /// Tokens [first, last).
    fn range(&self, first: usize, last: usize) -> Self {
        Self {
            rows: &self.rows[first..last],
            positions: &self.positions[first..last],
            slots: &self.slots[first..last],
            rope_positions: &self.rope_positions[first..last],
            ..*self
        }
    }

    /// Whether the tokens of each sequence have increasing positions. Then a cut of the call leaves no query before a key that it sees.
    fn keys_come_before_queries(&self) -> bool {
        let batch = self.block_table.len() / self.max_pages.max(1);
        let mut reached = vec![i32::MIN; batch];
        self.rows
            .iter()
            .zip(self.positions)
            .all(|(&row, &position)| {
                let Some(last) = usize::try_from(row)
                    .ok()
                    .and_then(|row| reached.get_mut(row))
                else {
                    return false; // the attention kernel rejects it
                };
                let rising = position >= *last;
                *last = position;
                rising
            })
    }
}

thread_local! {
    /// Activation memory of earlier calls: page faults of new memory would slow a prompt down.
    static KEPT: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// `len` floats of the calling thread's kept memory; undefined until written.
pub(crate) struct Scratch {
    memory: Vec<f32>,
    len: usize,
}

impl Scratch {
    pub(crate) fn new(len: usize) -> Self {
        let mut memory = KEPT.with_borrow_mut(Vec::pop).unwrap_or_default();
        if memory.len() < len {
            memory.resize(len, 0.0);
        }
        Self { memory, len }
    }
}

impl Deref for Scratch {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.memory[..self.len]
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.memory[..self.len]
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        // While the thread ends, the memory is freed instead.
        let _ = KEPT.try_with(|kept| kept.borrow_mut().push(memory));
    }
}

/// A norm inside a block: rows of `dim` elements, with weights for one or more rows that are used cyclically (one a head).
#[derive(Clone, Copy, Debug)]
pub struct RowNorm<'a> {
    pub norm: Norm<'a>,
    pub dim: usize,
    pub eps: f32,
}

impl RowNorm<'_> {
    fn apply(&self, x: &[f32]) -> Scratch {
        let mut out = Scratch::new(x.len());
        normalize(self.norm, x, self.dim, self.eps, &mut out);
        out
    }

    fn apply_in_place(&self, x: &mut [f32]) {
        normalize_in_place(self.norm, x, self.dim, self.eps);
    }

    /// Check that the norm takes rows of `width`, in whole multiples of its weights and in pieces of `dim`.
    fn check(&self, what: &'static str, width: usize, dim: usize) -> Result<(), BlockError> {
        expect(what, self.dim, dim)?;
        let weights = self.norm.weights();
        if weights == 0 || !width.is_multiple_of(weights) || !weights.is_multiple_of(dim) {
            return expect(what, weights, width);
        }
        Ok(())
    }
}

/// The input of a block's matrices: normalized, or None without a norm.
fn normalized(norm: Option<RowNorm<'_>>, x: &[f32]) -> Option<Scratch> {
    norm.map(|norm| norm.apply(x))
}

/// x += post(o(attention(rope(q_norm(q(h))), rope(k_norm(k(h))), v(h)))) with h = norm(x); norms are optional.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBlock<'a> {
    pub norm: Option<RowNorm<'a>>,
    pub q_norm: Option<RowNorm<'a>>,
    pub k_norm: Option<RowNorm<'a>>,
    pub post: Option<RowNorm<'a>>,
    pub q: &'a QuantMatrix,
    pub k: &'a QuantMatrix,
    pub v: &'a QuantMatrix,
    pub o: &'a QuantMatrix,
    pub head_dim: usize,
    pub scale: f32,
    pub window: usize,
    pub softcap: f32,
    /// q, k and v are clamped to +- this value if it is above zero.
    pub clip: f32,
}

impl AttentionBlock<'_> {
    /// Check that the matrices fit each other, the norms and `head_dim`.
    pub fn check(&self) -> Result<(), BlockError> {
        let hidden = self.q.in_features();
        let (q, k, d) = (
            self.q.out_features(),
            self.k.out_features(),
            self.head_dim.max(1),
        );
        for (what, got, expected) in [
            ("inputs of q", self.q.in_features(), hidden),
            ("inputs of k", self.k.in_features(), hidden),
            ("inputs of v", self.v.in_features(), hidden),
            ("outputs of q beyond whole heads", q % d, 0),
            ("outputs of k beyond whole heads", k % d, 0),
            ("outputs of v", self.v.out_features(), k),
            ("inputs of o", self.o.in_features(), q),
            ("outputs of o", self.o.out_features(), hidden),
        ] {
            expect(what, got, expected)?;
        }
        for (what, norm, width) in [
            ("weights of the norm", self.norm, hidden),
            ("weights of the post norm", self.post, hidden),
        ] {
            if let Some(norm) = norm {
                norm.check(what, width, hidden)?;
            }
        }
        for (what, norm, width) in [
            ("weights of the norm of q", self.q_norm, q),
            ("weights of the norm of k", self.k_norm, k),
        ] {
            if let Some(norm) = norm {
                norm.check(what, width, if norm.dim == width { width } else { d })?;
            }
        }
        Ok(())
    }

    /// Add the block's output to `x` [tokens, hidden] and the tokens' keys and values to `pages`.
    pub fn forward(
        &self,
        x: &mut [f32],
        tokens: &Tokens<'_>,
        pages: &Pages,
    ) -> Result<(), BlockError> {
        let (n, hidden) = (tokens.rows.len(), self.q.in_features());
        expect("elements of x", x.len(), n * hidden)?;
        expect("positions", tokens.positions.len(), n)?;
        expect("slots", tokens.slots.len(), n)?;
        expect("RoPE positions", tokens.rope_positions.len(), n)?;
        expect("head_dim of the pages", pages.head_dim, self.head_dim)?;
        let at_once = if tokens.keys_come_before_queries() {
            CHUNK_ROWS
        } else {
            n.max(1)
        };
        for first in (0..n).step_by(at_once) {
            let last = (first + at_once).min(n);
            let part = &mut x[first * hidden..last * hidden];
            self.forward_chunk(part, &tokens.range(first, last), pages)?;
        }
        Ok(())
    }

    fn forward_chunk(
        &self,
        x: &mut [f32],
        tokens: &Tokens<'_>,
        pages: &Pages,
    ) -> Result<(), BlockError> {
        let n = tokens.rows.len();
        let h = normalized(self.norm, x);
        let h = h.as_deref().unwrap_or(x);
        let [mut q, mut k, mut v] = matmuls([self.q, self.k, self.v], h, n);
        if self.clip > 0.0 {
            for values in [&mut q, &mut k, &mut v] {
                for value in values.iter_mut() {
                    *value = value.clamp(-self.clip, self.clip);
                }
            }
        }
        for (norm, values) in [(self.q_norm, &mut q), (self.k_norm, &mut k)] {
            if let Some(norm) = norm {
                norm.apply_in_place(values);
            }
        }
        let heads = self.q.out_features() / self.head_dim;
        let kv_heads = self.k.out_features() / self.head_dim;
        rope::apply(
            &mut q,
            heads,
            self.head_dim,
            tokens.tables,
            tokens.rope_positions,
        )?;
        rope::apply(
            &mut k,
            kv_heads,
            self.head_dim,
            tokens.tables,
            tokens.rope_positions,
        )?;
        kv::store(pages, &k, &v, tokens.slots)?;
        let attention = Attention {
            q: &q,
            q_heads: heads,
            pages,
            block_table: tokens.block_table,
            max_pages: tokens.max_pages,
            rows: tokens.rows,
            positions: tokens.positions,
            scale: self.scale,
            window: self.window,
            softcap: self.softcap,
            key_mask: tokens.key_mask,
        };
        let mut mixed = Scratch::new(q.len());
        paged_attention(&attention, &mut mixed)?;
        let [mut y] = matmuls([self.o], &mixed, n);
        if let Some(post) = self.post {
            post.apply_in_place(&mut y);
        }
        add(x, &y);
        Ok(())
    }
}

/// x += post(down(activation(gate(h)) * up(h))) with h = norm(x); without a gate: x += post(down(activation(up(h)))).
#[derive(Clone, Copy, Debug)]
pub struct Mlp<'a> {
    pub norm: Option<RowNorm<'a>>,
    pub post: Option<RowNorm<'a>>,
    pub gate: Option<&'a QuantMatrix>,
    pub up: &'a QuantMatrix,
    pub down: &'a QuantMatrix,
    pub activation: Activation,
}

impl Mlp<'_> {
    /// Check that the matrices fit each other and the norms.
    pub fn check(&self) -> Result<(), BlockError> {
        let (hidden, inner) = (self.up.in_features(), self.up.out_features());
        let gate = self.gate.unwrap_or(self.up);
        for (what, got, expected) in [
            ("inputs of gate", gate.in_features(), hidden),
            ("outputs of gate", gate.out_features(), inner),
            ("inputs of down", self.down.in_features(), inner),
            ("outputs of down", self.down.out_features(), hidden),
        ] {
            expect(what, got, expected)?;
        }
        for (what, norm) in [
            ("weights of the norm", self.norm),
            ("weights of the post norm", self.post),
        ] {
            if let Some(norm) = norm {
                norm.check(what, hidden, hidden)?;
            }
        }
        Ok(())
    }

    /// Add the block's output to `x` [rows, hidden].
    pub fn forward(&self, x: &mut [f32]) -> Result<(), BlockError> {
        let hidden = self.up.in_features();
        expect(
            "elements of x beyond whole rows",
            x.len() % hidden.max(1),
            0,
        )?;
        for part in x.chunks_mut(CHUNK_ROWS * hidden.max(1)) {
            self.forward_chunk(part, part.len() / hidden);
        }
        Ok(())
    }

    fn forward_chunk(&self, x: &mut [f32], rows: usize) {
        let h = normalized(self.norm, x);
        let h = h.as_deref().unwrap_or(x);
        let inner = if let Some(gate) = self.gate {
            let [mut gate, up] = matmuls([gate, self.up], h, rows);
            activate_in_place(self.activation, &mut gate, Some(&up));
            gate
        } else {
            let [mut up] = matmuls([self.up], h, rows);
            activate_in_place(self.activation, &mut up, None);
            up
        };
        let [mut y] = matmuls([self.down], &inner, rows);
        if let Some(post) = self.post {
            post.apply_in_place(&mut y);
        }
        add(x, &y);
    }
}

fn expect(what: &'static str, got: usize, expected: usize) -> Result<(), BlockError> {
    if got == expected {
        Ok(())
    } else {
        Err(BlockError::Size {
            what,
            got,
            expected,
        })
    }
}

/// Matmuls of one input, as one job of the pool.
fn matmuls<const M: usize>(matrices: [&QuantMatrix; M], x: &[f32], rows: usize) -> [Scratch; M] {
    let mut outs = matrices.map(|matrix| Scratch::new(rows * matrix.out_features()));
    let out_slices = outs.iter_mut().map(|out| &mut **out);
    let mut jobs: Vec<_> = matrices.into_iter().zip(out_slices).collect();
    matmul_together(&mut jobs, x, rows);
    outs
}

fn add(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "both sides of a residual sum");
    let (base, len) = (x.as_mut_ptr() as usize, x.len());
    pool::run(len.div_ceil(PER_TASK), &|task| {
        let first = task * PER_TASK;
        let n = PER_TASK.min(len - first);
        // SAFETY: `first + n <= len`, and each task has a separate range.
        let part = unsafe { std::slice::from_raw_parts_mut((base as *mut f32).add(first), n) };
        for (a, b) in part.iter_mut().zip(&y[first..first + n]) {
            *a += b;
        }
    });
}
