//! Whole sub-layers of a decoder in one call: the same kernels in the same order as calling them one by one, hence the same bits,
//! without a trip to Python between them. For one token that trip costs about as much as the small kernels themselves.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use crate::activation::{Activation, activate_in_place};
use crate::attention::{Attention, AttentionError, paged_attention};
use crate::kv::{self, KvError, Pages};
use crate::matmul::{QuantMatrix, matmul_together};
use crate::norm::{Norm, normalize};
use crate::pool;
use crate::rope::{self, RopeError, Tables};

/// Tokens that go through a block together: more give no speed, and would cost scratch memory in proportion.
const CHUNK: usize = 512;
/// Elements of a residual sum that one task adds.
const PER_TASK: usize = 1 << 15;

/// Why a block refused.
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

/// Where the tokens of a call lie and what they see; the fields are those of the kernels they go to.
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

    /// Whether every sequence's tokens come in rising order of position, so that cutting the call in two leaves no query
    /// before a key that it sees.
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
                    return false; // refused by the attention kernel
                };
                let rising = position >= *last;
                *last = position;
                rising
            })
    }
}

thread_local! {
    /// Activations of calls gone by, kept for the next: fresh memory costs a prompt a quarter of its time in page faults.
    static KEPT: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// `len` floats of the calling thread's kept memory; they hold anything until written.
struct Scratch {
    memory: Vec<f32>,
    len: usize,
}

impl Scratch {
    fn new(len: usize) -> Self {
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
        // During the thread's end there is nothing left to keep it for.
        let _ = KEPT.try_with(|kept| kept.borrow_mut().push(memory));
    }
}

/// RMSNorm in front of a block.
#[derive(Clone, Copy, Debug)]
pub struct PreNorm<'a> {
    pub weight: &'a [f32],
    pub eps: f32,
}

impl PreNorm<'_> {
    fn apply(&self, x: &[f32]) -> Scratch {
        let mut out = Scratch::new(x.len());
        let norm = Norm::Rms {
            weight: self.weight,
            offset: 0.0,
        };
        normalize(norm, x, self.weight.len(), self.eps, &mut out);
        out
    }
}

/// x += o(attention(rope(q(h)), rope(k(h)), v(h))) with h = norm(x).
#[derive(Clone, Copy, Debug)]
pub struct AttentionBlock<'a> {
    pub norm: PreNorm<'a>,
    pub q: &'a QuantMatrix,
    pub k: &'a QuantMatrix,
    pub v: &'a QuantMatrix,
    pub o: &'a QuantMatrix,
    pub head_dim: usize,
    pub scale: f32,
    pub window: usize,
    pub softcap: f32,
}

impl AttentionBlock<'_> {
    /// Whether the matrices fit each other, the norm and `head_dim`.
    pub fn check(&self) -> Result<(), BlockError> {
        let hidden = self.norm.weight.len();
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
        Ok(())
    }

    /// Adds the block's output to `x` [tokens, hidden] and the tokens' keys and values to `pages`.
    pub fn forward(
        &self,
        x: &mut [f32],
        tokens: &Tokens<'_>,
        pages: &Pages,
    ) -> Result<(), BlockError> {
        let (n, hidden) = (tokens.rows.len(), self.norm.weight.len());
        expect("elements of x", x.len(), n * hidden)?;
        expect("positions", tokens.positions.len(), n)?;
        expect("slots", tokens.slots.len(), n)?;
        expect("RoPE positions", tokens.rope_positions.len(), n)?;
        expect("head_dim of the pages", pages.head_dim, self.head_dim)?;
        let at_once = if tokens.keys_come_before_queries() {
            CHUNK
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
        let h = self.norm.apply(x);
        let [mut q, mut k, v] = products([self.q, self.k, self.v], &h, n);
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
        let [y] = products([self.o], &mixed, n);
        add(x, &y);
        Ok(())
    }
}

/// x += down(activation(gate(h)) * up(h)) with h = norm(x).
#[derive(Clone, Copy, Debug)]
pub struct GatedMlp<'a> {
    pub norm: PreNorm<'a>,
    pub gate: &'a QuantMatrix,
    pub up: &'a QuantMatrix,
    pub down: &'a QuantMatrix,
    pub activation: Activation,
}

impl GatedMlp<'_> {
    /// Whether the matrices fit each other and the norm.
    pub fn check(&self) -> Result<(), BlockError> {
        let (hidden, inner) = (self.norm.weight.len(), self.gate.out_features());
        for (what, got, expected) in [
            ("inputs of gate", self.gate.in_features(), hidden),
            ("inputs of up", self.up.in_features(), hidden),
            ("outputs of up", self.up.out_features(), inner),
            ("inputs of down", self.down.in_features(), inner),
            ("outputs of down", self.down.out_features(), hidden),
        ] {
            expect(what, got, expected)?;
        }
        Ok(())
    }

    /// Adds the block's output to `x` [rows, hidden].
    pub fn forward(&self, x: &mut [f32]) -> Result<(), BlockError> {
        let hidden = self.norm.weight.len();
        expect(
            "elements of x beyond whole rows",
            x.len() % hidden.max(1),
            0,
        )?;
        for part in x.chunks_mut(CHUNK * hidden.max(1)) {
            self.forward_chunk(part, part.len() / hidden);
        }
        Ok(())
    }

    fn forward_chunk(&self, x: &mut [f32], rows: usize) {
        let h = self.norm.apply(x);
        let [mut gate, up] = products([self.gate, self.up], &h, rows);
        activate_in_place(self.activation, &mut gate, Some(&up));
        let [y] = products([self.down], &gate, rows);
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

/// Products of one input, as one job of the pool.
fn products<const M: usize>(matrices: [&QuantMatrix; M], x: &[f32], rows: usize) -> [Scratch; M] {
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
        // SAFETY: `first + n <= len`, and each task has a range of its own.
        let part = unsafe { std::slice::from_raw_parts_mut((base as *mut f32).add(first), n) };
        for (a, b) in part.iter_mut().zip(&y[first..first + n]) {
            *a += b;
        }
    });
}
