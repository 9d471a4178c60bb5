//! Bindings of the `block` subject: sub-layers that hold their matrices, and the tokens of a call.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cpu::activation::Activation;
use exl_cpu::block::{self, BlockError, RowNorm};
use exl_cpu::norm::Norm;
use exl_cpu::rope::Tables;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cpu::kv::Pages;
use crate::cpu::linear::Matrix;
use crate::errors::shape_error;
use crate::operands::{AttentionTables, Rotation};
use crate::tensor::Tensor;

fn refused(py: Python<'_>, what: &str, error: BlockError) -> PyErr {
    shape_error(py, format!("{what}: {error}"))
}

/// Operands of a step's tokens: made once, used by every layer.
#[pyclass(frozen, name = "Tokens", module = "exl_kernels._native")]
pub struct Tokens {
    tables: Py<AttentionTables>,
    rotation: Py<Rotation>,
    slots: Tensor,
}

#[pymethods]
impl Tokens {
    /// `slots` int64 [T]: the places of the tokens' keys and values.
    #[new]
    fn new(
        py: Python<'_>,
        tables: Py<AttentionTables>,
        rotation: Py<Rotation>,
        slots: Tensor,
    ) -> PyResult<Self> {
        let key_mask = tables.get().key_mask.as_ref();
        if tables.get().block_table.shape.len() != 2
            || rotation.get().cos.shape.len() != 2
            || key_mask.is_some_and(|mask| mask.shape.len() != 2)
        {
            return Err(shape_error(
                py,
                "Tokens: block_table [B, max_pages], cos [S, R/2] and key_mask [B, S] have two dimensions".into(),
            ));
        }
        let tokens = Self {
            tables,
            rotation,
            slots,
        };
        tokens.view()?; // Checks the element types.
        Ok(tokens)
    }
}

impl Tokens {
    fn view(&self) -> PyResult<block::Tokens<'_>> {
        let (tables, rotation) = (self.tables.get(), self.rotation.get());
        let key_mask = match &tables.key_mask {
            Some(mask) => Some((mask.slice("key_mask")?, mask.shape[1])),
            None => None,
        };
        Ok(block::Tokens {
            block_table: tables.block_table.slice("block_table")?,
            max_pages: tables.block_table.shape[1],
            rows: tables.rows.slice("rows")?,
            positions: tables.positions.slice("positions")?,
            slots: self.slots.slice("slots")?,
            rope_positions: rotation.positions.slice("rope_positions")?,
            tables: Tables {
                cos: rotation.cos.slice("cos")?,
                sin: rotation.sin.slice("sin")?,
                half: rotation.cos.shape[1],
                interleaved: rotation.interleaved,
            },
            key_mask,
        })
    }
}

/// A norm inside a block: RMSNorm without a bias, or LayerNorm.
#[pyclass(frozen, name = "BlockNorm")]
pub struct BlockNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f32,
    layer: bool,
}

#[pymethods]
impl BlockNorm {
    #[new]
    #[pyo3(signature = (weight, bias, eps, layer))]
    fn new(
        py: Python<'_>,
        weight: Tensor,
        bias: Option<Tensor>,
        eps: f32,
        layer: bool,
    ) -> PyResult<Self> {
        let shapes_agree = bias.as_ref().is_none_or(|b| b.shape == weight.shape);
        if weight.numel() == 0 || !shapes_agree || (bias.is_some() && !layer) {
            return Err(shape_error(
                py,
                "BlockNorm: weight [D] or [H, D]; a bias of the same shape goes with a layer norm only".into(),
            ));
        }
        let norm = Self {
            weight,
            bias,
            eps,
            layer,
        };
        norm.view()?; // Checks the element types.
        Ok(norm)
    }
}

impl BlockNorm {
    fn view(&self) -> PyResult<RowNorm<'_>> {
        let weight = self.weight.slice("norm weight")?;
        let norm = if self.layer {
            let bias = self
                .bias
                .as_ref()
                .map(|b| b.slice("norm bias"))
                .transpose()?;
            Norm::Layer { weight, bias }
        } else {
            Norm::Rms {
                weight,
                offset: 0.0,
            }
        };
        Ok(RowNorm {
            norm,
            dim: self.weight.shape[self.weight.shape.len() - 1],
            eps: self.eps,
        })
    }
}

type MaybeNorm = Option<Py<BlockNorm>>;

fn view_norm(norm: &MaybeNorm) -> PyResult<Option<RowNorm<'_>>> {
    norm.as_ref().map(|norm| norm.get().view()).transpose()
}

/// Norm, q, k, v, their norms, RoPE, cache, attention, o, post norm, residual.
#[pyclass(frozen, name = "AttentionBlock")]
pub struct AttentionBlock {
    /// The norm before, those of q and of k, and the norm after.
    norms: [MaybeNorm; 4],
    matrices: [Py<Matrix>; 4],
    head_dim: usize,
    scale: f32,
    window: usize,
    softcap: f32,
    clip: f32,
}

#[pymethods]
impl AttentionBlock {
    #[new]
    #[pyo3(signature = (norms, matrices, *, head_dim, scale, window, softcap, clip))]
    fn new(
        py: Python<'_>,
        norms: [MaybeNorm; 4],
        matrices: [Py<Matrix>; 4],
        head_dim: usize,
        scale: f32,
        window: usize,
        softcap: f32,
        clip: f32,
    ) -> PyResult<Self> {
        let made = Self {
            norms,
            matrices,
            head_dim,
            scale,
            window,
            softcap,
            clip,
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
        let [norm, q_norm, k_norm, post] = &self.norms;
        Ok(block::AttentionBlock {
            norm: view_norm(norm)?,
            q_norm: view_norm(q_norm)?,
            k_norm: view_norm(k_norm)?,
            post: view_norm(post)?,
            q: &q.get().inner,
            k: &k.get().inner,
            v: &v.get().inner,
            o: &o.get().inner,
            head_dim: self.head_dim,
            scale: self.scale,
            window: self.window,
            softcap: self.softcap,
            clip: self.clip,
        })
    }
}

/// Norm, gate if there is one, up, activation, down, post norm, residual.
#[pyclass(frozen, name = "MlpBlock")]
pub struct MlpBlock {
    /// The norms before and after.
    norms: [MaybeNorm; 2],
    gate: Option<Py<Matrix>>,
    /// Up and down.
    matrices: [Py<Matrix>; 2],
    activation: Activation,
}

#[pymethods]
impl MlpBlock {
    #[new]
    #[pyo3(signature = (norms, gate, matrices, activation))]
    fn new(
        py: Python<'_>,
        norms: [MaybeNorm; 2],
        gate: Option<Py<Matrix>>,
        matrices: [Py<Matrix>; 2],
        activation: &str,
    ) -> PyResult<Self> {
        let activation = Activation::from_name(activation)
            .ok_or_else(|| PyValueError::new_err(format!("unknown activation {activation:?}")))?;
        let made = Self {
            norms,
            gate,
            matrices,
            activation,
        };
        made.view()?
            .check()
            .map_err(|e| refused(py, "MLP block", e))?;
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

impl MlpBlock {
    fn view(&self) -> PyResult<block::Mlp<'_>> {
        let [up, down] = &self.matrices;
        let [norm, post] = &self.norms;
        Ok(block::Mlp {
            norm: view_norm(norm)?,
            post: view_norm(post)?,
            gate: self.gate.as_ref().map(|gate| &*gate.get().inner),
            up: &up.get().inner,
            down: &down.get().inner,
            activation: self.activation,
        })
    }
}
