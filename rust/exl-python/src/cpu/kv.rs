//! Bindings of the `kv` subject.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cpu::kv;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::shape_error;
use crate::tensor::{Tensor, same_length, same_shape};

/// One layer's pages: the addresses, and the tensors that own them.
#[pyclass(frozen, name = "Pages")]
pub struct Pages {
    inner: kv::Pages,
    owners: Vec<Tensor>,
}

impl Pages {
    /// The pages, if their tensors still have the same addresses (`resize_` and `share_memory_` move them).
    pub fn get_checked(&self, py: Python<'_>) -> PyResult<&kv::Pages> {
        for tensor in &self.owners {
            let now = tensor
                .owner
                .call_method0(py, pyo3::intern!(py, "data_ptr"))?;
            if now.extract::<usize>(py)? != tensor.ptr {
                return Err(PyValueError::new_err(
                    "the tensors of these pages have moved in memory; make a new KVPages of them",
                ));
            }
        }
        Ok(&self.inner)
    }
}

#[pymethods]
impl Pages {
    /// key, value: [P, page, H, row]; scales [P, page, H, row] if the kind has them.
    #[new]
    #[pyo3(signature = (kind, head_dim, *, key, value, key_scales, value_scales))]
    fn new(
        py: Python<'_>,
        kind: &str,
        head_dim: usize,
        key: Tensor,
        value: Tensor,
        key_scales: Option<Tensor>,
        value_scales: Option<Tensor>,
    ) -> PyResult<Self> {
        let codecs = kv::codecs(kind)
            .ok_or_else(|| PyValueError::new_err(format!("unknown cache kind {kind:?}")))?;
        let &[num_pages, page_size, heads, _] = &key.shape[..] else {
            return Err(shape_error(
                py,
                "key must be [pages, page_size, heads, row]".into(),
            ));
        };
        let rows = num_pages * page_size * heads;
        let mut data = [std::ptr::null_mut(); 2];
        let mut scales = [std::ptr::null_mut(); 2];
        let parts = [
            (codecs.0, &key, &key_scales),
            (codecs.1, &value, &value_scales),
        ];
        for (i, (codec, plane, plane_scales)) in parts.into_iter().enumerate() {
            data[i] = if codec == kv::Codec::F16 {
                plane
                    .slice_mut::<half::f16>("key or value")?
                    .as_mut_ptr()
                    .cast()
            } else {
                plane.slice_mut::<u8>("key or value")?.as_mut_ptr()
            };
            same_length(
                "key or value bytes",
                plane.numel() * plane.dtype.size(),
                rows * codec.row_bytes(head_dim),
            )?;
            let wanted = rows * codec.row_scales(head_dim);
            same_length(
                "scales",
                plane_scales.as_ref().map_or(0, Tensor::numel),
                wanted,
            )?;
            if let Some(tensor) = plane_scales {
                scales[i] = tensor.slice_mut::<half::f16>("scales")?.as_mut_ptr().cast();
            }
        }
        // SAFETY: the lengths were compared above and `owners` keeps the tensors; calls that write hold the caller.
        let inner = unsafe {
            kv::Pages::new(
                codecs,
                (data[0], data[1]),
                (scales[0], scales[1]),
                [num_pages, page_size, heads, head_dim],
            )
        };
        let owners = [Some(key), Some(value), key_scales, value_scales];
        Ok(Self {
            inner,
            owners: owners.into_iter().flatten().collect(),
        })
    }
}

/// Encode k, v [T, H, D] into slots [T].
#[pyfunction]
#[pyo3(signature = (pages, *, k, v, slots))]
pub fn kv_store(
    py: Python<'_>,
    pages: &Bound<'_, Pages>,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
) -> PyResult<()> {
    let pages = pages.get().get_checked(py)?;
    let shape = [slots.numel(), pages.heads(), pages.head_dim()];
    same_shape("k", &k, &shape)?;
    same_shape("v", &v, &shape)?;
    same_shape("slots", &slots, &shape[..1])?;
    let (k, v, slots) = (k.slice("k")?, v.slice("v")?, slots.slice("slots")?);
    py.detach(|| kv::store(pages, k, v, slots))
        .map_err(|error| shape_error(py, format!("store_kv: {error}")))
}

/// Decode slots [T] into k, v [T, H, D].
#[pyfunction]
#[pyo3(signature = (pages, *, slots, k, v))]
pub fn kv_load(
    py: Python<'_>,
    pages: &Bound<'_, Pages>,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
) -> PyResult<()> {
    let pages = pages.get().get_checked(py)?;
    let (k, v, slots) = (k.slice_mut("k")?, v.slice_mut("v")?, slots.slice("slots")?);
    py.detach(|| kv::load(pages, slots, k, v))
        .map_err(|error| shape_error(py, format!("load_kv: {error}")))
}
