//! Bindings of the `sampling` subject.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cpu::pool;
use exl_cpu::sampling::{
    self, Bias, Chain, Dry, Edit, Failure, Late, MAX_LOGITS, Penalties, Row, edits::DISCOURAGED,
};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::by_name::{attribute, read_by_name};
use crate::tensor::Tensor;

/// A request's settings, an `exl_kernels.sampling.Plan`, as the CPU's and the GPU's rows use them.
#[pyclass(frozen, module = "exl_kernels._native")]
pub struct SamplingPlan {
    pub chain: Chain,
    pub penalties: Penalties,
    dry: Option<DryPlan>,
    bias: Vec<f32>,
    /// ids of `bias`; None: those from 0 on
    bias_ids: Option<Vec<i32>>,
    /// bias of all other ids
    bias_rest: f32,
    pub xtc_ignored: Vec<i32>,
    pub cfg_scale: f64,
    pub size: usize,
}

struct DryPlan {
    multiplier: f64,
    base: f64,
    allowed_length: usize,
    max_ngram: usize,
    window: usize,
    breakers: Vec<i32>,
}

#[pymethods]
impl SamplingPlan {
    /// Whether rows take a tail-free cut, for which a GPU needs more memory.
    #[getter]
    pub fn tail_free(&self) -> bool {
        self.chain.tfs > 0.0 && !self.chain.greedy
    }

    /// The settings of `plan`. `bias` (float32) is that of the first ids, or of `bias_ids` (int32, each once), and `bias_rest` then that of
    /// all others.
    #[new]
    #[pyo3(signature = (plan, bias=None, *, bias_ids=None, bias_rest=0.0))]
    fn new(
        plan: Settings,
        bias: Option<Tensor>,
        bias_ids: Option<Tensor>,
        bias_rest: f32,
    ) -> PyResult<Self> {
        let bias: Vec<f32> = copied(bias.as_ref(), "bias")?;
        let bias_ids = match bias_ids {
            None => None,
            Some(ids) => Some(ids.slice::<i32>("bias_ids")?.to_vec()),
        };
        if bias_ids.as_ref().is_some_and(|ids| ids.len() != bias.len()) {
            return Err(PyValueError::new_err(
                "bias and bias_ids must have the same length",
            ));
        }
        let words = |words: &Option<Words>, what: &str| match words {
            None => Ok(Vec::new()),
            Some(words) => Ok::<_, PyErr>(elements(&words.0, what)?.to_vec()),
        };
        let dry = plan.dry.as_ref().map(|dry| {
            Ok::<_, PyErr>(DryPlan {
                multiplier: dry.multiplier,
                base: dry.base,
                allowed_length: dry.allowed_length,
                max_ngram: dry.max_ngram,
                window: dry.range,
                breakers: elements(&dry.breakers.0, "breakers")?.to_vec(),
            })
        });
        Ok(Self {
            chain: plan.chain(),
            penalties: Penalties {
                repetition: plan.penalties.repetition,
                presence: plan.penalties.presence,
                frequency: plan.penalties.frequency,
                sustain: plan.penalties.range,
                decay: plan.penalties.decay,
            },
            dry: dry.transpose()?,
            bias,
            bias_ids,
            bias_rest,
            xtc_ignored: words(&plan.xtc_ignored, "xtc_ignored")?,
            cfg_scale: plan.cfg_scale.unwrap_or(1.0),
            size: plan.size,
        })
    }
}

impl SamplingPlan {
    fn bias(&self) -> Bias<'_> {
        match &self.bias_ids {
            None => Bias::Dense(&self.bias),
            Some(ids) => Bias::Sparse {
                ids,
                values: &self.bias,
                rest: self.bias_rest,
            },
        }
    }
}

fn copied<T: crate::tensor::Element>(tensor: Option<&Tensor>, what: &str) -> PyResult<Vec<T>> {
    tensor.map_or_else(|| Ok(Vec::new()), |t| Ok(t.slice::<T>(what)?.to_vec()))
}

/// The elements of a numpy array.
pub struct Ids(pub PyBuffer<i64>);
/// The elements of a numpy array.
pub struct Words(PyBuffer<i32>);

macro_rules! array_argument {
    ($($array:ident of $element:ty as $numpy:literal),*) => {$(
        impl<'a, 'py> FromPyObject<'a, 'py> for $array {
            type Error = PyErr;

            #[cfg(feature = "stubs")]
            const INPUT_TYPE: pyo3::inspect::PyStaticExpr = pyo3::type_hint_subscript!(
                pyo3::type_hint_identifier!("numpy.typing", "NDArray"),
                pyo3::type_hint_identifier!("numpy", $numpy)
            );

            fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
                obj.extract::<PyBuffer<$element>>().map(Self)
            }
        }
    )*};
}
array_argument!(Ids of i64 as "int64", Words of i32 as "int32");

