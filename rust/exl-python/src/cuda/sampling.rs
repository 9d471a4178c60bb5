//! Bindings of the `sampling` subject on a GPU: requests become rows in pinned memory.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use std::collections::HashSet;

use exl_cpu::sampling::{self as cpu, Late};
use exl_cuda::ops::sampling::select::row::{self, Call, Needs, Way};
use exl_cuda::ops::sampling::{self, Edit, Row, SEGMENT, Staging, Workspace, status};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::by_name::read_by_name;
use crate::cpu::sampling::{
    Answer, Edits, NoToken, Request, Sampled, SamplingPlan, mask, only, prepared,
};
use crate::cuda::{expect, target};
use crate::errors::device_error;
use crate::operands::Launch;
use crate::tensor::{DType, Tensor};

/// Constants of a plan on a GPU, made once for each GPU that samples with it.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct SamplingConstants {
    bias: Option<Tensor>,
    xtc_ignored: Option<Tensor>,
}

#[pymethods]
impl SamplingConstants {
    /// `bias` float32, `xtc_ignored` int32: packed ids that XTC keeps.
    #[new]
    #[pyo3(signature = (*, bias=None, xtc_ignored=None))]
    fn new(bias: Option<Tensor>, xtc_ignored: Option<Tensor>) -> PyResult<Self> {
        let is = |tensor: &Option<Tensor>, dtype| {
            let tensor = tensor.as_ref();
            tensor.is_none_or(|tensor| tensor.dtype == dtype)
        };
        expect(
            is(&bias, DType::F32) && is(&xtc_ignored, DType::I32),
            "bias must be float32, xtc_ignored int32",
        )?;
        Ok(Self { bias, xtc_ignored })
    }
}

read_by_name! { "exl_kernels.sampling":
    /// Inputs of the next step.
    pub struct NextInputs of "TokenTarget" {
        /// int64 on the GPU.
        ids: Tensor,
        /// Ids are below it.
        limit: usize,
        /// uint8 in pinned memory, and its destination of the same size on the GPU.
        copied: Option<(Tensor, Tensor)>,
    }
}

/// The rows of a call in the staging memory, and the launches that they need besides shaping and choosing.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct StagedRows {
    count: usize,
    /// Needed bytes. If they exceed the staging memory, the rows are not in it.
    #[pyo3(get)]
    bytes: usize,
    needs: Needs,
}

/// Memory that calls of one GPU share: staged rows, and the workspace of the kernels.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct SamplingWorkspace {
    staging: Tensor,
    device_copy: Tensor,
    shaped: Tensor,
    maxima: Tensor,
    sums: Tensor,
    wide: Tensor,
    tails: Tensor,
}

#[pymethods]
impl SamplingWorkspace {
    /// `staging` uint8 in pinned memory, `device_copy` of the same size on the GPU. Also on the GPU: `shaped` float32 [N, pitch], `maxima`
    /// int32 and `sums` int64 [N, 2048], for calls of up to N rows of up to `pitch` logits, `wide` uint8 of `wide_bytes(N)`, zero at the
    /// beginning, and `tails` int32 [N, 2, pitch], which may be empty until a row has a tail-free cut.
    #[new]
    #[pyo3(signature = (*, staging, device_copy, shaped, maxima, sums, wide, tails))]
    fn new(
        staging: Tensor,
        device_copy: Tensor,
        shaped: Tensor,
        maxima: Tensor,
        sums: Tensor,
        wide: Tensor,
        tails: Tensor,
    ) -> PyResult<Self> {
        expect(
            staging.slice::<u8>("staging")?.len() == device_copy.numel()
                && device_copy.dtype == DType::U8,
            "device_copy must be as long as staging",
        )?;
        expect(
            shaped.dtype == DType::F32 && maxima.dtype == DType::I32 && sums.dtype == DType::I64,
            "shaped must be float32, maxima int32, sums int64",
        )?;
        let rows = shaped.shape.first().copied().unwrap_or(0);
        expect(
            shaped.shape.len() == 2
                && maxima.shape == [rows, sampling::BLOCKS]
                && sums.shape == [rows, sampling::BLOCKS],
            "shaped must be [N, pitch], maxima and sums [N, 2048]",
        )?;
        expect(
            wide.dtype == DType::U8 && wide.numel() >= Self::wide_bytes(rows),
            "wide must be uint8 of wide_bytes(N)",
        )?;
        expect(
            tails.dtype == DType::I32 && [0, 2 * shaped.numel()].contains(&tails.numel()),
            "tails must be int32 [N, 2, pitch], or empty",
        )?;
        Ok(Self {
            staging,
            device_copy,
            shaped,
            maxima,
            sums,
            wide,
            tails,
        })
    }

