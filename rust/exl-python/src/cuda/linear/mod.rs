//! Bindings of quantized matmuls on a GPU: one to three matrices over one input, launched by the plan of `ops::linear::select`.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

mod launch;

use exl_cuda::ops::linear::select::{self, Call, Epilogue, Kernel, Plan, Tuning};
use exl_cuda::ops::linear::{Matrix, batch, few, ring};
use exl_cuda::{Capabilities, Device};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cuda::lora::{AdapterSizes, EpilogueAdapters};
use crate::cuda::matrix::CudaMatrix;
use crate::cuda::select::RefusedKernel;
use crate::cuda::{activation_kind, expect};
use crate::errors::device_error;
use crate::operands::Launch;
use crate::tensor::Tensor;
use launch::Operands;

/// Norm of a matmul's input, or RMS norm of a sum of residuals. A layer's is made once and used by every step.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct NormPrologue {
    pub weight: Tensor,
    pub eps: f32,
    pub offset: f32,
    /// Bias of a LayerNorm.
    pub bias: Option<Tensor>,
    pub layer: bool,
}

#[pymethods]
impl NormPrologue {
    /// x / sqrt(mean(x^2) + eps) * (weight + offset); `weight` float32 [width of x], for a matmul aligned to 16 bytes, on the GPU of x.
    /// `layer`: a LayerNorm, (x - mean(x)) / sqrt(var(x) + eps) * weight + `bias`, which is like the weight.
    #[new]
    #[pyo3(signature = (weight, eps, offset, *, layer=false, bias=None))]
    fn new(weight: Tensor, eps: f32, offset: f32, layer: bool, bias: Option<Tensor>) -> Self {
        Self {
            weight,
            eps,
            offset,
            bias,
            layer,
        }
    }
}

impl NormPrologue {
    fn argument(&self) -> ring::Norm {
        ring::Norm {
            weight: self.weight.ptr,
            eps: self.eps,
            offset: self.offset,
            bias: self.bias.as_ref().map_or(0, |bias| bias.ptr),
            layer: self.layer,
        }
    }
}

/// The input of the next matmul as the destination of results.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct NextInput {
    group: Py<CudaLinearGroup>,
    scratch: Tensor,
    normed: bool,
}

#[pymethods]
impl NextInput {
    /// `scratch` uint8, of the plan of that `group`; `normed`: it norms its input, so that results include their sums of squares.
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
    pub plan: Plan,
}

#[pymethods]
impl MatmulPlan {
    /// gemv_ring, gemv_ring_adapted, gemm_few, gemm_direct, gemm_batch, gemm_tile or gemm_large.
    #[getter]
    fn kernel(&self) -> &'static str {
        self.plan.kernel_name()
    }

    /// Whether `run` takes all matrices with norm, gate and residual. Otherwise each matrix has a separate plan.
    #[getter]
    fn joined(&self) -> bool {
        self.plan.joined
    }

    /// Rows of a launch. A call of more rows is several launches, each by the plan of its rows.
    #[getter]
    fn rows(&self) -> usize {
        self.plan.call.rows
    }

    /// Whether the caller dequantizes the matrix and multiplies by cuBLAS; `run` has no launch for that.
    #[getter]
    fn dequantizes(&self) -> bool {
        self.plan.kernel == Kernel::GemmLarge
    }

    /// Whether one launch on packed weights takes a whole block of rows.
    #[getter]
    fn whole_block(&self) -> bool {
        self.plan.is_whole_block()
    }

    /// Whether one launch of all matrices is faster than a launch each, where norm and residual are launches of their own.
    #[getter]
    fn pays_apart(&self) -> bool {
        self.plan.pays_apart
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

    /// Whether y has the results of one matrix before their activation, which is left to the caller.
    #[getter]
    fn separate_activation(&self) -> bool {
        self.plan.separate_activation
    }

    /// Whether `run` can apply an activation to x.
    #[getter]
    fn activates_input(&self) -> bool {
        self.plan.activates_input
    }

    /// Whether the previous matmul can write its results packed into the scratch memory, in the layout of `gemm_few`.
    #[getter]
    fn takes_packed(&self) -> bool {
        self.plan.takes_packed
    }

    /// Columns of the kernel's layout in which a launch other than a matmul can pack rows into the scratch memory, or None.
    #[getter]
    fn input_columns(&self) -> Option<usize> {
        self.plan.input_columns
    }

    /// Columns in which the launch of adapters before the matmul packs its rows into the scratch memory; None where it leaves them as they are.
    #[getter]
    fn columns_for_adapters(&self) -> Option<usize> {
        self.plan.columns_for_adapters()
    }

    /// Whether a call by this plan can write its results packed as the input of a call by `next`, of the same GPU and as many features.
    fn chains_to(&self, next: &Self) -> bool {
        self.plan.chains_to(&next.plan)
    }

    /// Faster kernels and why each does not take the call.
    #[getter]
    fn refused(&self) -> Vec<RefusedKernel> {
        let refused = self.plan.refused.iter();
        refused
            .map(|(kernel, why)| RefusedKernel::new(kernel.name(), why))
            .collect()
    }
}

