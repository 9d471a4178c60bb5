//! Bindings of launches that fuse the operators between two matmuls.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::ops::elementwise::{embedding, norm, residual, rope};
use exl_cuda::ops::kv::rope_store;
use exl_cuda::step::{self, Limits, Request, Sizes};
use pyo3::prelude::*;

use crate::cuda::attention::{CudaPages, MatmulInput, NewKeys, covers};
use crate::cuda::fields::MemoryField;
use crate::cuda::linear::NormPrologue;
use crate::cuda::{element, expect, target};
use crate::errors::device_error;
use crate::operands::{Launch, Rotation};
use crate::tensor::{DType, Tensor};

/// x += y, out = rms_norm(x); all [rows, width] of one type, weight float32 [width].
#[pyfunction]
#[pyo3(signature = (x, *, y, weight, out, eps, weight_offset, launch))]
pub fn cuda_add_rms_norm(
    py: Python<'_>,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: f32,
    weight_offset: f32,
    launch: &Launch,
) -> PyResult<()> {
    let width = x.shape.last().copied().unwrap_or(0);
    for (what, tensor) in [("y", &y), ("out", &out)] {
        let same = tensor.shape == x.shape && tensor.dtype == x.dtype;
        expect(same, &format!("{what} must have the shape and dtype of x"))?;
    }
    expect(
        width > 0 && weight.shape == [width] && weight.dtype == DType::F32,
        "weight must be float32 with the width of x",
    )?;
    let all = [("x", &x), ("y", &y), ("weight", &weight), ("out", &out)];
    let to = target(&all, launch)?;
    let op = residual::AddNorm {
        x: x.ptr,
        y: y.ptr,
        weight: weight.ptr,
        output: out.ptr,
        element: element(&x, "x")?,
        rows: x.numel() / width,
        width,
        eps,
        weight_offset,
    };
    // SAFETY: torch owns the memory; sizes were checked above; torch keeps freed blocks alive for work queued on their stream.
    py.detach(|| unsafe { residual::add_rms_norm(to, &op) })
        .map_err(|e| device_error(py, &e))
}

/// x += post(y), out = norm(x): x [rows, width] float16 or float32, y and out float16. A norm comes with out, or with
/// `into`, whose scratch then has the normed rows packed as a matmul's input.
#[pyfunction]
#[pyo3(signature = (x, *, y, post, norm, out=None, into=None, launch))]
pub fn cuda_add_post_norm(
    py: Python<'_>,
    x: Tensor,
    y: Tensor,
    post: Option<&NormPrologue>,
    norm: Option<&NormPrologue>,
    out: Option<Tensor>,
    into: Option<&MatmulInput>,
    launch: &Launch,
) -> PyResult<()> {
    let width = x.shape.last().copied().unwrap_or(0);
    expect(
        width > 0 && matches!(x.dtype, DType::F16 | DType::F32),
        "x must be float16 or float32",
    )?;
    expect(
        norm.is_some() == (out.is_some() || into.is_some()) && !(out.is_some() && into.is_some()),
        "a norm and its result, out or into, come together",
    )?;
    let mut all = vec![("x", &x), ("y", &y)];
    for (what, tensor) in [("y", Some(&y)), ("out", out.as_ref())] {
        let fits = tensor.is_none_or(|t| t.shape == x.shape && t.dtype == DType::F16);
        expect(fits, &format!("{what} must be float16 of the shape of x"))?;
    }
    all.extend(out.as_ref().map(|out| ("out", out)));
    all.extend(into.map(|into| ("into", &into.scratch)));
    for NormPrologue { weight, .. } in [post, norm].into_iter().flatten() {
        expect(
            weight.shape == [width] && weight.dtype == DType::F32,
            "weights must be float32 with the width of x",
        )?;
        all.push(("weight", weight));
    }
    let to = target(&all, launch)?;
    let row_norm = |norm: Option<&NormPrologue>| {
        norm.map_or_else(residual::RowNorm::default, |norm| residual::RowNorm {
            weight: norm.weight.ptr,
            eps: norm.eps,
            weight_offset: norm.offset,
        })
    };
    let op = residual::PostNorm {
        x: x.ptr,
        element: element(&x, "x")?,
        y: y.ptr,
        post: row_norm(post),
        norm: row_norm(norm),
        output: out.as_ref().map_or(0, |out| out.ptr),
        packed: into
            .map(|into| into.packed(x.numel() / width, width))
            .transpose()?,
        rows: x.numel() / width,
        width,
    };
    // SAFETY: as in `cuda_add_rms_norm`.
    py.detach(|| unsafe { residual::add_post_norm(to, &op) })
        .map_err(|e| device_error(py, &e))
}

