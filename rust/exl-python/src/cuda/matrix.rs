//! Bindings of a quantized matrix on a GPU: repacking on the CPU, dequantization on torch's stream.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::layout::{Codes, Layout, Scales};
use exl_cuda::ops::linear::{self, Addresses, Matrix};
use exl_format::exl2::Exl2View;
use half::f16;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cuda::{expect, target};
use crate::errors::{device_error, format_error, unsupported_error};
use crate::matrix_parts::{Exl2Parts, GptqFormat, GptqParts};
use crate::operands::Launch;
use crate::tensor::{DType, Element, Tensor, TensorObject};

/// A new CPU tensor of `count` elements, filled by `fill`.
fn tensor<T: Element + Send>(
    py: Python<'_>,
    dtype: &str,
    count: usize,
    fill: impl FnOnce(&mut [T]) + Send,
) -> PyResult<TensorObject> {
    let torch = py.import("torch")?;
    let options = pyo3::types::PyDict::new(py);
    options.set_item("dtype", torch.getattr(dtype)?)?;
    let made = torch.call_method("empty", (count,), Some(&options))?;
    let memory: Tensor = made.extract()?;
    let values = memory.slice_mut::<T>("a new tensor")?;
    py.detach(|| fill(values));
    Ok(TensorObject(made.unbind()))
}

/// A matrix repacked on the CPU: five tensors to be moved to the GPU. The image may be packed in parts instead, by `pack_exl2` and
/// `pack_gptq`.
#[pyclass(frozen, name = "CudaLayout", module = "exl_kernels._native")]
pub struct CudaLayout {
    layout: Layout,
    /// uint8; None if it is packed in parts
    #[pyo3(get)]
    image: Option<TensorObject>,
    /// int32, two a unit
    #[pyo3(get)]
    units: TensorObject,
    /// float16
    #[pyo3(get)]
    maxima: TensorObject,
    /// int32
    #[pyo3(get)]
    features: TensorObject,
    /// int16 that holds unsigned numbers
    #[pyo3(get)]
    row_of_feature: TensorObject,
}

impl CudaLayout {
    fn new(
        py: Python<'_>,
        layout: Layout,
        codes: &impl Codes,
        threads: usize,
        pack: bool,
    ) -> PyResult<Self> {
        let packed = || {
            tensor::<u8>(py, "uint8", layout.bytes(), |out| {
                layout.pack(codes, out, threads);
            })
        };
        let image = pack.then(packed).transpose()?;
        let units = tensor::<i32>(py, "int32", 2 * layout.units.len(), |out| {
            for (to, unit) in out.chunks_mut(2).zip(&layout.units) {
                to.copy_from_slice(&[unit.offset as i32, unit.widths as i32]);
            }
        })?;
        let maxima = tensor::<f16>(py, "float16", layout.maxima.len(), |out| {
            out.copy_from_slice(&layout.maxima);
        })?;
        let features = tensor::<i32>(py, "int32", layout.features.len(), |out| {
            out.copy_from_slice(&layout.features);
        })?;
        let rows = layout.row_of_feature();
        let row_of_feature = tensor::<i16>(py, "int16", rows.len(), |out| {
            for (to, &row) in out.iter_mut().zip(&rows) {
                *to = row as u16 as i16;
            }
        })?;
        Ok(Self {
            layout,
            image,
            units,
            maxima,
            features,
            row_of_feature,
        })
    }
}

/// Write the tiles from `first` on that fill `out` into it.
fn pack_part(
    py: Python<'_>,
    layout: &Layout,
    codes: &impl Codes,
    first: usize,
    out: &Tensor,
    threads: usize,
) -> PyResult<()> {
    let out = out.slice_mut::<u8>("out")?;
    let tiles = first..first.saturating_add(out.len() / layout.tile_bytes().max(1));
    expect(
        tiles.end <= layout.tiles() && out.len() == tiles.len() * layout.tile_bytes(),
        "out must be uint8 with the bytes of whole tiles of the matrix",
    )?;
    py.detach(|| layout.pack_tiles(codes, tiles, out, threads));
    Ok(())
}

