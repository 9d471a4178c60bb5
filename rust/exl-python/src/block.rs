//! Bindings of the `block` subject: sub-layers that hold their matrices, and the tokens of a call.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cpu::activation::Activation;
use exl_cpu::block::{self, BlockError, PreNorm};
use exl_cpu::rope::Tables;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::kv::Pages;
use crate::linear::Matrix;
use crate::tensor::{Tensor, shape_error};

fn refused(py: Python<'_>, what: &str, error: BlockError) -> PyErr {
    shape_error(py, format!("{what}: {error}"))
}

/// Where the tokens of one step lie: made once, used by every layer.
#[pyclass(frozen, name = "Tokens")]
pub struct Tokens {
    rows: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_table: Tensor,
    rope_positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_mask: Option<Tensor>,
    interleaved: bool,
}

#[pymethods]
impl Tokens {
    #[new]
    #[pyo3(signature = (rows, positions, slots, block_table, rope_positions, cos, sin, key_mask, interleaved))]
    fn new(
        py: Python<'_>,
        rows: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_table: Tensor,
        rope_positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_mask: Option<Tensor>,
        interleaved: bool,
    ) -> PyResult<Self> {
        if block_table.shape.len() != 2
            || cos.shape.len() != 2
            || key_mask.as_ref().is_some_and(|mask| mask.shape.len() != 2)
        {
            return Err(shape_error(
                py,
                "Tokens: block_table [B, max_pages], cos [S, R/2] and key_mask [B, S] have two dimensions".into(),
            ));
        }
        let tokens = Self {
            rows,
            positions,
            slots,
            block_table,
            rope_positions,
            cos,
            sin,
            key_mask,
            interleaved,
        };
        tokens.view()?; // element types
        Ok(tokens)
    }
}

impl Tokens {
    fn view(&self) -> PyResult<block::Tokens<'_>> {
        let key_mask = match &self.key_mask {
            Some(mask) => Some((mask.slice("key_mask")?, mask.shape[1])),
            None => None,
        };
        Ok(block::Tokens {
            block_table: self.block_table.slice("block_table")?,
            max_pages: self.block_table.shape[1],
            rows: self.rows.slice("rows")?,
            positions: self.positions.slice("positions")?,
            slots: self.slots.slice("slots")?,
            rope_positions: self.rope_positions.slice("rope_positions")?,
            tables: Tables {
                cos: self.cos.slice("cos")?,
                sin: self.sin.slice("sin")?,
                half: self.cos.shape[1],
                interleaved: self.interleaved,
            },
            key_mask,
        })
    }
}

fn pre_norm(weight: &Tensor, eps: f32) -> PyResult<PreNorm<'_>> {
    Ok(PreNorm {
        weight: weight.slice("norm weight")?,
        eps,
    })
}

/// Norm, q, k, v, RoPE, cache, attention, o, residual.
#[pyclass(frozen, name = "AttentionBlock")]
pub struct AttentionBlock {
    norm: Tensor,
    eps: f32,
    matrices: [Py<Matrix>; 4],
    head_dim: usize,
    scale: f32,
    window: usize,
    softcap: f32,
}

#[pymethods]
impl AttentionBlock {
    #[new]
    fn new(
        py: Python<'_>,
        norm: Tensor,
        eps: f32,
        matrices: [Py<Matrix>; 4],
        head_dim: usize,
        scale: f32,
        window: usize,
        softcap: f32,
    ) -> PyResult<Self> {
        let made = Self {
            norm,
            eps,
            matrices,
            head_dim,
            scale,
            window,
            softcap,
        };
        made.view()?
            .check()
            .map_err(|e| refused(py, "AttentionBlock", e))?;
        Ok(made)
    }

    /// x [T, hidden] float32, in place.
    fn forward(
        &self,
        py: Python<'_>,
        x: Tensor,
        tokens: &Bound<'_, Tokens>,
        pages: &Bound<'_, Pages>,
    ) -> PyResult<()> {
        let block = self.view()?;
        let (x, tokens, pages) = (
            x.slice_mut("x")?,
            tokens.get().view()?,
            pages.get().get_checked(py)?,
        );
        py.detach(|| block.forward(x, &tokens, pages))
            .map_err(|e| refused(py, "attention block", e))
    }
}

impl AttentionBlock {
    fn view(&self) -> PyResult<block::AttentionBlock<'_>> {
        let [q, k, v, o] = &self.matrices;
        Ok(block::AttentionBlock {
            norm: pre_norm(&self.norm, self.eps)?,
            q: &q.get().inner,
            k: &k.get().inner,
            v: &v.get().inner,
            o: &o.get().inner,
            head_dim: self.head_dim,
            scale: self.scale,
            window: self.window,
            softcap: self.softcap,
        })
    }
}

/// Norm, gate, up, activation, down, residual.
#[pyclass(frozen, name = "GatedMlpBlock")]
pub struct GatedMlpBlock {
    norm: Tensor,
    eps: f32,
    matrices: [Py<Matrix>; 3],
    activation: Activation,
}

#[pymethods]
impl GatedMlpBlock {
    #[new]
    fn new(
        py: Python<'_>,
        norm: Tensor,
        eps: f32,
        matrices: [Py<Matrix>; 3],
        activation: &str,
    ) -> PyResult<Self> {
        let activation = Activation::from_name(activation)
            .ok_or_else(|| PyValueError::new_err(format!("unknown activation {activation:?}")))?;
        let made = Self {
            norm,
            eps,
            matrices,
            activation,
        };
        made.view()?
            .check()
            .map_err(|e| refused(py, "GatedMlpBlock", e))?;
        Ok(made)
    }

    /// x [T, hidden] float32, in place.
    fn forward(&self, py: Python<'_>, x: Tensor) -> PyResult<()> {
        let block = self.view()?;
        let x = x.slice_mut("x")?;
        py.detach(|| block.forward(x))
            .map_err(|e| refused(py, "MLP block", e))
    }
}

impl GatedMlpBlock {
    fn view(&self) -> PyResult<block::GatedMlp<'_>> {
        let [gate, up, down] = &self.matrices;
        Ok(block::GatedMlp {
            norm: pre_norm(&self.norm, self.eps)?,
            gate: &gate.get().inner,
            up: &up.get().inner,
            down: &down.get().inner,
            activation: self.activation,
        })
    }
}

/// Adds this subject's classes to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<Tokens>()?;
    m.add_class::<AttentionBlock>()?;
    m.add_class::<GatedMlpBlock>()
}
