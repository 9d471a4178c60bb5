//! Bindings of low-rank adapters.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::ops::linear::lora::{self, LoraEntry};
use pyo3::prelude::*;

use super::attention::MatmulInput;
use super::linear::NormPrologue;
use super::{activation_kind, expect, target};
use crate::errors::device_error;
use crate::operands::Launch;
use crate::tensor::{DType, Tensor};

/// Compute y [T, out] += (x [T, in] A) B with the entry that each row's slot names, all float16.
///
/// table: int64 [entries, 5], addresses of A [rank, in] and B [rank, out] float16, scale [rank] and bias [out] (or 0) float32, and the
/// rank. slots: int32 [T], negative for none; None: entry 0 for all rows. middle: float32 [T, largest rank], overwritten.
#[pyfunction]
#[pyo3(signature = (x, *, y, table, slots, middle, launch))]
pub fn cuda_lora_add(
    py: Python<'_>,
    x: Tensor,
    y: Tensor,
    table: Tensor,
    slots: Option<Tensor>,
    middle: Tensor,
    launch: &Launch,
) -> PyResult<()> {
    let half = |tensor: &Tensor| tensor.shape.len() == 2 && tensor.dtype == DType::F16;
    expect(
        half(&x) && half(&y) && x.shape[0] == y.shape[0],
        "x and y must be float16 [T, in] and [T, out]",
    )?;
    expect(
        table.dtype == DType::I64
            && table.shape.len() == 2
            && table.shape[0] > 0
            && table.shape[1] * 8 == size_of::<LoraEntry>(),
        "table must be int64 [entries, 5]",
    )?;
    let rows = x.shape[0];
    expect(
        middle.dtype == DType::F32 && middle.shape.len() == 2 && middle.shape[0] >= rows,
        "middle must be float32 [T, largest rank]",
    )?;
    let mut all = vec![("x", &x), ("y", &y), ("table", &table), ("middle", &middle)];
    if let Some(slots) = &slots {
        expect(
            slots.dtype == DType::I32 && slots.shape == [rows],
            "slots must be int32 [T]",
        )?;
        all.push(("slots", slots));
    }
    let to = target(&all, launch)?;
    let op = lora::Lora {
        x: x.ptr,
        y: y.ptr,
        table: table.ptr,
        slots: slots.map_or(0, |slots| slots.ptr),
        middle: middle.ptr,
        rows,
        in_features: x.shape[1],
        out_features: y.shape[1],
        most_rank: middle.shape[1],
    };
    // SAFETY: torch owns the memory; sizes were checked above; what the table names is kept alive by its owner in Python.
    py.detach(|| unsafe { lora::add(to, &op) })
        .map_err(|e| device_error(py, &e))
}

/// Entries of adapters, and the sets of rows.
#[derive(Debug)]
struct Entries {
    table: Tensor,
    slots: Option<Tensor>,
}

impl Entries {
    /// The tensors, named for errors.
    fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let slots = self.slots.as_ref().map(|slots| ("slots", slots));
        [("table", &self.table)].into_iter().chain(slots)
    }

    /// The operands for `rows` rows.
    fn checked(&self, rows: usize) -> PyResult<lora::Entries> {
        let Self { table, slots } = self;
        let [levels, matrices, sets, fields] = match table.shape[..] {
            [levels, matrices, sets, fields] => [levels, matrices, sets, fields],
            _ => [0; 4],
        };
        expect(
            table.dtype == DType::I64
                && levels * matrices * sets > 0
                && matrices <= 3
                && fields * 8 == size_of::<LoraEntry>(),
            "table must be int64 [levels, matrices, sets, 5]",
        )?;
        expect(
            slots
                .as_ref()
                .is_none_or(|slots| slots.dtype == DType::I32 && slots.shape == [rows]),
            "slots must be int32 [T]",
        )?;
        Ok(lora::Entries {
            table: table.ptr,
            slots: slots.as_ref().map_or(0, |slots| slots.ptr),
            rows,
            sets,
            matrices,
            levels,
        })
    }
}

/// The adapters of the rows of a pass, for the matrices of one joined matmul, as launches before and after it take them.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct LoraRows {
    entries: Entries,
    middle: Tensor,
}

