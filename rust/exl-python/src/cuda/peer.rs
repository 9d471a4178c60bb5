//! Bindings of exchanges between GPUs.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::ops::elementwise::exchange::{
    COLUMN_BLOCKS, Columns, Exchange, exchange, store_columns,
};
use pyo3::prelude::*;

use crate::cuda::{expect, target};
use crate::errors::device_error;
use crate::operands::Launch;
use crate::tensor::{DType, Tensor};

/// Columns of each GPU's part of results. Made once for the exchanges of equal parts.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct PeerParts {
    begins: Vec<usize>,
    receivers: u32,
}

#[pymethods]
impl PeerParts {
    /// begins: first column of each GPU and the number of columns; receivers: bit of each GPU that gets the whole.
    #[new]
    #[pyo3(signature = (begins, *, receivers))]
    fn new(begins: Vec<usize>, receivers: u32) -> PyResult<Self> {
        expect(
            begins.is_sorted() && !begins.is_empty(),
            "begins must be ascending",
        )?;
        Ok(Self { begins, receivers })
    }
}

/// The exchange buffers of GPUs that exchange parts of results, as one of them sees them.
#[pyclass(frozen, module = "exl_kernels._native")]
pub struct PeerExchange {
    buffers: Vec<Tensor>,
    half: usize,
    me: usize,
    step: Tensor,
    failed: Tensor,
    limit_ns: u64,
}

#[pymethods]
impl PeerExchange {
    /// buffers: int64 on each GPU, zeros, `half` words for exchanges of even numbers and at least as many for odd ones; me: place of this
    /// GPU among them; step, failed: int32 [1] on this GPU.
    #[new]
    #[pyo3(signature = (buffers, *, half, me, step, failed, limit_ns))]
    fn new(
        buffers: Vec<Tensor>,
        half: usize,
        me: usize,
        step: Tensor,
        failed: Tensor,
        limit_ns: u64,
    ) -> PyResult<Self> {
        expect(
            me < buffers.len()
                && buffers
                    .iter()
                    .all(|t| t.dtype == DType::I64 && t.numel() >= 2 * half && t.cuda.is_some()),
            "buffers must be int64 of two halves on GPUs",
        )?;
        expect(
            [&step, &failed]
                .iter()
                .all(|t| t.dtype == DType::I32 && t.numel() == 1 && t.cuda == buffers[me].cuda),
            "step and failed must be int32 [1] on this GPU",
        )?;
        Ok(Self {
            buffers,
            half,
            me,
            step,
            failed,
            limit_ns,
        })
    }

    /// Send own [rows, width] to the receivers and gather all parts in full [rows, columns], both of 32-bit words.
    #[pyo3(signature = (*, own, full, parts, number, launch, send=true, receive=true))]
    fn gather(
        &self,
        py: Python<'_>,
        own: Tensor,
        full: Tensor,
        parts: &PeerParts,
        number: u32,
        launch: &Launch,
        send: bool,
        receive: bool,
    ) -> PyResult<()> {
        let all = [
            ("own", &own),
            ("full", &full),
            ("buffer", &self.buffers[self.me]),
        ];
        let to = target(&all, launch)?;
        let word = |t: &Tensor| t.dtype.size() == 4 && t.shape.len() == 2;
        expect(
            word(&own) && word(&full),
            "own and full must be matrices of 32-bit words",
        )?;
        let &PeerParts {
            ref begins,
            receivers,
        } = parts;
        let columns = begins.last().copied().unwrap_or(0);
        let wide = begins.len() == self.buffers.len() + 1
            && own.shape[1] == begins[self.me + 1] - begins[self.me]
            && full.shape == [own.shape[0], columns];
        expect(wide, "own and full must have the widths that begins says")?;
        let received = self.buffers.iter().enumerate();
        let received = received.filter(|(gpu, _)| receivers >> gpu & 1 == 1);
        let op = Exchange {
            buffers: self.buffers.iter().map(|t| t.ptr).collect(),
            half: self.half,
            second: received
                .map(|(_, t)| t.numel() - self.half)
                .min()
                .unwrap_or(usize::MAX),
            rows: own.shape[0],
            begins: begins.clone(),
            me: self.me,
            own: own.ptr,
            full: full.ptr,
            step: self.step.ptr,
            failed: self.failed.ptr,
            number,
            receivers,
            send,
            receive,
            limit_ns: self.limit_ns,
        };
        // SAFETY: torch owns the memory; sizes were checked above and by `exchange`; the caller opened peer access.
        py.detach(|| unsafe { exchange(to, &op) })
            .map_err(|e| device_error(py, &e))
    }
}

