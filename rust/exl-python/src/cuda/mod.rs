//! Bindings of the CUDA operators: devices, probes and elementwise operators here, one file for each other subject.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

pub mod attention;
pub mod fields;
pub mod float;
pub mod fused;
pub mod limits;
pub mod linear;
pub mod lora;
pub mod matrix;
pub mod moe;
pub mod operands;
pub mod padded;
pub mod peer;
pub mod router;
pub mod sampling;
pub mod select;

use std::collections::BTreeMap;

use exl_cuda::ops::elementwise::{self, norm, rope};
use exl_cuda::ops::{Element, Target, probe};
use exl_cuda::{DeviceInfo, Driver, devices, images, own_arch};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::errors::device_error;
use crate::operands::Launch;
use crate::tensor::{DType, Tensor};

/// The activation type of `tensor`, named `what` in errors.
pub fn element(tensor: &Tensor, what: &str) -> PyResult<Element> {
    match tensor.dtype {
        DType::F16 => Ok(Element::F16),
        DType::BF16 => Ok(Element::BF16),
        DType::F32 => Ok(Element::F32),
        other => Err(PyTypeError::new_err(format!(
            "{what}: dtype {other:?}, expected float16, bfloat16 or float32"
        ))),
    }
}

/// The GPU that all `tensors` are on.
pub fn target(tensors: &[(&str, &Tensor)], launch: &Launch) -> PyResult<Target> {
    let mut found: Option<(&str, u32)> = None;
    for (what, tensor) in tensors {
        let Some(device) = tensor.cuda else {
            return Err(PyTypeError::new_err(format!(
                "{what}: tensor is in CPU memory, expected a GPU"
            )));
        };
        match found {
            Some((first, other)) if other != device => {
                return Err(PyTypeError::new_err(format!(
                    "{what} is on cuda:{device} and {first} on cuda:{other}"
                )));
            }
            _ => found = Some((what, device)),
        }
    }
    let (_, device) = found.ok_or_else(|| PyValueError::new_err("no tensors"))?;
    Ok(Target {
        device,
        stream: launch.stream,
        programmatic: launch.programmatic,
    })
}

pub fn expect(holds: bool, what: &str) -> PyResult<()> {
    if holds {
        return Ok(());
    }
    Err(PyValueError::new_err(what.to_owned()))
}

/// The kernels of this build.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct CudaBuild {
    /// Architectures that the kernels were built for.
    archs: Vec<&'static str>,
    /// The reason for these architectures.
    origin: &'static str,
    /// Version of the toolkit; "" when there was none.
    toolkit: &'static str,
    /// The reason for missing kernels; "" when there are all.
    note: &'static str,
}

/// Return what this build holds.
#[pyfunction]
pub fn cuda_build() -> CudaBuild {
    CudaBuild {
        archs: images::ARCHS.to_vec(),
        origin: images::ORIGIN,
        toolkit: images::TOOLKIT,
        note: images::NOTE,
    }
}

/// One visible GPU, in the driver's and torch's numbering. `exl_kernels.device.CudaDevice` documents the fields.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct ProbedDevice {
    index: u32,
    name: String,
    /// (major, minor)
    compute_capability: (i32, i32),
    sm_count: usize,
    shared_bytes_per_block: usize,
    memory_bytes: usize,
    /// Why the kernels of this build do not run on it, or None.
    reason: Option<String>,
    code: Option<&'static str>,
    own_arch: String,
    treated_as: Option<&'static str>,
}

impl From<DeviceInfo> for ProbedDevice {
    fn from(info: DeviceInfo) -> Self {
        Self {
            index: info.index,
            name: info.name,
            compute_capability: info.compute,
            sm_count: info.caps.sms,
            shared_bytes_per_block: info.caps.shared_per_block,
            memory_bytes: info.memory_bytes,
            reason: info.unsupported,
            code: info.arch,
            own_arch: own_arch(info.compute),
            treated_as: info.treated_as,
        }
    }
}

/// The driver and the GPUs of this machine.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct CudaProbe {
    /// Highest CUDA version that the driver supports, or None without a driver.
    driver_version: Option<(i32, i32)>,
    devices: Vec<Py<ProbedDevice>>,
    /// Why CUDA cannot be used, or None.
    reason: Option<String>,
}

