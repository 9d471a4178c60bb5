//! Bindings of the router of a mixture of experts on a GPU.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::Device;
use exl_cuda::ops::moe::route::{self, Choice, Route, RouteNorm};
use exl_cuda::ops::moe::select::route::{MOST_HIDDEN, NormShape, Plan, Router};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cuda::linear::NormPrologue;
use crate::cuda::select::CudaCard;
use crate::cuda::{expect, target};
use crate::errors::device_error;
use crate::operands::Launch;
use crate::tensor::{DType, Tensor};

/// The choice of experts and weights from the logits of a router: made once with the layer.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct ExpertRouter {
    weight: Tensor,
    bias: Option<Tensor>,
    prescale: f64,
    choice: Choice,
    router: Router,
}

/// How a number of rows is routed.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct RouterPlan {
    plan: Plan,
    /// The norm of the launch, if it has one; of shapes alone always None.
    norm: Option<Py<NormPrologue>>,
}

#[pymethods]
impl RouterPlan {
    /// experts_route or experts_route_many; "topk" or "sparse_mixture" where the caller computes logits and chooses.
    #[getter]
    fn kernel(&self) -> &'static str {
        self.plan.name()
    }

    /// One launch chooses the experts.
    #[getter]
    fn routes(&self) -> bool {
        self.plan.kernel.is_some()
    }

    /// The launch norms the rows first.
    #[getter]
    fn norms(&self) -> bool {
        self.plan.norms
    }

    /// Why no kernel routes, or None.
    #[getter]
    fn refused(&self) -> Option<String> {
        self.plan.router.refusal()
    }

    /// Rows of `logits` and `arrivals` of `ExpertRouter.route`.
    #[getter]
    fn scratch_rows(&self) -> usize {
        self.plan.scratch_rows()
    }
}

#[pymethods]
impl ExpertRouter {
    /// Logits are (h @ weight^T + bias) * prescale; `weight` [experts, hidden] float16 or bfloat16, `bias` float32. If `jitter` is not
    /// negative, two experts are chosen by the sparse mixer.
    #[new]
    #[pyo3(signature = (weight, bias, *, prescale, chosen, normalize, jitter))]
    fn new(
        weight: Tensor,
        bias: Option<Tensor>,
        prescale: f64,
        chosen: usize,
        normalize: bool,
        jitter: Option<f32>,
    ) -> PyResult<Self> {
        expect(
            weight.shape.len() == 2 && matches!(weight.dtype, DType::F16 | DType::BF16),
            "weight must be [experts, hidden] halves",
        )?;
        expect(
            weight.ptr.is_multiple_of(16),
            "weight must be aligned to 16 bytes",
        )?;
        if let Some(bias) = &bias {
            expect(
                bias.dtype == DType::F32 && bias.numel() == weight.shape[0],
                "bias must be float32 [experts]",
            )?;
        }
        let choice = match jitter {
            Some(jitter) => Choice::Sparse { jitter },
            None => Choice::Softmax { normalize },
        };
        let router = Router {
            hidden: weight.shape[1],
            experts: weight.shape[0],
            chosen,
            sparse: jitter.is_some(),
            quantized: false,
        };
        if let Some(why) = router.refusal() {
            return Err(PyValueError::new_err(why));
        }
        Ok(Self {
            weight,
            bias,
            prescale,
            choice,
            router,
        })
    }

    /// Most features of a row.
    #[classattr]
    fn most_hidden() -> usize {
        MOST_HIDDEN
    }

    /// Why no kernel chooses `chosen` of `experts` experts by a router of `hidden` features, whatever the card and the rows; None where one does.
    #[staticmethod]
    #[pyo3(signature = (*, hidden, experts, chosen, quantized))]
    fn refusal(hidden: usize, experts: usize, chosen: usize, quantized: bool) -> Option<String> {
        let router = Router {
            hidden,
            experts,
            chosen,
            sparse: false,
            quantized,
        };
        router.refusal()
    }

    /// The plan of `rows` rows, whose launch applies `norm` first where it can.
    #[pyo3(signature = (rows, norm=None))]
    fn plan(
        &self,
        py: Python<'_>,
        rows: usize,
        norm: Option<Py<NormPrologue>>,
    ) -> PyResult<RouterPlan> {
        let device = self.weight.cuda.unwrap_or_default();
        let device = Device::get(device).map_err(|error| device_error(py, &error))?;
        let shape = norm.as_ref().map(|norm| {
            let NormPrologue { weight, layer, .. } = norm.get();
            NormShape {
                features: weight.numel(),
                layer: *layer,
                float32: weight.dtype == DType::F32,
                aligned: weight.ptr.is_multiple_of(16),
            }
        });
        let plan = self.router.plan(rows, shape, &device.info.caps);
        let norm = norm.filter(|_| plan.norms);
        Ok(RouterPlan { plan, norm })
    }

