//! Bindings of quantized matmuls on a GPU: one to three matrices over one input, launched by the plan of `ops::linear::select`.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::ops::Target;
use exl_cuda::ops::linear::select::{self, Call, Epilogue, Kernel, Plan, Planned, Tuning};
use exl_cuda::ops::linear::{self, Half, Matrix, batch, few, ring};
use exl_cuda::{Capabilities, CudaError, Device};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cuda::matrix::CudaMatrix;
use crate::cuda::operands::kind;
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

/// The input of the next matmul, as a place for results.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct NextInput {
    group: Py<CudaLinearGroup>,
    scratch: Tensor,
    normed: bool,
}

#[pymethods]
impl NextInput {
    /// `scratch` uint8, of the plan of that `group`; `normed`: it norms its input, so that results bring their sums of squares.
    #[new]
    #[pyo3(signature = (group, scratch, normed=false))]
    fn new(group: Py<CudaLinearGroup>, scratch: Tensor, normed: bool) -> Self {
        Self {
            group,
            scratch,
            normed,
        }
    }
}

/// The kernel of a call of `CudaLinearGroup.run` and the memory that it needs.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct MatmulPlan {
    plan: Plan,
}

#[pymethods]
impl MatmulPlan {
    /// gemv_ring, gemm_few, gemm_batch, gemm_tile or gemm_large.
    #[getter]
    fn kernel(&self) -> &'static str {
        self.plan.kernel.name()
    }

    /// Whether `run` takes all matrices with norm, gate and residual. Otherwise each matrix has a plan of its own.
    #[getter]
    fn joined(&self) -> bool {
        self.plan.joined
    }

    /// Bytes of scratch memory, aligned to 128.
    #[getter]
    fn scratch_bytes(&self) -> usize {
        self.plan.scratch_bytes
    }

    /// Bytes of the inter-block workspace, all ones before and after every launch; 0 for none.
    #[getter]
    fn exchange_bytes(&self) -> usize {
        self.plan.exchange_bytes
    }

    /// Whether y is [2, m, N], the results of gate and up, with the activation left to the caller.
    #[getter]
    fn separate_gate(&self) -> bool {
        self.plan.separate_gate
    }

    /// Whether the matmul before can leave its results packed in the scratch memory, in the layout of `gemm_few`.
    #[getter]
    fn takes_packed(&self) -> bool {
        self.plan.takes_packed
    }

    /// Columns of the kernel's layout in which a launch that is no matmul can pack rows in the scratch memory, or None.
    #[getter]
    fn input_columns(&self) -> Option<usize> {
        self.plan.input_columns
    }

    /// Whether results can be left packed as the input of the next matmul.
    #[getter]
    fn hands_on(&self) -> bool {
        self.plan.hands_on
    }

    /// Faster kernels and why each does not take the call.
    #[getter]
    fn refused(&self) -> Vec<(&'static str, String)> {
        let refused = self.plan.refused.iter();
        refused
            .map(|(kernel, why)| (kernel.name(), why.to_string()))
            .collect()
    }
}

/// One to three quantized matrices on a GPU over one input, with the activation of a gate or without.
#[pyclass(frozen, name = "CudaLinearGroup", module = "exl_kernels._native")]
pub struct CudaLinearGroup {
    matrices: Vec<Py<CudaMatrix>>,
    /// Number of the activation of the first of two matrices, which gates the second.
    gate: Option<i32>,
    device: u32,
    in_features: usize,
    out_features: usize,
}

impl CudaLinearGroup {
    fn parts(&self) -> Vec<&Matrix> {
        self.matrices.iter().map(|m| &m.get().matrix).collect()
    }

    fn caps(&self, py: Python<'_>) -> PyResult<Capabilities> {
        let device = Device::get(self.device).map_err(|error| device_error(py, &error))?;
        Ok(device.info.caps)
    }

