//! Bindings of the plan of dequantized experts, made on the host.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::ops::moe::dequantized;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cuda::expect;
use crate::tensor::Tensor;

/// Memory for dequantized matrices of experts, unless a single one is larger.
#[pyfunction]
pub fn dequantized_bytes() -> usize {
    dequantized::DEQUANTIZED_BYTES
}

/// Most padded rows of dequantized experts whose rows are `pairs` in all.
#[pyfunction]
pub fn most_padded_rows(pairs: usize, experts: usize) -> usize {
    dequantized::most_padded(pairs, experts)
}

/// Experts that are multiplied at once.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct PaddedGroup {
    /// Number of experts.
    experts: usize,
    /// Padded rows of each.
    rows: usize,
}

/// Divide the experts that have rows into groups that are multiplied at once.
///
/// `begins` int64 [experts + 1] on the CPU: where the rows of each expert begin; `most`: experts of a group. `plan` uint8 [20 * experts] on
/// the CPU gets the experts' numbers as int64, then, from byte 8 * experts, int32 [_, 3]: an expert, its first padded row and their number.
#[pyfunction]
#[pyo3(signature = (begins, *, most, plan))]
pub fn plan_padded_experts(
    begins: Tensor,
    most: usize,
    plan: Tensor,
) -> PyResult<Vec<PaddedGroup>> {
    let (begins, plan) = (
        begins.slice::<i64>("begins")?,
        plan.slice_mut::<u8>("plan")?,
    );
    expect(
        most > 0
            && begins.len() > 1
            && begins.is_sorted()
            && begins[0] >= 0
            && i32::try_from(begins[begins.len() - 1]).is_ok(),
        "begins must be ascending, at least two and below 2^31, and most at least 1",
    )?;
    let experts = begins.len() - 1;
    expect(
        plan.len() == 20 * experts,
        "plan must be uint8 [20 * experts]",
    )?;
    let (numbers, padded) = plan.split_at_mut(8 * experts);
    let mut places = numbers.chunks_exact_mut(8).zip(padded.chunks_exact_mut(12));
    let (mut found, mut first) = (Vec::new(), 0i64);
    for (held, rows) in dequantized::groups(begins, most) {
        for &expert in &held {
            let (number, place) = places.next().expect("a place for each expert");
            number.copy_from_slice(&(expert as i64).to_ne_bytes());
            for (to, value) in place
                .chunks_exact_mut(4)
                .zip([expert as i64, first, rows as i64])
            {
                to.copy_from_slice(&index32(value)?.to_ne_bytes());
            }
            first += rows as i64;
        }
        let experts = held.len();
        found.push(PaddedGroup { experts, rows });
    }
    Ok(found)
}

fn index32(value: i64) -> PyResult<i32> {
    i32::try_from(value)
        .map_err(|_| PyValueError::new_err(format!("{value} padded rows: at most {}", i32::MAX)))
}
