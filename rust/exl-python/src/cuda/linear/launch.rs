//! Checks and launches of one call of `CudaLinearGroup.run`.

use exl_cuda::ops::Target;
use exl_cuda::ops::linear::select::{Call, Kernel, Plan, Planned};
use exl_cuda::ops::linear::{self, Half, batch, few, lora, ring};
use exl_cuda::{Capabilities, CudaError};
use pyo3::prelude::*;

use super::{CudaLinearGroup, NextInput, NormPrologue};
use crate::cuda::lora::EpilogueAdapters;
use crate::cuda::operands::kind;
use crate::cuda::{expect, target};
use crate::operands::Launch;
use crate::tensor::{DType, Tensor};

/// The operands of `CudaLinearGroup.run`.
pub(super) struct Operands<'a> {
    pub(super) group: &'a CudaLinearGroup,
    pub(super) plan: &'a Plan,
    pub(super) x: Option<Tensor>,
    pub(super) y: Option<Tensor>,
    pub(super) scratch: Option<Tensor>,
    pub(super) exchange: Option<Tensor>,
    pub(super) residual: Option<Tensor>,
    pub(super) norm: Option<&'a NormPrologue>,
    pub(super) next: Option<&'a NextInput>,
    pub(super) chained: bool,
    pub(super) input_activation: Option<i32>,
    pub(super) adapters: Option<&'a EpilogueAdapters>,
}