    fn epilogue(&self, norm: bool, residual: bool, bf16: bool) -> Epilogue {
        Epilogue {
            gate: self.gate.is_some(),
            norm,
            residual,
            bf16,
        }
    }
}

#[pymethods]
impl CudaLinearGroup {
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

    /// The plan of a call of `rows` rows of float16, or of `bfloat16`. `aligned_input`: x is aligned to 16 bytes; `aligned_output`: y is
    /// aligned to 8 bytes and the residual to 4.
    #[pyo3(signature = (rows, *, bfloat16=false, norm=false, residual=false, aligned_input=true, aligned_output=true))]
    #[allow(clippy::fn_params_excessive_bools)] // one keyword each
    fn plan(
        &self,
        py: Python<'_>,
        rows: usize,
        bfloat16: bool,
        norm: bool,
        residual: bool,
        aligned_input: bool,
        aligned_output: bool,
    ) -> PyResult<MatmulPlan> {
        let call = Call {
            rows,
            epilogue: self.epilogue(norm, residual, bfloat16),
            aligned_input,
            aligned_output,
        };
        let plan = select::plan(&self.caps(py)?, &self.parts(), call);
        Ok(MatmulPlan { plan })
    }

    /// The plan of a call of the first matrix alone, as `QuantMatrix.matmul` launches it; x is aligned to 16 bytes.
    #[pyo3(signature = (rows, *, bfloat16=false))]
    fn plan_alone(&self, py: Python<'_>, rows: usize, bfloat16: bool) -> PyResult<MatmulPlan> {
        let caps = self.caps(py)?;
        let plan = select::plan_alone(&caps, &self.matrices[0].get().matrix, rows, bfloat16);
        Ok(MatmulPlan { plan })
    }

    /// The plan of a call by the kernel of this name, for benchmarks and tests that compare kernels. `tuning`: of gemv_ring (slots, window),
    /// of gemm_few (cut, slots, window), of gemm_batch (slots, activations, cut, groups, looks); zeros leave a number as planned.
    #[pyo3(signature = (kernel, rows, *, bfloat16=false, norm=false, residual=false, tuning=None))]
    fn plan_with(
        &self,
        py: Python<'_>,
        kernel: &str,
        rows: usize,
        bfloat16: bool,
        norm: bool,
        residual: bool,
        tuning: Option<Vec<usize>>,
    ) -> PyResult<MatmulPlan> {
        let kernel = Kernel::named(kernel)
            .ok_or_else(|| PyValueError::new_err(format!("no kernel {kernel:?}")))?;
        let call = Call::aligned(rows, self.epilogue(norm, residual, bfloat16));
        let tuning = tuned(kernel, &tuning.unwrap_or_default())?;
        let plan = select::plan_with(kernel, &self.caps(py)?, &self.parts(), call, tuning);
        plan.map(|plan| MatmulPlan { plan })
            .map_err(|error| device_error(py, &error))
    }

    /// Whether a call by `plan` can leave its results packed as the input of a call of `next` by `next_plan`.
    fn chains_to(&self, plan: &MatmulPlan, next: &Self, next_plan: &MatmulPlan) -> bool {
        self.out_features == next.in_features
            && self.device == next.device
            && plan.plan.chains_to(&next_plan.plan)
    }

