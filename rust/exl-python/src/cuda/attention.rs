//! Bindings of the cache and of attention on a GPU.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::ops::attention::{self, Attention, DIM_STEP, MAX_DIM, Ordered, Own, Plan, Rows};
use exl_cuda::ops::elementwise::select::MOST_PACKED_WIDTH;
use exl_cuda::ops::kv::{self, Direction, KINDS, Kind};
use exl_cuda::ops::linear::{PackedInput, input_columns};
use exl_cuda::ops::{Element, Target};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cuda::matrix::CudaMatrix;
use crate::cuda::{element, target};
use crate::errors::{device_error, shape_error};
use crate::operands::{AttentionOptions, AttentionTables, Launch, Rotation};
use crate::tensor::{DType, Tensor, same_length};

/// One layer's pages on a GPU: the addresses, and the tensors that own them.
#[pyclass(frozen)]
pub struct CudaPages {
    pub inner: kv::Pages,
    device: u32,
    _owners: Vec<Tensor>,
}

#[pymethods]
impl CudaPages {
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
        let kind: Kind = KINDS
            .into_iter()
            .find(|k| k.name == kind)
            .ok_or_else(|| PyValueError::new_err(format!("unknown cache kind {kind:?}")))?;
        let &[num_pages, page_size, heads, _] = &key.shape[..] else {
            return Err(shape_error(
                py,
                "key must be [pages, page_size, heads, row]".into(),
            ));
        };
        if head_dim == 0 || !head_dim.is_multiple_of(DIM_STEP) || head_dim > MAX_DIM {
            return Err(shape_error(
                py,
                format!("head_dim {head_dim}: on a GPU, a multiple of {DIM_STEP} up to {MAX_DIM}"),
            ));
        }
        let rows = num_pages * page_size * heads;
        let mut all = vec![("key", &key), ("value", &value)];
        for (what, tensor, codec) in [("key", &key, kind.key), ("value", &value, kind.value)] {
            let bytes = tensor.numel() * tensor.dtype.size();
            same_length(what, bytes, rows * codec.row_bytes(head_dim))?;
        }
        for (scales, codec) in [(&key_scales, kind.key), (&value_scales, kind.value)] {
            let wanted = if codec.is_hadamard() {
                rows * head_dim.next_multiple_of(64) / 32
            } else {
                0
            };
            same_length("scales", scales.as_ref().map_or(0, Tensor::numel), wanted)?;
            all.extend(scales.iter().map(|t| ("scales", t)));
        }
        if let Some((what, _)) = all.iter().find(|(_, t)| t.ptr % 16 != 0) {
            return Err(shape_error(
                py,
                format!("{what} does not begin at a multiple of 16 bytes: allocate it separately"),
            ));
        }
        let device = target(&all, &Launch::in_order(0))?.device;
        let address = |t: &Option<Tensor>| t.as_ref().map_or(0, |t| t.ptr);
        let inner = kv::Pages {
            kind,
            data: [key.ptr, value.ptr],
            scales: [address(&key_scales), address(&value_scales)],
            num_pages,
            page_size,
            heads,
            head_dim,
        };
        let owners = [Some(key), Some(value), key_scales, value_scales];
        Ok(Self {
            inner,
            device,
            _owners: owners.into_iter().flatten().collect(),
        })
    }

    /// Check and plan a launch of attention over these pages; see `exl_kernels.attention.cuda`. q: flat, `q_stride` elements between
    /// tokens. With `into`, results go there, and only the shape of `out` is used. `tokens`: the
    /// most tokens of a row of the block table, whose keys are stored before; None: not known. `windows`: rows of few tokens are windows
    /// of prompts, and neighbours may be of one sequence.
    #[pyo3(signature = (q, *, q_stride, tables, options, out, launch, new_keys=None, into=None, tokens=None, windows=false))]
    #[allow(clippy::too_many_arguments)] // an object of them would be made for each launch
    fn attention(
        slf: Py<Self>,
        py: Python<'_>,
        q: Tensor,
        q_stride: usize,
        tables: Py<AttentionTables>,
        options: &AttentionOptions,
        out: Tensor,
        launch: &Launch,
        new_keys: Option<Py<NewKeys>>,
        into: Option<Py<MatmulInput>>,
        tokens: Option<usize>,
        windows: bool,
    ) -> PyResult<AttentionCall> {
        let (pages, seen) = (slf.get(), tables.get());
        let (new, packed) = (new_keys.as_ref().map(Py::get), into.as_ref().map(Py::get));
        let mut all = vec![("q", &q), ("out", &out)];
        all.extend(seen.tensors());
        all.extend(new.into_iter().flat_map(NewKeys::tensors));
        all.extend(packed.map(|to| ("scratch", &to.scratch)));
        let to = pages.target(&all, launch)?;
        let mut op = operands(pages, (&q, q_stride), &out, seen, options)?;
        op.own = new.map(|new| own_operands(&op, &q, new)).transpose()?;
        op.table_rows = tokens.map_or(Rows::Sequences, |each| Rows::of(each, windows));
        if let Some(packed) = packed {
            let fits = ordered_operands(&op, packed).map_err(PyValueError::new_err)?;
            let few = op.own.is_some() || op.table_rows.are_few();
            if !few || packed.matrix.get().device != to.device {
                return Err(PyValueError::new_err(
                    "results packed for a matmul need own keys or few tokens a row, and a matrix on the same GPU",
                ));
            }
            op.ordered = Some(fits);
        }
        let room = op.max_pages * pages.inner.page_size;
        let plan = attention::plan(to.device, &op, seen.max_keys.unwrap_or(room))
            .map_err(|e| device_error(py, &e))?;
        Ok(AttentionCall {
            op,
            plan,
            to,
            _pages: slf,
            _tensors: (q, out),
            _tables: tables,
            _new_keys: new_keys,
            _into: into,
        })
    }
}