    /// Bytes of `wide` for `rows` rows.
    #[staticmethod]
    fn wide_bytes(rows: usize) -> usize {
        sampling::WIDE_CONTROL_BYTES + rows * sampling::WIDE_ROW_BYTES
    }

    /// Most rows of a call.
    #[getter]
    fn rows(&self) -> usize {
        self.shaped.shape[0]
    }
}

/// The properties of a row that decide how it is sampled.
///
/// `width`: its logits; `mirostat`: its threshold; `mixed`: it has logits of a negative prompt; `top_n`: candidates to report.
pub fn row_call(
    plan: &SamplingPlan,
    width: usize,
    mirostat: f64,
    mixed: bool,
    top_n: usize,
) -> Call {
    let chain = &plan.chain;
    Call {
        size: plan.size.min(width),
        greedy: chain.greedy,
        smooth: chain.smooth,
        top_k: chain.top_k,
        top_p: chain.top_p > 0.0,
        top_a: chain.top_a > 0.0,
        min_p: chain.min_p > 0.0,
        tfs: chain.tfs > 0.0,
        typical: chain.typical > 0.0,
        mirostat: mirostat > 0.0,
        late: match chain.late {
            Late::None => row::Late::None,
            Late::Fixed(_) => row::Late::Fixed,
            Late::Dynamic { .. } => row::Late::Dynamic,
        },
        xtc: chain.xtc_probability > 0.0,
        descending: chain.descending,
        mixed,
        top_n,
    }
}

/// Two lists of edits, before and after the bias, in the kernels' format.
struct Grouped([(Vec<Edit>, Vec<u32>); 2]);

impl Grouped {
    fn of(edits: &Edits, size: usize) -> Self {
        Self([
            grouped([&edits.penalties, &edits.discouraged], size),
            grouped([&edits.dry, &edits.banned], size),
        ])
    }

    /// Addresses of edits and starts of each list on the GPU; 0 for an empty one.
    fn push(&self, staging: &mut Staging) -> [(usize, usize); 2] {
        [0, 1].map(|i| match &self.0[i] {
            (edits, _) if edits.is_empty() => (0, 0),
            (edits, starts) => (staging.push(edits), staging.push(starts)),
        })
    }
}

/// Edits below `size`, sorted by segment, and the start of each segment. The second list overrides the first.
fn grouped(lists: [&[cpu::Edit]; 2], size: usize) -> (Vec<Edit>, Vec<u32>) {
    if lists.iter().all(|list| list.is_empty()) {
        return Default::default();
    }
    let set: HashSet<u32> = lists[1].iter().map(|edit| edit.id).collect();
    let kept = |edit: &&cpu::Edit| (edit.id as usize) < size;
    let first = |edit: &&cpu::Edit| kept(edit) && (set.is_empty() || !set.contains(&edit.id));
    let all = || {
        lists[0]
            .iter()
            .filter(first)
            .chain(lists[1].iter().filter(kept))
    };
    let mut starts = vec![0u32; size.div_ceil(SEGMENT) + 1];
    for edit in all() {
        starts[edit.id as usize / SEGMENT + 1] += 1;
    }
    for i in 1..starts.len() {
        starts[i] += starts[i - 1];
    }
    let nothing = Edit {
        factor: 0.0,
        minus: 0.0,
        id: 0,
    };
    let count = starts[starts.len() - 1] as usize;
    let (mut edits, mut next) = (vec![nothing; count], starts.clone());
    for edit in all() {
        let at = &mut next[edit.id as usize / SEGMENT];
        edits[*at as usize] = Edit {
            factor: edit.factor,
            minus: edit.minus,
            id: edit.id,
        };
        *at += 1;
    }
    (edits, starts)
}

