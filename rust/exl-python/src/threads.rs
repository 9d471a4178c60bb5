//! Bindings of the `threads` subject: the kernels' pool and instruction set.

use exl_cpu::isa::Isa;
use exl_cpu::pool;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

#[pyfunction]
fn num_threads() -> usize {
    pool::threads()
}

#[pyfunction]
fn set_num_threads(n: usize) {
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
fn isa() -> &'static str {
    name(Isa::current())
}

#[pyfunction]
fn best_isa() -> &'static str {
    name(Isa::detect())
}

#[pyfunction]
fn set_isa(wanted: &str) -> PyResult<&'static str> {
    let isa = Isa::from_name(wanted)
        .ok_or_else(|| PyValueError::new_err(format!("unknown instruction set {wanted:?}")))?;
    Ok(name(Isa::force(isa)))
}

/// Runs `tasks` empty tasks: what a job costs by itself.
#[pyfunction]
fn run_empty(py: Python<'_>, tasks: usize) {
    py.detach(|| pool::run(tasks, &|_| {}));
}

/// Adds this subject's functions and classes to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(num_threads, m)?)?;
    m.add_function(wrap_pyfunction!(set_num_threads, m)?)?;
    m.add_function(wrap_pyfunction!(isa, m)?)?;
    m.add_function(wrap_pyfunction!(best_isa, m)?)?;
    m.add_function(wrap_pyfunction!(set_isa, m)?)?;
    m.add_function(wrap_pyfunction!(run_empty, m)?)?;
    Ok(())
}
