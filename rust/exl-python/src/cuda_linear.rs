//! Bindings of quantized matrices on a GPU: repacking on the CPU, products on torch's stream.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::layout::{Codes, Layout};
use exl_cuda::ops::linear::{self, Addresses, Half, Matrix, Product};
use exl_cuda::ops::{Target, batch, few, ring};
use exl_format::exl2::Exl2View;
use exl_format::gptq::{GptqView, Zeros};
use half::f16;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::cuda::{device_error, expect, target};
use crate::linear::{Exl2Parts, GptqParts, format_error};
use crate::tensor::{DType, Element, Tensor};

/// A new CPU tensor of `count` elements, filled by `fill`.
fn tensor<T: Element + Send>(
    py: Python<'_>,
    dtype: &str,
    count: usize,
    fill: impl FnOnce(&mut [T]) + Send,
) -> PyResult<Py<PyAny>> {
    let torch = py.import("torch")?;
    let options = pyo3::types::PyDict::new(py);
    options.set_item("dtype", torch.getattr(dtype)?)?;
    let made = torch.call_method("empty", (count,), Some(&options))?;
    let memory: Tensor = made.extract()?;
    let values = memory.slice_mut::<T>("a new tensor")?;
    py.detach(|| fill(values));
    Ok(made.unbind())
}

/// A matrix repacked on the CPU: five tensors to be moved to the GPU.
#[pyclass(frozen, name = "CudaLayout", module = "exl_kernels._native")]
pub struct CudaLayout {
    layout: Layout,
    /// uint8
    #[pyo3(get)]
    image: Py<PyAny>,
    /// int32, two a unit
    #[pyo3(get)]
    units: Py<PyAny>,
    /// float16
    #[pyo3(get)]
    maxima: Py<PyAny>,
    /// int32
    #[pyo3(get)]
    features: Py<PyAny>,
    /// int16 that holds unsigned numbers
    #[pyo3(get)]
    row_of_feature: Py<PyAny>,
}