/// Open the driver and return what it finds.
#[pyfunction]
pub fn cuda_probe(py: Python<'_>) -> PyResult<CudaProbe> {
    let found = py.detach(|| match (Driver::get(), devices()) {
        (Ok(driver), Ok(found)) => Ok((driver.version(), found)),
        (Err(reason), _) | (_, Err(reason)) => Err(reason.to_string()),
    });
    let (driver_version, found, reason) = match found {
        Ok((version, found)) => (Some(version), found, None),
        Err(reason) => (None, Vec::new(), Some(reason)),
    };
    let usable = found.iter().any(|device| device.unsupported.is_none());
    let first = found.first().and_then(|device| device.unsupported.clone());
    let devices = found
        .into_iter()
        .map(|device| Py::new(py, ProbedDevice::from(device)));
    Ok(CudaProbe {
        driver_version,
        devices: devices.collect::<PyResult<_>>()?,
        reason: reason.or(first.filter(|_| !usable)),
    })
}

/// Check the operands that both norms have, and launch.
fn launch_norm(
    py: Python<'_>,
    x: &Tensor,
    weight: &Tensor,
    out: &Tensor,
    eps: f32,
    kind: norm::Kind,
    to: Target,
) -> PyResult<()> {
    let width = x.shape.last().copied().unwrap_or(0);
    expect(
        out.shape == x.shape && out.dtype == x.dtype,
        "out must have the shape and dtype of x",
    )?;
    expect(
        width > 0 && weight.shape.last() == Some(&width),
        "weight must have the width of x",
    )?;
    let (rows, heads) = (x.numel() / width, weight.numel() / width);
    expect(
        heads > 0 && rows % heads == 0,
        "the rows of weight must divide the rows of x",
    )?;
    let op = norm::Norm {
        input: x.ptr,
        element: element(x, "x")?,
        weight: weight.ptr,
        weight_element: element(weight, "weight")?,
        heads,
        output: out.ptr,
        rows,
        width,
        eps,
        kind,
    };
    // SAFETY: torch owns the memory; sizes were checked above; torch keeps freed blocks alive for work queued on their stream.
    py.detach(|| unsafe { norm::norm(to, &op) })
        .map_err(|e| device_error(py, &e))
}

#[pyfunction]
#[pyo3(signature = (x, *, weight, out, eps, weight_offset, launch))]
pub fn cuda_rms_norm(
    py: Python<'_>,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: f32,
    weight_offset: f32,
    launch: &Launch,
) -> PyResult<()> {
    let to = target(&[("x", &x), ("weight", &weight), ("out", &out)], launch)?;
    launch_norm(
        py,
        &x,
        &weight,
        &out,
        eps,
        norm::Kind::Rms { weight_offset },
        to,
    )
}

#[pyfunction]
#[pyo3(signature = (x, *, weight, bias, out, eps, launch))]
pub fn cuda_layer_norm(
    py: Python<'_>,
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    out: Tensor,
    eps: f32,
    launch: &Launch,
) -> PyResult<()> {
    let mut all = vec![("x", &x), ("weight", &weight), ("out", &out)];
    if let Some(bias) = &bias {
        expect(
            bias.shape == weight.shape && bias.dtype == weight.dtype,
            "bias must have the shape and dtype of weight",
        )?;
        all.push(("bias", bias));
    }
    let to = target(&all, launch)?;
    let bias = bias.as_ref().map_or(0, |b| b.ptr);
    launch_norm(py, &x, &weight, &out, eps, norm::Kind::Layer { bias }, to)
}

#[pyfunction]
#[pyo3(signature = (x, *, cos, sin, positions, interleaved, launch))]
pub fn cuda_rope(
    py: Python<'_>,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    interleaved: bool,
    launch: &Launch,
) -> PyResult<()> {
    let to = target(
        &[
            ("x", &x),
            ("cos", &cos),
            ("sin", &sin),
            ("positions", &positions),
        ],
        launch,
    )?;
    expect(x.shape.len() == 3, "x must be [tokens, heads, head_dim]")?;
    expect(
        cos.shape.len() == 2 && cos.shape == sin.shape,
        "cos and sin must both be [positions, rotated / 2]",
    )?;
    expect(
        cos.dtype == DType::F32 && sin.dtype == DType::F32,
        "cos and sin must be float32",
    )?;
    expect(
        positions.dtype == DType::I64 && positions.shape == x.shape[..1],
        "positions must be int64 [tokens]",
    )?;
    let rotated = 2 * cos.shape[1];
    expect(
        rotated <= x.shape[2],
        "cos has more columns than half of head_dim",
    )?;
    let op = rope::Rope {
        x: x.ptr,
        element: element(&x, "x")?,
        cos: cos.ptr,
        sin: sin.ptr,
        positions: positions.ptr,
        tokens: x.shape[0],
        heads: x.shape[1],
        head_dim: x.shape[2],
        rotated,
        table_rows: cos.shape[0],
        interleaved,
    };
    // SAFETY: as in `cuda_rms_norm`.
    py.detach(|| unsafe { rope::apply(to, &op) })
        .map_err(|e| device_error(py, &e))
}

