//! Bindings of the `format` subject: EXL2 and GPTQ matrices, safetensors headers and positional reads.
//!
//! Outputs are tensors that the Python side allocates from the group table, so memory belongs to torch.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use exl_format::exl2::{self, Exl2Matrix, Exl2View, Plan, Search};
use exl_format::gptq::{self, GptqView, Settings};
use exl_format::source::Weight;
use exl_format::{FormatError, Problem, safetensors};
use half::{bf16, f16};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::format_error;
use crate::matrix_parts::{Exl2Parts, GptqParts, two, zeros};
use crate::tensor::{DType, Tensor};

/// Bytes that one task of a positional read fills.
const READ_CHUNK: usize = 16 << 20;

fn problem(py: Python<'_>, name: &str, problem: Problem) -> PyErr {
    format_error(py, &FormatError::new(name, problem))
}

impl Exl2Parts {
    fn fill(&self, matrix: &Exl2Matrix) -> PyResult<()> {
        copy(&matrix.q_weight, self.0.slice_mut("q_weight")?, "q_weight")?;
        copy(&matrix.q_scale, self.1.slice_mut("q_scale")?, "q_scale")?;
        copy(
            &matrix.q_scale_max,
            self.2.slice_mut("q_scale_max")?,
            "q_scale_max",
        )?;
        copy(&matrix.q_groups, self.3.slice_mut("q_groups")?, "q_groups")?;
        copy(
            &matrix.q_invperm,
            self.4.slice_mut("q_invperm")?,
            "q_invperm",
        )
    }
}

fn copy<T: Copy>(from: &[T], to: &mut [T], what: &str) -> PyResult<()> {
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

/// Check an EXL2 matrix and return (bits, rows) of each group.
#[pyfunction]
pub fn exl2_check(py: Python<'_>, name: &str, parts: Exl2Parts) -> PyResult<Vec<(u32, usize)>> {
    let tensors = parts.tensors()?;
    let view = py
        .detach(|| Exl2View::new(name, tensors))
        .map_err(|error| format_error(py, &error))?;
    let groups = view.groups().iter();
    Ok(groups.map(|group| (group.bits, group.rows.len())).collect())
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

/// Return (bits, rows) of each group that `plan` cuts `k` rows into.
#[pyfunction]
pub fn exl2_groups(
    py: Python<'_>,
    name: &str,
    plan_text: &str,
    k: usize,
) -> PyResult<Vec<(u32, usize)>> {
    plan(py, name, plan_text)?
        .groups(k)
        .map_err(|error| problem(py, name, error))
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

/// Pack codes [K, N] and scale codes [G, N] into `parts`.
#[pyfunction]
#[pyo3(signature = (name, codes, *, scale_codes, q_scale_max, groups, perm, parts))]
pub fn exl2_pack(
    py: Python<'_>,
    name: &str,
    codes: Tensor,
    scale_codes: Tensor,
    q_scale_max: Tensor,
    groups: Vec<(u32, usize)>,
    perm: Option<Tensor>,
    parts: Exl2Parts,
) -> PyResult<()> {
    let n = two(&codes, "codes")?[1];
    let perm = permutation(perm.as_ref())?;
    let matrix = Exl2Matrix::pack(
        codes.slice("codes")?,
        scale_codes.slice("scale_codes")?,
        q_scale_max.slice("q_scale_max")?,
        &groups,
        perm.as_deref(),
        n,
    )
    .map_err(|error| problem(py, name, error))?;
    parts.fill(&matrix)
}

/// Check a GPTQ matrix and return the group of each row.
#[pyfunction]
pub fn gptq_check(
    py: Python<'_>,
    name: &str,
    parts: GptqParts,
    bits: u32,
    v2: bool,
    group_size: Option<usize>,
) -> PyResult<(usize, usize)> {
    let view = GptqView::new(name, parts.tensors()?, bits, zeros(v2), group_size)
        .map_err(|error| format_error(py, &error))?;
    Ok((view.in_features(), view.out_features()))
}

/// Dequantize W [K, N] into `out`.
#[pyfunction]
pub fn gptq_dequantize(
    py: Python<'_>,
    name: &str,
    parts: GptqParts,
    bits: u32,
    v2: bool,
    group_size: Option<usize>,
    out: Tensor,
) -> PyResult<()> {
    let tensors = parts.tensors()?;
    let weights = out.slice_mut::<f16>("out")?;
    py.detach(|| {
        let view = GptqView::new(name, tensors, bits, zeros(v2), group_size)?;
        view.dequantize_into(weights);
        Ok(())
    })
    .map_err(|error: FormatError| format_error(py, &error))
}

/// Quantize `weight` [out, in] into `parts` (qweight, qzeros, scales, g_idx).
#[pyfunction]
#[pyo3(signature = (name, weight, *, bits, group_size, symmetric, v2, perm, parts))]
pub fn gptq_quantize(
    py: Python<'_>,
    name: &str,
    weight: Tensor,
    bits: u32,
    group_size: usize,
    symmetric: bool,
    v2: bool,
    perm: Option<Tensor>,
    parts: (Tensor, Tensor, Tensor, Tensor),
) -> PyResult<()> {
    let (source, shape) = (float_weight(&weight)?, two(&weight, "weight")?);
    let settings = Settings {
        bits,
        group_size,
        symmetric,
        zeros: zeros(v2),
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
    copy(&matrix.qweight, parts.0.slice_mut("qweight")?, "qweight")?;
    copy(&matrix.qzeros, parts.1.slice_mut("qzeros")?, "qzeros")?;
    copy(&matrix.scales, parts.2.slice_mut("scales")?, "scales")?;
    copy(&matrix.g_idx, parts.3.slice_mut("g_idx")?, "g_idx")
}

/// Name, dtype, shape, absolute offset, bytes.
type Entry = (String, &'static str, Vec<u64>, u64, u64);

/// Check the header of a safetensors file and return its entries in data order and its metadata.
#[pyfunction]
pub fn safetensors_header(
    py: Python<'_>,
    path: PathBuf,
) -> PyResult<(Vec<Entry>, BTreeMap<String, String>)> {
    let header = py
        .detach(|| safetensors::read_header(&path))
        .map_err(|error| format_error(py, &error))?;
    let entries = header
        .tensors
        .into_iter()
        .map(|t| (t.name, t.dtype.name, t.shape, t.offset, t.nbytes))
        .collect();
    Ok((entries, header.metadata))
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