/// One row of a call: the fields of `exl_kernels.sampling.Row`, by name.
pub struct Request {
    pub plan: Py<SamplingPlan>,
    /// [V]
    pub logits: Tensor,
    /// Logits of the negative prompt.
    pub negative: Option<Tensor>,
    pub context: Option<Ids>,
    pub uniform: f64,
    /// Threshold.
    pub mirostat: f64,
    /// Words of allowed ids.
    pub mask: Option<Words>,
    pub banned: Vec<i64>,
    pub discouraged: Vec<i64>,
    /// The only allowed ids.
    pub only: Option<Ids>,
    /// Candidates to report.
    pub top_n: usize,
}

read_by_name! { "exl_kernels.sampling":
    /// The settings of a plan. 0 or None switches a transform off.
    struct Settings of "Plan" {
        /// Ids of the vocabulary.
        size: usize,
        scale: f32,
        smoothing: f64,
        top_k: usize,
        top_p: f64,
        top_a: f64,
        min_p: f64,
        tfs: f64,
        typical: f64,
        late: Option<LateTemperature>,
        xtc: Xtc,
        xtc_ignored: Option<Words>,
        descending: bool,
        greedy: bool,
        penalties: PenaltySettings,
        dry: Option<DrySettings>,
        cfg_scale: Option<f64>,
    }
    /// The temperature after the cuts.
    struct LateTemperature of "LateTemperature" {
        low: f64,
        high: f64,
        exponent: f64,
    }
    struct Xtc of "Xtc" {
        probability: f64,
        threshold: f64,
    }
    struct PenaltySettings of "Penalties" {
        repetition: f64,
        presence: f64,
        frequency: f64,
        range: i64,
        decay: i64,
    }
    struct DrySettings of "Dry" {
        multiplier: f64,
        base: f64,
        allowed_length: usize,
        max_ngram: usize,
        range: usize,
        breakers: Words,
    }
}

impl Settings {
    fn chain(&self) -> Chain {
        let late = match self.late {
            None => Late::None,
            // A single temperature: p^(1/T).
            Some(LateTemperature { low, high, .. }) if low == high => {
                Late::Fixed(((1.0 / low) as f32).min(3e38))
            }
            Some(LateTemperature {
                low,
                high,
                exponent,
            }) => Late::Dynamic {
                low,
                high,
                exponent,
            },
        };
        Chain {
            greedy: self.greedy,
            scale: self.scale,
            smooth: self.smoothing > 0.0,
            top_k: self.top_k.min(MAX_LOGITS),
            top_p: self.top_p,
            top_a: self.top_a,
            min_p: self.min_p,
            tfs: self.tfs,
            typical: self.typical,
            mirostat: 0.0,
            late,
            xtc_probability: self.xtc.probability,
            xtc_threshold: self.xtc.threshold,
            descending: self.descending,
        }
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Request {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: pyo3::inspect::PyStaticExpr =
        pyo3::type_hint_identifier!("exl_kernels.sampling", "Row");

    fn extract(row: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self {
            plan: attribute!(attribute!(row, "plan"), "native").extract()?,
            logits: attribute!(row, "logits").extract()?,
            negative: attribute!(row, "negative").extract()?,
            context: attribute!(row, "context").extract()?,
            uniform: attribute!(row, "uniform").extract()?,
            mirostat: attribute!(row, "mirostat").extract()?,
            mask: attribute!(row, "mask").extract()?,
            banned: attribute!(row, "banned").extract()?,
            discouraged: attribute!(row, "discouraged").extract()?,
            only: attribute!(row, "only").extract()?,
            top_n: attribute!(row, "top_n").extract()?,
        })
    }
}

/// A token with its final probability.
#[pyclass(
    frozen,
    get_all,
    eq,
    skip_from_py_object,
    module = "exl_kernels._native"
)]
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    token: u32,
    probability: f64,
    /// The first candidates by falling probability, at most `top_n` of the row.
    top_tokens: Vec<u32>,
    top_probabilities: Vec<f64>,
}

#[pymethods]
impl Sampled {
    #[new]
    #[pyo3(signature = (token, probability, top_tokens=vec![], top_probabilities=vec![]))]
    pub fn new(
        token: u32,
        probability: f64,
        top_tokens: Vec<u32>,
        top_probabilities: Vec<f64>,
    ) -> Self {
        Self {
            token,
            probability,
            top_tokens,
            top_probabilities,
        }
    }

    #[classattr]
    fn __match_args__() -> (&'static str, &'static str, &'static str, &'static str) {
        ("token", "probability", "top_tokens", "top_probabilities")
    }