/// RMS norms, in place, of the first elements of each row of x [rows, stride] float16: of as many as `first` has, then of as many as
/// `second` has, both float32.
#[pyfunction]
#[pyo3(signature = (x, *, first, second, eps, launch))]
pub fn cuda_rms_norm_parts(
    py: Python<'_>,
    x: Tensor,
    first: Tensor,
    second: Tensor,
    eps: f32,
    launch: &Launch,
) -> PyResult<()> {
    let &[rows, stride] = &x.shape[..] else {
        return expect(false, "x must be [rows, stride]");
    };
    let widths = [first.numel(), second.numel()];
    expect(
        x.dtype == DType::F16
            && first.dtype == DType::F32
            && second.dtype == DType::F32
            && widths.iter().all(|&width| width > 0)
            && widths.iter().sum::<usize>() <= stride,
        "x must be float16 with rows at least as long as both weights, which are float32",
    )?;
    let all = [("x", &x), ("first", &first), ("second", &second)];
    let to = target(&all, launch)?;
    let op = norm::PartNorms {
        x: x.ptr,
        stride,
        weights: [first.ptr, second.ptr],
        widths,
        rows,
        eps,
    };
    // SAFETY: as in `cuda_add_rms_norm`.
    py.detach(|| unsafe { norm::norm_parts(to, &op) })
        .map_err(|e| device_error(py, &e))
}

/// LayerNorm of x [rows, width] float16 with weight and bias float32 [width], packed in the scratch of `into`.
#[pyfunction]
#[pyo3(signature = (x, *, weight, bias, eps, into, launch))]
pub fn cuda_layer_norm_packed(
    py: Python<'_>,
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f32,
    into: &MatmulInput,
    launch: &Launch,
) -> PyResult<()> {
    let &[rows, width] = &x.shape[..] else {
        return expect(false, "x must be [rows, width]");
    };
    expect(x.dtype == DType::F16, "x must be float16")?;
    let mut all = vec![("x", &x), ("into", &into.scratch)];
    for one in [Some(&weight), bias.as_ref()].into_iter().flatten() {
        expect(
            one.shape == [width] && one.dtype == DType::F32,
            "weight and bias must be float32 with the width of x",
        )?;
        all.push(("weight", one));
    }
    let to = target(&all, launch)?;
    let (output, packed) = into.packed(rows, width)?;
    let op = norm::PackedNorm {
        input: x.ptr,
        weight: weight.ptr,
        bias: bias.as_ref().map_or(0, |bias| bias.ptr),
        output,
        packed,
        rows,
        width,
        eps,
    };
    // SAFETY: as in `cuda_add_rms_norm`.
    py.detach(|| unsafe { norm::layer_norm_packed(to, &op) })
        .map_err(|e| device_error(py, &e))
}

