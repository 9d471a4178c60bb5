//! The kernels that a card runs, without launching anything: for `exl info --kernels`, and for tests that need a certain kernel.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::layout::{Layout, Problem, has_fine_scales};
use exl_cuda::ops::Element;
use exl_cuda::ops::elementwise::select as norms;
use exl_cuda::ops::kv::{self, KINDS, Kind};
use exl_cuda::ops::linear::float::{self, FloatMatrix};
use exl_cuda::ops::linear::lora::select as adapters;
use exl_cuda::ops::linear::select::{self, Call, Epilogue};
use exl_cuda::ops::linear::{Addresses, Matrix};
use exl_cuda::ops::moe;
use exl_cuda::ops::sampling::SEGMENT;
use exl_cuda::ops::sampling::select::{self as sampling, Batch, row};
use exl_cuda::{CARDS, Capabilities, Card, Device, Feature};
use exl_format::exl2::{Exl2View, read_groups};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

pub mod attention;

use crate::cpu::sampling::SamplingPlan;
use crate::cuda::linear::{MatmulCall, MatmulPlan};
use crate::cuda::sampling::row_call;
use crate::errors::{device_error, format_error, unsupported_error};
use crate::matrix_parts::{Exl2Parts, GptqFormat, GptqParts};

/// The properties of a GPU that decide its kernels: a GPU of this machine, or one known by name.
#[pyclass(frozen, name = "CudaCard", module = "exl_kernels._native")]
pub struct CudaCard {
    pub caps: Capabilities,
}

#[pymethods]
impl CudaCard {
    /// The GPU `index` of this machine with the code that this module holds for it.
    #[staticmethod]
    fn device(py: Python<'_>, index: u32) -> PyResult<Self> {
        let device = Device::get(index).map_err(|error| device_error(py, &error))?;
        Ok(Self {
            caps: device.info.caps,
        })
    }

    /// A card of `cuda_cards` with the code of a build for it, or None.
    #[staticmethod]
    fn named(name: &str) -> Option<Self> {
        Card::named(name).map(|card| Self {
            caps: card.with_own_code(),
        })
    }

    /// Architecture of the code that the card runs, 80 for sm_80.
    #[getter]
    fn code(&self) -> i32 {
        self.caps.code
    }

    /// The features that the code has, of "bulk_copy", "clusters", "tested_clusters", "wgmma", "async_copy" and "mma_pipeline".
    #[getter]
    fn features(&self) -> Vec<&'static str> {
        Feature::ALL
            .into_iter()
            .filter(|&feature| self.caps.has(feature))
            .map(Feature::name)
            .collect()
    }
}

/// Names of the cards whose kernels can be listed on other machines.
#[pyfunction]
pub fn cuda_cards() -> Vec<&'static str> {
    CARDS.iter().map(|card| card.name).collect()
}

/// Whether the GPU's layout of an EXL2 matrix stores a scale for every 32 rows because some groups are smaller than 128 rows. False for
/// groups that the format forbids.
///
/// `q_groups`: as in the file; `words`: rows of `q_weight`.
#[pyfunction]
pub fn cuda_has_fine_scales(q_groups: Vec<i16>, words: usize) -> bool {
    read_groups(&q_groups, words).is_ok_and(|groups| has_fine_scales(&groups))
}

/// The shape of a quantized matrix in the GPU's layout, without its weights.
#[pyclass(frozen, name = "CudaShape", module = "exl_kernels._native")]
pub struct CudaShape {
    matrix: Matrix,
}

impl CudaShape {
    /// The shape of a matrix of this name, with the layout computed for it.
    fn new(py: Python<'_>, name: &str, layout: Result<Layout, Problem>) -> PyResult<Self> {
        let layout = layout.map_err(|error| unsupported_error(py, format!("{name}: {error}")))?;
        let nowhere = Addresses {
            image: 0,
            units: 0,
            maxima: 0,
            features: 0,
            row_of_feature: 0,
            bias: 0,
        };
        Ok(Self {
            matrix: Matrix::new(&layout, nowhere, 1.0),
        })
    }
}

#[pymethods]
impl CudaShape {
    #[staticmethod]
    #[pyo3(signature = (name, parts, *, fine_scales = false))]
    fn from_exl2(
        py: Python<'_>,
        name: &str,
        parts: Exl2Parts,
        fine_scales: bool,
    ) -> PyResult<Self> {
        let view =
            Exl2View::new(name, parts.tensors()?).map_err(|error| format_error(py, &error))?;
        Self::new(py, name, Layout::exl2(&view, fine_scales))
    }

