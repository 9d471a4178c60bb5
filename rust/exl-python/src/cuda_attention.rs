//! Bindings of paged keys, values and attention on a GPU.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::ops::attention::{self, Kind, NewTokens, Query};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cuda::{device_error, element, expect, target};
use crate::tensor::{DType, Tensor};

/// The pages of one layer on a GPU, checked once.
#[pyclass(frozen, name = "CudaPages", module = "exl_kernels._native")]
pub struct CudaPages {
    pages: attention::Pages,
    device: u32,
    /// Keeps the tensors alive whose addresses `pages` holds.
    _tensors: Vec<Tensor>,
}

fn shape4(tensor: &Tensor) -> PyResult<[usize; 4]> {
    <[usize; 4]>::try_from(&tensor.shape[..])
        .map_err(|_| PyValueError::new_err("pages must have four dimensions"))
}

#[pymethods]
impl CudaPages {
    #[new]
    #[pyo3(signature = (kind, head_dim, key, value, key_scales, value_scales))]
    fn new(
        kind: &str,
        head_dim: usize,
        key: Tensor,
        value: Tensor,
        key_scales: Option<Tensor>,
        value_scales: Option<Tensor>,
    ) -> PyResult<Self> {
        let kind = Kind::ALL
            .into_iter()
            .find(|k| k.name() == kind)
            .ok_or_else(|| PyValueError::new_err(format!("unknown kind {kind:?}")))?;
        let [pages, page_size, heads, _] = shape4(&key)?;
        let (key_bytes, value_bytes, scale_bytes) = kind.stored_bytes(head_dim);
        let fits = |tensor: &Tensor, bytes: usize| {
            tensor.numel() * tensor.dtype.size() == pages * page_size * heads * bytes
        };
        expect(
            fits(&key, key_bytes) && fits(&value, value_bytes),
            "key or value pages have the wrong size",
        )?;
        let scaled = scale_bytes > 0;
        for scales in [&key_scales, &value_scales] {
            expect(scales.is_some() == scaled, "scales do not match the kind")?;
            let sized = scales
                .as_ref()
                .is_none_or(|s| fits(s, scale_bytes) && s.dtype == DType::F16);
            expect(sized, "scales have the wrong size")?;
        }
        let mut all = vec![("key", &key), ("value", &value)];
        all.extend(key_scales.as_ref().map(|s| ("key_scales", s)));
        all.extend(value_scales.as_ref().map(|s| ("value_scales", s)));
        let device = target(&all, 0, false)?.device;
        let address = |tensor: &Option<Tensor>| tensor.as_ref().map_or(0, |t| t.ptr);
        let pages = attention::Pages {
            kind,
            key: key.ptr,
            key_scales: address(&key_scales),
            value: value.ptr,
            value_scales: address(&value_scales),
            pages,
            page_size,
            heads,
            head_dim,
        };
        let tensors = [Some(key), Some(value), key_scales, value_scales];
        Ok(Self {
            pages,
            device,
            _tensors: tensors.into_iter().flatten().collect(),
        })
    }

    /// Encodes k and v [T, H, D] into slots int64 [T].
    fn store(
        &self,
        py: Python<'_>,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
        stream: usize,
        programmatic: bool,
    ) -> PyResult<()> {
        let to = target(
            &[("k", &k), ("v", &v), ("slots", &slots)],
            stream,
            programmatic,
        )?;
        expect(to.device == self.device, "the pages are on another GPU")?;
        let tokens = slots.numel();
        let shape = [tokens, self.pages.heads, self.pages.head_dim];
        expect(
            k.shape == shape && v.shape == shape && v.dtype == k.dtype,
            "k and v must be alike, [T, H, D]",
        )?;
        expect(slots.dtype == DType::I64, "slots must be int64")?;
        let op = NewTokens {
            k: k.ptr,
            v: v.ptr,
            element: element(&k, "k")?,
            slots: slots.ptr,
            tokens,
        };
        // SAFETY: torch owns the memory and keeps freed blocks for work queued on their stream; sizes were checked.
        py.detach(|| unsafe { attention::store(to, &self.pages, &op) })
            .map_err(|error| device_error(py, &error))
    }

    /// Floats of scratch that `attend` needs for one token.
    fn scratch_floats(&self, query_heads: usize, table_width: usize) -> usize {
        attention::scratch_floats(&self.pages, 1, query_heads, table_width)
    }

    /// Attention of q [T, Hq, D] into out.
    #[pyo3(signature = (q, block_table, rows, positions, mask, scratch, out, scale, window, softcap, stream, programmatic))]
    fn attend(
        &self,
        py: Python<'_>,
        q: Tensor,
        block_table: Tensor,
        rows: Tensor,
        positions: Tensor,
        mask: Option<Tensor>,
        scratch: Tensor,
        out: Tensor,
        scale: f32,
        window: usize,
        softcap: f32,
        stream: usize,
        programmatic: bool,
    ) -> PyResult<()> {
        let mut all = vec![
            ("q", &q),
            ("block_table", &block_table),
            ("rows", &rows),
            ("positions", &positions),
            ("scratch", &scratch),
            ("out", &out),
        ];
        all.extend(mask.as_ref().map(|m| ("key_mask", m)));
        let to = target(&all, stream, programmatic)?;
        expect(to.device == self.device, "the pages are on another GPU")?;
        let [tokens, query_heads, head_dim] = <[usize; 3]>::try_from(&q.shape[..])
            .map_err(|_| PyValueError::new_err("q must be [T, Hq, D]"))?;
        let [sequences, table_width] = <[usize; 2]>::try_from(&block_table.shape[..])
            .map_err(|_| PyValueError::new_err("block_table must be [B, pages]"))?;
        expect(
            head_dim == self.pages.head_dim,
            "q has another head_dim than the pages",
        )?;
        expect(
            query_heads > 0 && query_heads.is_multiple_of(self.pages.heads),
            "heads of q must be a multiple of the pages'",
        )?;
        expect(
            out.shape == q.shape && out.dtype == q.dtype,
            "out must be like q",
        )?;
        for index in [&block_table, &rows, &positions] {
            expect(
                index.dtype == DType::I32,
                "block_table, rows and positions must be int32",
            )?;
        }
        expect(
            rows.numel() == tokens && positions.numel() == tokens,
            "rows and positions must be [T]",
        )?;
        let mask_width = match &mask {
            None => 0,
            Some(mask) => {
                let [b, s] = <[usize; 2]>::try_from(&mask.shape[..])
                    .map_err(|_| PyValueError::new_err("key_mask must be [B, S]"))?;
                expect(
                    b == sequences && mask.dtype == DType::F32,
                    "key_mask must be float32 [B, S]",
                )?;
                s
            }
        };
        let needed = attention::scratch_floats(&self.pages, tokens, query_heads, table_width);
        expect(
            scratch.dtype == DType::F32 && scratch.numel() >= needed,
            "scratch is too small",
        )?;
        let op = Query {
            q: q.ptr,
            out: out.ptr,
            element: element(&q, "q")?,
            tokens,
            query_heads,
            block_table: block_table.ptr,
            sequences,
            table_width,
            rows: rows.ptr,
            positions: positions.ptr,
            mask: mask.as_ref().map_or(0, |m| m.ptr),
            mask_width,
            scale,
            window,
            softcap,
            parts: scratch.ptr,
        };
        // SAFETY: as in `store`.
        py.detach(|| unsafe { attention::attend(to, &self.pages, &op) })
            .map_err(|error| device_error(py, &error))
    }
}

/// Adds this subject's functions and classes to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<CudaPages>()
}
