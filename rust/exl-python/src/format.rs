//! Bindings of the `format` subject: EXL2 and GPTQ matrices, safetensors headers and positional reads.
//!
//! Outputs are tensors that the Python side allocates from the group table, so memory belongs to torch.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use exl_format::exl2::{self, Exl2Matrix, Exl2View, Plan, Search};
use exl_format::gptq::{self, GptqMatrix, Settings};
use exl_format::source::Weight;
use exl_format::{FormatError, Problem, safetensors};
use half::{bf16, f16};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::format_error;
use crate::matrix_parts::{Exl2Codes, Exl2Parts, GptqFormat, GptqParts, two};
use crate::tensor::{DType, Element, Tensor};

/// Bytes that one task of a positional read fills.
const READ_CHUNK: usize = 16 << 20;

fn problem(py: Python<'_>, name: &str, problem: Problem) -> PyErr {
    format_error(py, &FormatError::new(name, problem))
}

impl Exl2Parts {
    fn fill(&self, matrix: &Exl2Matrix) -> PyResult<()> {
        copy(&matrix.q_weight, &self.q_weight, "q_weight")?;
        copy(&matrix.q_scale, &self.q_scale, "q_scale")?;
        copy(&matrix.q_scale_max, &self.q_scale_max, "q_scale_max")?;
        copy(&matrix.q_groups, &self.q_groups, "q_groups")?;
        copy(&matrix.q_invperm, &self.q_invperm, "q_invperm")
    }
}

impl GptqParts {
    fn fill(&self, matrix: &GptqMatrix) -> PyResult<()> {
        let g_idx = self.g_idx.as_ref();
        let g_idx = g_idx.ok_or_else(|| PyValueError::new_err("g_idx is missing"))?;
        copy(&matrix.qweight, &self.qweight, "qweight")?;
        copy(&matrix.qzeros, &self.qzeros, "qzeros")?;
        copy(&matrix.scales, &self.scales, "scales")?;
        copy(&matrix.g_idx, g_idx, "g_idx")
    }
}

fn copy<T: Element>(from: &[T], to: &Tensor, what: &str) -> PyResult<()> {
    let to = to.slice_mut::<T>(what)?;
    if from.len() != to.len() {
        return Err(PyValueError::new_err(format!(
            "{what}: output holds {} elements, the result has {}",
            to.len(),
            from.len()
        )));
    }
    to.copy_from_slice(from);
    Ok(())
}

fn float_weight(tensor: &Tensor) -> PyResult<Weight<'_>> {
    Ok(match tensor.dtype {
        DType::F16 => Weight::F16(tensor.slice::<f16>("weight")?),
        DType::BF16 => Weight::BF16(tensor.slice::<bf16>("weight")?),
        _ => Weight::F32(tensor.slice::<f32>("weight")?),
    })
}

fn permutation(perm: Option<&Tensor>) -> PyResult<Option<Vec<u32>>> {
    let Some(perm) = perm else { return Ok(None) };
    // A value that is no row number becomes one that the permutation check rejects.
    let rows = perm.slice::<i64>("perm")?.iter();
    Ok(Some(
        rows.map(|&row| u32::try_from(row).unwrap_or(u32::MAX))
            .collect(),
    ))
}

fn plan(py: Python<'_>, name: &str, text: &str) -> PyResult<Plan> {
    text.parse().map_err(|error| problem(py, name, error))
}

/// Rows of an EXL2 matrix whose codes have one width.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct Exl2Group {
    bits: u32,
    rows: usize,
}

impl From<(u32, usize)> for Exl2Group {
    fn from((bits, rows): (u32, usize)) -> Self {
        Self { bits, rows }
    }
}

/// Check an EXL2 matrix and return its groups.
#[pyfunction]
pub fn exl2_check(py: Python<'_>, name: &str, parts: Exl2Parts) -> PyResult<Vec<Exl2Group>> {
    let tensors = parts.tensors()?;
    let view = py
        .detach(|| Exl2View::new(name, tensors))
        .map_err(|error| format_error(py, &error))?;
    let groups = view.groups().iter();
    let found = groups.map(|group| (group.bits, group.rows.len()).into());
    Ok(found.collect())
}

/// Dequantize W [K, N] into `out`.
#[pyfunction]
pub fn exl2_dequantize(py: Python<'_>, name: &str, parts: Exl2Parts, out: Tensor) -> PyResult<()> {
    let tensors = parts.tensors()?;
    let weights = out.slice_mut::<f16>("out")?;
    py.detach(|| {
        let view = Exl2View::new(name, tensors)?;
        view.dequantize_into(weights);
        Ok(())
    })
    .map_err(|error: FormatError| format_error(py, &error))
}

/// Return the groups that `plan` cuts `k` rows into.
#[pyfunction]
pub fn exl2_groups(
    py: Python<'_>,
    name: &str,
    plan_text: &str,
    k: usize,
) -> PyResult<Vec<Exl2Group>> {
    let groups = plan(py, name, plan_text)?
        .groups(k)
        .map_err(|error| problem(py, name, error))?;
    Ok(groups.into_iter().map(Exl2Group::from).collect())
}

/// Bits of a [k, n] matrix under `plan`.
#[pyfunction]
pub fn exl2_total_bits(
    py: Python<'_>,
    name: &str,
    plan_text: &str,
    k: usize,
    n: usize,
) -> PyResult<u64> {
    plan(py, name, plan_text)?
        .total_bits(k, n)
        .map_err(|error| problem(py, name, error))
}