impl CudaPages {
    /// Target of a launch on `tensors` and these pages.
    pub fn target(&self, tensors: &[(&str, &Tensor)], launch: &Launch) -> PyResult<Target> {
        let to = target(tensors, launch)?;
        if to.device == self.device {
            return Ok(to);
        }
        Err(PyValueError::new_err(format!(
            "the pages are on cuda:{}, the other operands on cuda:{}",
            self.device, to.device
        )))
    }
}

/// Encode k, v [T, H, D] into slots [T], or (`load`) decode the slots into them.
#[pyfunction]
#[pyo3(signature = (pages, *, k, v, slots, load, launch))]
pub fn cuda_kv_transfer(
    py: Python<'_>,
    pages: &Bound<'_, CudaPages>,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    load: bool,
    launch: &Launch,
) -> PyResult<()> {
    let pages = pages.get();
    let to = pages.target(&[("k", &k), ("v", &v), ("slots", &slots)], launch)?;
    let tokens = slots.numel();
    let wanted = tokens * pages.inner.heads * pages.inner.head_dim;
    same_length("k", k.numel(), wanted)?;
    same_length("v", v.numel(), wanted)?;
    let kind = element(&k, "k")?;
    if slots.dtype != DType::I64 || v.dtype != k.dtype || (load && kind != Element::F32) {
        return Err(PyValueError::new_err(
            "k and v of one float type (float32 to load), slots int64",
        ));
    }
    let direction = if load {
        Direction::Load
    } else {
        Direction::Store(kind)
    };
    // SAFETY: torch owns the memory; sizes were checked above; torch keeps freed blocks alive for work queued on their stream.
    py.detach(|| unsafe {
        kv::transfer(to, direction, &pages.inner, k.ptr, v.ptr, slots.ptr, tokens)
    })
    .map_err(|e| device_error(py, &e))
}

/// RMS norms of each head of the queries and of the keys, before the rotation.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct HeadNorms {
    q: Tensor,
    k: Tensor,
    eps: f32,
}

#[pymethods]
impl HeadNorms {
    /// Weights `q` and `k` float32 [head_dim].
    #[new]
    fn new(q: Tensor, k: Tensor, eps: f32) -> Self {
        Self { q, k, eps }
    }
}

impl HeadNorms {
    fn checked(&self, head_dim: usize, gpu: Option<u32>) -> PyResult<attention::HeadNorms> {
        let fits = |t: &Tensor| {
            t.dtype == DType::F32
                && t.shape == [head_dim]
                && t.ptr.is_multiple_of(8)
                && t.cuda == gpu
        };
        if !(fits(&self.q) && fits(&self.k)) {
            return Err(PyValueError::new_err(
                "norms of q and k must be float32 [head_dim], aligned to 8 bytes, on the queries' GPU",
            ));
        }
        Ok(attention::HeadNorms {
            q: self.q.ptr,
            k: self.k.ptr,
            eps: self.eps,
        })
    }
}

/// Keys and values of the call's own tokens, which are not in the pages: rotated and stored in the same launch.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct NewKeys {
    pub(super) key: Tensor,
    pub(super) value: Tensor,
    pub(super) stride: usize,
    pub(super) rotation: Py<Rotation>,
    pub(super) slots: Tensor,
    early: bool,
    pub(super) norms: Option<Py<HeadNorms>>,
}

#[pymethods]
impl NewKeys {
    /// `key` and `value` flat, `stride` elements between tokens; `slots` int64 [T]. `early`: everything except queries, keys and values may
    /// be read before the preceding launches have ended.
    #[new]
    #[pyo3(signature = (*, key, value, stride, rotation, slots, early, norms=None))]
    fn new(
        key: Tensor,
        value: Tensor,
        stride: usize,
        rotation: Py<Rotation>,
        slots: Tensor,
        early: bool,
        norms: Option<Py<HeadNorms>>,
    ) -> Self {
        Self {
            key,
            value,
            stride,
            rotation,
            slots,
            early,
            norms,
        }
    }
}