    /// Write the experts of each row of h [rows, hidden] float16: `ids` int64 and `weights` float32 [rows, chosen]. `logits` float32
    /// [scratch rows, experts] is scratch; `arrivals` int32 [scratch rows] is zero before and after. A plan that norms writes the normed h into
    /// `normed`, like h. `plan` is one of this router.
    #[pyo3(signature = (plan, h, *, logits, arrivals, ids, weights, launch, normed=None))]
    #[allow(clippy::too_many_arguments)] // an object of them would be made for each launch
    fn route(
        &self,
        py: Python<'_>,
        plan: &RouterPlan,
        h: Tensor,
        logits: Tensor,
        arrivals: Tensor,
        ids: Tensor,
        weights: Tensor,
        launch: &Launch,
        normed: Option<Tensor>,
    ) -> PyResult<()> {
        let Plan { router, rows, .. } = plan.plan;
        expect(router == self.router, "plan must be one of this router")?;
        expect(
            h.dtype == DType::F16 && h.numel() == rows * router.hidden && h.ptr.is_multiple_of(16),
            "h must be float16 [rows, hidden] of the plan's rows, aligned to 16 bytes",
        )?;
        let scratch = plan.plan.scratch_rows();
        expect(
            logits.dtype == DType::F32
                && logits.numel() >= scratch * router.experts
                && arrivals.dtype == DType::I32
                && arrivals.numel() >= scratch,
            "scratch tensors are too small",
        )?;
        let chosen = [rows, router.chosen];
        expect(
            ids.dtype == DType::I64
                && ids.shape == chosen
                && weights.dtype == DType::F32
                && weights.shape == chosen,
            "ids and weights must be [rows, chosen]",
        )?;
        let mut all = vec![
            ("h", &h),
            ("weight", &self.weight),
            ("logits", &logits),
            ("arrivals", &arrivals),
            ("ids", &ids),
            ("weights", &weights),
        ];
        all.extend(self.bias.as_ref().map(|bias| ("bias", bias)));
        let norm = match (plan.norm.as_ref().map(Py::get), &normed) {
            (None, None) => None,
            (Some(norm), Some(normed)) => {
                expect(
                    normed.dtype == DType::F16
                        && normed.numel() == h.numel()
                        && normed.ptr.is_multiple_of(16)
                        && normed.ptr != h.ptr,
                    "normed must be a tensor of its own like h, aligned to 16 bytes",
                )?;
                all.extend([("norm", &norm.weight), ("normed", normed)]);
                Some(RouteNorm {
                    weight: norm.weight.ptr,
                    eps: norm.eps,
                    weight_offset: norm.offset,
                    output: normed.ptr,
                })
            }
            _ => {
                return Err(PyValueError::new_err(
                    "a plan that norms and normed belong together",
                ));
            }
        };
        let to = target(&all, launch)?;
        let op = Route {
            h: h.ptr,
            weight: self.weight.ptr,
            bf16: self.weight.dtype == DType::BF16,
            bias: self.bias.as_ref().map_or(0, |bias| bias.ptr),
            prescale: self.prescale,
            logits: logits.ptr,
            arrivals: arrivals.ptr,
            ids: ids.ptr,
            weights: weights.ptr,
            plan: plan.plan,
            choice: self.choice,
            norm,
        };
        // SAFETY: torch owns the memory and keeps freed blocks for work queued on their stream; sizes were checked.
        py.detach(|| unsafe { route::route(to, &op) })
            .map_err(|error| device_error(py, &error))
    }
}

/// A router that need not be loaded.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct RouterShape {
    router: Router,
}

#[pymethods]
impl RouterShape {
    /// Of `hidden` features; it chooses `chosen` of `experts` experts. `sparse`: two experts are chosen by the sparse mixer.
    #[new]
    #[pyo3(signature = (*, hidden, experts, chosen, sparse, quantized))]
    fn new(hidden: usize, experts: usize, chosen: usize, sparse: bool, quantized: bool) -> Self {
        let router = Router {
            hidden,
            experts,
            chosen,
            sparse,
            quantized,
        };
        Self { router }
    }
}

/// The plan of a router for `rows` rows, as `ExpertRouter.plan` makes it for a loaded one. `rms`: features of the RMS norm before it, or None.
#[pyfunction]
#[pyo3(signature = (card, router, rows, *, rms=None))]
pub fn cuda_plan_router(
    card: &CudaCard,
    router: &RouterShape,
    rows: usize,
    rms: Option<usize>,
) -> RouterPlan {
    let plan = router
        .router
        .plan(rows, rms.map(NormShape::rms), &card.caps);
    RouterPlan { plan, norm: None }
}