/// Results of several GPUs, as one of them sees them, which stores its columns into each.
#[pyclass(frozen, module = "exl_kernels._native")]
pub struct PeerColumns {
    results: Vec<Tensor>,
    half: usize,
    marks: Vec<Tensor>,
    me: usize,
    step: Tensor,
    failed: Tensor,
    limit_ns: u64,
}

#[pymethods]
impl PeerColumns {
    /// results: int32 of one size on each GPU, `half` words for stores of even numbers and the rest for odd ones; marks: int32
    /// [gpus, blocks] on each GPU, zeros at first; me, step, failed: as for `PeerExchange`.
    #[new]
    #[pyo3(signature = (results, *, half, marks, me, step, failed, limit_ns))]
    fn new(
        results: Vec<Tensor>,
        half: usize,
        marks: Vec<Tensor>,
        me: usize,
        step: Tensor,
        failed: Tensor,
        limit_ns: u64,
    ) -> PyResult<Self> {
        let gpus = results.len();
        let words = |t: &Tensor| t.dtype == DType::I32 && t.cuda.is_some();
        expect(
            me < gpus
                && results
                    .iter()
                    .all(|t| words(t) && t.numel() == results[me].numel() && t.numel() >= half),
            "results must be int32 of one size on GPUs",
        )?;
        expect(
            marks.len() == gpus
                && marks.iter().zip(&results).all(|(t, at)| {
                    words(t) && t.shape == [gpus, COLUMN_BLOCKS] && t.cuda == at.cuda
                }),
            "marks must be int32 [gpus, blocks] on each GPU",
        )?;
        expect(
            [&step, &failed]
                .iter()
                .all(|t| words(t) && t.numel() == 1 && t.cuda == results[me].cuda),
            "step and failed must be int32 [1] on this GPU",
        )?;
        Ok(Self {
            results,
            half,
            marks,
            me,
            step,
            failed,
            limit_ns,
        })
    }

    /// Store own [rows, width], of 32-bit words, into the results of all GPUs: into the part that `number` says. begins: first column of each
    /// GPU and the number of columns; mark: tell the others; wait: for the others' columns.
    #[pyo3(signature = (own, begins, number, launch, *, mark, wait))]
    fn store(
        &self,
        py: Python<'_>,
        own: Tensor,
        begins: Vec<usize>,
        number: u32,
        launch: &Launch,
        mark: bool,
        wait: bool,
    ) -> PyResult<()> {
        let mine = &self.results[self.me];
        let to = target(&[("own", &own), ("result", mine)], launch)?;
        let (at, room) = if number.is_multiple_of(2) {
            (0, self.half)
        } else {
            (4 * self.half, mine.numel() - self.half)
        };
        let wide = begins.len() == self.results.len() + 1
            && begins.windows(2).all(|pair| pair[0] < pair[1])
            && own.dtype.size() == 4
            && own.shape.len() == 2
            && own.shape[1] == begins[self.me + 1] - begins[self.me];
        expect(wide, "own must have the width that begins says, in words")?;
        let rows = own.shape[0];
        expect(
            rows * begins.last().copied().unwrap_or(0) <= room,
            "the result must fit its part of the memory",
        )?;
        let op = Columns {
            fulls: self.results.iter().map(|t| t.ptr + at).collect(),
            marks: self.marks.iter().map(|t| t.ptr).collect(),
            begins,
            me: self.me,
            rows,
            own: own.ptr,
            step: self.step.ptr,
            failed: self.failed.ptr,
            number,
            limit_ns: self.limit_ns,
            mark,
            wait,
        };
        // SAFETY: torch owns the memory; sizes were checked above and by `store_columns`; the caller opened peer access.
        py.detach(|| unsafe { store_columns(to, &op) })
            .map_err(|e| device_error(py, &e))
    }
}
