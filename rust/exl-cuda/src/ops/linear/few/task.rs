//! Parameters of the kernels of 3 to 8 rows, with the layout of the CUDA structs.

use super::super::MatrixArgument;
use super::super::ring::{MATRICES, NO_GATE};
use crate::abi::{assert_constants, assert_layout};

/// Units that fit a launch's parameters, including the end of each matrix's: those of an input of up to 20,224 features.
pub(super) const LISTED: usize = 80;

assert_constants!(few_task, { FEW_LISTED == LISTED, FEW_MATRICES == MATRICES });

/// `struct FewPart` of `kernels/linear/few.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) matrix: MatrixArgument,
    pub(super) pieces_at: u32,
    pub(super) units_at: u32,
    pub(super) maxima_at: u32,
    pub(super) x_at: u32,
    pub(super) copy: i32,
    pub(super) y_offset: i32,
    pub(super) listed: i32,
}

assert_layout!(Part, few_task::FewPart, { matrix as a, pieces_at, units_at, maxima_at, x_at, copy, y_offset, listed });

/// `struct FewTask` of `kernels/linear/few.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub(super) barriers_at: u32,
    pub(super) stage_stride: u32,
    pub(super) slots: i32,
    pub(super) window: i32,
    pub(super) count: i32,
    pub(super) cut: i32,
    pub(super) units: i32,
    pub(super) stages: i32,
    pub(super) stage_log: i32,
    pub(super) rounds: i32,
    pub(super) longer: i32,
    pub(super) tiles: i32,
    pub(super) gate: i32,
    pub(super) results_at: u32,
    pub(super) places_at: u32,
    pub(super) exchange_at: u32,
    pub(super) exchanges: i32,
    pub(super) m: i32,
    pub(super) y_kind: i32,
    pub(super) y_stride: i32,
    pub(super) scaled: i32,
    pub(super) copies: i32,
    pub(super) class_step: i32,
    pub(super) stay: i32,
    pub(super) first_stages: i32,
    pub(super) copy_bytes: usize,
    pub(super) x: usize,
    pub(super) multipliers: usize,
    pub(super) norm: usize,
    pub(super) squares: usize,
    pub(super) eps: f32,
    pub(super) k: i32,
    pub(super) y: usize,
    pub(super) residual: usize,
    pub(super) next: usize,
    pub(super) next_rows: usize,
    pub(super) next_squares: usize,
    pub(super) units_listed: [u32; LISTED],
    pub(super) parts: [Part; MATRICES],
}

assert_layout!(Task, few_task::FewTask, { barriers_at, stage_stride, slots, window, count, cut, units, stages, stage_log, rounds, longer, tiles, gate, results_at, places_at, exchange_at, exchanges, m, y_kind, y_stride, scaled, copies, class_step, stay, first_stages, copy_bytes, x, multipliers, norm, squares, eps, k, y, residual, next, next_rows, next_squares, units_listed, parts as part });

impl Task {
    /// Whether only the general form of the kernel does this: two passes over the tiles, or an activation of results that gate nothing.
    pub(super) fn is_general(&self) -> bool {
        self.first_stages < self.stages || self.gate < NO_GATE
    }

    /// A task with only these parts, without addresses and sizes.
    pub(super) fn without_operands(parts: &[Part; MATRICES]) -> Self {
        Self {
            barriers_at: 0,
            stage_stride: 0,
            slots: 0,
            window: 0,
            count: 0,
            cut: 0,
            units: 0,
            stages: 0,
            stage_log: 0,
            rounds: 0,
            longer: 0,
            tiles: 0,
            gate: NO_GATE,
            results_at: 0,
            places_at: 0,
            exchange_at: 0,
            exchanges: 0,
            m: 0,
            y_kind: 0,
            y_stride: 0,
            scaled: 0,
            copies: 0,
            class_step: 0,
            stay: 0,
            first_stages: 0,
            copy_bytes: 0,
            x: 0,
            multipliers: 0,
            norm: 0,
            squares: 0,
            eps: 0.0,
            k: 0,
            y: 0,
            residual: 0,
            next: 0,
            next_rows: 0,
            next_squares: 0,
            units_listed: [0; LISTED],
            parts: *parts,
        }
    }
}

/// `struct RowsTask` of `kernels/linear/rows.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Preparation {
    pub(super) x: usize,
    pub(super) weight: usize,
    pub(super) out: usize,
    pub(super) multipliers: usize,
    pub(super) copy_bytes: usize,
    pub(super) features: [usize; MATRICES],
    pub(super) layout_rows: [i32; MATRICES],
    pub(super) copies: i32,
    pub(super) units: i32,
    pub(super) k: i32,
    pub(super) m: i32,
    pub(super) eps: f32,
    pub(super) offset: f32,
}

assert_layout!(Preparation, rows::RowsTask, { x, weight, out, multipliers, copy_bytes, features, layout_rows as rows, copies, units, k, m, eps, offset });
