//! Bindings of low-rank adapters.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::ops::linear::lora::{self, LoraEntry};
use pyo3::prelude::*;

use super::{expect, target};
use crate::errors::device_error;
use crate::operands::Launch;
use crate::tensor::{DType, Tensor};

/// Compute y [T, out] += (x [T, in] A) B with the entry that each row's slot names, all float16.
///
/// table: int64 [entries, 5], addresses of A [rank, in] and B [rank, out] float16, scale [rank] and bias [out] (or 0) float32, and the
/// rank. slots: int32 [T], negative for none; None: entry 0 for all rows. middle: float32 [T, largest rank], overwritten.
#[pyfunction]
#[pyo3(signature = (x, y, table, slots, middle, launch))]
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
