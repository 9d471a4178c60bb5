//! Bindings of joined products: several quantized matrices on a GPU over one input, by the kernels of one to 64 rows.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::ops::Target;
use exl_cuda::ops::linear::select::Epilogue;
use exl_cuda::ops::linear::{Half, Matrix, batch, few, ring};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cuda::matrix::CudaMatrix;
use crate::cuda::operands::{Scratch, kind};
use crate::cuda::{expect, target};
use crate::errors::device_error;
use crate::operands::Launch;
use crate::tensor::{DType, Tensor};

/// RMS norm of a matmul's input: made once with the layer, used by every step.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct NormPrologue {
    weight: Tensor,
    eps: f32,
    offset: f32,
}

#[pymethods]
impl NormPrologue {
    /// x / sqrt(mean(x^2) + eps) * (weight + offset); `weight` float32 [in_features], aligned to 16 bytes, on the matrices' GPU.
    #[new]
    fn new(weight: Tensor, eps: f32, offset: f32) -> Self {
        Self {
            weight,
            eps,
            offset,
        }
    }
}

impl NormPrologue {
    fn argument(&self) -> ring::Norm {
        ring::Norm {
            weight: self.weight.ptr,
            eps: self.eps,
            offset: self.offset,
        }
    }
}

/// Memory of one call of `CudaRing.run_batch`.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct BatchWorkspace {
    scratch: Tensor,
    multipliers: Tensor,
    exchange: Option<Tensor>,
}

#[pymethods]
impl BatchWorkspace {
    /// `scratch` uint8 of `scratch_bytes`, `multipliers` float32 [m]; `exchange` uint8 of `meeting_bytes`, all ones before and after.
    #[new]
    #[pyo3(signature = (scratch, multipliers, exchange))]
    fn new(scratch: Tensor, multipliers: Tensor, exchange: Option<Tensor>) -> Self {
        Self {
            scratch,
            multipliers,
            exchange,
        }
    }
}

/// The input of the matmul that comes next, as a place for results.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct NextInput {
    product: Py<CudaRing>,
    scratch: Tensor,
    normed: bool,
}

#[pymethods]
impl NextInput {
    /// `scratch` uint8 of that `product`; `normed`: it norms its input, so that results bring their sums of squares.
    #[new]
    #[pyo3(signature = (product, scratch, normed=false))]
    fn new(product: Py<CudaRing>, scratch: Tensor, normed: bool) -> Self {
        Self {
            product,
            scratch,
            normed,
        }
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
        let epilogue = Epilogue {
            gate: self.gate.is_some(),
            norm,
            residual: false,
            bf16: bfloat16,
        };
        Ok(ring::rows(&info.info.caps, &self.parts(), epilogue))
    }

    /// y [m, N] = norm(x) @ W, gated, with `residual` added; `tuning` = (slots, window) is for benchmarks.
    #[pyo3(signature = (x, y, launch, *, residual=None, norm=None, tuning=None))]
    fn run(
        &self,
        py: Python<'_>,
        x: Tensor,
        y: Tensor,
        launch: &Launch,
        residual: Option<Tensor>,
        norm: Option<&NormPrologue>,
        tuning: Option<(i32, i32)>,
    ) -> PyResult<()> {
        let (to, op) = self.checked(&x, &y, None, launch, residual.as_ref(), norm)?;
        let tuning = tuning.map(|(slots, window)| ring::Tuning { slots, window });
        let parts = self.parts();
        // SAFETY: as in `CudaMatrix::matmul`.
        py.detach(|| unsafe { ring::launch(to, &parts, &op, tuning) })
            .map_err(|error| device_error(py, &error))
    }

    /// Whether one launch of the batch kernel takes these matrices, 1 to 64 rows each call.
    fn batch_fits(&self, py: Python<'_>) -> PyResult<bool> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        Ok(batch::fits(&info.info.caps, &self.parts()))
    }

    /// Whether `run_batch` applies the activation of the first of two matrices itself.
    fn batch_gates(&self) -> bool {
        self.gate.is_some() && batch::gates(&self.parts())
    }

    /// Whether `run_batch` can norm its input.
    fn batch_norms(&self, py: Python<'_>) -> PyResult<bool> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        Ok(batch::norms(&info.info.caps, &self.parts()))
    }

