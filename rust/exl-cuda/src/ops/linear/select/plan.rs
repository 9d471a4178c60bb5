//! The launch plan of a matmul: kernel, memory and chaining.

use super::super::lora::select::packs_input;
use super::super::{Matrix, Tile, batch, few, ring};
use super::{Call, Epilogue, Kernel, Refusal};
use crate::capabilities::Capabilities;
use crate::rows::{BLOCK_ROWS, FEW_ROWS, GEMV_ROWS};

/// Launch parameters of benchmarks and tests that override the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    pub ring: Option<ring::Tuning>,
    pub few: few::Tuning,
    pub batch: batch::Tuning,
}

/// A launch without addresses, kept so that calls need not plan it again.
#[derive(Clone, Debug)]
pub enum Planned {
    Ring(Box<ring::Plan>),
    Few(Box<few::Plan>),
    Direct(Box<few::Plan>),
    Batch(Box<batch::Planned>),
    Tile(Tile),
    /// A call without a launch.
    None,
}

/// A launch plan: the kernel of a call, the memory that it needs, and the chaining that it supports.
#[derive(Clone, Debug)]
// Independent properties of a launch, not states of one thing.
#[allow(clippy::struct_excessive_bools)]
pub struct Plan {
    /// The call of one launch. A call of more rows is several launches of so many, each planned by its own rows.
    pub call: Call,
    pub in_features: usize,
    pub kernel: Kernel,
    /// One call of the kernel takes all matrices with the epilogue. Otherwise each matrix has a separate plan ([`super::plan_alone`];
    /// `kernel` is that of the first), and norm, gate and residual are separate launches.
    pub joined: bool,
    /// The matrices share a launch with profit even where norm and residual are launches of their own.
    pub pays_apart: bool,
    /// Bytes of scratch memory of the call, aligned to 128; it begins with the packed input.
    pub scratch_bytes: usize,
    /// Place of the rows' multipliers (FP32) in the scratch memory of [`Kernel::GemmBatch`] and [`Kernel::GemmTile`].
    pub multipliers_at: usize,
    /// Bytes of the inter-block workspace, all ones before and after every launch; 0 for none.
    pub exchange_bytes: usize,
    /// The kernel stores the results of a gate's two matrices one after the other; the activation is a separate launch.
    pub separate_gate: bool,
    /// The kernel stores the results of one matrix without their activation, which is a separate launch.
    pub separate_activation: bool,
    /// The launch that packs the input can apply an activation to it.
    pub activates_input: bool,
    /// The previous matmul can write its results packed as the input of this one, in [`Kernel::GemmFew`]'s layout.
    pub takes_packed: bool,
    /// Columns of the kernel's layout in which a launch other than a matmul can write F16 rows packed as the input.
    pub input_columns: Option<usize>,
    /// The previous matmul can write its gated results packed as the input of this one, in [`Kernel::GemmBatch`]'s layout.
    pub takes_gated: bool,
    /// Results can be written packed as the input of the next matmul.
    pub packs_results: bool,
    /// Why faster kernels do not take the call. Kernels for fewer rows are left out, unless there are too many rows for packed weights.
    pub refused: Vec<(Kernel, Refusal)>,
    pub tuning: Tuning,
    pub planned: Planned,
}

impl Plan {
    pub(super) fn new(
        caps: &Capabilities,
        matrices: &[&Matrix],
        call: Call,
        (kernel, joined): (Kernel, bool),
        refused: Vec<(Kernel, Refusal)>,
        tuning: Tuning,
    ) -> Self {
        let mut plan = Self {
            call,
            in_features: matrices[0].in_features(),
            kernel,
            joined,
            pays_apart: joined && kernel == Kernel::GemmBatch,
            scratch_bytes: 0,
            multipliers_at: 0,
            exchange_bytes: 0,
            separate_gate: false,
            separate_activation: false,
            activates_input: false,
            takes_packed: false,
            input_columns: None,
            takes_gated: false,
            packs_results: false,
            refused,
            tuning,
            planned: Planned::None,
        };
        if joined {
            plan.add_launch(caps, matrices);
            plan.add_memory(caps, matrices);
            plan.add_chaining(caps, matrices);
        }
        plan
    }