impl CudaLayout {
    fn new(py: Python<'_>, layout: Layout, codes: &impl Codes, threads: usize) -> PyResult<Self> {
        let image = tensor::<u8>(py, "uint8", layout.bytes(), |out| {
            layout.pack(codes, out, threads);
        })?;
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

fn layout_error(py: Python<'_>, name: &str, error: &exl_cuda::layout::Problem) -> PyErr {
    let raised = py
        .import("exl_kernels.errors")
        .and_then(|module| module.getattr("UnsupportedError"))
        .and_then(|class| class.call1((format!("{name}: {error}"),)));
    match raised {
        Ok(error) => PyErr::from_value(error),
        Err(error) => error,
    }
}

#[pymethods]
impl CudaLayout {
    #[staticmethod]
    fn from_exl2(py: Python<'_>, name: &str, parts: Exl2Parts, threads: usize) -> PyResult<Self> {
        let view =
            Exl2View::new(name, parts.tensors()?).map_err(|error| format_error(py, &error))?;
        let layout = Layout::exl2(&view).map_err(|error| layout_error(py, name, &error))?;
        Self::new(py, layout, &view, threads)
    }

    #[staticmethod]
    #[pyo3(signature = (name, parts, bits, v2, group_size, threads))]
    fn from_gptq(
        py: Python<'_>,
        name: &str,
        parts: GptqParts,
        bits: u32,
        v2: bool,
        group_size: Option<usize>,
        threads: usize,
    ) -> PyResult<Self> {
        let zeros = if v2 { Zeros::V2 } else { Zeros::Classic };
        let view = GptqView::new(name, parts.tensors()?, bits, zeros, group_size)
            .map_err(|error| format_error(py, &error))?;
        let layout = Layout::gptq(&view).map_err(|error| layout_error(py, name, &error))?;
        Self::new(py, layout, &view, threads)
    }

    #[getter]
    fn in_features(&self) -> usize {
        self.layout.in_features
    }

    #[getter]
    fn out_features(&self) -> usize {
        self.layout.out_features
    }

    /// Rows of K in the layout, padding included.
    #[getter]
    fn rows(&self) -> usize {
        self.layout.rows()
    }

    /// Rows that share a scale entry.
    #[getter]
    fn entry_rows(&self) -> usize {
        self.layout.entry_rows
    }

    /// The code at a row of the layout and a feature, read back from the image.
    fn code(&self, py: Python<'_>, row: usize, feature: usize) -> PyResult<u32> {
        if row >= self.layout.rows() || feature >= self.layout.out_features {
            return Err(PyValueError::new_err(format!(
                "({row}, {feature}) is outside the matrix"
            )));
        }
        let image: Tensor = self.image.bind(py).extract()?;
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

fn kind(tensor: &Tensor, what: &str) -> PyResult<Half> {
    match tensor.dtype {
        DType::F16 => Ok(Half::F16),
        DType::BF16 => Ok(Half::BF16),
        DType::F32 => Ok(Half::F32),
        other => Err(PyTypeError::new_err(format!("{what}: dtype {other:?}"))),
    }
}

impl CudaMatrix {
    fn product(&self, x: &Tensor, y: &Tensor) -> PyResult<Product> {
        let (k, n) = (self.matrix.in_features(), self.matrix.out_features());
        let m = x.numel() / k;
        expect(
            x.numel() == m * k && y.numel() == m * n,
            "x or y has the wrong size",
        )?;
        expect(m <= linear::MAX_ROWS, "too many rows for a matrix kernel")?;
        expect(
            x.cuda == Some(self.device) && y.cuda == Some(self.device),
            "x and y must be on the matrix's GPU",
        )?;
        let x_type = kind(x, "x")?;
        expect(x_type != Half::F32, "x must be float16 or bfloat16")?;
        Ok(Product {
            x: x.ptr,
            x_type,
            y: y.ptr,
            y_type: kind(y, "y")?,
            m,
        })
    }
}

#[pymethods]
impl CudaMatrix {
    /// The tensors of `layout`, moved to one GPU, and a float32 bias there or None.
    #[new]
    #[pyo3(signature = (layout, image, units, maxima, features, row_of_feature, bias, prescale))]
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
        for (moved, from) in [
            (&image, &layout.image),
            (&units, &layout.units),
            (&maxima, &layout.maxima),
            (&features, &layout.features),
            (&row_of_feature, &layout.row_of_feature),
        ] {
            let original: Tensor = from.bind(py).extract()?;
            expect(
                moved.dtype == original.dtype && moved.shape == original.shape,
                "a tensor of the layout changed on its way",
            )?;
        }
        expect(
            image.ptr.is_multiple_of(128),
            "the image must be aligned to 128 bytes",
        )?;
        let mut all = vec![
            ("image", &image),
            ("units", &units),
            ("features", &features),
            ("row_of_feature", &row_of_feature),
        ];
        all.extend(bias.as_ref().map(|bias| ("bias", bias)));
        let device = target(&all, 0, false)?.device;
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

    /// Bytes of scratch memory that `matmul` needs for `rows` rows.
    fn prepared_bytes(&self, rows: usize) -> usize {
        self.matrix.prepared_bytes(rows)
    }

    /// y = (x @ W + bias) * prescale; `prepared` uint8 and `multipliers` [m] float32 are scratch.
    fn matmul(
        &self,
        py: Python<'_>,
        x: Tensor,
        prepared: Tensor,
        multipliers: Tensor,
        y: Tensor,
        stream: usize,
        programmatic: bool,
    ) -> PyResult<()> {
        let op = self.product(&x, &y)?;
        let scratch = prepared.dtype == DType::U8
            && prepared.numel() >= self.matrix.prepared_bytes(op.m)
            && prepared.ptr.is_multiple_of(16)
            && multipliers.dtype == DType::F32
            && multipliers.numel() >= op.m;
        expect(scratch, "scratch tensors are too small")?;
        let all = [
            ("x", &x),
            ("prepared", &prepared),
            ("multipliers", &multipliers),
            ("y", &y),
        ];
        let to = target(&all, stream, programmatic)?;
        // SAFETY: torch owns the memory and keeps freed blocks for work queued on their stream; sizes were checked.
        py.detach(|| unsafe {
            linear::matmul(to, &self.matrix, &op, prepared.ptr, multipliers.ptr)
        })
        .map_err(|error| device_error(py, &error))
    }

    /// W [in_features, out_features] float16 into `out`.
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
        let to = target(&[("out", &out)], stream, false)?;
        // SAFETY: as in `matmul`.
        py.detach(|| unsafe { linear::dequantize(to, &self.matrix, out.ptr) })
            .map_err(|error| device_error(py, &error))
    }
}

/// Several matrices over one input as one launch of the ring kernel: what `FusedLinear` calls.
#[pyclass(frozen, name = "CudaRing", module = "exl_kernels._native")]
pub struct CudaRing {
    matrices: Vec<Py<CudaMatrix>>,
    /// Number of the activation of the first of two matrices, which gates the second.
    gate: Option<i32>,
    device: u32,
    in_features: usize,
    out_features: usize,
}

impl CudaRing {
    fn parts(&self) -> Vec<&Matrix> {
        self.matrices.iter().map(|m| &m.get().matrix).collect()
    }
}

#[pymethods]
impl CudaRing {
    #[new]
    #[pyo3(signature = (matrices, gate=None))]
    fn new(matrices: Vec<Py<CudaMatrix>>, gate: Option<&str>) -> PyResult<Self> {
        let gate = match gate {
            None => None,
            Some("silu") => Some(0),
            Some("gelu") => Some(1),
            Some("quickgelu") => Some(2),
            Some(other) => {
                return Err(PyValueError::new_err(format!(
                    "unknown activation {other:?}"
                )));
            }
        };
        expect(
            (1..=ring::MATRICES).contains(&matrices.len()),
            "one to three matrices",
        )?;
        let first = matrices[0].get();
        let alike = |m: &Py<CudaMatrix>| {
            m.get().device == first.device
                && m.get().matrix.in_features() == first.matrix.in_features()
        };
        expect(
            matrices.iter().all(alike),
            "matrices of one GPU and one input size",
        )?;
        let (device, in_features) = (first.device, first.matrix.in_features());
        let out_features = match gate {
            Some(_) => first.matrix.out_features(),
            None => matrices.iter().map(|m| m.get().matrix.out_features()).sum(),
        };
        Ok(Self {
            matrices,
            gate,
            device,
            in_features,
            out_features,
        })
    }

    /// Most rows of a call on this GPU, with a norm before it or not, of BF16 or F16; 0 where separate launches have to do.
    fn rows(&self, py: Python<'_>, norm: bool, bfloat16: bool) -> PyResult<usize> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        let around = ring::Around {
            gated: self.gate.is_some(),
            norm,
            scaled: bfloat16,
        };
        Ok(ring::rows(&info.info, &self.parts(), around))
    }

    /// y [m, N]; `norm` = (weight, eps, offset); `tuning` = (slots, window) is for benchmarks.
    #[pyo3(signature = (x, y, stream, programmatic, residual=None, norm=None, tuning=None))]
    fn run(
        &self,
        py: Python<'_>,
        x: Tensor,
        y: Tensor,
        stream: usize,
        programmatic: bool,
        residual: Option<Tensor>,
        norm: Option<NormArgument>,
        tuning: Option<(i32, i32)>,
    ) -> PyResult<()> {
        let (to, op) = self.checked(
            &x,
            &y,
            None,
            (stream, programmatic),
            residual.as_ref(),
            norm.as_ref(),
        )?;
        let tuning = tuning.map(|(slots, window)| ring::Tuning { slots, window });
        let parts = self.parts();
        // SAFETY: as in `CudaMatrix::matmul`.
        py.detach(|| unsafe { ring::launch(to, &parts, &op, tuning) })
            .map_err(|error| device_error(py, &error))
    }

    /// Whether one launch of the batch kernel takes these matrices, 1 to 64 rows each call.
    fn batch_fits(&self, py: Python<'_>) -> PyResult<bool> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        Ok(batch::fits(&info.info, &self.parts()))
    }

    /// Whether `run_batch` applies the activation of the first of two matrices itself.
    fn batch_gates(&self) -> bool {
        self.gate.is_some() && batch::gates(&self.parts())
    }

    /// Whether `run_batch` can norm its input.
    fn batch_norms(&self, py: Python<'_>) -> PyResult<bool> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        Ok(batch::norms(&info.info, &self.parts()))
    }

    /// Bytes of scratch memory that `run_batch` needs for `rows` rows.
    #[pyo3(signature = (rows, tuning=None))]
    fn scratch_bytes(
        &self,
        py: Python<'_>,
        rows: usize,
        tuning: Option<(usize, usize, usize, usize)>,
    ) -> PyResult<usize> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        Ok(batch::scratch_bytes(
            &info.info,
            &self.parts(),
            rows,
            self.batch_gates(),
            batch_tuning(tuning),
        ))
    }

    /// (columns, byte of counters, number of counters) by which another launch lays out `rows` rows in the scratch memory of `run_batch`, or None.
    fn batch_input(&self, py: Python<'_>, rows: usize) -> PyResult<Option<(usize, usize, usize)>> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        Ok(match self.gate {
            None => batch::input(&info.info, &self.parts(), rows),
            Some(_) => None,
        })
    }

    /// y [m, N], or [2, m, N] for a matrix that gates another where not `batch_gates`, whose activation is left to the caller; `scratch` uint8
    /// and `multipliers` [m] float32; `residual` like y, even and of halves; `norm` where `batch_norms`; `tuning` = (slots, activations, cut,
    /// groups) is for benchmarks. Without x its rows stand laid out in scratch (`batch_input`).
    #[pyo3(signature = (x, scratch, multipliers, y, stream, programmatic, residual=None, norm=None, tuning=None))]
    fn run_batch(
        &self,
        py: Python<'_>,
        x: Option<Tensor>,
        scratch: Tensor,
        multipliers: Tensor,
        y: Tensor,
        stream: usize,
        programmatic: bool,
        residual: Option<Tensor>,
        norm: Option<NormArgument>,
        tuning: Option<(usize, usize, usize, usize)>,
    ) -> PyResult<()> {
        let k = self.in_features;
        // With a gate that is left to the caller, y has both matrices' results.
        let n: usize = self.parts().iter().map(|p| p.out_features()).sum();
        let m = x.as_ref().map_or(y.numel() / n, |x| x.numel() / k);
        let gated = self.batch_gates();
        let n = if gated { self.out_features } else { n };
        expect(
            x.as_ref().is_none_or(|x| x.numel() == m * k)
                && y.numel() == m * n
                && m <= batch::MOST_ROWS,
            "x or y has the wrong size",
        )?;
        let x_type = x.as_ref().map_or(Ok(Half::F16), |x| kind(x, "x"))?;
        expect(x_type != Half::F32, "x must be float16 or bfloat16")?;
        let room = scratch.dtype == DType::U8
            && scratch.numel() >= self.scratch_bytes(py, m, tuning)?
            && scratch.ptr.is_multiple_of(128)
            && multipliers.dtype == DType::F32
            && multipliers.numel() >= m;
        expect(room, "scratch tensors are too small")?;
        let mut all = vec![
            ("scratch", &scratch),
            ("multipliers", &multipliers),
            ("y", &y),
        ];
        all.extend(x.as_ref().map(|x| ("x", x)));
        if let Some(residual) = &residual {
            expect(
                self.gate.is_none() && residual.dtype == y.dtype && residual.numel() == y.numel(),
                "residual must be like y, and a gated product takes none",
            )?;
            all.push(("residual", residual));
        }
        if let Some(norm) = &norm {
            self.check_norm(norm)?;
            all.push(("norm", &norm.0));
        }
        let to = target(&all, stream, programmatic)?;
        expect(to.device == self.device, "operands on another GPU")?;
        let op = batch::Product {
            x: x.as_ref().map_or(0, |x| x.ptr),
            x_type,
            y: y.ptr,
            y_type: kind(&y, "y")?,
            m,
            apart: self.gate.is_some() && !gated,
            norm: norm.as_ref().map(norm_of),
            residual: residual.as_ref().map_or(0, |r| r.ptr),
            gate: self.gate.filter(|_| gated),
        };
        let tuning = batch_tuning(tuning);
        let parts = self.parts();
        // SAFETY: torch owns the memory and keeps freed blocks for work queued on their stream; sizes were checked.
        py.detach(|| unsafe {
            batch::launch(to, &parts, &op, scratch.ptr, multipliers.ptr, tuning)
        })
        .map_err(|error| device_error(py, &error))
    }

    /// Most rows of `run_few` on this GPU; 0 where it cannot run.
    fn few_rows(&self, py: Python<'_>) -> PyResult<usize> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        Ok(few::rows(&info.info, &self.parts(), self.gate.is_some()))
    }

    /// Bytes of scratch memory that `run_few` needs.
    #[pyo3(signature = (tuning=None))]
    fn few_bytes(&self, py: Python<'_>, tuning: Option<(i32, i32, i32)>) -> PyResult<usize> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        let gated = self.gate.is_some();
        Ok(few::scratch_bytes(
            &info.info,
            &self.parts(),
            gated,
            few_tuning(tuning),
        ))
    }

    /// Whether who makes the input of `run_few` can leave it prepared in its scratch memory, normed already or not.
    fn few_takes_prepared(&self, py: Python<'_>, unnormed: bool) -> PyResult<bool> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        let gated = self.gate.is_some();
        Ok(few::takes_prepared(
            &info.info,
            &self.parts(),
            gated,
            unnormed,
        ))
    }

    /// `run` in two launches, for 3 to 8 rows; `scratch` uint8, `tuning` = (cut, slots, window) is for benchmarks.
    #[pyo3(signature = (x, y, scratch, stream, programmatic, residual=None, norm=None, tuning=None))]
    fn run_few(
        &self,
        py: Python<'_>,
        x: Tensor,
        y: Tensor,
        scratch: Tensor,
        stream: usize,
        programmatic: bool,
        residual: Option<Tensor>,
        norm: Option<NormArgument>,
        tuning: Option<(i32, i32, i32)>,
    ) -> PyResult<()> {
        let at = (stream, programmatic);
        let (to, op) =
            self.checked(&x, &y, Some(&scratch), at, residual.as_ref(), norm.as_ref())?;
        let (parts, tuning) = (self.parts(), few_tuning(tuning));
        expect(scratch.dtype == DType::U8, "scratch must be uint8")?;
        let room = (scratch.ptr, scratch.numel());
        // SAFETY: as in `CudaMatrix::matmul`.
        py.detach(|| unsafe { few::launch(to, &parts, &op, few::Input::Rows, room, None, tuning) })
            .map_err(|error| device_error(py, &error))
    }

    /// A product of `rows` rows of float16 whose input, results or both go from launch to launch prepared: `x` None where it stands in
    /// `scratch`, `y` None where only `following` = (product, its scratch, whether it norms them) wants the results. `norm` is as in
    /// `run_few` with an x; without one weight and offset added up, [units * 256], in the order of the layout.
    #[pyo3(signature = (x, y, rows, scratch, stream, programmatic, residual=None, norm=None, following=None, tuning=None))]
    fn run_few_in_a_row(
        &self,
        py: Python<'_>,
        x: Option<Tensor>,
        y: Option<Tensor>,
        rows: usize,
        scratch: Tensor,
        stream: usize,
        programmatic: bool,
        residual: Option<Tensor>,
        norm: Option<NormArgument>,
        following: Option<(PyRef<'_, Self>, Tensor, bool)>,
        tuning: Option<(i32, i32, i32)>,
    ) -> PyResult<()> {
        let mut all = vec![("scratch", &scratch)];
        let (wide, narrow) = (rows * self.out_features, rows * self.in_features);
        for (name, tensor, size) in [
            ("x", &x, narrow),
            ("y", &y, wide),
            ("residual", &residual, wide),
        ] {
            let Some(tensor) = tensor else { continue };
            let alone = name == "y" && residual.is_none() && following.is_none();
            let fits = tensor.dtype == DType::F16 || (alone && tensor.dtype == DType::F32);
            expect(
                fits && tensor.numel() == size,
                "x, y and residual must be float16 of the right size",
            )?;
            all.push((name, tensor));
        }
        expect(
            x.as_ref().is_none_or(|x| x.ptr.is_multiple_of(16)),
            "x must be aligned to 16 bytes",
        )?;
        expect(
            (y.is_some() || following.is_some()) && (residual.is_none() || self.gate.is_none()),
            "results must go somewhere, and a gated product takes no residual",
        )?;
        expect(scratch.dtype == DType::U8, "scratch must be uint8")?;
        let parts = self.parts();
        if let Some(norm) = &norm {
            if x.is_some() {
                self.check_norm(norm)?;
            } else {
                let padded = parts[0].rows().next_multiple_of(256);
                let fits = norm.0.dtype == DType::F32
                    && norm.0.numel() == padded
                    && norm.0.ptr.is_multiple_of(16);
                expect(
                    fits,
                    "norm weight must be float32, as many as the layout has rows",
                )?;
            }
            all.push(("norm", &norm.0));
        }
        if let Some((_, tensor, _)) = &following {
            expect(tensor.dtype == DType::U8, "scratch must be uint8")?;
            all.push(("following", tensor));
        }
        let to = target(&all, stream, programmatic)?;
        expect(to.device == self.device, "operands on another GPU")?;
        let input = match (&x, &norm) {
            (Some(_), _) => few::Input::Rows,
            (None, None) => few::Input::Prepared,
            (None, Some((weight, eps, _))) => few::Input::Unnormed {
                weight: weight.ptr,
                eps: *eps,
            },
        };
        let address = |tensor: &Option<Tensor>| tensor.as_ref().map_or(0, |t| t.ptr);
        let op = ring::Product {
            x: address(&x),
            x_type: Half::F16,
            y: address(&y),
            y_type: y.as_ref().map_or(Ok(Half::F16), |y| kind(y, "y"))?,
            m: rows,
            residual: address(&residual),
            gate: self.gate,
            norm: norm.as_ref().filter(|_| x.is_some()).map(norm_of),
        };
        let next_parts = following.as_ref().map(|(next, _, _)| next.parts());
        let next = following.as_ref().zip(next_parts.as_ref()).map(
            |((product, tensor, unnormed), matrices)| few::Next {
                matrices,
                gated: product.gate.is_some(),
                scratch: (tensor.ptr, tensor.numel()),
                unnormed: *unnormed,
            },
        );
        let room = (scratch.ptr, scratch.numel());
        // SAFETY: as in `CudaMatrix::matmul`.
        unsafe { few::launch(to, &parts, &op, input, room, next, few_tuning(tuning)) }
            .map_err(|error| device_error(py, &error))
    }
}

