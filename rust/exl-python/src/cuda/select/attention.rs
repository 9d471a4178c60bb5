//! The kernels of attention that a card runs, without launching anything.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::ops::Element;
use exl_cuda::ops::attention::{self, Call as AttentionCall, select::Rotated};
use exl_cuda::ops::kv::Kind;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{CudaCard, RefusedKernel, named};

/// Whether the launch of attention rotates and stores the keys of a step of `tokens` tokens a sequence; a launch before it does otherwise.
#[pyfunction]
pub fn cuda_attention_stores_keys(tokens: usize) -> bool {
    attention::select::stores_own_keys(tokens)
}

/// Whether attention reads sequences of `tokens` tokens each as those of a decode step: each token may have blocks of its own, and results
/// may be packed as the input of a matmul. Longer ones are read as prompts.
#[pyfunction]
pub fn cuda_is_decode_step(tokens: usize) -> bool {
    attention::select::is_decode_step(tokens)
}

/// The heads of a layer's attention, and the format of their pages.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct AttentionHeads {
    kind: Kind,
    head_dim: usize,
    q_heads: usize,
    kv_heads: usize,
}

#[pymethods]
impl AttentionHeads {
    /// `kind`: format of the pages; `q_heads` query heads over `kv_heads` key heads.
    #[new]
    #[pyo3(signature = (kind, head_dim, *, q_heads, kv_heads))]
    fn new(kind: &str, head_dim: usize, q_heads: usize, kv_heads: usize) -> PyResult<Self> {
        let kind = named(kind)?;
        let whole = kv_heads != 0 && q_heads != 0 && q_heads.is_multiple_of(kv_heads);
        if !whole || !(1..=attention::MAX_DIM).contains(&head_dim) {
            return Err(PyValueError::new_err(format!(
                "{q_heads} query heads over {kv_heads} key heads of {head_dim} dimensions"
            )));
        }
        Ok(Self {
            kind,
            head_dim,
            q_heads,
            kv_heads,
        })
    }
}

/// The properties of a call of attention that decide its kernel.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct AttentionShape {
    call: AttentionCall,
}

#[pymethods]
impl AttentionShape {
    /// `tokens`: query tokens of all `batch` sequences; `keys`: no token sees a key at or beyond this index; `window` and `softcap` as of
    /// `AttentionOptions`. The pages have 256 tokens, and the keys of the call are stored before.
    #[new]
    #[pyo3(signature = (heads, *, batch, tokens, keys, window=0, softcap=0.0))]
    fn new(
        heads: &AttentionHeads,
        batch: usize,
        tokens: usize,
        keys: usize,
        window: usize,
        softcap: f32,
    ) -> Self {
        let &AttentionHeads {
            kind,
            head_dim,
            q_heads,
            kv_heads,
        } = heads;
        let call = AttentionCall {
            kind,
            head_dim,
            q_heads,
            kv_heads,
            element: Element::F16,
            q_stride: q_heads * head_dim,
            batch,
            tokens,
            keys,
            page_size: 256,
            max_pages: keys.div_ceil(256).max(1),
            window,
            capped: softcap != 0.0,
            masked: false,
            new_keys: None,
            rows: attention::Rows::Sequences,
        };
        Self { call }
    }

    /// The call with a block table of `columns` pages of `page_size` tokens.
    fn with_pages(&self, page_size: usize, columns: usize) -> PyResult<Self> {
        if page_size == 0 {
            return Err(PyValueError::new_err("pages of 0 tokens"));
        }
        let (mut call, max_pages) = (self.call, columns);
        (call.page_size, call.max_pages) = (page_size, max_pages);
        Ok(Self { call })
    }

    /// The call whose launch stores its own keys, with `rotated` elements of each head rotated.
    #[pyo3(signature = (rotated, *, interleaved=false))]
    fn with_own_keys(&self, rotated: usize, interleaved: bool) -> Self {
        let mut call = self.call;
        call.new_keys = Some(Rotated {
            elements: rotated,
            interleaved,
        });
        Self { call }
    }

    /// The call with at most `tokens` tokens a row of the block table; `windows` as of `CudaPages.attention`.
    #[pyo3(signature = (tokens, *, windows=false))]
    fn with_rows(&self, tokens: usize, windows: bool) -> Self {
        let mut call = self.call;
        call.rows = attention::Rows::of(tokens, windows);
        Self { call }
    }
}

/// The kernel of a call of attention.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct AttentionPlan {
    /// Name of its function.
    kernel: String,
    refused: Vec<RefusedKernel>,
    /// Blocks that share the keys of a tile of query rows.
    blocks: usize,
}

/// The kernel of a call of attention, as it is launched.
#[pyfunction]
pub fn cuda_select_attention(card: &CudaCard, shape: &AttentionShape) -> AttentionPlan {
    let plan = attention::select::plan(&card.caps, &shape.call);
    AttentionPlan {
        blocks: plan.chunks(),
        refused: plan
            .refused
            .iter()
            .map(|(kernel, why)| RefusedKernel::new(kernel.name(), why))
            .collect(),
        kernel: plan.name,
    }
}

/// Why a card has no kernel of attention for pages of `kind` with heads of `head_dim` elements; None if it has.
#[pyfunction]
pub fn cuda_refusal_of_pages(
    card: &CudaCard,
    kind: &str,
    head_dim: usize,
) -> PyResult<Option<String>> {
    let found = attention::select::check_pages(&card.caps, named(kind)?, head_dim);
    Ok(found.err().map(|why| why.to_string()))
}
