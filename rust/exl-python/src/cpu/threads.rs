//! Bindings of the `threads` subject: the kernels' pool and instruction set.

use exl_cpu::isa::Isa;
use exl_cpu::{pool, roof};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::tensor::Tensor;

#[pyfunction]
pub fn num_threads() -> usize {
    pool::threads()
}

#[pyfunction]
pub fn set_num_threads(n: usize) {
    pool::set_threads(n);
}

fn name(isa: Isa) -> &'static str {
    match isa {
        Isa::Scalar => "scalar",
        Isa::Avx2 => "avx2",
        Isa::Avx512 => "avx512",
    }
}

#[pyfunction]
pub fn isa() -> &'static str {
    name(Isa::current())
}

#[pyfunction]
pub fn best_isa() -> &'static str {
    name(Isa::detect())
}

#[pyfunction]
pub fn set_isa(wanted: &str) -> PyResult<&'static str> {
    let isa = Isa::from_name(wanted)
        .ok_or_else(|| PyValueError::new_err(format!("unknown instruction set {wanted:?}")))?;
    Ok(name(Isa::force(isa)))
}

#[pyfunction]
pub fn pin_threads() -> bool {
    pool::pin()
}

/// Run `tasks` empty tasks, to measure the overhead of a job.
#[pyfunction]
pub fn run_empty(py: Python<'_>, tasks: usize) {
    py.detach(|| pool::run(tasks, &|_| {}));
}

/// Bytes per second at which the pool reads `data` (int64) once.
#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // PyO3 hands extracted arguments over by value.
pub fn read_bandwidth(py: Python<'_>, data: Tensor) -> PyResult<f64> {
    let words = data.slice::<i64>("data")?;
    // SAFETY: the same size and alignment, and every bit pattern is a number.
    let words = unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u64>(), words.len()) };
    Ok(py.detach(|| roof::read_bandwidth(words)))
}