    /// Bytes of scratch memory that `run_batch` needs for `rows` rows.
    fn scratch_bytes(&self, rows: usize) -> usize {
        batch::scratch_bytes(&self.parts(), rows)
    }

    /// Bytes in which blocks of `run_batch` meet, for `rows` rows; 0 where they do not.
    #[pyo3(signature = (rows, tuning=None))]
    fn meeting_bytes(
        &self,
        py: Python<'_>,
        rows: usize,
        tuning: Option<BatchTuning>,
    ) -> PyResult<usize> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        Ok(batch::meeting_bytes(
            &info.info.caps,
            &self.parts(),
            rows,
            self.batch_gates(),
            batch_tuning(tuning),
        ))
    }

    /// For how many columns another launch lays out `rows` rows in the scratch memory of `run_batch`, or None.
    fn batch_input(&self, rows: usize) -> Option<usize> {
        match self.gate {
            None => batch::input(&self.parts(), rows),
            Some(_) => None,
        }
    }

    /// y [m, N], or [2, m, N] for a matrix that gates another where not `batch_gates`, whose activation is left to the caller. `residual` is
    /// like y, even and of halves; `norm` where `batch_norms`; `tuning` = (slots, activations, cut, groups, looks) is for benchmarks and
    /// tests. Without x its rows are in the workspace's scratch already, in the order of `batch_input`; `chained`: the matmul before put
    /// them there as its `next`. Without y gated results go to `next`.
    #[pyo3(signature = (x, y, workspace, launch, *, residual=None, norm=None, next=None, chained=false, tuning=None))]
    fn run_batch(
        &self,
        py: Python<'_>,
        x: Option<Tensor>,
        y: Option<Tensor>,
        workspace: &BatchWorkspace,
        launch: &Launch,
        residual: Option<Tensor>,
        norm: Option<&NormPrologue>,
        next: Option<&NextInput>,
        chained: bool,
        tuning: Option<BatchTuning>,
    ) -> PyResult<()> {
        let BatchWorkspace {
            scratch,
            multipliers,
            exchange,
        } = workspace;
        let gated = self.batch_gates();
        let m = self.batch_rows(x.as_ref(), y.as_ref(), next.is_some())?;
        let x_type = x.as_ref().map_or(Ok(Half::F16), |x| kind(x, "x"))?;
        expect(x_type != Half::F32, "x must be float16 or bfloat16")?;
        let needed = Scratch {
            bytes: self.scratch_bytes(m),
            alignment: 128,
            rows: m,
        };
        needed.check(scratch, multipliers)?;
        let meets = self.meeting_bytes(py, m, tuning)?;
        expect(
            exchange.as_ref().map_or(meets == 0, |t| holds(t, meets)),
            "memory to meet in is too small",
        )?;
        let mut all = vec![("scratch", scratch), ("multipliers", multipliers)];
        for (name, tensor) in [("x", &x), ("y", &y), ("exchange", exchange)] {
            all.extend(tensor.as_ref().map(|tensor| (name, tensor)));
        }
        if let Some(residual) = &residual {
            let like_y = y
                .as_ref()
                .is_some_and(|y| residual.dtype == y.dtype && residual.numel() == y.numel());
            expect(
                self.gate.is_none() && like_y,
                "residual must be like y, and a gated product takes none",
            )?;
            all.push(("residual", residual));
        }
        if let Some(norm) = norm {
            self.check_norm(norm)?;
            all.push(("norm", &norm.weight));
        }
        let next_parts = next.map(|next| next.product.get().parts());
        if let (Some(next), Some(parts)) = (next, &next_parts) {
            let enough = next.product.get().scratch_bytes(m);
            expect(
                parts.len() == 1 && holds(&next.scratch, enough),
                "the next product has one matrix, and scratch memory enough",
            )?;
            all.push(("next", &next.scratch));
        }
        let next = next
            .zip(next_parts.as_ref())
            .map(|(next, parts)| batch::Next {
                matrix: parts[0],
                scratch: next.scratch.ptr,
            });
        let to = target(&all, launch)?;
        expect(to.device == self.device, "operands on another GPU")?;
        let address = |tensor: &Option<Tensor>| tensor.as_ref().map_or(0, |t| t.ptr);
        let op = batch::Product {
            x: address(&x),
            turned: chained,
            x_type,
            y: address(&y),
            y_type: y.as_ref().map_or(Ok(Half::F16), |y| kind(y, "y"))?,
            m,
            apart: self.gate.is_some() && !gated,
            norm: norm.map(NormPrologue::argument),
            residual: address(&residual),
            gate: self.gate.filter(|_| gated),
        };
        let room = batch::Room {
            scratch: scratch.ptr,
            multipliers: multipliers.ptr,
            meeting: address(exchange),
        };
        let (parts, tuning) = (self.parts(), batch_tuning(tuning));
        // SAFETY: torch owns the memory and keeps freed blocks for work queued on their stream; sizes were checked.
        unsafe { batch::launch(to, &parts, &op, room, next, tuning) }
            .map_err(|error| device_error(py, &error))
    }

    /// Most rows of `run_few` on this GPU; 0 where it cannot run.
    fn few_rows(&self, py: Python<'_>) -> PyResult<usize> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        Ok(few::rows(
            &info.info.caps,
            &self.parts(),
            self.gate.is_some(),
        ))
    }

    /// Bytes of scratch memory that `run_few` needs.
    #[pyo3(signature = (tuning=None))]
    fn few_bytes(&self, py: Python<'_>, tuning: Option<(i32, i32, i32)>) -> PyResult<usize> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        let gated = self.gate.is_some();
        Ok(few::scratch_bytes(
            &info.info.caps,
            &self.parts(),
            gated,
            few_tuning(tuning),
        ))
    }

    /// Whether who makes the input of `run_few` can leave it prepared in its scratch memory, normed already or not.
    fn few_takes_prepared(&self, py: Python<'_>) -> PyResult<bool> {
        let info = exl_cuda::Device::get(self.device).map_err(|error| device_error(py, &error))?;
        let gated = self.gate.is_some();
        Ok(few::takes_prepared(&info.info.caps, &self.parts(), gated))
    }

    /// `run` in two launches, for 3 to 8 rows; `scratch` uint8, `tuning` = (cut, slots, window) is for benchmarks.
    #[pyo3(signature = (x, y, scratch, launch, *, residual=None, norm=None, tuning=None))]
    fn run_few(
        &self,
        py: Python<'_>,
        x: Tensor,
        y: Tensor,
        scratch: Tensor,
        launch: &Launch,
        residual: Option<Tensor>,
        norm: Option<&NormPrologue>,
        tuning: Option<(i32, i32, i32)>,
    ) -> PyResult<()> {
        let (to, op) = self.checked(&x, &y, Some(&scratch), launch, residual.as_ref(), norm)?;
        let (parts, tuning) = (self.parts(), few_tuning(tuning));
        expect(scratch.dtype == DType::U8, "scratch must be uint8")?;
        let room = (scratch.ptr, scratch.numel());
        // SAFETY: as in `CudaMatrix::matmul`.
        py.detach(|| unsafe { few::launch(to, &parts, &op, few::Input::Rows, room, None, tuning) })
            .map_err(|error| device_error(py, &error))
    }

    /// A product of `rows` rows of float16 whose input, results or both go from launch to launch prepared: `x` None where it stands in
    /// `scratch`, `y` None where only `next` wants the results. `norm` is as in `run_few` with an x; without one its weight is weight and
    /// offset added up, [units * 256], in the order of the layout.
    #[pyo3(signature = (x, y, rows, scratch, launch, *, residual=None, norm=None, next=None, tuning=None))]
    fn run_few_chained(
        &self,
        py: Python<'_>,
        x: Option<Tensor>,
        y: Option<Tensor>,
        rows: usize,
        scratch: Tensor,
        launch: &Launch,
        residual: Option<Tensor>,
        norm: Option<&NormPrologue>,
        next: Option<&NextInput>,
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
            let alone = name == "y" && residual.is_none() && next.is_none();
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
            (y.is_some() || next.is_some()) && (residual.is_none() || self.gate.is_none()),
            "results must go somewhere, and a gated product takes no residual",
        )?;
        expect(scratch.dtype == DType::U8, "scratch must be uint8")?;
        let parts = self.parts();
        if let Some(norm) = norm {
            if x.is_some() {
                self.check_norm(norm)?;
            } else {
                let padded = parts[0].rows().next_multiple_of(256);
                let fits = norm.weight.dtype == DType::F32
                    && norm.weight.numel() == padded
                    && norm.weight.ptr.is_multiple_of(16);
                expect(
                    fits,
                    "norm weight must be float32, as many as the layout has rows",
                )?;
            }
            all.push(("norm", &norm.weight));
        }
        if let Some(next) = next {
            expect(next.scratch.dtype == DType::U8, "scratch must be uint8")?;
            all.push(("next", &next.scratch));
        }
        let to = target(&all, launch)?;
        expect(to.device == self.device, "operands on another GPU")?;
        let input = match (&x, norm) {
            (Some(_), _) => few::Input::Rows,
            (None, None) => few::Input::Prepared,
            (None, Some(norm)) => few::Input::Unnormed {
                weight: norm.weight.ptr,
                eps: norm.eps,
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
            norm: norm.filter(|_| x.is_some()).map(NormPrologue::argument),
        };
        let next_parts = next.map(|next| next.product.get().parts());
        let next = next
            .zip(next_parts.as_ref())
            .map(|(next, matrices)| few::Next {
                matrices,
                gated: next.product.get().gate.is_some(),
                scratch: (next.scratch.ptr, next.scratch.numel()),
                unnormed: next.normed,
            });
        let room = (scratch.ptr, scratch.numel());
        // SAFETY: as in `CudaMatrix::matmul`.
        unsafe { few::launch(to, &parts, &op, input, room, next, few_tuning(tuning)) }
            .map_err(|error| device_error(py, &error))
    }
}