/// The properties of a call of a matmul that decide its kernel, besides its matrices.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct MatmulCall {
    call: Call,
}

#[pymethods]
impl MatmulCall {
    /// A call of `rows` rows of float16, or of `bfloat16`. `norm`: "rms" or "layer" where the input is normed; `residual`: one is added.
    /// `aligned_input`: x is aligned to 16 bytes; `aligned_output`: y is aligned to 8 bytes and the residual to 4; `invariant`: a row's
    /// result must not depend on the number of rows; `adapters`: the
    /// launch adds adapters of these sizes.
    #[new]
    #[pyo3(signature = (rows, *, bfloat16=false, norm=None, residual=false, aligned_input=true, aligned_output=true, invariant=false, adapters=None))]
    #[allow(clippy::fn_params_excessive_bools)] // one keyword each
    fn new(
        rows: usize,
        bfloat16: bool,
        norm: Option<&str>,
        residual: bool,
        aligned_input: bool,
        aligned_output: bool,
        invariant: bool,
        adapters: Option<&AdapterSizes>,
    ) -> PyResult<Self> {
        if let Some(other) = norm.filter(|name| !["rms", "layer"].contains(name)) {
            return Err(PyValueError::new_err(format!(
                "norm {other:?}: expected \"rms\" or \"layer\""
            )));
        }
        let epilogue = Epilogue {
            norm: norm.is_some(),
            layer: norm == Some("layer"),
            residual,
            bf16: bfloat16,
            adapters: adapters.map(|adapters| adapters.sizes),
            ..Epilogue::default()
        };
        let call = Call {
            rows,
            epilogue,
            aligned_input,
            aligned_output,
            invariant,
        };
        Ok(Self { call })
    }
}

impl MatmulCall {
    /// The call of two matrices with a `gate`, or of one with an `activation` of its results.
    pub fn of(&self, gate: bool, activation: bool) -> Call {
        let epilogue = Epilogue {
            gate,
            activation,
            ..self.call.epilogue
        };
        Call {
            epilogue,
            ..self.call
        }
    }
}

/// Launch parameters of a kernel that override its plan, for benchmarks and tests.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct MatmulTuning {
    kernel: Kernel,
    tuning: Tuning,
}

#[pymethods]
impl MatmulTuning {
    /// Of gemv_ring: `slots` of the ring, of which `window` are under way.
    #[staticmethod]
    #[pyo3(signature = (*, slots, window))]
    fn ring(slots: i32, window: i32) -> Self {
        let ring = Some(ring::Tuning { slots, window });
        Self {
            kernel: Kernel::GemvRing,
            tuning: Tuning {
                ring,
                ..Tuning::default()
            },
        }
    }

    /// Of gemm_few: parts that K is cut into, slots of the ring, of which `window` are under way, and passes over the tiles; 0 keeps the
    /// planned number.
    #[staticmethod]
    #[pyo3(signature = (*, cut=0, slots=0, window=0, passes=0))]
    fn few(cut: i32, slots: i32, window: i32, passes: i32) -> Self {
        let few = few::Tuning {
            cut,
            slots,
            window,
            passes,
        };
        Self {
            kernel: Kernel::GemmFew,
            tuning: Tuning {
                few,
                ..Tuning::default()
            },
        }
    }

    /// Of gemm_batch: slots of the ring, activations streamed (1) or kept (2), parts that K is cut into, warpgroups, and polls for
    /// the blocks that share K; 0 keeps the planned number.
    #[staticmethod]
    #[pyo3(signature = (*, slots=0, activations=0, cut=0, groups=0, looks=0))]
    fn batch(slots: usize, activations: usize, cut: usize, groups: usize, looks: usize) -> Self {
        let batch = batch::Tuning {
            slots,
            activations,
            cut,
            groups,
            looks,
            whole: false,
        };
        Self {
            kernel: Kernel::GemmBatch,
            tuning: Tuning {
                batch,
                ..Tuning::default()
            },
        }
    }
}

/// One to three quantized matrices on a GPU over one input, optionally with an activation: of a gate, or of one matrix's results.
#[pyclass(frozen, name = "CudaLinearGroup", module = "exl_kernels._native")]
pub struct CudaLinearGroup {
    matrices: Vec<Py<CudaMatrix>>,
    /// Number of the activation of the only matrix's results, or of the first of two matrices, which gates the second.
    activation: Option<i32>,
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

    fn gate(&self) -> Option<i32> {
        self.activation.filter(|_| self.matrices.len() > 1)
    }

    fn activation_of_all(&self) -> Option<i32> {
        self.activation.filter(|_| self.matrices.len() == 1)
    }
}

