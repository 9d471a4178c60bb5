//! Parameters of the warp ring kernel, with the layout of the CUDA structs.

use super::super::MatrixArgument;
use super::super::ring::MATRICES;
use crate::abi::assert_layout;

/// `struct WarpPart` of `kernels/linear/warp_ring_task.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::ops::linear) struct Part {
    pub(in crate::ops::linear) matrix: MatrixArgument,
    pub(in crate::ops::linear) list_at: u32,
    pub(in crate::ops::linear) maxima_at: u32,
    pub(in crate::ops::linear) x_at: u32,
    pub(in crate::ops::linear) order: i32,
    pub(in crate::ops::linear) copy: i32,
    pub(in crate::ops::linear) y_offset: i32,
}

assert_layout!(Part, warp_ring_task::WarpPart, { matrix as a, list_at, maxima_at, x_at, order, copy, y_offset });

/// `struct WarpTask` of `kernels/linear/warp_ring_task.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::ops::linear) struct Task {
    pub(in crate::ops::linear) rings_at: u32,
    pub(in crate::ops::linear) slot_bytes: u32,
    pub(in crate::ops::linear) stages: i32,
    pub(in crate::ops::linear) teams: i32,
    pub(in crate::ops::linear) phases: i32,
    pub(in crate::ops::linear) count: i32,
    pub(in crate::ops::linear) tiles: i32,
    pub(in crate::ops::linear) longer: i32,
    pub(in crate::ops::linear) gate: i32,
    pub(in crate::ops::linear) results_at: u32,
    pub(in crate::ops::linear) carries_at: u32,
    pub(in crate::ops::linear) rows_at: u32,
    pub(in crate::ops::linear) m: i32,
    pub(in crate::ops::linear) k: i32,
    pub(in crate::ops::linear) units: i32,
    pub(in crate::ops::linear) padded: i32,
    pub(in crate::ops::linear) packed: i32,
    pub(in crate::ops::linear) x_kind: i32,
    pub(in crate::ops::linear) y_kind: i32,
    pub(in crate::ops::linear) y_stride: i32,
    pub(in crate::ops::linear) scaled: i32,
    pub(in crate::ops::linear) eps: f32,
    pub(in crate::ops::linear) offset: f32,
    pub(in crate::ops::linear) reserved: i32,
    pub(in crate::ops::linear) copy_bytes: usize,
    pub(in crate::ops::linear) x: usize,
    pub(in crate::ops::linear) multipliers: usize,
    pub(in crate::ops::linear) norm: usize,
    pub(in crate::ops::linear) squares: usize,
    pub(in crate::ops::linear) y: usize,
    pub(in crate::ops::linear) residual: usize,
    pub(in crate::ops::linear) next: usize,
    pub(in crate::ops::linear) next_rows: usize,
    pub(in crate::ops::linear) next_squares: usize,
    pub(in crate::ops::linear) parts: [Part; MATRICES],
}

assert_layout!(Task, warp_ring_task::WarpTask, { rings_at, slot_bytes, stages, teams, phases, count, tiles, longer, gate, results_at, carries_at, rows_at, m, k, units, padded, packed, x_kind, y_kind, y_stride, scaled, eps, offset, reserved, copy_bytes, x, multipliers, norm, squares, y, residual, next, next_rows, next_squares, parts as part });

impl Task {
    /// A task with only these parts, without addresses and sizes.
    pub(super) fn without_operands(parts: &[Part; MATRICES]) -> Self {
        Self {
            rings_at: 0,
            slot_bytes: 0,
            stages: 0,
            teams: 0,
            phases: 0,
            count: 0,
            tiles: 0,
            longer: 0,
            gate: -1,
            results_at: 0,
            carries_at: 0,
            rows_at: 0,
            m: 0,
            k: 0,
            units: 0,
            padded: 0,
            packed: 0,
            x_kind: 0,
            y_kind: 0,
            y_stride: 0,
            scaled: 0,
            eps: 0.0,
            offset: 0.0,
            reserved: 0,
            copy_bytes: 0,
            x: 0,
            multipliers: 0,
            norm: 0,
            squares: 0,
            y: 0,
            residual: 0,
            next: 0,
            next_rows: 0,
            next_squares: 0,
            parts: *parts,
        }
    }
}