/// Whether a tensor is aligned memory of at least so many bytes.
fn holds(tensor: &Tensor, least: usize) -> bool {
    tensor.dtype == DType::U8 && tensor.numel() >= least && tensor.ptr.is_multiple_of(128)
}

fn few_tuning(tuning: Option<(i32, i32, i32)>) -> few::Tuning {
    let (cut, slots, window) = tuning.unwrap_or_default();
    few::Tuning { cut, slots, window }
}

/// Slots, activations, cut, groups, looks.
type BatchTuning = (usize, usize, usize, usize, usize);

fn batch_tuning(tuning: Option<BatchTuning>) -> batch::Tuning {
    tuning.map_or_else(
        batch::Tuning::default,
        |(slots, activations, cut, groups, looks)| batch::Tuning {
            slots,
            activations,
            cut,
            groups,
            looks,
            ..batch::Tuning::default()
        },
    )
}

impl CudaRing {
    /// Rows of `run_batch`, of operands whose sizes are checked.
    fn batch_rows(&self, x: Option<&Tensor>, y: Option<&Tensor>, goes_on: bool) -> PyResult<usize> {
        let k = self.in_features;
        let gated = self.batch_gates();
        // With a gate that is left to the caller, y has both matrices' results.
        let both: usize = self.parts().iter().map(|p| p.out_features()).sum();
        let n = if gated { self.out_features } else { both };
        expect(
            y.is_some() != goes_on && (gated || !goes_on),
            "results go to y or, gated, to what follows",
        )?;
        let m = match (x, y) {
            (Some(x), _) => x.numel() / k,
            (None, Some(y)) => y.numel() / n,
            (None, None) => 0,
        };
        expect(
            m > 0
                && x.is_none_or(|x| x.numel() == m * k)
                && y.is_none_or(|y| y.numel() == m * n)
                && m <= batch::MOST_ROWS,
            "x or y has the wrong size",
        )?;
        Ok(m)
    }

    /// The operands of a product, checked.
    fn checked(
        &self,
        x: &Tensor,
        y: &Tensor,
        scratch: Option<&Tensor>,
        launch: &Launch,
        residual: Option<&Tensor>,
        norm: Option<&NormPrologue>,
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
            all.push(("norm", &norm.weight));
        }
        let to = target(&all, launch)?;
        expect(to.device == self.device, "operands on another GPU")?;
        let op = ring::Product {
            x: x.ptr,
            x_type,
            y: y.ptr,
            y_type: kind(y, "y")?,
            m,
            residual: residual.as_ref().map_or(0, |r| r.ptr),
            gate: self.gate,
            norm: norm.map(NormPrologue::argument),
        };
        Ok((to, op))
    }

    fn check_norm(&self, NormPrologue { weight, .. }: &NormPrologue) -> PyResult<()> {
        expect(
            weight.dtype == DType::F32
                && weight.numel() == self.in_features
                && weight.ptr.is_multiple_of(16),
            "norm weight must be float32 [in_features] and aligned to 16 bytes",
        )
    }
}