#[pymethods]
impl LoraRows {
    /// `table` int64 [levels, matrices, sets, 5], entries as for `cuda_lora_add`; `slots` int32 [T], the set of each row, negative for none;
    /// None: set 0 for all rows. Both must be written before the launches that may overlap with those of the adapters. `middle` float32
    /// [T, levels * matrices * largest rank]: result of `cuda_lora_shrink`, operand of `cuda_lora_expand`.
    #[new]
    #[pyo3(signature = (table, *, slots, middle))]
    fn new(table: Tensor, slots: Option<Tensor>, middle: Tensor) -> Self {
        Self {
            entries: Entries { table, slots },
            middle,
        }
    }
}

impl LoraRows {
    /// The tensors, named for errors.
    fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        self.entries.tensors().chain([("middle", &self.middle)])
    }

    /// The operands for `rows` rows.
    fn checked(&self, rows: usize) -> PyResult<lora::Group> {
        let (entries, middle) = (self.entries.checked(rows)?, &self.middle);
        let lines = entries.levels * entries.matrices;
        expect(
            middle.dtype == DType::F32
                && middle.shape.len() == 2
                && middle.shape[0] == rows
                && middle.shape[1].is_multiple_of(lines),
            "middle must be float32 [T, levels * matrices * largest rank]",
        )?;
        Ok(lora::Group {
            entries,
            middle: middle.ptr,
            most_rank: middle.shape[1] / lines,
        })
    }
}

/// Sizes of the adapters of a matmul's rows, by which plans decide whether it adds them itself.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct AdapterSizes {
    pub sizes: lora::select::Sizes,
}

#[pymethods]
impl AdapterSizes {
    /// `levels`: most adapters of a row; `most_rank`: the largest rank.
    #[new]
    #[pyo3(signature = (*, levels, most_rank))]
    const fn new(levels: usize, most_rank: usize) -> Self {
        Self {
            sizes: lora::select::Sizes { levels, most_rank },
        }
    }

    #[getter]
    const fn levels(&self) -> usize {
        self.sizes.levels
    }

    #[getter]
    const fn most_rank(&self) -> usize {
        self.sizes.most_rank
    }
}

/// The adapters of the rows of a matmul that adds them itself.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct EpilogueAdapters {
    entries: Entries,
    pub sizes: lora::select::Sizes,
    looks: Option<u16>,
}

#[pymethods]
impl EpilogueAdapters {
    /// `table` and `slots` as for `LoraRows`; `sizes`: of the entries. `looks`: how often a block polls for the results of others before it
    /// computes them itself, for tests; None: some milliseconds long.
    #[new]
    #[pyo3(signature = (table, *, slots, sizes, looks=None))]
    fn new(table: Tensor, slots: Option<Tensor>, sizes: &AdapterSizes, looks: Option<u16>) -> Self {
        Self {
            entries: Entries { table, slots },
            sizes: sizes.sizes,
            looks,
        }
    }
}

impl EpilogueAdapters {
    /// The tensors, named for errors.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        self.entries.tensors()
    }

    /// The operands for `rows` rows of `matrices` matrices, with the workspace at `exchange`.
    pub(super) fn checked(
        &self,
        rows: usize,
        matrices: usize,
        exchange: usize,
    ) -> PyResult<lora::InMatmul> {
        let entries = self.entries.checked(rows)?;
        expect(
            entries.matrices == matrices && entries.levels == self.sizes.levels,
            "the adapters are for other matrices, or their sizes are others",
        )?;
        Ok(lora::InMatmul {
            entries,
            exchange,
            looks: self.looks.map(i32::from),
        })
    }
}

fn is_halves(tensor: &Tensor, shape: &[usize], alignment: usize) -> bool {
    tensor.dtype == DType::F16 && tensor.shape == shape && tensor.ptr.is_multiple_of(alignment)
}

