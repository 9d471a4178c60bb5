//! Bindings of the `attention` subject.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cpu::attention::{self, Attention};
use pyo3::prelude::*;

use crate::cpu::kv::Pages;
use crate::errors::shape_error;
use crate::operands::AttentionTables;
use crate::tensor::{Tensor, same_shape};

/// See `exl_kernels.attention.paged_attention`.
#[pyfunction]
#[pyo3(signature = (q, pages, tables, *, scale, window, softcap, out))]
pub fn paged_attention(
    py: Python<'_>,
    q: Tensor,
    pages: &Bound<'_, Pages>,
    tables: &AttentionTables,
    scale: f32,
    window: usize,
    softcap: f32,
    out: Tensor,
) -> PyResult<()> {
    let AttentionTables {
        block_table,
        rows,
        positions,
        key_mask,
        ..
    } = tables;
    let (&[_, q_heads, _], &[_, max_pages]) = (&q.shape[..], &block_table.shape[..]) else {
        return Err(shape_error(
            py,
            "paged_attention: q must be [T, Hq, D], block_table [B, max_pages]".into(),
        ));
    };
    let inner = pages.get().get_checked(py)?;
    let tokens = q.shape[0];
    same_shape("q", &q, &[tokens, q_heads, inner.head_dim()])?;
    same_shape("out", &out, &q.shape)?;
    same_shape("rows", rows, &[tokens])?;
    same_shape("positions", positions, &[tokens])?;
    if softcap < 0.0 {
        return Err(shape_error(
            py,
            format!("paged_attention: softcap {softcap}, expected 0 or more"),
        ));
    }
    if let Some(mask) = key_mask {
        let width = mask.shape.last().copied().unwrap_or(0);
        same_shape("key_mask", mask, &[block_table.shape[0], width])?;
    }
    let key_mask = match key_mask {
        Some(mask) => Some((
            mask.slice("key_mask")?,
            mask.shape.last().copied().unwrap_or(0),
        )),
        None => None,
    };
    let args = Attention {
        q: q.slice("q")?,
        q_heads,
        pages: inner,
        block_table: block_table.slice("block_table")?,
        max_pages,
        rows: rows.slice("rows")?,
        positions: positions.slice("positions")?,
        scale,
        window,
        softcap,
        key_mask,
    };
    let out = out.slice_mut("out")?;
    py.detach(|| attention::paged_attention(&args, out))
        .map_err(|error| shape_error(py, format!("paged_attention: {error}")))
}