    fn add_launch(&mut self, caps: &Capabilities, matrices: &[&Matrix]) {
        let (Call { rows, epilogue, .. }, tuning) = (self.call, self.tuning);
        match self.kernel {
            Kernel::GemvRing => {
                let plan = ring::planned(caps, matrices, rows, epilogue, tuning.ring);
                self.planned = plan.map_or(Planned::None, |plan| Planned::Ring(Box::new(plan)));
            }
            Kernel::GemmFew => {
                let plan = few::planned(caps, matrices, rows, epilogue, tuning.few);
                self.planned = plan.map_or(Planned::None, |plan| Planned::Few(Box::new(plan)));
            }
            Kernel::GemmDirect => {
                if let Ok(plan) = few::plan_direct(caps, matrices, rows, epilogue.gate) {
                    self.scratch_bytes = plan.scratch_bytes();
                    self.planned = Planned::Direct(Box::new(plan));
                }
            }
            Kernel::GemmBatch => {
                let plan = batch::Planned::new(caps, matrices, rows, epilogue, tuning.batch);
                self.planned = plan.map_or(Planned::None, |plan| Planned::Batch(Box::new(plan)));
            }
            Kernel::GemmTile => self.planned = Planned::Tile(Tile::of(rows)),
            Kernel::GemmLarge => {}
        }
    }

    fn add_memory(&mut self, caps: &Capabilities, matrices: &[&Matrix]) {
        let (rows, gate) = (self.call.rows, self.call.epilogue.gate);
        self.separate_activation =
            self.call.epilogue.activation && self.kernel == Kernel::GemmBatch;
        match self.kernel {
            Kernel::GemvRing => {
                self.exchange_bytes = ring::exchange_bytes(matrices, rows, self.call.epilogue);
            }
            // `add_launch` knows the memory of a direct launch.
            Kernel::GemmDirect | Kernel::GemmLarge => {}
            Kernel::GemmFew => {
                self.scratch_bytes = few::scratch_bytes(caps, matrices, gate);
            }
            Kernel::GemmBatch => {
                let Planned::Batch(planned) = &self.planned else {
                    return;
                };
                let packed_bytes = planned.scratch_bytes();
                self.separate_gate = gate && !planned.gated();
                self.exchange_bytes = planned.exchange_bytes();
                let Call {
                    epilogue,
                    aligned_input,
                    ..
                } = self.call;
                self.activates_input = aligned_input
                    && !epilogue.bf16
                    && !epilogue.norm
                    && batch::activates_input(caps, matrices);
                self.add_multipliers(packed_bytes);
            }
            Kernel::GemmTile => self.add_multipliers(matrices[0].packed_bytes(rows)),
        }
    }

    fn add_multipliers(&mut self, packed_bytes: usize) {
        self.multipliers_at = packed_bytes;
        self.scratch_bytes = packed_bytes + 4 * self.call.rows;
    }

    fn add_chaining(&mut self, caps: &Capabilities, matrices: &[&Matrix]) {
        let Call { rows, epilogue, .. } = self.call;
        let Epilogue {
            gate, norm, bf16, ..
        } = epilogue;
        if bf16 || !self.call.aligned_input {
            return;
        }
        match self.kernel {
            Kernel::GemmFew | Kernel::GemmDirect
                if rows > GEMV_ROWS || self.kernel == Kernel::GemmDirect =>
            {
                self.takes_packed = few::takes_packed(matrices);
                self.packs_results = gate || matrices.len() == 1;
                let bare = self.takes_packed && !norm;
                self.input_columns = bare.then_some(FEW_ROWS);
            }
            Kernel::GemmBatch if batch::stores_pairs(matrices) => {
                self.packs_results = gate && !self.separate_gate;
                if !norm {
                    self.input_columns = batch::input(caps, matrices, rows);
                }
                self.takes_gated = matrices.len() == 1 && self.input_columns.is_some();
            }
            _ => {}
        }
    }

    /// The kernel's name, for reports: the ring that adds adapters has one of its own.
    pub const fn kernel_name(&self) -> &'static str {
        match self.call.epilogue.adapters {
            Some(_) if self.joined => "gemv_ring_adapted",
            _ => self.kernel.name(),
        }
    }

    /// Columns in which the launch of adapters before this matmul packs its rows; None where it leaves them as they are.
    pub fn columns_for_adapters(&self) -> Option<usize> {
        self.input_columns
            .filter(|_| !self.separate_gate && packs_input(self.call.rows, self.in_features))
    }

    /// Whether one launch on packed weights takes a whole block of rows.
    pub fn is_whole_block(&self) -> bool {
        self.kernel != Kernel::GemmLarge && self.call.rows == BLOCK_ROWS
    }

    /// Whether this matmul can write its results packed as the input of `next`, whose input has as many features.
    pub fn chains_to(&self, next: &Self) -> bool {
        let takes = match (self.kernel, next.kernel) {
            (Kernel::GemmFew | Kernel::GemmDirect, Kernel::GemmFew | Kernel::GemmDirect) => {
                next.takes_packed
            }
            (Kernel::GemmBatch, Kernel::GemmBatch) => next.takes_gated,
            _ => false,
        };
        self.packs_results && self.call.rows == next.call.rows && takes
    }
}