/// The ids that a row may have as packed words; None: all.
fn allowed(request: &Request, size: usize) -> PyResult<Option<Vec<i32>>> {
    let mask = mask(request)?;
    let Some(only) = only(request)? else {
        return Ok(mask.map(|words| words[..words.len().min(size.div_ceil(32))].to_vec()));
    };
    let mut words = vec![0i32; size.div_ceil(32)];
    for &id in only {
        let inside = usize::try_from(id).ok().filter(|&id| id < size);
        if let Some(id) = inside
            && mask.is_none_or(|mask| cpu::edits::contains(mask, id))
        {
            words[id / 32] |= 1 << (id % 32);
        }
    }
    Ok(Some(words))
}

/// The row as the kernels read it, and its plan.
fn row(
    request: &Request,
    constants: Option<&SamplingConstants>,
    edits: &Grouped,
    staging: &mut Staging,
    shaped: usize,
) -> PyResult<(Row, row::Plan)> {
    let (plan, width, top_n) = (request.plan.get(), request.logits.numel(), request.top_n);
    let mixed = request.negative.is_some();
    let call = row_call(plan, width, request.mirostat, mixed, top_n);
    let planned = row::plan(&call);
    if planned.way == Way::Host {
        let skipped = Row {
            flags: planned.flags,
            ..Row::default()
        };
        return Ok((skipped, planned));
    }
    let (chain, size) = (&plan.chain, call.size);
    let [before, after] = edits.push(staging);
    let words = allowed(request, size)?;
    let (low, high, exponent, late_scale) = match chain.late {
        Late::None => (0.0, 0.0, 0.0, 1.0),
        Late::Fixed(scale) => (0.0, 0.0, 0.0, scale),
        Late::Dynamic {
            low,
            high,
            exponent,
        } => (low, high, exponent, 1.0),
    };
    let bias = constants.and_then(|constants| constants.bias.as_ref());
    let xtc_ignored = constants.and_then(|constants| constants.xtc_ignored.as_ref());
    let negative = request.negative.as_ref().map_or(0, |t| t.ptr);
    let row = Row {
        // A mix is written to the place of the shaped row.
        logits: if negative == 0 {
            request.logits.ptr
        } else {
            shaped
        },
        positive: request.logits.ptr,
        negative,
        bias: bias.map_or(0, |t| t.ptr),
        mask: words.as_ref().map_or(0, |words| staging.push(words)),
        edits: [before.0, after.0],
        starts: [before.1, after.1],
        ignored: xtc_ignored.map_or(0, |t| t.ptr),
        top_p: chain.top_p,
        top_a: chain.top_a,
        min_p: chain.min_p,
        tfs: chain.tfs,
        typical: chain.typical,
        mirostat: request.mirostat,
        xtc_probability: chain.xtc_probability,
        xtc_threshold: chain.xtc_threshold,
        low,
        high,
        exponent,
        uniform: request.uniform,
        mix: plan.cfg_scale,
        scale: chain.scale,
        late_scale,
        size: size as i32,
        bias_length: bias.map_or(0, |t| t.numel().min(size) as i32),
        mask_words: words.map_or(0, |words| words.len() as i32),
        ignored_words: xtc_ignored.map_or(0, |t| t.numel() as i32),
        top_k: planned.top_k as i32,
        top_n: top_n as i32,
        flags: planned.flags,
        width: width as i32,
    };
    Ok((row, planned))
}