    #[staticmethod]
    fn from_gptq(
        py: Python<'_>,
        name: &str,
        parts: GptqParts,
        format: GptqFormat,
    ) -> PyResult<Self> {
        let view = format
            .view(name, parts.tensors()?)
            .map_err(|error| format_error(py, &error))?;
        Self::new(py, name, Layout::gptq(&view))
    }

    /// Rows of the matrix.
    #[getter]
    fn in_features(&self) -> usize {
        self.matrix.in_features()
    }

    /// Columns of the matrix.
    #[getter]
    fn out_features(&self) -> usize {
        self.matrix.out_features()
    }
}

/// The plan of a matmul of several matrices over one input, as `CudaLinearGroup.plan` makes it for a loaded group with or without an
/// activation.
#[pyfunction]
#[pyo3(signature = (card, shapes, call, *, activation=false))]
pub fn cuda_plan_fused(
    card: &CudaCard,
    shapes: Vec<PyRef<'_, CudaShape>>,
    call: &MatmulCall,
    activation: bool,
) -> MatmulPlan {
    let matrices: Vec<&Matrix> = shapes.iter().map(|shape| &shape.matrix).collect();
    let gate = activation && matrices.len() > 1;
    let call = call.of(gate, activation && !gate);
    MatmulPlan {
        plan: select::plan(&card.caps, &matrices, call),
    }
}

/// The plan of one matrix without an epilogue, as `QuantMatrix.matmul` runs aligned float16.
#[pyfunction]
#[pyo3(signature = (card, shape, rows, *, invariant=false))]
pub fn cuda_plan_alone(
    card: &CudaCard,
    shape: &CudaShape,
    rows: usize,
    invariant: bool,
) -> MatmulPlan {
    let call = Call {
        invariant,
        ..Call::aligned(rows, Epilogue::default())
    };
    MatmulPlan {
        plan: select::plan_alone(&card.caps, &shape.matrix, call),
    }
}

/// The kernel of `rows` batch-invariant float16 rows of a float matrix, aligned to 16 bytes like them.
#[pyfunction]
#[pyo3(signature = (card, rows, *, in_features, out_features))]
pub fn cuda_select_float(
    card: &CudaCard,
    rows: usize,
    in_features: usize,
    out_features: usize,
) -> &'static str {
    let whole = in_features.is_multiple_of(8);
    float::select(&card.caps, rows, in_features, out_features, whole).name()
}

/// Whether a row's result of a quantized matmul does not depend on the number of rows, if the matmul is asked to be `invariant` or not.
#[pyfunction]
pub fn cuda_rows_invariant(rows: usize, invariant: bool) -> bool {
    select::is_invariant(rows, invariant)
}

/// Most rows of a pass, other than a decode step, that run on packed weights and are batch-invariant. `whole_blocks`: the plan of a block of
/// every matrix is a `whole_block`.
#[pyfunction]
pub fn cuda_pass_rows(whole_blocks: bool) -> usize {
    select::pass_rows(whole_blocks)
}

/// Whether a pass of `rows` rows runs on packed weights, batch-invariant: a decode step, or one of up to `packed` rows, which
/// `cuda_pass_rows` returns.
#[pyfunction]
#[pyo3(signature = (rows, *, decodes, packed))]
pub fn cuda_runs_packed(rows: usize, decodes: bool, packed: usize) -> bool {
    select::runs_packed(rows, decodes, packed)
}

/// A kernel that is faster than the chosen one, and why it does not take the call.
#[pyclass(frozen, get_all, skip_from_py_object, module = "exl_kernels._native")]
#[derive(Clone, Debug)]
pub struct RefusedKernel {
    kernel: String,
    why: String,
}

impl RefusedKernel {
    pub fn new(kernel: impl Into<String>, why: impl ToString) -> Self {
        Self {
            kernel: kernel.into(),
            why: why.to_string(),
        }
    }

    /// The reason of a kernel that takes only `what`.
    fn takes(kernel: impl Into<String>, what: &str) -> Self {
        Self::new(kernel, format!("it takes {what}"))
    }
}

/// The kernels of a call.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct KernelChoice {
    /// Names of their functions, in the order of the launches; none where the CPU computes the call.
    kernels: Vec<String>,
    /// Kernels that would be faster, or would need no further launches.
    refused: Vec<RefusedKernel>,
}

/// How the experts of a layer run.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct ExpertsPlan {
    /// As reports name it.
    kernel: &'static str,
    /// One call for all experts is faster than one expert after the other.
    shares: bool,
    /// The call dequantizes some experts at a time.
    dequantizes: bool,
    /// The call sorts its rows by expert, for a matmul of each. Calls that neither sort nor dequantize share launches.
    sorts: bool,
    /// Why the experts cannot share launches, or None.
    refused: Option<String>,
    /// Rows of a call of shared launches: more rows are several calls. All rows where experts are dequantized, sorted or refused.
    rows: usize,
    /// Bytes of scratch memory of shared launches; 0 where the experts cannot share them.
    scratch_bytes: usize,
    /// Names of the functions of shared launches, in their order; none where experts are dequantized, sorted or run one after the other.
    launches: Vec<String>,
}