/// Rotate q [T, `q_heads`, D] and the new keys in place, and encode the new keys and values into their slots. q is flat, with `q_stride`
/// elements between tokens. Everything except q, keys and values may be read before the preceding launches have ended; there are no norms.
#[pyfunction]
#[pyo3(signature = (pages, q, *, q_stride, q_heads, new_keys, launch))]
pub fn cuda_rope_store(
    py: Python<'_>,
    pages: &Bound<'_, CudaPages>,
    q: Tensor,
    q_stride: usize,
    q_heads: usize,
    new_keys: &NewKeys,
    launch: &Launch,
) -> PyResult<()> {
    let pages = pages.get();
    let NewKeys {
        key,
        value,
        stride,
        rotation,
        slots,
        norms,
        ..
    } = new_keys;
    let Rotation {
        cos,
        sin,
        positions,
        interleaved,
    } = rotation.get();
    expect(norms.is_none(), "norms of q and k come before")?;
    let mut all = vec![("q", &q)];
    all.extend(new_keys.tensors());
    let to = pages.target(&all, launch)?;
    let (heads, dim) = (pages.inner.heads, pages.inner.head_dim);
    let tokens = slots.numel();
    for (what, tensor, stride, width) in [
        ("q", &q, q_stride, q_heads * dim),
        ("k", key, *stride, heads * dim),
        ("v", value, *stride, heads * dim),
    ] {
        let fits = tensor.dtype == q.dtype && covers(tensor, tokens, stride, width);
        expect(fits, &format!("{what} does not fit q, the pages and slots"))?;
    }
    expect(
        cos.shape.len() == 2
            && cos.shape == sin.shape
            && cos.dtype == DType::F32
            && sin.dtype == DType::F32
            && 2 * cos.shape[1] <= dim,
        "cos and sin must be float32 [positions, at most head_dim / 2]",
    )?;
    for (what, tensor) in [("positions", positions), ("slots", slots)] {
        let fits = tensor.dtype == DType::I64 && tensor.shape == [tokens];
        expect(fits, &format!("{what} must be int64 [tokens]"))?;
    }
    let op = rope::Rope {
        x: q.ptr,
        element: element(&q, "q")?,
        cos: cos.ptr,
        sin: sin.ptr,
        positions: positions.ptr,
        tokens,
        heads: q_heads,
        head_dim: dim,
        rotated: 2 * cos.shape[1],
        table_rows: cos.shape[0],
        interleaved: *interleaved,
    };
    // SAFETY: as in `cuda_add_rms_norm`.
    let new = rope_store::NewKeys {
        key: key.ptr,
        value: value.ptr,
        stride: *stride,
        slots: slots.ptr,
    };
    py.detach(|| unsafe { rope_store::rope_store(to, &op, q_stride, &pages.inner, &new) })
        .map_err(|e| device_error(py, &e))
}

/// Write table[ids] * factor into out [T, width] float16 or float32.
#[pyfunction]
#[pyo3(signature = (table, *, ids, out, factor, launch))]
pub fn cuda_embed(
    py: Python<'_>,
    table: Tensor,
    ids: Tensor,
    out: Tensor,
    factor: f32,
    launch: &Launch,
) -> PyResult<()> {
    let to = target(&[("table", &table), ("ids", &ids), ("out", &out)], launch)?;
    expect(table.shape.len() == 2, "table must be [rows, width]")?;
    expect(
        ids.dtype == DType::I64 && ids.shape.len() == 1,
        "ids must be int64 [tokens]",
    )?;
    expect(
        matches!(out.dtype, DType::F16 | DType::F32) && out.shape == [ids.shape[0], table.shape[1]],
        "out must be float16 or float32 [tokens, width]",
    )?;
    let op = embedding::Embed {
        table: table.ptr,
        element: element(&table, "table")?,
        rows: table.shape[0],
        width: table.shape[1],
        ids: ids.ptr,
        tokens: ids.shape[0],
        output: out.ptr,
        output_element: element(&out, "out")?,
        factor,
    };
    // SAFETY: as in `cuda_add_rms_norm`.
    py.detach(|| unsafe { embedding::embed(to, &op) })
        .map_err(|e| device_error(py, &e))
}

/// The sizes of a captured step's inputs.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct StepSizes {
    sizes: Sizes,
}