#[pymethods]
impl CudaLinearGroup {
    #[new]
    #[pyo3(signature = (matrices, activation=None))]
    fn new(matrices: Vec<Py<CudaMatrix>>, activation: Option<&str>) -> PyResult<Self> {
        let activation = activation.map(activation_number).transpose()?;
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
        let out_features = match activation {
            Some(_) => first.matrix.out_features(),
            None => matrices.iter().map(|m| m.get().matrix.out_features()).sum(),
        };
        Ok(Self {
            matrices,
            activation,
            device,
            in_features,
            out_features,
        })
    }

    /// The plan of a call of `run`.
    fn plan(&self, py: Python<'_>, call: &MatmulCall) -> PyResult<MatmulPlan> {
        let call = call.of(self.gate().is_some(), self.activation_of_all().is_some());
        let plan = select::plan(&self.caps(py)?, &self.parts(), call);
        Ok(MatmulPlan { plan })
    }

    /// The plan of a call of the first matrix only, as `QuantMatrix.matmul` launches it; x is aligned to 16 bytes.
    #[pyo3(signature = (rows, *, bfloat16=false, invariant=false))]
    fn plan_alone(
        &self,
        py: Python<'_>,
        rows: usize,
        bfloat16: bool,
        invariant: bool,
    ) -> PyResult<MatmulPlan> {
        let caps = self.caps(py)?;
        let epilogue = Epilogue {
            bf16: bfloat16,
            ..Epilogue::default()
        };
        let call = Call {
            invariant,
            ..Call::aligned(rows, epilogue)
        };
        let plan = select::plan_alone(&caps, &self.matrices[0].get().matrix, call);
        Ok(MatmulPlan { plan })
    }

    /// The plan of a call by the kernel of this name, for benchmarks and tests that compare kernels.
    #[pyo3(signature = (kernel, call, tuning=None))]
    fn plan_with(
        &self,
        py: Python<'_>,
        kernel: &str,
        call: &MatmulCall,
        tuning: Option<&MatmulTuning>,
    ) -> PyResult<MatmulPlan> {
        let kernel = Kernel::named(kernel)
            .ok_or_else(|| PyValueError::new_err(format!("no kernel {kernel:?}")))?;
        let call = call.of(self.gate().is_some(), self.activation_of_all().is_some());
        let tuning = match tuning {
            None => Tuning::default(),
            Some(of) if of.kernel == kernel => of.tuning,
            Some(of) => {
                let (name, other) = (kernel.name(), of.kernel.name());
                return Err(PyValueError::new_err(format!(
                    "the tuning is one of {other}, not of {name}"
                )));
            }
        };
        let plan = select::plan_with(kernel, &self.caps(py)?, &self.parts(), call, tuning);
        plan.map(|plan| MatmulPlan { plan })
            .map_err(|error| device_error(py, &error))
    }

    /// Compute y [m, N] = norm(x) @ W, gated, with `residual` added, by `plan`; y is [2, m, N] if the plan has a separate gate.
    ///
    /// `scratch` and `exchange`, uint8 and aligned to 128 bytes, have the plan's sizes. Without x, its rows are packed in `scratch`;
    /// `chained`: the previous matmul wrote them there as its `next`. `norm` is then weight plus offset, in the order of the layout, padded
    /// to whole units of 256. Without y, results go only to `next`. `input_activation`: an activation of x, if the plan activates inputs.
    /// `adapters`: of the rows, if the plan is for them.
    #[pyo3(signature = (plan, x, y, launch, *, scratch=None, exchange=None, residual=None, norm=None, next=None, chained=false, input_activation=None, adapters=None))]
    #[allow(clippy::too_many_arguments)] // an object of them would be made for each launch
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
        input_activation: Option<&str>,
        adapters: Option<&EpilogueAdapters>,
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
            input_activation: input_activation.map(activation_number).transpose()?,
            adapters,
        };
        let to = call.check(|| self.caps(py), launch)?;
        let adapters = call.adapters()?;
        let done = match plan.plan.kernel {
            Kernel::GemvRing => py.detach(|| call.gemv_ring(to, adapters)),
            Kernel::GemmFew => py.detach(|| call.gemm_few(to)),
            Kernel::GemmDirect => py.detach(|| call.gemm_direct(to)),
            Kernel::GemmBatch => py.detach(|| call.gemm_batch(to)),
            Kernel::GemmTile => py.detach(|| call.gemm_tile(to)),
            Kernel::GemmLarge => {
                return Err(PyValueError::new_err(
                    "gemm_large dequantizes and calls cuBLAS: it has no launch here",
                ));
            }
        };
        done.map_err(|error| device_error(py, &error))
    }
}
/// The number of an activation in the kernels.
fn activation_number(name: &str) -> PyResult<i32> {
    activation_kind(name).map(|kind| kind as i32)
}