impl ExpertsPlan {
    /// The plan for `rows` rows with `chosen` experts each, batch-invariant or not.
    pub fn of(experts: &moe::Experts, rows: usize, chosen: usize, invariant: bool) -> Self {
        let plan = Self::new(experts.kernel(rows, chosen, invariant), rows, None);
        Self {
            rows: if plan.dequantizes || plan.sorts {
                rows
            } else {
                moe::rows_at_once(rows, chosen)
            },
            scratch_bytes: experts.scratch_bytes(rows, chosen),
            launches: experts.launches(rows, chosen, invariant),
            ..plan
        }
    }

    /// The same of experts that shared launches may refuse.
    fn of_made(
        experts: Result<moe::Experts, String>,
        rows: usize,
        chosen: usize,
        invariant: bool,
    ) -> Self {
        match experts {
            Ok(made) => Self::of(&made, rows, chosen, invariant),
            Err(why) => Self::new(moe::select::Kernel::Apart, rows, Some(why)),
        }
    }

    fn new(kernel: moe::select::Kernel, rows: usize, refused: Option<String>) -> Self {
        Self {
            rows,
            kernel: kernel.name(),
            shares: kernel.shares(),
            dequantizes: kernel.dequantizes(),
            sorts: kernel.sorts(),
            refused,
            scratch_bytes: 0,
            launches: Vec::new(),
        }
    }
}