impl Operands<'_> {
    /// Check sizes, types and addresses against the plan.
    /// `caps`: the card, which only chained matmuls need.
    pub(super) fn check(
        &self,
        caps: impl FnOnce() -> PyResult<Capabilities>,
        launch: &Launch,
    ) -> PyResult<Target> {
        expect(
            self.plan.joined
                && self.plan.call.epilogue.gate == self.group.gate().is_some()
                && self.plan.call.epilogue.activation == self.group.activation_of_all().is_some()
                && self.plan.call.epilogue.norm == self.norm.is_some()
                && self.plan.call.epilogue.layer == self.norm.is_some_and(|norm| norm.layer),
            "the plan is for other matrices, or the norm differs from the plan",
        )?;
        expect(
            self.input_activation.is_none() || self.plan.activates_input,
            "this plan applies no activation to its input",
        )?;
        expect(
            self.plan.call.epilogue.adapters == self.adapters.map(|adapters| adapters.sizes),
            "the plan has an epilogue of adapters, or none, where the call differs",
        )?;
        self.check_input()?;
        self.check_results()?;
        self.check_memory(caps)?;
        let mut all = Vec::with_capacity(8);
        for (name, tensor) in [
            ("x", &self.x),
            ("y", &self.y),
            ("scratch", &self.scratch),
            ("exchange", &self.exchange),
            ("residual", &self.residual),
        ] {
            all.extend(tensor.as_ref().map(|tensor| (name, tensor)));
        }
        all.extend(self.norm.map(|norm| ("norm", &norm.weight)));
        let bias = self.norm.and_then(|norm| norm.bias.as_ref());
        all.extend(bias.map(|bias| ("norm bias", bias)));
        all.extend(self.next.map(|next| ("next", &next.scratch)));
        all.extend(
            self.adapters
                .into_iter()
                .flat_map(EpilogueAdapters::tensors),
        );
        let to = target(&all, launch)?;
        expect(
            to.device == self.group.device,
            "the operands are on another GPU than the matrices",
        )?;
        Ok(to)
    }

    fn check_input(&self) -> PyResult<()> {
        let Call {
            rows,
            epilogue,
            aligned_input,
            ..
        } = self.plan.call;
        let features = self.group.in_features;
        let Some(x) = &self.x else {
            let packed = self.plan.takes_packed || self.plan.input_columns.is_some();
            expect(packed, "this plan takes no packed input")?;
            let padded = self.group.matrices[0]
                .get()
                .matrix
                .rows()
                .next_multiple_of(256);
            return expect(
                self.norm.is_none_or(|norm| norm.holds(padded)),
                "norm weight must be float32 with as many elements as the layout has rows",
            );
        };
        let kind = if epilogue.bf16 {
            DType::BF16
        } else {
            DType::F16
        };
        expect(
            x.dtype == kind && x.numel() == rows * features,
            "x must be [m, in_features] of the plan's rows and dtype",
        )?;
        expect(
            !aligned_input || x.ptr.is_multiple_of(16),
            "x must be aligned to 16 bytes",
        )?;
        expect(
            self.norm.is_none_or(|norm| norm.holds(features)),
            "norm weight must be float32 [in_features] and aligned to 16 bytes",
        )
    }

    fn check_results(&self) -> PyResult<()> {
        let width = self.group.out_features * if self.plan.separate_gate { 2 } else { 1 };
        let size = self.plan.call.rows * width;
        let fits = |tensor: &Tensor| tensor.numel() == size;
        expect(
            self.y.as_ref().is_none_or(fits),
            "y must be [m, out_features] of the plan's rows",
        )?;
        expect(
            self.y.is_some() || (self.next.is_some() && self.plan.packs_results),
            "results need y or next",
        )?;
        let Some(residual) = &self.residual else {
            return Ok(());
        };
        let like_y = residual.dtype == self.y.as_ref().map_or(DType::F16, |y| y.dtype);
        expect(
            self.group.activation.is_none() && like_y && fits(residual),
            "residual must have the shape and dtype of y, and a matmul with an activation takes none",
        )
    }

    fn check_memory(&self, caps: impl FnOnce() -> PyResult<Capabilities>) -> PyResult<()> {
        let holds = |tensor: Option<&Tensor>, bytes: usize| match tensor {
            Some(t) => t.dtype == DType::U8 && t.numel() >= bytes && t.ptr.is_multiple_of(128),
            None => bytes == 0,
        };
        expect(
            holds(self.scratch.as_ref(), self.plan.scratch_bytes)
                && holds(self.exchange.as_ref(), self.plan.exchange_bytes),
            "scratch or exchange memory is smaller than the plan requires",
        )?;
        let Some(next) = self.next else { return Ok(()) };
        expect(
            self.plan.packs_results && next.scratch.dtype == DType::U8,
            "this plan cannot pack results for next, or the scratch of next is not uint8",
        )?;
        if self.plan.kernel != Kernel::GemmBatch {
            return Ok(()); // `few::launch` checks the size
        }
        let parts = next.group.get().parts();
        let bytes = batch::scratch_bytes(&caps()?, &parts, self.plan.call.rows);
        expect(
            self.y.is_none() && parts.len() == 1 && holds(Some(&next.scratch), bytes),
            "the next matmul must have one matrix and enough scratch memory, and y must be None",
        )
    }

    fn x(&self) -> (usize, Half) {
        let kind = if self.plan.call.epilogue.bf16 {
            Half::BF16
        } else {
            Half::F16
        };
        (address(self.x.as_ref()), kind)
    }

    fn y(&self) -> (usize, Half) {
        let kind = self.y.as_ref().map(|y| kind(y, "y"));
        (
            address(self.y.as_ref()),
            kind.and_then(Result::ok).unwrap_or(Half::F16),
        )
    }

    fn scratch(&self) -> (usize, usize) {
        let scratch = self.scratch.as_ref();
        (address(scratch), scratch.map_or(0, Tensor::numel))
    }

    /// The error for tuning that the kernel cannot take.
    fn unplanned(&self) -> CudaError {
        CudaError::Argument {
            what: format!("{:?}", self.plan.tuning),
            limit: "does not fit the shared memory of this card".to_owned(),
        }
    }

    /// The operands of `gemv_ring` and `gemm_few`.
    fn matmul(&self, adapters: Option<lora::InMatmul>) -> ring::Matmul {
        let ((x, x_type), (y, y_type)) = (self.x(), self.y());
        ring::Matmul {
            x,
            x_type,
            y,
            y_type,
            m: self.plan.call.rows,
            residual: address(self.residual.as_ref()),
            gate: self.group.gate(),
            activation: self.group.activation_of_all(),
            norm: self
                .norm
                .filter(|_| self.x.is_some())
                .map(NormPrologue::argument),
            adapters,
        }
    }

    /// The adapters of the rows, whose sizes fit the matrices.
    pub(super) fn adapters(&self) -> PyResult<Option<lora::InMatmul>> {
        let Some(rows) = self.adapters else {
            return Ok(None);
        };
        let y = self.y.as_ref().map(|y| y.dtype);
        expect(y == Some(DType::F16), "adapters are added to float16 alone")?;
        let exchange = address(self.exchange.as_ref());
        let matrices = self.group.matrices.len();
        rows.checked(self.plan.call.rows, matrices, exchange)
            .map(Some)
    }

    pub(super) fn gemv_ring(
        &self,
        to: Target,
        adapters: Option<lora::InMatmul>,
    ) -> Result<(), CudaError> {
        let Planned::Ring(plan) = &self.plan.planned else {
            return Err(self.unplanned());
        };
        // SAFETY: torch owns the memory and keeps freed blocks for work queued on their stream; sizes were checked.
        unsafe { ring::launch(to, &self.group.parts(), &self.matmul(adapters), plan) }
    }

    pub(super) fn gemm_few(&self, to: Target) -> Result<(), CudaError> {
        let Planned::Few(plan) = &self.plan.planned else {
            return Err(self.unplanned());
        };
        // SAFETY: as in `gemv_ring`.
        self.with_few(|call| unsafe { few::launch(to, call, plan) })
    }

    pub(super) fn gemm_direct(&self, to: Target) -> Result<(), CudaError> {
        let Planned::Direct(plan) = &self.plan.planned else {
            return Err(self.unplanned());
        };
        // SAFETY: as in `gemv_ring`.
        self.with_few(|call| unsafe { few::launch_direct(to, call, plan) })
    }

    /// Launch with the operands of `gemm_few` and `gemm_direct`, whose packed input has one layout.
    fn with_few<T>(&self, launch: impl FnOnce(&few::Call) -> T) -> T {
        let input = match (&self.x, self.norm) {
            (Some(_), _) => few::Input::Rows,
            (None, None) => few::Input::Packed,
            (None, Some(norm)) => few::Input::Unnormed {
                weight: norm.weight.ptr,
                eps: norm.eps,
            },
        };
        let parts = self.next.map(|next| next.group.get().parts());
        let next = self.next.zip(parts.as_ref());
        let next = next.map(|(next, matrices)| few::Next {
            matrices,
            gated: next.group.get().gate().is_some(),
            scratch: (next.scratch.ptr, next.scratch.numel()),
            unnormed: next.normed,
        });
        launch(&few::Call {
            matrices: &self.group.parts(),
            op: &self.matmul(None),
            input,
            scratch: self.scratch(),
            next,
        })
    }

    pub(super) fn gemm_batch(&self, to: Target) -> Result<(), CudaError> {
        let Planned::Batch(plan) = &self.plan.planned else {
            return Err(self.unplanned());
        };
        let ((x, x_type), (y, y_type)) = (self.x(), self.y());
        let op = batch::Matmul {
            x,
            transposed: self.chained,
            x_type,
            y,
            y_type,
            m: self.plan.call.rows,
            apart: self.plan.separate_gate,
            norm: self.norm.map(NormPrologue::argument),
            input_activation: self.input_activation,
            residual: address(self.residual.as_ref()),
            gate: self.group.gate().filter(|_| !self.plan.separate_gate),
        };
        let scratch = address(self.scratch.as_ref());
        let room = batch::Room {
            scratch,
            multipliers: scratch + self.plan.multipliers_at,
            exchange: address(self.exchange.as_ref()),
        };
        let parts = self.next.map(|next| next.group.get().parts());
        let next = self.next.zip(parts.as_ref());
        let next = next.map(|(next, parts)| batch::Next {
            matrix: parts[0],
            scratch: next.scratch.ptr,
        });
        // SAFETY: as in `gemv_ring`.
        unsafe { batch::launch(to, &self.group.parts(), &op, room, next, plan) }
    }

    pub(super) fn gemm_tile(&self, to: Target) -> Result<(), CudaError> {
        let Planned::Tile(tile) = self.plan.planned else {
            return Err(self.unplanned());
        };
        let ((x, x_type), (y, y_type)) = (self.x(), self.y());
        let op = linear::Matmul {
            x,
            x_type,
            y,
            y_type,
            m: self.plan.call.rows,
        };
        let scratch = address(self.scratch.as_ref());
        let multipliers = scratch + self.plan.multipliers_at;
        let matrix = &self.group.matrices[0].get().matrix;
        // SAFETY: as in `gemv_ring`.
        unsafe { linear::matmul(to, matrix, &op, (scratch, multipliers), tile) }
    }
}

impl NormPrologue {
    /// Whether weight and bias have `features` features.
    fn holds(&self, features: usize) -> bool {
        [Some(&self.weight), self.bias.as_ref()]
            .into_iter()
            .flatten()
            .all(|t| t.dtype == DType::F32 && t.numel() == features && t.ptr.is_multiple_of(16))
    }
}

fn address(tensor: Option<&Tensor>) -> usize {
    tensor.map_or(0, |tensor| tensor.ptr)
}