    /// y [m, N] = norm(x) @ W, gated, with `residual` added, as `plan` says; y is [2, m, N] where the plan has a separate gate.
    ///
    /// `scratch` and `exchange`, uint8 and aligned to 128 bytes, are of the plan's sizes. Without x its rows are packed in `scratch`; `chained`:
    /// the matmul before put them there as its `next`. `norm` then is weight and offset added up, in the order of the layout, padded to
    /// whole units of 256. Without y results go to `next` alone.
    #[pyo3(signature = (plan, x, y, launch, *, scratch=None, exchange=None, residual=None, norm=None, next=None, chained=false))]
    fn run(
        &self,
        py: Python<'_>,
        plan: &MatmulPlan,
        x: Option<Tensor>,
        y: Option<Tensor>,
        launch: &Launch,
        scratch: Option<Tensor>,
        exchange: Option<Tensor>,
        residual: Option<Tensor>,
        norm: Option<&NormPrologue>,
        next: Option<&NextInput>,
        chained: bool,
    ) -> PyResult<()> {
        let call = Operands {
            group: self,
            plan: &plan.plan,
            x,
            y,
            scratch,
            exchange,
            residual,
            norm,
            next,
            chained,
        };
        let to = call.check(launch)?;
        let done = match plan.plan.kernel {
            Kernel::GemvRing => py.detach(|| call.gemv_ring(to)),
            Kernel::GemmFew => py.detach(|| call.gemm_few(to)),
            Kernel::GemmBatch => py.detach(|| call.gemm_batch(to)),
            Kernel::GemmTile => py.detach(|| call.gemm_tile(to)),
            Kernel::GemmLarge => {
                return Err(PyValueError::new_err(
                    "gemm_large is dequantizing and cuBLAS",
                ));
            }
        };
        done.map_err(|error| device_error(py, &error))
    }
}

/// The operands of `CudaLinearGroup.run`.
struct Operands<'a> {
    group: &'a CudaLinearGroup,
    plan: &'a Plan,
    x: Option<Tensor>,
    y: Option<Tensor>,
    scratch: Option<Tensor>,
    exchange: Option<Tensor>,
    residual: Option<Tensor>,
    norm: Option<&'a NormPrologue>,
    next: Option<&'a NextInput>,
    chained: bool,
}