fn few_tuning(tuning: Option<(i32, i32, i32)>) -> few::Tuning {
    let (cut, slots, window) = tuning.unwrap_or_default();
    few::Tuning { cut, slots, window }
}

/// Weight, eps and offset of an RMS norm.
type NormArgument = (Tensor, f32, f32);

impl CudaRing {
    /// The operands of a product, checked, on (stream, programmatic).
    fn checked(
        &self,
        x: &Tensor,
        y: &Tensor,
        scratch: Option<&Tensor>,
        at: (usize, bool),
        residual: Option<&Tensor>,
        norm: Option<&NormArgument>,
    ) -> PyResult<(Target, ring::Product)> {
        let (k, n) = (self.in_features, self.out_features);
        let m = x.numel() / k;
        expect(
            x.numel() == m * k && y.numel() == m * n,
            "x or y has the wrong size",
        )?;
        expect(x.ptr.is_multiple_of(16), "x must be aligned to 16 bytes")?;
        let x_type = kind(x, "x")?;
        expect(x_type != Half::F32, "x must be float16 or bfloat16")?;
        let mut all = vec![("x", x), ("y", y)];
        all.extend(scratch.map(|scratch| ("scratch", scratch)));
        if let Some(residual) = residual {
            expect(
                self.gate.is_none() && residual.dtype == y.dtype && residual.numel() == y.numel(),
                "residual must be like y, and a gated product takes none",
            )?;
            all.push(("residual", residual));
        }
        if let Some(norm) = norm {
            self.check_norm(norm)?;
            all.push(("norm", &norm.0));
        }
        let to = target(&all, at.0, at.1)?;
        expect(to.device == self.device, "operands on another GPU")?;
        let op = ring::Product {
            x: x.ptr,
            x_type,
            y: y.ptr,
            y_type: kind(y, "y")?,
            m,
            residual: residual.as_ref().map_or(0, |r| r.ptr),
            gate: self.gate,
            norm: norm.map(norm_of),
        };
        Ok((to, op))
    }

    fn check_norm(&self, (weight, _, _): &NormArgument) -> PyResult<()> {
        expect(
            weight.dtype == DType::F32
                && weight.numel() == self.in_features
                && weight.ptr.is_multiple_of(16),
            "norm weight must be float32 [in_features] and aligned to 16 bytes",
        )
    }
}

fn norm_of((weight, eps, offset): &NormArgument) -> ring::Norm {
    ring::Norm {
        weight: weight.ptr,
        eps: *eps,
        offset: *offset,
    }
}

fn batch_tuning(tuning: Option<(usize, usize, usize, usize)>) -> batch::Tuning {
    tuning.map_or_else(
        batch::Tuning::default,
        |(slots, activations, cut, groups)| batch::Tuning {
            slots,
            activations,
            cut,
            groups,
        },
    )
}

/// Adds this subject's functions and classes to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<CudaLayout>()?;
    m.add_class::<CudaMatrix>()?;
    m.add_class::<CudaRing>()
}
