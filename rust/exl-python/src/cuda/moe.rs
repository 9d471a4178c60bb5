//! Bindings of a mixture of experts on a GPU: the chosen experts and their weighted sum.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::ops::moe::dequantized::{self, Padding, Part};
use exl_cuda::ops::moe::{self, Call, Experts};
use exl_cuda::{Capabilities, Device};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::cuda::float::CudaFloat;
use crate::cuda::matrix::CudaMatrix;
use crate::cuda::select::ExpertsPlan;
use crate::cuda::{activation_kind, expect, target};
use crate::errors::device_error;
use crate::operands::Launch;
use crate::tensor::{DType, Tensor};

/// (gate, up, down) of each expert of a layer.
#[derive(FromPyObject)]
pub enum ExpertMatrices {
    Quantized(Vec<[Py<CudaMatrix>; 3]>),
    Float(Vec<[Py<CudaFloat>; 3]>),
}

impl ExpertMatrices {
    /// Their GPU, if there is one.
    fn device(&self) -> PyResult<u32> {
        let devices: Vec<Option<u32>> = match self {
            Self::Quantized(all) => all.iter().flatten().map(|m| Some(m.get().device)).collect(),
            Self::Float(all) => all.iter().flatten().map(|m| m.get().device()).collect(),
        };
        expect(!devices.is_empty(), "no experts")?;
        let first = devices[0];
        expect(
            devices.iter().all(|&device| device == first),
            "the experts are on several GPUs",
        )?;
        first.ok_or_else(|| PyValueError::new_err("the experts are on the CPU"))
    }

    fn experts(&self, caps: &Capabilities) -> Result<Experts, String> {
        match self {
            Self::Quantized(all) => {
                let all: Vec<_> = all
                    .iter()
                    .map(|parts| parts.each_ref().map(|m| &m.get().matrix))
                    .collect();
                Experts::new(&all, caps)
            }
            Self::Float(all) => {
                let all: Vec<_> = all
                    .iter()
                    .map(|parts| parts.each_ref().map(|m| &m.get().matrix))
                    .collect();
                Experts::of_float(&all, caps)
            }
        }
    }
}

/// The gated MLPs of a layer, all quantized or all of float matrices, some of which each row uses.
#[pyclass(frozen, name = "CudaExperts", module = "exl_kernels._native")]
pub struct CudaExperts {
    experts: Experts,
    activation: i32,
    device: u32,
    /// Keeps the tensors alive whose addresses `experts` holds.
    _matrices: ExpertMatrices,
}

#[pymethods]
impl CudaExperts {
    /// (gate, up, down) of each expert, all on one GPU. Raises ValueError with the reason if shared launches cannot take them.
    #[new]
    fn new(py: Python<'_>, matrices: ExpertMatrices, activation: &str) -> PyResult<Self> {
        let activation = activation_kind(activation)? as i32;
        let device = matrices.device()?;
        let info = Device::get(device).map_err(|error| device_error(py, &error))?;
        let experts = matrices
            .experts(&info.info.caps)
            .map_err(PyValueError::new_err)?;
        Ok(Self {
            experts,
            activation,
            device,
            _matrices: matrices,
        })
    }