/// Write the rows to the staging memory and queue its copy on `stream`. If the needed bytes exceed the staging memory, nothing useful was
/// written and nothing is queued. `constants`: of each request; None: it has none.
#[pyfunction]
pub fn cuda_sample_fill(
    py: Python<'_>,
    workspace: &SamplingWorkspace,
    requests: Vec<Request>,
    constants: Vec<Option<Py<SamplingConstants>>>,
    stream: usize,
) -> PyResult<StagedRows> {
    let SamplingWorkspace {
        staging,
        device_copy,
        shaped,
        tails,
        ..
    } = workspace;
    let mut all = vec![("device_copy", device_copy)];
    for (request, constants) in requests.iter().zip(&constants) {
        all.push(("logits", &request.logits));
        all.extend(request.negative.as_ref().map(|t| ("negative", t)));
        if let Some(SamplingConstants { bias, xtc_ignored }) = constants.as_ref().map(Py::get) {
            all.extend(bias.as_ref().map(|t| ("bias", t)));
            all.extend(xtc_ignored.as_ref().map(|t| ("xtc_ignored", t)));
        }
        check_row(request, shaped.shape[1])?;
    }
    let to = target(&all, &Launch::in_order(stream))?;
    let rows = requests.len();
    expect(constants.len() == rows, "constants must be one a request")?;
    let bytes = staging.slice_mut::<u8>("staging")?;
    let (base, device) = (bytes.as_mut_ptr() as usize, device_copy.ptr);
    // SAFETY: the caller synchronizes after every launch, so no launch reads or writes the memory now; torch owns it.
    let Some(mut memory) = (unsafe { Staging::new(base, device, bytes.len(), rows) }) else {
        let front = size_of::<sampling::Answer>() + size_of::<Row>();
        return Ok(StagedRows {
            count: rows,
            bytes: 2 * rows * front + (1 << 16),
            needs: Needs::default(),
        });
    };
    let edits = prepared(py, &requests, |edits, size| Grouped::of(&edits, size))?;
    let mut needs = Needs::default();
    for (i, (request, constants)) in requests.iter().zip(&constants).enumerate() {
        let at = shaped.ptr + i * shaped.shape[1] * size_of::<f32>();
        let (row, planned) = row(
            request,
            constants.as_ref().map(Py::get),
            &edits[i],
            &mut memory,
            at,
        )?;
        needs = needs.or(planned.needs);
        expect(
            !request.plan.get().tail_free() || tails.numel() > 0,
            "a row with a tail-free cut needs tails",
        )?;
        memory.set_row(i, &row);
    }
    let (start, end) = (memory.rows_at(), memory.used());
    if !memory.overflows() {
        // SAFETY: both have the same length; the caller keeps them until the stream has passed.
        py.detach(|| unsafe { sampling::send(to, base, device, start, end - start) })
            .map_err(|e| device_error(py, &e))?;
    }
    Ok(StagedRows {
        count: rows,
        bytes: end,
        needs,
    })
}

/// Launch for the rows that `cuda_sample_fill` wrote and copied. The answers are in the workspace once the stream has passed. `next`: int64
/// [count] on the GPU that receives the tokens, clamped to ids below the given limit, and the source and destination of a copy before
/// the launch. Rows that are left to the CPU may write no token.
#[pyfunction]
#[pyo3(signature = (workspace, rows, launch, next=None))]
pub fn cuda_sample_launch(
    py: Python<'_>,
    workspace: &SamplingWorkspace,
    rows: &StagedRows,
    launch: &Launch,
    next: Option<NextInputs>,
) -> PyResult<()> {
    let SamplingWorkspace {
        staging,
        device_copy,
        shaped,
        maxima,
        sums,
        wide,
        tails,
    } = workspace;
    let mut all = vec![
        ("wide", wide),
        ("device_copy", device_copy),
        ("shaped", shaped),
        ("maxima", maxima),
        ("sums", sums),
    ];
    if let Some(next) = &next {
        all.push(("next", &next.ids));
        all.extend(next.copied.as_ref().map(|(_, to)| ("inputs", to)));
    }
    if tails.numel() > 0 {
        all.push(("tails", tails));
    }
    let to = target(&all, launch)?;
    let &StagedRows { count, needs, .. } = rows;
    expect(
        shaped.shape[0] >= count,
        "the workspace has fewer rows than there are requests",
    )?;
    let next = next.map(|next| next_inputs(count, &next)).transpose()?;
    let host = staging.slice_mut::<u8>("staging")?.as_mut_ptr() as usize;
    let workspace = Workspace {
        shaped: shaped.ptr,
        maxima: maxima.ptr,
        sums: sums.ptr,
        wide: wide.ptr,
        tails: if tails.numel() > 0 { tails.ptr } else { 0 },
        pitch: shaped.shape[1],
    };
    let copy = device_copy.ptr;
    // SAFETY: sizes were checked above and when filling; the caller keeps the tensors until the stream has passed.
    py.detach(|| unsafe { sampling::sample(to, host, copy, count, workspace, needs, next) })
        .map_err(|e| device_error(py, &e))
}