impl CudaLayout {
    /// Check that a matrix is of the size and the format that this layout was made for.
    fn expect_matrix(&self, k: usize, n: usize, gptq: bool) -> PyResult<()> {
        expect(
            (k, n) == (self.layout.in_features, self.layout.out_features)
                && gptq == (self.layout.scales == Scales::Gptq),
            "the parts are not those of this layout",
        )
    }
}

fn layout_error(py: Python<'_>, name: &str, error: &exl_cuda::layout::Problem) -> PyErr {
    unsupported_error(py, format!("{name}: {error}"))
}

#[pymethods]
impl CudaLayout {
    /// `pack` = False leaves the image to `pack_exl2`.
    #[staticmethod]
    #[pyo3(signature = (name, parts, threads, pack = true, *, fine_scales = false))]
    fn from_exl2(
        py: Python<'_>,
        name: &str,
        parts: Exl2Parts,
        threads: usize,
        pack: bool,
        fine_scales: bool,
    ) -> PyResult<Self> {
        let view =
            Exl2View::new(name, parts.tensors()?).map_err(|error| format_error(py, &error))?;
        let layout =
            Layout::exl2(&view, fine_scales).map_err(|error| layout_error(py, name, &error))?;
        Self::new(py, layout, &view, threads, pack)
    }

    /// Pack the tiles from `first` on into `out`, uint8 [their number * tile_bytes] on the CPU. `parts`: as given to `from_exl2`.
    #[pyo3(signature = (name, parts, *, first, out, threads))]
    fn pack_exl2(
        &self,
        py: Python<'_>,
        name: &str,
        parts: Exl2Parts,
        first: usize,
        out: Tensor,
        threads: usize,
    ) -> PyResult<()> {
        let view =
            Exl2View::new(name, parts.tensors()?).map_err(|error| format_error(py, &error))?;
        self.expect_matrix(view.in_features(), view.out_features(), false)?;
        pack_part(py, &self.layout, &view, first, &out, threads)
    }

    /// As `pack_exl2`, with the parts and the format given to `from_gptq`.
    #[pyo3(signature = (name, parts, format, *, first, out, threads))]
    fn pack_gptq(
        &self,
        py: Python<'_>,
        name: &str,
        parts: GptqParts,
        format: GptqFormat,
        first: usize,
        out: Tensor,
        threads: usize,
    ) -> PyResult<()> {
        let view = format
            .view(name, parts.tensors()?)
            .map_err(|error| format_error(py, &error))?;
        self.expect_matrix(view.in_features(), view.out_features(), true)?;
        pack_part(py, &self.layout, &view, first, &out, threads)
    }

    #[staticmethod]
    #[pyo3(signature = (name, parts, format, threads, pack = true))]
    fn from_gptq(
        py: Python<'_>,
        name: &str,
        parts: GptqParts,
        format: GptqFormat,
        threads: usize,
        pack: bool,
    ) -> PyResult<Self> {
        let view = format
            .view(name, parts.tensors()?)
            .map_err(|error| format_error(py, &error))?;
        let layout = Layout::gptq(&view).map_err(|error| layout_error(py, name, &error))?;
        Self::new(py, layout, &view, threads, pack)
    }

    #[getter]
    fn in_features(&self) -> usize {
        self.layout.in_features
    }

    #[getter]
    fn out_features(&self) -> usize {
        self.layout.out_features
    }

    /// Rows of K in the layout, including padding.
    #[getter]
    fn rows(&self) -> usize {
        self.layout.rows()
    }

    /// Number of tiles of the image.
    #[getter]
    fn tiles(&self) -> usize {
        self.layout.tiles()
    }

    /// Bytes of a tile of the image.
    #[getter]
    fn tile_bytes(&self) -> usize {
        self.layout.tile_bytes()
    }