    /// Copies and pickles.
    fn __getnewargs__(&self) -> (u32, f64, Vec<u32>, Vec<f64>) {
        let Self {
            token,
            probability,
            top_tokens,
            top_probabilities,
        } = self.clone();
        (token, probability, top_tokens, top_probabilities)
    }

    fn __repr__(&self) -> String {
        let Self {
            token,
            probability,
            top_tokens,
            top_probabilities,
        } = self;
        format!(
            "Sampled(token={token}, probability={probability:?}, top_tokens={top_tokens:?}, \
             top_probabilities={top_probabilities:?})"
        )
    }
}

/// No token: everything is excluded, or (`not_finite`) an allowed logit is NaN or +inf.
///
/// With a pair of prompts (CFG) `not_finite` covers every logit, allowed or not, since the mix sums over all of them.
#[pyclass(
    frozen,
    get_all,
    eq,
    skip_from_py_object,
    name = "Failure",
    module = "exl_kernels._native"
)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoToken {
    not_finite: bool,
}

#[pymethods]
impl NoToken {
    #[new]
    pub fn new(not_finite: bool) -> Self {
        Self { not_finite }
    }

    #[classattr]
    fn __match_args__() -> (&'static str,) {
        ("not_finite",)
    }

    /// Copies and pickles.
    fn __getnewargs__(&self) -> (bool,) {
        (self.not_finite,)
    }

    fn __repr__(&self) -> String {
        let truth = if self.not_finite { "True" } else { "False" };
        format!("Failure(not_finite={truth})")
    }
}

/// The result of sampling a row.
#[derive(IntoPyObject)]
pub enum Answer {
    Sampled(Sampled),
    Failure(NoToken),
}

/// The elements of a contiguous buffer. No other thread may write to it while the slice lives.
pub fn elements<'a, T: Element>(buffer: &'a PyBuffer<T>, what: &str) -> PyResult<&'a [T]> {
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err(format!("{what} is not contiguous")));
    }
    if buffer.item_count() == 0 {
        return Ok(&[]);
    }
    // SAFETY: `PyBuffer` has checked type and alignment, and keeps the memory alive; the calling thread waits for the kernel.
    Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.item_count()) })
}

/// The edits of single logits by a request's settings and by the lists that it brings.
pub struct Edits {
    pub penalties: Vec<Edit>,
    pub discouraged: Vec<Edit>,
    pub dry: Vec<Edit>,
    pub banned: Vec<Edit>,
}

impl Edits {
    fn of(
        plan: &SamplingPlan,
        context: &[i64],
        width: usize,
        banned: &[i64],
        rare: &[i64],
    ) -> Self {
        // Ids outside the vocabulary ban nothing.
        let set = |ids: &[i64], value: f64| {
            let known = ids.iter().filter_map(|&id| u32::try_from(id).ok());
            known.map(|id| Edit::set(id, value)).collect()
        };
        let dry = plan.dry.as_ref().map(|d| {
            let dry = Dry {
                multiplier: d.multiplier,
                base: d.base,
                allowed_length: d.allowed_length,
                max_ngram: d.max_ngram,
                window: d.window,
                breakers: &d.breakers,
            };
            dry.edits(context, width)
        });
        let penalties = if plan.penalties.active() {
            plan.penalties.edits(context, width)
        } else {
            Vec::new()
        };
        Self {
            penalties,
            discouraged: set(rare, DISCOURAGED),
            dry: dry.unwrap_or_default(),
            banned: set(banned, f64::NEG_INFINITY),
        }
    }
}

/// Context tokens below which waking other threads costs more than it saves.
const PARALLEL_FROM: usize = 8192;

/// Pass the edits and the index of each request to `finish`, on the pool's threads.
pub fn prepared<T: Send>(
    py: Python<'_>,
    requests: &[Request],
    finish: impl Fn(Edits, usize) -> T + Sync,
) -> PyResult<Vec<T>> {
    let contexts: Vec<&[i64]> = requests
        .iter()
        .map(|request| {
            let context = request.context.as_ref().map(|b| elements(&b.0, "context"));
            Ok(context.transpose()?.unwrap_or(&[]))
        })
        .collect::<PyResult<_>>()?;
    let jobs: Vec<_> = requests
        .iter()
        .zip(contexts)
        .map(|(r, context)| {
            (
                r.plan.get(),
                context,
                r.logits.numel(),
                &r.banned[..],
                &r.discouraged[..],
            )
        })
        .collect();
    let read = |plan: &SamplingPlan| plan.penalties.active() || plan.dry.is_some();
    let tokens: usize = jobs
        .iter()
        .filter(|job| read(job.0))
        .map(|job| job.1.len())
        .sum();
    let one = |i: usize| {
        let (plan, context, width, banned, rare) = jobs[i];
        let edits = Edits::of(plan, context, width, banned, rare);
        finish(edits, plan.size.min(width))
    };
    if tokens < PARALLEL_FROM {
        return Ok((0..jobs.len()).map(one).collect());
    }
    Ok(py.detach(|| pool::map(jobs.len(), &one)))
}