    /// The table of all experts that the launches read, to be copied to the GPU.
    fn table<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.experts.table())
    }

    /// Most rows of a call times the experts of each.
    #[classattr]
    fn most_pairs() -> usize {
        moe::MOST_PAIRS
    }

    /// Most experts of a row.
    #[classattr]
    fn most_chosen() -> usize {
        moe::MOST_EXPERTS
    }

    /// Why no card runs `chosen` experts a row with this activation in shared launches, whatever their matrices; None where one may.
    #[staticmethod]
    fn refusal(activation: &str, chosen: usize) -> Option<String> {
        moe::refusal(activation, chosen)
    }

    /// Most bytes of scratch memory of the shared launches of a call on any card; `width`: features between gate, up and down.
    #[staticmethod]
    #[pyo3(signature = (*, rows, chosen, experts, hidden, width))]
    fn most_scratch_bytes(
        rows: usize,
        chosen: usize,
        experts: usize,
        hidden: usize,
        width: usize,
    ) -> usize {
        let call = moe::select::Call {
            rows,
            chosen,
            experts,
            hidden,
            width,
        };
        moe::most_scratch_bytes(call)
    }

    /// The plan of a call of `rows` rows with `chosen` experts each, whose results do not depend on one another if `invariant`.
    fn plan(&self, rows: usize, chosen: usize, invariant: bool) -> ExpertsPlan {
        ExpertsPlan::of(&self.experts, rows, chosen, invariant)
    }

    /// Number of experts.
    #[getter]
    fn count(&self) -> usize {
        self.experts.count()
    }

    /// Features between gate, up and down.
    #[getter]
    fn width(&self) -> usize {
        self.experts.width()
    }

    /// Compute out [rows, hidden] = residual + sum of weights * the experts of h, + shared * shared_weights. All are float16, except
    /// `weights` and `shared_weights`, which are float32. `ids` int64 and `weights` have shape [rows, chosen]; `table` holds the bytes of
    /// `table`; `scratch` is uint8, the bytes of a plan of at least as many rows.
    #[pyo3(signature = (table, h, *, ids, weights, scratch, out, launch, shared=None, shared_weights=None, residual=None))]
    #[allow(clippy::too_many_arguments)] // an object of them would be made for each launch
    fn run(
        &self,
        py: Python<'_>,
        table: Tensor,
        h: Tensor,
        ids: Tensor,
        weights: Tensor,
        scratch: Tensor,
        out: Tensor,
        launch: &Launch,
        shared: Option<Tensor>,
        shared_weights: Option<Tensor>,
        residual: Option<Tensor>,
    ) -> PyResult<()> {
        let hidden = self.experts.hidden();
        let rows = h.numel() / hidden;
        let chosen = ids.shape.last().copied().unwrap_or(0);
        self.expect_rows(
            rows,
            [
                ("h", Some(&h)),
                ("out", Some(&out)),
                ("shared", shared.as_ref()),
                ("residual", residual.as_ref()),
            ],
        )?;
        expect(
            ids.dtype == DType::I64
                && ids.shape == [rows, chosen]
                && weights.dtype == DType::F32
                && weights.shape == ids.shape,
            "ids and weights must be [rows, chosen]",
        )?;
        expect_factors(shared_weights.as_ref(), rows)?;
        self.expect_table(&table)?;
        expect(
            scratch.dtype == DType::U8
                && scratch.numel() >= self.experts.scratch_bytes(rows, chosen)
                && scratch.ptr.is_multiple_of(16),
            "scratch has another size",
        )?;
        let mut all = vec![
            ("table", &table),
            ("h", &h),
            ("ids", &ids),
            ("weights", &weights),
            ("scratch", &scratch),
            ("out", &out),
        ];
        for (what, tensor) in [
            ("shared", &shared),
            ("shared_weights", &shared_weights),
            ("residual", &residual),
        ] {
            all.extend(tensor.as_ref().map(|t| (what, t)));
        }
        let to = target(&all, launch)?;
        expect(to.device == self.device, "h must be on the experts' GPU")?;
        let address = |tensor: &Option<Tensor>| tensor.as_ref().map_or(0, |t| t.ptr);
        let op = Call {
            table: table.ptr,
            h: h.ptr,
            ids: ids.ptr,
            weights: weights.ptr,
            scratch: scratch.ptr,
            shared: address(&shared),
            shared_weights: address(&shared_weights),
            residual: address(&residual),
            out: out.ptr,
            rows,
            chosen,
            activation: self.activation,
        };
        // SAFETY: torch owns the memory and keeps freed blocks for work queued on their stream; sizes were checked. The caller's contract is that
        // ids are expert indices; kernels skip others.
        py.detach(|| unsafe { moe::run(to, &self.experts, &op) })
            .map_err(|error| device_error(py, &error))
    }

    /// Write a matrix of each expert of `numbers` int64 [n] into `out` float16 [n, in, out]; part 0 is gate, 1 up, 2 down. `table` as for
    /// `run`. For quantized experts.
    #[pyo3(signature = (table, *, numbers, part, out, launch))]
    fn dequantize(
        &self,
        py: Python<'_>,
        table: Tensor,
        numbers: Tensor,
        part: usize,
        out: Tensor,
        launch: &Launch,
    ) -> PyResult<()> {
        let of = *Part::ALL
            .get(part)
            .ok_or_else(|| PyValueError::new_err("part must be 0, 1 or 2"))?;
        let (hidden, width) = (self.experts.hidden(), self.experts.width());
        let [k, n] = if of == Part::Down {
            [width, hidden]
        } else {
            [hidden, width]
        };
        let count = numbers.numel();
        expect(
            numbers.dtype == DType::I64
                && out.dtype == DType::F16
                && out.shape == [count, k, n]
                && out.ptr.is_multiple_of(16),
            "numbers must be int64 [n] and out float16 [n, in, out], aligned to 16 bytes",
        )?;
        self.expect_table(&table)?;
        let all = [("table", &table), ("numbers", &numbers), ("out", &out)];
        let to = target(&all, launch)?;
        expect(to.device == self.device, "out must be on the experts' GPU")?;
        // SAFETY: as in `run`; the caller's contract is that numbers are expert indices.
        py.detach(|| unsafe {
            dequantized::dequantize(
                to,
                &self.experts,
                table.ptr,
                (numbers.ptr, count),
                of,
                out.ptr,
            )
        })
        .map_err(|error| device_error(py, &error))
    }

    /// Write the row of each padded row into `rows` int32, 0 for padding, and the padded row of each pair of a row and an expert into
    /// `places` int32 [pairs]. `padded` int32 [n, 3]: an expert, its first padded row and their number. `order` int64 [pairs]: pairs sorted
    /// by expert; `begins` int64 [experts + 1]: where each expert's begin there.
    #[pyo3(signature = (padded, order, begins, *, chosen, rows, places, launch))]
    fn pad(
        &self,
        py: Python<'_>,
        padded: Tensor,
        order: Tensor,
        begins: Tensor,
        chosen: usize,
        rows: Tensor,
        places: Tensor,
        launch: &Launch,
    ) -> PyResult<()> {
        let count = padded.shape.first().copied().unwrap_or(0);
        expect(
            [&padded, &rows, &places]
                .iter()
                .all(|t| t.dtype == DType::I32)
                && padded.shape == [count, 3]
                && order.dtype == DType::I64
                && order.numel() == places.numel()
                && begins.dtype == DType::I64
                && begins.numel() == self.experts.count() + 1
                && chosen > 0,
            "padded must be int32 [n, 3], rows and places int32, order int64 like places, and begins int64 [experts + 1]",
        )?;
        let all = [
            ("padded", &padded),
            ("order", &order),
            ("begins", &begins),
            ("rows", &rows),
            ("places", &places),
        ];
        let to = target(&all, launch)?;
        let op = Padding {
            experts: padded.ptr,
            count,
            order: order.ptr,
            begins: begins.ptr,
            chosen,
            rows: rows.ptr,
            places: places.ptr,
        };
        // SAFETY: as in `run`; the caller's contract is that padded experts fit `begins` and `rows`.
        py.detach(|| unsafe { dequantized::pad(to, &op) })
            .map_err(|error| device_error(py, &error))
    }

    /// Compute out [rows, hidden] = residual + sum of weights * parts, + shared * shared_weights, in the order of choices; `parts` float16
    /// [_, hidden]; `places` int32 [rows, chosen]: the row of each choice's result there; the rest as for `run`.
    #[pyo3(signature = (parts, *, places, weights, out, launch, shared=None, shared_weights=None, residual=None))]
    #[allow(clippy::too_many_arguments)] // an object of them would be made for each launch
    fn combine(
        &self,
        py: Python<'_>,
        parts: Tensor,
        places: Tensor,
        weights: Tensor,
        out: Tensor,
        launch: &Launch,
        shared: Option<Tensor>,
        shared_weights: Option<Tensor>,
        residual: Option<Tensor>,
    ) -> PyResult<()> {
        let hidden = self.experts.hidden();
        let [rows, chosen] = weights.shape[..] else {
            return Err(PyValueError::new_err("weights must be [rows, chosen]"));
        };
        self.expect_rows(
            rows,
            [
                ("out", Some(&out)),
                ("shared", shared.as_ref()),
                ("residual", residual.as_ref()),
            ],
        )?;
        expect(
            weights.dtype == DType::F32
                && parts.dtype == DType::F16
                && parts.shape.len() == 2
                && parts.shape[1] == hidden
                && parts.ptr.is_multiple_of(4)
                && places.dtype == DType::I32
                && places.numel() == rows * chosen,
            "weights must be float32 and places int32 [rows, chosen], and parts float16 [_, hidden]",
        )?;
        expect_factors(shared_weights.as_ref(), rows)?;
        let mut all = vec![
            ("parts", &parts),
            ("places", &places),
            ("weights", &weights),
            ("out", &out),
        ];
        for (what, tensor) in [
            ("shared", &shared),
            ("shared_weights", &shared_weights),
            ("residual", &residual),
        ] {
            all.extend(tensor.as_ref().map(|t| (what, t)));
        }
        let to = target(&all, launch)?;
        expect(to.device == self.device, "out must be on the experts' GPU")?;
        let address = |tensor: &Option<Tensor>| tensor.as_ref().map_or(0, |t| t.ptr);
        let op = Call {
            table: 0,
            h: 0,
            ids: 0,
            weights: weights.ptr,
            scratch: 0,
            shared: address(&shared),
            shared_weights: address(&shared_weights),
            residual: address(&residual),
            out: out.ptr,
            rows,
            chosen,
            activation: self.activation,
        };
        // SAFETY: as in `run`.
        py.detach(|| unsafe {
            dequantized::combine(to, &self.experts, &op, (parts.ptr, places.ptr))
        })
        .map_err(|error| device_error(py, &error))
    }
}

impl CudaExperts {
    fn expect_table(&self, table: &Tensor) -> PyResult<()> {
        let bytes = self.experts.table().len();
        let fits = table.dtype == DType::U8 && table.numel() == bytes;
        expect(
            fits && table.ptr.is_multiple_of(16),
            "table has another size",
        )
    }

    fn expect_rows<const N: usize>(
        &self,
        rows: usize,
        tensors: [(&str, Option<&Tensor>); N],
    ) -> PyResult<()> {
        let shape = [rows, self.experts.hidden()];
        for (what, tensor) in tensors {
            let fits = tensor.is_none_or(|t| {
                t.dtype == DType::F16 && t.shape == shape && t.ptr.is_multiple_of(4)
            });
            expect(fits, &format!("{what} must be float16 [rows, hidden]"))?;
        }
        Ok(())
    }
}

fn expect_factors(shared_weights: Option<&Tensor>, rows: usize) -> PyResult<()> {
    expect(
        shared_weights.is_none_or(|t| t.dtype == DType::F32 && t.numel() == rows),
        "shared_weights must be float32 [rows]",
    )
}