/// The activation of that name.
pub fn activation_kind(name: &str) -> PyResult<elementwise::Activation> {
    elementwise::Activation::named(name).ok_or_else(|| {
        let known = elementwise::Activation::ALL.map(elementwise::Activation::name);
        PyValueError::new_err(format!(
            "activation {name:?}: expected one of {}",
            known.join(", ")
        ))
    })
}

#[pyfunction]
#[pyo3(signature = (gate, *, up, out, kind, launch))]
pub fn cuda_activation(
    py: Python<'_>,
    gate: Tensor,
    up: Option<Tensor>,
    out: Tensor,
    kind: &str,
    launch: &Launch,
) -> PyResult<()> {
    let kind = activation_kind(kind)?;
    let mut all = vec![("gate", &gate), ("out", &out)];
    all.extend(up.as_ref().map(|t| ("up", t)));
    for (what, tensor) in &all {
        let same = tensor.shape == gate.shape && tensor.dtype == gate.dtype;
        expect(
            same,
            &format!("{what} must have the shape and dtype of gate"),
        )?;
    }
    let to = target(&all, launch)?;
    let op = elementwise::Gated {
        gate: gate.ptr,
        up: up.as_ref().map_or(0, |t| t.ptr),
        output: out.ptr,
        element: element(&gate, "gate")?,
        count: gate.numel(),
        kind,
    };
    // SAFETY: as in `cuda_rms_norm`.
    py.detach(|| unsafe { elementwise::activation(to, &op) })
        .map_err(|e| device_error(py, &e))
}

/// x = cap * tanh(x / cap), in place; x is float32.
#[pyfunction]
pub fn cuda_softcap(py: Python<'_>, x: Tensor, cap: f32, launch: &Launch) -> PyResult<()> {
    expect(x.dtype == DType::F32, "x must be float32")?;
    let to = target(&[("x", &x)], launch)?;
    // SAFETY: as in `cuda_rms_norm`.
    py.detach(|| unsafe { elementwise::softcap(to, x.ptr, x.numel(), cap) })
        .map_err(|e| device_error(py, &e))
}

/// Read all of `buffer` (uint8) to measure the read bandwidth; `sink` is a uint8 tensor of at least 4 elements.
#[pyfunction]
pub fn cuda_probe_read(
    py: Python<'_>,
    buffer: Tensor,
    sink: Tensor,
    stream: usize,
) -> PyResult<()> {
    let to = target(
        &[("buffer", &buffer), ("sink", &sink)],
        &Launch::in_order(stream),
    )?;
    let bytes = buffer.numel() * buffer.dtype.size();
    expect(
        bytes.is_multiple_of(16) && sink.numel() >= 4,
        "buffer must be a multiple of 16 bytes, sink at least 4",
    )?;
    // SAFETY: as in `launch_norm`.
    py.detach(|| unsafe { probe::read(to, buffer.ptr, bytes, sink.ptr) })
        .map_err(|e| device_error(py, &e))
}

/// Launch an empty kernel, to measure the cost of a launch.
#[pyfunction]
pub fn cuda_probe_empty(py: Python<'_>, device: u32, launch: &Launch) -> PyResult<()> {
    let to = Target {
        device,
        stream: launch.stream,
        programmatic: launch.programmatic,
    };
    py.detach(|| probe::empty(to))
        .map_err(|e| device_error(py, &e))
}

/// Number of launches of each kernel of the GPUs in use by this process. A captured launch counts once. Empty before the first use of a
/// GPU.
#[pyfunction]
pub fn cuda_launches() -> BTreeMap<String, u64> {
    exl_cuda::launches()
}