fn row<'a>(request: &'a Request, edits: &'a Edits) -> PyResult<Row<'a>> {
    let plan = request.plan.get();
    let logits = request.logits.slice::<f32>("logits")?;
    if request.logits.shape.len() != 1 || logits.len() > MAX_LOGITS {
        return Err(PyValueError::new_err(format!(
            "logits are {:?}, expected one dimension of at most {MAX_LOGITS}",
            request.logits.shape
        )));
    }
    let negative = request
        .negative
        .as_ref()
        .map(|t| t.slice::<f32>("negative"));
    let negative = negative.transpose()?;
    if negative.is_some_and(|negative| negative.len() != logits.len()) {
        return Err(PyValueError::new_err("negative must be as wide as logits"));
    }
    if !(0.0..1.0).contains(&request.uniform) {
        return Err(PyValueError::new_err("uniform must be in [0, 1)"));
    }
    let chain = Chain {
        mirostat: request.mirostat,
        ..plan.chain
    };
    Ok(Row {
        logits,
        negative: negative.map(|negative| (negative, plan.cfg_scale)),
        size: plan.size,
        before: [&edits.penalties, &edits.discouraged],
        bias: plan.bias(),
        after: [&edits.dry, &edits.banned],
        mask: mask(request)?,
        only: only(request)?,
        chain,
        xtc_ignored: &plan.xtc_ignored,
        uniform: request.uniform,
        top_n: request.top_n,
    })
}

pub fn mask(request: &Request) -> PyResult<Option<&[i32]>> {
    request
        .mask
        .as_ref()
        .map(|b| elements(&b.0, "mask"))
        .transpose()
}

pub fn only(request: &Request) -> PyResult<Option<&[i64]>> {
    request
        .only
        .as_ref()
        .map(|b| elements(&b.0, "only"))
        .transpose()
}

/// Sample each row from its float32 logits in CPU memory.
#[pyfunction]
pub fn sample_rows(py: Python<'_>, requests: Vec<Request>) -> PyResult<Vec<Answer>> {
    let edits = prepared(py, &requests, |edits, _| edits)?;
    let rows: Vec<Row<'_>> = requests
        .iter()
        .zip(&edits)
        .map(|(request, edits)| row(request, edits))
        .collect::<PyResult<_>>()?;
    let results = py.detach(|| sampling::sample(&rows));
    Ok(results.into_iter().map(answer).collect())
}

fn answer(result: Result<sampling::Sampled, Failure>) -> Answer {
    match result {
        Ok(found) => {
            let (tokens, probabilities) = found.top.into_iter().unzip();
            let (token, probability) = (found.token, found.probability);
            Answer::Sampled(Sampled::new(token, probability, tokens, probabilities))
        }
        Err(failure) => Answer::Failure(NoToken::new(matches!(failure, Failure::NotFinite))),
    }
}

/// The final candidates of a row.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct Candidates {
    /// In ascending order.
    ids: Vec<u32>,
    /// Their probabilities times a common factor.
    weights: Vec<u64>,
}

/// The final candidates of one row. Raises `LookupError` if there are none.
#[pyfunction]
pub fn sampling_distribution(py: Python<'_>, request: Request) -> PyResult<Candidates> {
    let edits = prepared(py, std::slice::from_ref(&request), |edits, _| edits)?;
    let row = row(&request, &edits[0])?;
    let found = py.detach(|| sampling::distribution(&row));
    found
        .map(|pairs| {
            let (ids, weights) = pairs.into_iter().unzip();
            Candidates { ids, weights }
        })
        .map_err(|_| pyo3::exceptions::PyLookupError::new_err("no candidates"))
}

/// Write the logits of one row after steps 1 to 8 into `out` (float32, one for each id of the vocabulary).
#[pyfunction]
pub fn sampling_shaped(py: Python<'_>, request: Request, out: Tensor) -> PyResult<()> {
    let edits = prepared(py, std::slice::from_ref(&request), |edits, _| edits)?;
    let row = row(&request, &edits[0])?;
    let to = out.slice_mut::<f32>("out")?;
    if to.len() != row.size.min(row.logits.len()) {
        return Err(PyTypeError::new_err("out must have an element per id"));
    }
    sampling::shaped(&row, to);
    Ok(())
}