impl Operands<'_> {
    /// Checks sizes, types and places against the plan.
    fn check(&self, launch: &Launch) -> PyResult<Target> {
        expect(
            self.plan.joined
                && self.plan.call.epilogue.gate == self.group.gate.is_some()
                && self.plan.call.epilogue.norm == self.norm.is_some(),
            "the plan is of other matrices, or of a call without or with a norm",
        )?;
        self.check_input()?;
        self.check_results()?;
        self.check_memory()?;
        let mut all = Vec::with_capacity(7);
        for (name, tensor) in [
            ("x", &self.x),
            ("y", &self.y),
            ("scratch", &self.scratch),
            ("exchange", &self.exchange),
            ("residual", &self.residual),
        ] {
            all.extend(tensor.as_ref().map(|tensor| (name, tensor)));
        }
        all.extend(self.norm.map(|norm| ("norm", &norm.weight)));
        all.extend(self.next.map(|next| ("next", &next.scratch)));
        let to = target(&all, launch)?;
        expect(to.device == self.group.device, "operands on another GPU")?;
        Ok(to)
    }

    fn check_input(&self) -> PyResult<()> {
        let Call {
            rows,
            epilogue,
            aligned_input,
            ..
        } = self.plan.call;
        let features = self.group.in_features;
        let Some(x) = &self.x else {
            let packed = self.plan.takes_packed || self.plan.input_columns.is_some();
            expect(packed, "this plan takes no packed input")?;
            let padded = self.group.matrices[0]
                .get()
                .matrix
                .rows()
                .next_multiple_of(256);
            return expect(
                self.norm.is_none_or(|norm| norm.holds(padded)),
                "norm weight must be float32, as many as the layout has rows",
            );
        };
        let kind = if epilogue.bf16 {
            DType::BF16
        } else {
            DType::F16
        };
        expect(
            x.dtype == kind && x.numel() == rows * features,
            "x must be [m, in_features] of the plan's rows and dtype",
        )?;
        expect(
            !aligned_input || x.ptr.is_multiple_of(16),
            "x must be aligned to 16 bytes",
        )?;
        expect(
            self.norm.is_none_or(|norm| norm.holds(features)),
            "norm weight must be float32 [in_features] and aligned to 16 bytes",
        )
    }

    fn check_results(&self) -> PyResult<()> {
        let width = self.group.out_features * if self.plan.separate_gate { 2 } else { 1 };
        let size = self.plan.call.rows * width;
        let fits = |tensor: &Tensor| tensor.numel() == size;
        expect(
            self.y.as_ref().is_none_or(fits),
            "y must be [m, out_features] of the plan's rows",
        )?;
        expect(
            self.y.is_some() || (self.next.is_some() && self.plan.hands_on),
            "results must go somewhere",
        )?;
        let Some(residual) = &self.residual else {
            return Ok(());
        };
        let like_y = residual.dtype == self.y.as_ref().map_or(DType::F16, |y| y.dtype);
        expect(
            self.group.gate.is_none() && like_y && fits(residual),
            "residual must be like y, and a gated matmul takes none",
        )
    }

    fn check_memory(&self) -> PyResult<()> {
        let holds = |tensor: Option<&Tensor>, bytes: usize| match tensor {
            Some(t) => t.dtype == DType::U8 && t.numel() >= bytes && t.ptr.is_multiple_of(128),
            None => bytes == 0,
        };
        expect(
            holds(self.scratch.as_ref(), self.plan.scratch_bytes)
                && holds(self.exchange.as_ref(), self.plan.exchange_bytes),
            "scratch or exchange memory is smaller than the plan says",
        )?;
        let Some(next) = self.next else { return Ok(()) };
        expect(
            self.plan.hands_on && next.scratch.dtype == DType::U8,
            "this plan hands no results on, or not to uint8",
        )?;
        if self.plan.kernel != Kernel::GemmBatch {
            return Ok(()); // `few::launch` checks the size
        }
        let parts = next.group.get().parts();
        let bytes = batch::scratch_bytes(&parts, self.plan.call.rows);
        expect(
            self.y.is_none() && parts.len() == 1 && holds(Some(&next.scratch), bytes),
            "the next matmul has one matrix and enough scratch memory, and takes all results",
        )
    }

    fn x(&self) -> (usize, Half) {
        let kind = if self.plan.call.epilogue.bf16 {
            Half::BF16
        } else {
            Half::F16
        };
        (address(self.x.as_ref()), kind)
    }

    fn y(&self) -> (usize, Half) {
        let kind = self.y.as_ref().map(|y| kind(y, "y"));
        (
            address(self.y.as_ref()),
            kind.and_then(Result::ok).unwrap_or(Half::F16),
        )
    }

    fn scratch(&self) -> (usize, usize) {
        let scratch = self.scratch.as_ref();
        (address(scratch), scratch.map_or(0, Tensor::numel))
    }

    /// Tuning that the kernel cannot take.
    fn unplanned(&self) -> CudaError {
        CudaError::Argument {
            what: format!("{:?}", self.plan.tuning),
            limit: "does not fit the shared memory of this card".to_owned(),
        }
    }

    /// The operands of `gemv_ring` and `gemm_few`.
    fn matmul(&self) -> ring::Matmul {
        let ((x, x_type), (y, y_type)) = (self.x(), self.y());
        ring::Matmul {
            x,
            x_type,
            y,
            y_type,
            m: self.plan.call.rows,
            residual: address(self.residual.as_ref()),
            gate: self.group.gate,
            norm: self
                .norm
                .filter(|_| self.x.is_some())
                .map(NormPrologue::argument),
        }
    }

    fn gemv_ring(&self, to: Target) -> Result<(), CudaError> {
        let Planned::Ring(plan) = &self.plan.planned else {
            return Err(self.unplanned());
        };
        // SAFETY: torch owns the memory and keeps freed blocks for work queued on their stream; sizes were checked.
        unsafe { ring::launch(to, &self.group.parts(), &self.matmul(), plan) }
    }

    fn gemm_few(&self, to: Target) -> Result<(), CudaError> {
        let input = match (&self.x, self.norm) {
            (Some(_), _) => few::Input::Rows,
            (None, None) => few::Input::Prepared,
            (None, Some(norm)) => few::Input::Unnormed {
                weight: norm.weight.ptr,
                eps: norm.eps,
            },
        };
        let parts = self.next.map(|next| next.group.get().parts());
        let next = self.next.zip(parts.as_ref());
        let next = next.map(|(next, matrices)| few::Next {
            matrices,
            gated: next.group.get().gate.is_some(),
            scratch: (next.scratch.ptr, next.scratch.numel()),
            unnormed: next.normed,
        });
        let Planned::Few(plan) = &self.plan.planned else {
            return Err(self.unplanned());
        };
        // SAFETY: as in `gemv_ring`.
        unsafe {
            few::launch(
                to,
                &self.group.parts(),
                &self.matmul(),
                input,
                self.scratch(),
                next,
                plan,
            )
        }
    }

    fn gemm_batch(&self, to: Target) -> Result<(), CudaError> {
        let ((x, x_type), (y, y_type)) = (self.x(), self.y());
        let op = batch::Matmul {
            x,
            transposed: self.chained,
            x_type,
            y,
            y_type,
            m: self.plan.call.rows,
            apart: self.plan.separate_gate,
            norm: self.norm.map(NormPrologue::argument),
            residual: address(self.residual.as_ref()),
            gate: self.group.gate.filter(|_| !self.plan.separate_gate),
        };
        let scratch = address(self.scratch.as_ref());
        let room = batch::Room {
            scratch,
            multipliers: scratch + self.plan.multipliers_at,
            exchange: address(self.exchange.as_ref()),
        };
        let parts = self.next.map(|next| next.group.get().parts());
        let next = self.next.zip(parts.as_ref());
        let next = next.map(|(next, parts)| batch::Next {
            matrix: parts[0],
            scratch: next.scratch.ptr,
        });
        let (matrices, tuning) = (self.group.parts(), self.plan.tuning.batch);
        // SAFETY: as in `gemv_ring`.
        unsafe { batch::launch(to, &matrices, &op, room, next, tuning) }
    }

    fn gemm_tile(&self, to: Target) -> Result<(), CudaError> {
        let ((x, x_type), (y, y_type)) = (self.x(), self.y());
        let op = linear::Matmul {
            x,
            x_type,
            y,
            y_type,
            m: self.plan.call.rows,
        };
        let scratch = address(self.scratch.as_ref());
        let multipliers = scratch + self.plan.multipliers_at;
        let matrix = &self.group.matrices[0].get().matrix;
        // SAFETY: as in `gemv_ring`.
        unsafe { linear::matmul(to, matrix, &op, scratch, multipliers) }
    }
}