#[pymethods]
impl StepSizes {
    /// `batch` rows of `q_len` tokens in `pages` pages of `page_size` tokens.
    #[new]
    #[pyo3(signature = (*, batch, q_len, pages, page_size))]
    fn new(batch: usize, q_len: usize, pages: usize, page_size: usize) -> Self {
        Self {
            sizes: Sizes {
                batch,
                q_len,
                pages,
                page_size,
            },
        }
    }

    /// Bytes of the buffer.
    #[getter]
    fn bytes(&self) -> usize {
        self.sizes.bytes()
    }

    /// The fields of the buffer.
    #[getter]
    fn fields(&self) -> Vec<MemoryField> {
        self.sizes.fields().map(MemoryField::from).into()
    }
}

/// The bounds of a step's inputs.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct StepLimits {
    limits: Limits,
}

#[pymethods]
impl StepLimits {
    /// Ids, positions and page numbers are below `vocab`, `positions` and `pages`.
    #[new]
    #[pyo3(signature = (*, vocab, positions, pages))]
    fn new(vocab: i64, positions: i64, pages: i64) -> Self {
        Self {
            limits: Limits {
                vocab,
                positions,
                num_pages: pages,
            },
        }
    }

    #[getter]
    fn vocab(&self) -> i64 {
        self.limits.vocab
    }
}

/// The pinned buffer of one captured step's inputs.
#[pyclass(frozen, name = "StepStage", module = "exl_kernels._native")]
pub struct StepStage {
    buffer: Tensor,
    sizes: Sizes,
}

#[pymethods]
impl StepStage {
    /// `buffer`: uint8 on the CPU, of `sizes.bytes` bytes.
    #[new]
    fn new(buffer: Tensor, sizes: &StepSizes) -> PyResult<Self> {
        let sizes = sizes.sizes;
        buffer.slice_mut::<u8>("buffer")?;
        expect(
            buffer.numel() == sizes.bytes(),
            "the buffer has the wrong size",
        )?;
        Ok(Self { buffer, sizes })
    }

    /// Write a step into the buffer. Returns False and leaves the buffer unchanged if an operand is invalid or too large.
    /// ids int64 [rows, q_len] or None for zeros, past int32 [rows], table int32 [rows, width].
    #[pyo3(signature = (ids, *, past, table, limits))]
    fn fill(
        &self,
        ids: Option<Tensor>,
        past: Tensor,
        table: Tensor,
        limits: &StepLimits,
    ) -> PyResult<bool> {
        let rows = past.numel();
        let shaped = |ids: &Tensor| ids.shape == [rows, self.sizes.q_len];
        if !ids.as_ref().is_none_or(shaped) || table.shape.len() != 2 || rows > self.sizes.batch {
            return Ok(false);
        }
        let zeros = vec![
            0;
            if ids.is_none() {
                rows * self.sizes.q_len
            } else {
                0
            }
        ];
        let request = Request {
            ids: match &ids {
                Some(ids) => ids.slice::<i64>("ids")?,
                None => &zeros,
            },
            past: past.slice::<i32>("past")?,
            table: table.slice::<i32>("table")?,
            width: table.shape[1],
        };
        if !step::fits(&self.sizes, &limits.limits, &request) {
            return Ok(false);
        }
        step::write(
            &self.sizes,
            &request,
            self.buffer.slice_mut::<u8>("buffer")?,
        );
        Ok(true)
    }

    /// Queue the copy of the buffer to `to`, uint8 of the same length on a GPU.
    fn send(&self, py: Python<'_>, to: Tensor, stream: usize) -> PyResult<()> {
        let target = target(&[("to", &to)], &Launch::in_order(stream))?;
        let bytes = self.buffer.numel();
        expect(
            to.dtype == DType::U8 && to.numel() == bytes,
            "to must be uint8 and as long as the buffer",
        )?;
        // SAFETY: sizes were checked; the caller writes to the buffer again only after the stream has passed.
        py.detach(|| unsafe { step::send(target, to.ptr, self.buffer.ptr, bytes) })
            .map_err(|e| device_error(py, &e))
    }
}