impl NewKeys {
    /// The tensors, named for errors.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        [
            ("new keys", &self.key),
            ("new values", &self.value),
            ("slots", &self.slots),
        ]
        .into_iter()
        .chain(self.rotation.get().tensors())
    }
}

/// The packed input of a matmul as the destination of results.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct MatmulInput {
    matrix: Py<CudaMatrix>,
    pub(super) columns: usize,
    pub(super) scratch: Tensor,
}

impl MatmulInput {
    /// The address and the layout of the input of up to `rows` rows of `width` F16 elements.
    pub(super) fn packed(&self, rows: usize, width: usize) -> PyResult<(usize, PackedInput)> {
        let matrix = &self.matrix.get().matrix;
        let input = matrix.packed_input(self.columns).filter(|input| {
            let scratch = &self.scratch;
            matrix.in_features() == width
                && rows <= self.columns
                && width <= MOST_PACKED_WIDTH
                && scratch.dtype == DType::U8
                && scratch.ptr.is_multiple_of(16)
                && scratch.numel() >= input.bytes()
        });
        input.map(|input| (self.scratch.ptr, input)).ok_or_else(|| {
            PyValueError::new_err(format!(
                "{rows} rows of {width} elements do not fit the packed input: expected up to {} rows of {}",
                self.columns,
                matrix.in_features()
            ))
        })
    }
}

#[pymethods]
impl MatmulInput {
    /// `scratch` uint8 of the matmul by `matrix`, packed for `columns` rows.
    #[new]
    fn new(matrix: Py<CudaMatrix>, columns: usize, scratch: Tensor) -> Self {
        Self {
            matrix,
            columns,
            scratch,
        }
    }
}

/// The checked operands of one call.
fn operands(
    pages: &CudaPages,
    (q, q_stride): (&Tensor, usize),
    out: &Tensor,
    tables: &AttentionTables,
    options: &AttentionOptions,
) -> PyResult<Attention> {
    let AttentionTables {
        block_table,
        rows,
        positions,
        key_mask,
        ..
    } = tables;
    let key_mask = key_mask.as_ref();
    let (&[tokens, q_heads, dim], &[batch, max_pages]) = (&out.shape[..], &block_table.shape[..])
    else {
        return Err(PyValueError::new_err(
            "out must be [T, Hq, D], block_table [B, max_pages]",
        ));
    };
    let integers = [block_table, rows, positions]
        .iter()
        .all(|t| t.dtype == DType::I32);
    let heads = pages.inner.heads;
    let fits = dim == pages.inner.head_dim
        && q_heads % heads == 0
        && rows.numel() == tokens
        && positions.numel() == tokens
        && covers(q, tokens, q_stride, q_heads * dim)
        && out.dtype == q.dtype;
    let mask_fits =
        key_mask.is_none_or(|m| m.dtype == DType::F32 && m.shape.len() == 2 && m.shape[0] == batch);
    if !(integers && fits && mask_fits) {
        return Err(PyValueError::new_err(
            "the operands of paged attention do not fit each other",
        ));
    }
    Ok(Attention {
        q: q.ptr,
        q_stride,
        out: out.ptr,
        element: element(q, "q")?,
        tokens,
        q_heads,
        pages: pages.inner,
        block_table: block_table.ptr,
        batch,
        max_pages,
        rows: rows.ptr,
        positions: positions.ptr,
        key_mask: key_mask.map_or(0, |m| m.ptr),
        mask_width: key_mask.map_or(0, |m| m.shape[1]),
        scale: options.scale,
        window: options.window,
        softcap: options.softcap,
        own: None,
        table_rows: Rows::Sequences,
        ordered: None,
    })
}

/// Whether rows of `width` elements, `stride` apart, lie within the tensor, on addresses that are multiples of 4 bytes.
pub fn covers(t: &Tensor, rows: usize, stride: usize, width: usize) -> bool {
    rows == 0
        || (stride >= width
            && stride.is_multiple_of(2)
            && t.ptr.is_multiple_of(2 * t.dtype.size())
            && t.numel() >= (rows - 1) * stride + width)
}