/// Quantize `weight` [out, in] into `parts`.
#[pyfunction]
#[pyo3(signature = (name, weight, plan_text, *, perm, grid, parts))]
pub fn exl2_quantize(
    py: Python<'_>,
    name: &str,
    weight: Tensor,
    plan_text: &str,
    perm: Option<Tensor>,
    grid: bool,
    parts: Exl2Parts,
) -> PyResult<()> {
    let (source, shape) = (float_weight(&weight)?, two(&weight, "weight")?);
    let plan = plan(py, name, plan_text)?;
    let perm = permutation(perm.as_ref())?;
    let search = if grid { Search::Grid } else { Search::None };
    let matrix = py
        .detach(|| {
            exl2::quantize(
                source,
                shape,
                &plan,
                perm.as_deref(),
                search,
                &exl_cpu::pool::run,
            )
        })
        .map_err(|error| problem(py, name, error))?;
    parts.fill(&matrix)
}

/// Pack `codes` into `parts`.
#[pyfunction]
pub fn exl2_pack(
    py: Python<'_>,
    name: &str,
    codes: Exl2Codes,
    perm: Option<Tensor>,
    parts: Exl2Parts,
) -> PyResult<()> {
    let n = two(&codes.codes, "codes")?[1];
    let perm = permutation(perm.as_ref())?;
    let matrix = Exl2Matrix::pack(
        codes.codes.slice("codes")?,
        codes.scale_codes.slice("scale_codes")?,
        codes.q_scale_max.slice("q_scale_max")?,
        &codes.groups,
        perm.as_deref(),
        n,
    )
    .map_err(|error| problem(py, name, error))?;
    parts.fill(&matrix)
}

/// The size of a matrix.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct MatrixSize {
    in_features: usize,
    out_features: usize,
}

/// Check a GPTQ matrix and return its size.
#[pyfunction]
pub fn gptq_check(
    py: Python<'_>,
    name: &str,
    parts: GptqParts,
    format: GptqFormat,
) -> PyResult<MatrixSize> {
    let view = format
        .view(name, parts.tensors()?)
        .map_err(|error| format_error(py, &error))?;
    Ok(MatrixSize {
        in_features: view.in_features(),
        out_features: view.out_features(),
    })
}

/// Dequantize W [K, N] into `out`.
#[pyfunction]
pub fn gptq_dequantize(
    py: Python<'_>,
    name: &str,
    parts: GptqParts,
    format: GptqFormat,
    out: Tensor,
) -> PyResult<()> {
    let tensors = parts.tensors()?;
    let weights = out.slice_mut::<f16>("out")?;
    py.detach(|| {
        let view = format.view(name, tensors)?;
        view.dequantize_into(weights);
        Ok(())
    })
    .map_err(|error: FormatError| format_error(py, &error))
}

/// Quantize `weight` [out, in] into `parts` (qweight, qzeros, scales, g_idx).
#[pyfunction]
#[pyo3(signature = (name, weight, format, *, symmetric, perm, parts))]
pub fn gptq_quantize(
    py: Python<'_>,
    name: &str,
    weight: Tensor,
    format: GptqFormat,
    symmetric: bool,
    perm: Option<Tensor>,
    parts: GptqParts,
) -> PyResult<()> {
    let (source, shape) = (float_weight(&weight)?, two(&weight, "weight")?);
    let group_size = format.group_size;
    let settings = Settings {
        bits: format.bits,
        group_size: group_size.ok_or_else(|| PyValueError::new_err("group_size is missing"))?,
        symmetric,
        zeros: format.zeros(),
    };
    let perm = permutation(perm.as_ref())?;
    let matrix = py
        .detach(|| {
            gptq::quantize(
                source,
                shape,
                settings,
                perm.as_deref(),
                &exl_cpu::pool::run,
            )
        })
        .map_err(|error| problem(py, name, error))?;
    parts.fill(&matrix)
}

/// A tensor of a safetensors file.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct HeaderEntry {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
    /// First byte, counted from the start of the file.
    offset: u64,
    nbytes: u64,
}

/// The header of a safetensors file.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct FileHeader {
    /// In the order of the data.
    #[pyo3(get)]
    entries: Vec<Py<HeaderEntry>>,
    #[pyo3(get)]
    metadata: BTreeMap<String, String>,
}

/// Check the header of a safetensors file and return it.
#[pyfunction]
pub fn safetensors_header(py: Python<'_>, path: PathBuf) -> PyResult<FileHeader> {
    let header = py
        .detach(|| safetensors::read_header(&path))
        .map_err(|error| format_error(py, &error))?;
    let entries = header
        .tensors
        .into_iter()
        .map(|tensor| {
            let entry = HeaderEntry {
                name: tensor.name,
                dtype: tensor.dtype.name,
                shape: tensor.shape,
                offset: tensor.offset,
                nbytes: tensor.nbytes,
            };
            Py::new(py, entry)
        })
        .collect::<PyResult<_>>()?;
    Ok(FileHeader {
        entries,
        metadata: header.metadata,
    })
}

/// Fill `out` (uint8) with the file's bytes at `offset`.
#[pyfunction]
pub fn read_into(
    py: Python<'_>,
    path: PathBuf,
    offset: u64,
    out: Tensor,
    name: &str,
) -> PyResult<()> {
    let bytes = out.slice_mut::<u8>("out")?;
    py.detach(|| {
        let parts: Vec<_> = bytes
            .chunks_mut(READ_CHUNK)
            .map(|part| std::sync::Mutex::new((part, None)))
            .collect();
        exl_cpu::pool::run(parts.len(), &|i| {
            let mut part = parts[i].lock().expect("each task locks its own part");
            let start = offset.saturating_add((i * READ_CHUNK) as u64);
            let done = safetensors::read_at(&path, Some(name), start, part.0);
            part.1 = done.err();
        });
        let results = parts
            .into_iter()
            .map(|part| part.into_inner().expect("each task locks its own part").1);
        match results.flatten().next() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    })
    .map_err(|error| format_error(py, &error))
}