    /// The code at a row of the layout and a feature, read from the image.
    fn code(&self, py: Python<'_>, row: usize, feature: usize) -> PyResult<u32> {
        if row >= self.layout.rows() || feature >= self.layout.out_features {
            return Err(PyValueError::new_err(format!(
                "({row}, {feature}) is outside the matrix"
            )));
        }
        let packed = self.image.as_ref();
        let image = packed
            .ok_or_else(|| PyValueError::new_err("the image is packed in parts"))?
            .view(py)?;
        Ok(self.layout.code(image.slice::<u8>("image")?, row, feature))
    }
}

/// A matrix whose tensors are on a GPU.
#[pyclass(frozen, name = "CudaMatrix", module = "exl_kernels._native")]
pub struct CudaMatrix {
    pub matrix: Matrix,
    pub device: u32,
    /// Keeps the tensors alive whose addresses `matrix` holds.
    _tensors: Vec<Tensor>,
}

#[pymethods]
impl CudaMatrix {
    /// The tensors of `layout`, moved to one GPU, and a float32 bias there or None.
    #[new]
    #[pyo3(signature = (layout, *, image, units, maxima, features, row_of_feature, bias, prescale))]
    fn new(
        py: Python<'_>,
        layout: &CudaLayout,
        image: Tensor,
        units: Tensor,
        maxima: Tensor,
        features: Tensor,
        row_of_feature: Tensor,
        bias: Option<Tensor>,
        prescale: f32,
    ) -> PyResult<Self> {
        expect(
            image.dtype == DType::U8 && image.shape == [layout.layout.bytes()],
            "the image must be uint8 with the bytes of the layout",
        )?;
        for (moved, from) in [
            (&units, &layout.units),
            (&maxima, &layout.maxima),
            (&features, &layout.features),
            (&row_of_feature, &layout.row_of_feature),
        ] {
            let original = from.view(py)?;
            expect(
                moved.dtype == original.dtype && moved.shape == original.shape,
                "a tensor does not have the size or dtype of the layout",
            )?;
        }
        expect(
            image.ptr.is_multiple_of(128),
            "the image must be aligned to 128 bytes",
        )?;
        expect(
            maxima.ptr.is_multiple_of(16),
            "the maxima must be aligned to 16 bytes",
        )?;
        let mut all = vec![
            ("image", &image),
            ("units", &units),
            ("features", &features),
            ("row_of_feature", &row_of_feature),
        ];
        all.extend(bias.as_ref().map(|bias| ("bias", bias)));
        let device = target(&all, &Launch::in_order(0))?.device;
        if let Some(bias) = &bias {
            expect(
                bias.dtype == DType::F32 && bias.numel() == layout.layout.out_features,
                "bias must be float32 [out_features]",
            )?;
        }
        let at = Addresses {
            image: image.ptr,
            units: units.ptr,
            maxima: maxima.ptr,
            features: features.ptr,
            row_of_feature: row_of_feature.ptr,
            bias: bias.as_ref().map_or(0, |bias| bias.ptr),
        };
        let matrix = Matrix::new(&layout.layout, at, prescale);
        let mut tensors = vec![image, units, maxima, features, row_of_feature];
        tensors.extend(bias);
        Ok(Self {
            matrix,
            device,
            _tensors: tensors,
        })
    }

    /// Write W [in_features, out_features] float16 into `out`.
    fn dequantize(&self, py: Python<'_>, out: Tensor, stream: usize) -> PyResult<()> {
        let size = self.matrix.in_features() * self.matrix.out_features();
        expect(
            out.dtype == DType::F16 && out.numel() == size,
            "out must be float16 [in, out]",
        )?;
        expect(
            out.cuda == Some(self.device),
            "out must be on the matrix's GPU",
        )?;
        let to = target(&[("out", &out)], &Launch::in_order(stream))?;
        // SAFETY: torch owns the memory and keeps freed blocks for work queued on their stream; the size was checked.
        py.detach(|| unsafe { linear::dequantize(to, &self.matrix, out.ptr) })
            .map_err(|error| device_error(py, &error))
    }
}