fn own_operands(op: &Attention, q: &Tensor, own: &NewKeys) -> PyResult<Own> {
    let NewKeys {
        key,
        value,
        stride,
        rotation,
        slots,
        early,
        norms,
    } = own;
    let Rotation {
        cos,
        sin,
        positions: rope_positions,
        interleaved,
    } = rotation.get();
    let width = op.pages.heads * op.pages.head_dim;
    let (&[table_rows, half], true) = (&cos.shape[..], cos.shape == sin.shape) else {
        return Err(PyValueError::new_err("cos and sin must be [S, R/2]"));
    };
    let fits = covers(key, op.tokens, *stride, width)
        && covers(value, op.tokens, *stride, width)
        && key.dtype == q.dtype
        && value.dtype == q.dtype
        && cos.dtype == DType::F32
        && sin.dtype == DType::F32
        && 2 * half <= op.pages.head_dim
        && op.tokens <= op.batch;
    let counts = [rope_positions, slots]
        .iter()
        .all(|t| t.dtype == DType::I64 && t.numel() == op.tokens);
    if !(fits && counts) {
        return Err(PyValueError::new_err(
            "own keys and values, tables, positions or slots do not fit the queries",
        ));
    }
    let norms = norms
        .as_ref()
        .map(|norms| norms.get().checked(op.pages.head_dim, key.cuda))
        .transpose()?
        .unwrap_or_default();
    Ok(Own {
        key: key.ptr,
        value: value.ptr,
        stride: *stride,
        cos: cos.ptr,
        sin: sin.ptr,
        table_rows,
        rotated: 2 * half,
        interleaved: *interleaved,
        rope_positions: rope_positions.ptr,
        slots: slots.ptr,
        early: *early,
        norms,
    })
}

fn ordered_operands(op: &Attention, to: &MatmulInput) -> Result<Ordered, String> {
    let MatmulInput {
        matrix,
        columns,
        scratch,
    } = to;
    let matrix = &matrix.get().matrix;
    let features = op.q_heads * op.pages.head_dim;
    if matrix.in_features() != features {
        return Err(format!(
            "the matmul takes {} inputs, but a token has {features} results",
            matrix.in_features()
        ));
    }
    if op.element != Element::F16 {
        return Err("results packed for a matmul must be float16".to_owned());
    }
    if !input_columns().any(|of| of == *columns) || op.tokens > *columns {
        let mut known: Vec<usize> = input_columns().collect();
        known.dedup();
        return Err(format!(
            "{} tokens in {columns} columns: expected at most that many, of {known:?}",
            op.tokens
        ));
    }
    let ordered = Ordered::of(matrix, *columns, scratch.ptr)
        .ok_or("the matmul's matrix pads its input: pack the input in a separate launch")?;
    let bytes = ordered.bytes(features);
    let fits =
        scratch.dtype == DType::U8 && scratch.ptr.is_multiple_of(16) && scratch.numel() >= bytes;
    if !fits {
        return Err(format!(
            "scratch of {} elements: at least {bytes} bytes are needed, aligned to 16",
            scratch.numel()
        ));
    }
    Ok(ordered)
}

/// One launch of attention: its checked operands and its plan. It keeps the operands alive.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct AttentionCall {
    op: Attention,
    plan: Plan,
    to: Target,
    _pages: Py<CudaPages>,
    _tensors: (Tensor, Tensor),
    _tables: Py<AttentionTables>,
    _new_keys: Option<Py<NewKeys>>,
    _into: Option<Py<MatmulInput>>,
}

#[pymethods]
impl AttentionCall {
    /// Floats of `partials` that `run` needs.
    #[getter]
    fn partial_floats(&self) -> usize {
        self.plan.workspace()
    }

    /// Counters in `tickets` that `run` needs.
    #[getter]
    fn ticket_counters(&self) -> usize {
        self.plan.tickets()
    }

    /// Launch the kernel. `partials` float32 and `tickets` int32, at least as many as `partial_floats` and `ticket_counters` say, aligned to 16
    /// bytes; tickets are zero before and after the launch.
    #[pyo3(signature = (partials=None, tickets=None))]
    fn run(
        &self,
        py: Python<'_>,
        partials: Option<Tensor>,
        tickets: Option<Tensor>,
    ) -> PyResult<()> {
        let holds = |t: &Option<Tensor>, dtype: DType, count: usize| match t {
            Some(t) => {
                t.dtype == dtype
                    && t.numel() >= count
                    && t.ptr.is_multiple_of(16)
                    && t.cuda == Some(self.to.device)
            }
            None => count == 0,
        };
        let (floats, counters) = (self.partial_floats(), self.ticket_counters());
        if !holds(&partials, DType::F32, floats) || !holds(&tickets, DType::I32, counters) {
            return Err(PyValueError::new_err(format!(
                "workspace or tickets too small, unaligned, of another type or on another GPU: {floats} float32 and \
                 {counters} int32 are needed"
            )));
        }
        let memory = [&partials, &tickets].map(|t| t.as_ref().map_or(0, |t| t.ptr));
        // SAFETY: as in `cuda_kv_transfer`; the plan was made for these operands.
        py.detach(|| unsafe { attention::attend(self.to, &self.op, &self.plan, memory) })
            .map_err(|e| device_error(py, &e))
    }
}