/// How the experts (gate, up, down) of a layer run for `rows` rows with `chosen` experts each, batch-invariant or not.
#[pyfunction]
#[pyo3(signature = (card, experts, rows, chosen, *, invariant=false))]
pub fn cuda_select_experts(
    card: &CudaCard,
    experts: Vec<[PyRef<'_, CudaShape>; 3]>,
    rows: usize,
    chosen: usize,
    invariant: bool,
) -> ExpertsPlan {
    let all: Vec<[&Matrix; 3]> = experts
        .iter()
        .map(|parts| parts.each_ref().map(|shape| &shape.matrix))
        .collect();
    let experts = moe::Experts::new(&all, &card.caps);
    ExpertsPlan::of_made(experts, rows, chosen, invariant)
}

/// As `cuda_select_experts`, for `experts` experts of float matrices with aligned weights; `width`: features between gate, up and down.
#[pyfunction]
#[pyo3(signature = (card, rows, chosen, *, experts, hidden, width, invariant=false))]
pub fn cuda_select_float_experts(
    card: &CudaCard,
    rows: usize,
    chosen: usize,
    experts: usize,
    hidden: usize,
    width: usize,
    invariant: bool,
) -> ExpertsPlan {
    let matrix = |in_features, out_features| FloatMatrix {
        weight: 0,
        bias: 0,
        in_features,
        out_features,
        scale: 1.0,
        prescale: 1.0,
    };
    let (up, down) = (matrix(hidden, width), matrix(width, hidden));
    let all = vec![[&up, &up, &down]; experts];
    let experts = moe::Experts::of_float(&all, &card.caps);
    ExpertsPlan::of_made(experts, rows, chosen, invariant)
}

fn named(kind: &str) -> PyResult<Kind> {
    let found = KINDS.into_iter().find(|known| known.name == kind);
    found.ok_or_else(|| PyValueError::new_err(format!("no cache kind {kind:?}")))
}

/// The kernel that rotates and stores `tokens` tokens of float16 in aligned tensors.
#[pyfunction]
#[pyo3(signature = (kind, head_dim, *, tokens, rotated, interleaved=false))]
pub fn cuda_select_rope_store(
    kind: &str,
    head_dim: usize,
    tokens: usize,
    rotated: usize,
    interleaved: bool,
) -> PyResult<KernelChoice> {
    let call = kv::select::Call {
        tokens,
        element: Element::F16,
        kind: named(kind)?,
        head_dim,
        rotated,
        interleaved,
        aligned: true,
    };
    let (kernel, faster) = kv::select::select(&call);
    let many = kv::select::Kernel::Many.name();
    Ok(KernelChoice {
        kernels: vec![kernel.name()],
        refused: faster
            .map(|what| RefusedKernel::takes(many, what))
            .into_iter()
            .collect(),
    })
}

/// The kernel of a norm of float16 rows, or of float32 rows, with a float32 weight. `operation`: "rms", "layer", "rms parts", "add rms" (x + y
/// and its RMS norm) or "add post" (x + norm(y) and its norm). `columns`: of the input of a matmul that the launch packs.
#[pyfunction]
#[pyo3(signature = (operation, width, *, float32=false, columns=None))]
pub fn cuda_select_norm(
    operation: &str,
    width: usize,
    float32: bool,
    columns: Option<usize>,
) -> PyResult<KernelChoice> {
    let (element, weight) = (
        if float32 { Element::F32 } else { Element::F16 },
        Element::F32,
    );
    let call = match (operation, columns) {
        ("rms", None) => norms::Call::Rms { element, weight },
        ("layer", None) => norms::Call::Layer { element, weight },
        ("layer", Some(columns)) if !float32 => norms::Call::LayerPacked { columns },
        ("rms parts", None) if !float32 => norms::Call::RmsParts,
        ("add rms", None) => norms::Call::AddRms { element },
        ("add post", columns) => norms::Call::AddPost {
            element,
            width,
            columns,
            aligned: true,
        },
        _ => {
            return Err(PyValueError::new_err(format!(
                "no kernel computes {operation:?} of {} rows into {columns:?} columns",
                element.suffix()
            )));
        }
    };
    let (kernel, faster) = norms::select(&call);
    Ok(KernelChoice {
        kernels: vec![kernel.name()],
        refused: faster
            .map(|(faster, what)| RefusedKernel::takes(faster.name(), what))
            .into_iter()
            .collect(),
    })
}

/// The kernels that add the adapters of `rows` rows, of A and of B. `ranks`: of all matrices of a joined matmul together, or 0 for those of one
/// matrix whose matmul is not joined; `columns`: of the matmul's input, if the launch can pack that; `gated`: the results have a gate.
#[pyfunction]
#[pyo3(signature = (rows, ranks, *, columns=None, gated=false))]
pub fn cuda_select_adapters(
    rows: usize,
    ranks: usize,
    columns: Option<usize>,
    gated: bool,
) -> KernelChoice {
    let (shrink, expand, faster) = if ranks == 0 {
        let (shrink, expand) = adapters::alone();
        (shrink, expand, None)
    } else {
        let shrink = adapters::shrink(rows, ranks, columns);
        (shrink.kernel, adapters::expand(gated), shrink.refused)
    };
    let packing = adapters::Kernel::ShrinkPacking.name();
    KernelChoice {
        kernels: [shrink, expand]
            .map(|kernel| kernel.name().to_owned())
            .to_vec(),
        refused: faster
            .map(|what| RefusedKernel::takes(packing, what))
            .into_iter()
            .collect(),
    }
}

/// Why the kernels do not add the adapters of `rows` rows, which are asked to be batch-invariant or not; None if they do.
#[pyfunction]
#[pyo3(signature = (rows, *, invariant=false))]
pub fn cuda_refusal_of_adapted_rows(rows: usize, invariant: bool) -> Option<String> {
    let refused = adapters::takes_rows(rows, invariant).err();
    refused.map(|why| why.to_string())
}

/// Why the kernels do not add adapters to matrices over one input, with `widths` outputs each, or None.
#[pyfunction]
pub fn cuda_refusal_of_adapted_shapes(in_features: usize, widths: Vec<usize>) -> Option<String> {
    let refused = adapters::takes_shapes(in_features, &widths).err();
    refused.map(|why| why.to_string())
}

/// The kernels that sample `rows` rows of `width` logits with one plan; none where the CPU samples the rows. `mirostat`: the rows have a
/// threshold; `mixed`: they have logits of a negative prompt; `top_n`: candidates to report.
#[pyfunction]
#[pyo3(signature = (card, plan, rows, width, *, mirostat=false, mixed=false, top_n=0))]
pub fn cuda_select_sampling(
    card: &CudaCard,
    plan: &SamplingPlan,
    rows: usize,
    width: usize,
    mirostat: bool,
    mixed: bool,
    top_n: usize,
) -> KernelChoice {
    let call = row_call(plan, width, f64::from(mirostat), mixed, top_n);
    let planned = row::plan(&call);
    let batch = Batch {
        rows: if planned.way == row::Way::Host {
            0
        } else {
            rows
        },
        pitch: width.next_multiple_of(SEGMENT),
        needs: planned.needs,
        copies: false,
    };
    let launches = sampling::plan(&card.caps, &batch);
    let refused = planned.refused();
    KernelChoice {
        kernels: launches
            .iter()
            .map(|launch| launch.kernel.name().to_owned())
            .collect(),
        refused: refused
            .iter()
            .map(|(kernel, why)| RefusedKernel::new(kernel.name(), why))
            .collect(),
    }
}