impl NormPrologue {
    /// Whether the weight is of so many features.
    fn holds(&self, features: usize) -> bool {
        self.weight.dtype == DType::F32
            && self.weight.numel() == features
            && self.weight.ptr.is_multiple_of(16)
    }
}

fn address(tensor: Option<&Tensor>) -> usize {
    tensor.map_or(0, |tensor| tensor.ptr)
}

fn tuned(kernel: Kernel, numbers: &[usize]) -> PyResult<Tuning> {
    let mut tuning = Tuning::default();
    match (kernel, numbers) {
        (_, []) => {}
        (Kernel::GemvRing, &[slots, window]) => {
            let (slots, window) = (slots as i32, window as i32);
            tuning.ring = Some(ring::Tuning { slots, window });
        }
        (Kernel::GemmFew, &[cut, slots, window]) => {
            let (cut, slots, window) = (cut as i32, slots as i32, window as i32);
            tuning.few = few::Tuning { cut, slots, window };
        }
        (Kernel::GemmBatch, &[slots, activations, cut, groups, looks]) => {
            tuning.batch = batch::Tuning {
                slots,
                activations,
                cut,
                groups,
                looks,
                whole: false,
            };
        }
        _ => {
            return Err(PyValueError::new_err(format!(
                "{} is not tuned by {} numbers",
                kernel.name(),
                numbers.len()
            )));
        }
    }
    Ok(tuning)
}
