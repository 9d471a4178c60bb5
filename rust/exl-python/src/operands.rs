//! Operands that several calls share: the target of a launch, the visible keys, and the rotation of positions.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use pyo3::prelude::*;

use crate::tensor::Tensor;

/// Queueing of kernels: the stream, as the driver's handle, and whether a kernel may begin while its predecessor drains (programmatic
/// dependent launch).
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct Launch {
    pub stream: usize,
    pub programmatic: bool,
}

impl Launch {
    /// A launch on `stream` after all work queued there before.
    pub fn in_order(stream: usize) -> Self {
        Self {
            stream,
            programmatic: false,
        }
    }
}

#[pymethods]
impl Launch {
    #[new]
    fn new(stream: usize, programmatic: bool) -> Self {
        Self {
            stream,
            programmatic,
        }
    }
}

/// The keys that the tokens of a call see.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct AttentionTables {
    pub block_table: Tensor,
    pub rows: Tensor,
    pub positions: Tensor,
    pub key_mask: Option<Tensor>,
    pub max_keys: Option<usize>,
}

#[pymethods]
impl AttentionTables {
    /// `block_table` int32 [B, max_pages], `rows` and `positions` int32 [T], `key_mask` float32 [B, width]. Every position is below
    /// `max_keys`, which is the capacity of the block table by default.
    #[new]
    #[pyo3(signature = (block_table, *, rows, positions, key_mask=None, max_keys=None))]
    fn new(
        block_table: Tensor,
        rows: Tensor,
        positions: Tensor,
        key_mask: Option<Tensor>,
        max_keys: Option<usize>,
    ) -> Self {
        Self {
            block_table,
            rows,
            positions,
            key_mask,
            max_keys,
        }
    }
}

impl AttentionTables {
    /// The tensors, named for errors.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        [
            ("block_table", &self.block_table),
            ("rows", &self.rows),
            ("positions", &self.positions),
        ]
        .into_iter()
        .chain(self.key_mask.as_ref().map(|mask| ("key_mask", mask)))
    }
}

/// A layer's options for scores and weights.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct AttentionOptions {
    pub scale: f32,
    pub window: usize,
    pub softcap: f32,
}

#[pymethods]
impl AttentionOptions {
    /// `scale` of q * k; `window`: number of keys that a token sees, 0 for all before it; `softcap`: limit of scores, 0 for none.
    #[new]
    #[pyo3(signature = (scale, *, window, softcap))]
    fn new(scale: f32, window: usize, softcap: f32) -> Self {
        Self {
            scale,
            window,
            softcap,
        }
    }
}

/// Rotary position embedding of a call's tokens.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct Rotation {
    pub cos: Tensor,
    pub sin: Tensor,
    pub positions: Tensor,
    pub interleaved: bool,
}

#[pymethods]
impl Rotation {
    /// `cos` and `sin` float32 [S, R/2], `positions` int64 [T]; `interleaved`: pairs are neighbours, not halves.
    #[new]
    #[pyo3(signature = (*, cos, sin, positions, interleaved))]
    fn new(cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Self {
        Self {
            cos,
            sin,
            positions,
            interleaved,
        }
    }
}

impl Rotation {
    /// The tensors, named for errors.
    pub fn tensors(&self) -> [(&'static str, &Tensor); 3] {
        [
            ("cos", &self.cos),
            ("sin", &self.sin),
            ("rope_positions", &self.positions),
        ]
    }
}