/// Compute the middle of `rows`: x [T, in] float16 times the A of each row's adapters. norm: an RMS norm of x that comes first. normed: like
/// x, gets the normed rows; or into: its scratch gets the rows packed, normed if there is a norm.
#[pyfunction]
#[pyo3(signature = (x, rows, launch, *, norm=None, normed=None, into=None))]
pub fn cuda_lora_shrink(
    py: Python<'_>,
    x: Tensor,
    rows: &LoraRows,
    launch: &Launch,
    norm: Option<&NormPrologue>,
    normed: Option<Tensor>,
    into: Option<&MatmulInput>,
) -> PyResult<()> {
    expect(
        x.shape.len() == 2 && is_halves(&x, &x.shape, 16),
        "x must be float16 [T, in], aligned to 16 bytes",
    )?;
    expect(
        normed.is_some() == (norm.is_some() && into.is_none()),
        "a norm and its result come together",
    )?;
    let group = rows.checked(x.shape[0])?;
    let mut all = vec![("x", &x)];
    all.extend(rows.tensors());
    if let Some(NormPrologue { weight, .. }) = norm {
        expect(
            weight.dtype == DType::F32
                && weight.shape == [x.shape[1]]
                && weight.ptr.is_multiple_of(16),
            "the norm's weight must be float32 [in], aligned to 16 bytes",
        )?;
        all.push(("weight", weight));
    }
    if let Some(normed) = &normed {
        expect(
            is_halves(normed, &x.shape, 16),
            "normed must be like x, aligned to 16 bytes",
        )?;
        all.push(("normed", normed));
    }
    all.extend(into.map(|into| ("into", &into.scratch)));
    let to = target(&all, launch)?;
    let (weight, eps, offset) = norm.map_or((0, 0.0, 0.0), |norm| {
        (norm.weight.ptr, norm.eps, norm.offset)
    });
    let input = lora::Input {
        x: x.ptr,
        in_features: x.shape[1],
        weight,
        eps,
        offset,
        normed: normed.as_ref().map_or(0, |normed| normed.ptr),
        packed: into
            .map(|into| into.packed(x.shape[0], x.shape[1]))
            .transpose()?,
    };
    // SAFETY: torch owns the memory; sizes were checked above; what the table names is kept alive by its owner in Python.
    py.detach(|| unsafe { lora::shrink(to, &group, &input) })
        .map_err(|e| device_error(py, &e))
}

/// Compute out = y + the adapters' results [+ residual], or the gated activation of both halves of y, all float16.
///
/// y: [T, sum of widths], the outputs of all matrices side by side. out: like y, or [T, width] with `gate` ("silu", "gelu" or
/// "quickgelu"); may be y or the residual. rows: with the middle that `cuda_lora_shrink` filled.
#[pyfunction]
#[pyo3(signature = (y, *, out, widths, rows, launch, residual=None, gate=None))]
pub fn cuda_lora_expand(
    py: Python<'_>,
    y: Tensor,
    out: Tensor,
    widths: Vec<usize>,
    rows: &LoraRows,
    launch: &Launch,
    residual: Option<Tensor>,
    gate: Option<&str>,
) -> PyResult<()> {
    let (count, width) = (
        y.shape.first().copied().unwrap_or(0),
        widths.iter().sum::<usize>(),
    );
    let group = rows.checked(count)?;
    expect(
        widths.len() == group.entries.matrices && is_halves(&y, &[count, width], 4),
        "y must be float16 [T, sum of widths], a width for each matrix",
    )?;
    let gate = gate.map(activation_kind).transpose()?;
    let wide = if gate.is_some() { widths[0] } else { width };
    expect(
        is_halves(&out, &[count, wide], 4),
        "out must be float16 [T, width]",
    )?;
    expect(
        residual
            .as_ref()
            .is_none_or(|t| gate.is_none() && is_halves(t, &[count, width], 4)),
        "the residual must be like y, and there is none with a gate",
    )?;
    let mut all = vec![("y", &y), ("out", &out)];
    all.extend(rows.tensors());
    all.extend(residual.as_ref().map(|residual| ("residual", residual)));
    let to = target(&all, launch)?;
    let results = lora::Results {
        y: y.ptr,
        out: out.ptr,
        residual: residual.as_ref().map_or(0, |residual| residual.ptr),
        widths: std::array::from_fn(|i| widths.get(i).copied().unwrap_or(0)),
        gate,
    };
    // SAFETY: torch owns the memory; sizes were checked above; what the table names is kept alive by its owner in Python.
    py.detach(|| unsafe { lora::expand(to, &group, &results) })
        .map_err(|e| device_error(py, &e))
}