fn next_inputs(count: usize, next: &NextInputs) -> PyResult<sampling::Next> {
    let &NextInputs {
        ref ids,
        limit,
        ref copied,
    } = next;
    expect(
        ids.dtype == DType::I64 && ids.numel() == count && limit > 0,
        "next must be int64, with an id a request and a limit of at least 1",
    )?;
    let inputs = copied.as_ref().map(|(from, to)| inputs(from, to));
    Ok(sampling::Next {
        ids: ids.ptr,
        limit,
        inputs: inputs.transpose()?.unwrap_or_default(),
    })
}

fn inputs(from: &Tensor, to: &Tensor) -> PyResult<sampling::Inputs> {
    let source = from.slice::<u8>("the source of inputs")?;
    expect(
        to.dtype == DType::U8 && to.numel() == source.len() && source.len().is_multiple_of(4),
        "inputs must be uint8 of the same length as their source, a multiple of 4",
    )?;
    let from = source.as_ptr() as usize;
    expect(
        (from | to.ptr).is_multiple_of(4),
        "inputs must be aligned to 4 bytes",
    )?;
    let words = i32::try_from(source.len() / 4)
        .map_err(|_| PyValueError::new_err("inputs are 8 GB or more"))?;
    Ok(sampling::Inputs {
        from,
        to: to.ptr,
        words,
    })
}

fn check_row(request: &Request, pitch: usize) -> PyResult<()> {
    let logits = &request.logits;
    expect(
        logits.dtype == DType::F32 && logits.shape.len() == 1,
        "logits must be float32 [V]",
    )?;
    expect(
        logits.numel() <= pitch && logits.numel() <= cpu::MAX_LOGITS,
        "logits are wider than the workspace",
    )?;
    if let Some(negative) = &request.negative {
        expect(
            negative.dtype == DType::F32 && negative.shape == logits.shape,
            "negative must be float32, as wide as logits",
        )?;
    }
    if (0.0..1.0).contains(&request.uniform) {
        return Ok(());
    }
    Err(PyValueError::new_err("uniform must be in [0, 1)"))
}

/// The answers of the last launch over `workspace`, whose stream has been synchronized. None: sample this row on the CPU.
#[pyfunction]
pub fn cuda_sample_answers(
    workspace: &SamplingWorkspace,
    count: usize,
) -> PyResult<Vec<Option<Answer>>> {
    let bytes = workspace.staging.slice::<u8>("staging")?;
    expect(
        bytes.len() >= count * size_of::<sampling::Answer>(),
        "staging holds fewer answers",
    )?;
    let base = bytes.as_ptr() as usize;
    Ok((0..count)
        .map(|i| {
            // SAFETY: within the tensor; the launch has ended.
            let answer = unsafe { sampling::answer(base, i) };
            let part = |weight: u64| weight as f64 / answer.total as f64;
            match answer.status {
                status::OK => {
                    let n = answer.top as usize;
                    Some(Answer::Sampled(Sampled::new(
                        answer.token as u32,
                        part(answer.weight),
                        answer.top_ids[..n].to_vec(),
                        answer.top_weights[..n].iter().map(|&w| part(w)).collect(),
                    )))
                }
                status::EMPTY => Some(Answer::Failure(NoToken::new(false))),
                status::NOT_FINITE => Some(Answer::Failure(NoToken::new(true))),
                _ => None,
            }
        })
        .collect())
}
