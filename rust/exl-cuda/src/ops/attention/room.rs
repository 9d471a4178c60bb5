//! Shared memory of attention's blocks.

use super::{ROWS, UNIT};
use crate::layout::COLUMN_TILE;
use crate::ops::kv::{Codec, Kind};

/// Bytes of a block of `kernels/attention/attention_wide.cuh`.
pub(super) fn wide_shared(dim: usize) -> usize {
    let (ring, rows) = (384 / dim, 8 * ROWS);
    let (units, queries, totals) = (ring * 4 * UNIT * dim, 4 * rows * dim, 4 * rows * dim);
    units + queries + totals + 16 * rows + 64 + 8 * (2 * ring + 4)
}

/// Warps of a prefill block.
pub(super) fn prefill_warps(dim: usize) -> usize {
    if dim <= 128 { 8 } else { 4 }
}

/// Bytes of a packed row of one head, without scales, and bytes of its scales.
pub(super) fn packed(codec: Codec, dim: usize) -> (usize, usize) {
    let scales = if codec.is_hadamard() { dim / 16 } else { 0 };
    (codec.row_bytes(dim), scales)
}

/// Bytes of a unit: 64 keys and values in shared memory, `Stages` of `kernels/attention/attention_ring.cuh`.
pub(super) fn unit_bytes(kind: Kind, dim: usize) -> usize {
    let (key, key_scales) = packed(kind.key, dim);
    let (value, value_scales) = packed(kind.value, dim);
    let key = key + if key <= 64 { 0 } else { 16 } + key_scales;
    UNIT * (key + value + 16 + value_scales)
}

/// Bytes of a decode block without its ring: the end of `Decode` of `kernels/attention/attention_decode.cuh`, or the rows of results.
pub(super) fn decode_rest(kind: Kind, dim: usize, column_tiles: usize) -> usize {
    let columns = COLUMN_TILE * column_tiles;
    let own = |codec| {
        let (row, scales) = packed(codec, dim);
        (row + scales).next_multiple_of(16)
    };
    let work = columns * dim * 2 + 1024 * column_tiles + 16 * columns;
    (work + own(kind.key) + own(kind.value) + 16 * dim).max(columns * (dim + 4) * 4)
}

/// Units of a ring: the kernel's number, or two, or one, depending on `room`.
pub(super) fn ring(kind: Kind, dim: usize, budget: usize, room: usize) -> usize {
    let unit = unit_bytes(kind, dim);
    let full = (budget / unit).clamp(2, 4);
    [full, 2]
        .into_iter()
        .find(|units| units * unit <= room)
        .unwrap_or(1)
}

/// Units and bytes of a decode block's shared memory.
pub(super) fn decode_shared(
    kind: Kind,
    dim: usize,
    column_tiles: usize,
    per_block: usize,
) -> (usize, usize) {
    let rest = decode_rest(kind, dim, column_tiles);
    let units = ring(kind, dim, 106_496, per_block.saturating_sub(rest));
    (units, units * unit_bytes(kind, dim) + rest)
}

/// Padded head dimensions of the small prefill kernels, which keep the totals of a tile in the workspace.
pub(super) const SMALL_DIMS: [usize; 2] = [128, 256];

/// Shared memory of a prefill block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrefillRoom {
    pub units: usize,
    pub bytes: usize,
    /// Whether only the small kernel's block fits.
    pub small: bool,
}

/// Shared memory of a prefill block of at most `per_block` bytes; None if none fits.
pub(super) fn prefill_room(kind: Kind, dim: usize, per_block: usize) -> Option<PrefillRoom> {
    let whole = whole_room(kind, dim, per_block);
    let small = || {
        SMALL_DIMS
            .contains(&dim)
            .then(|| small_room(kind, dim, per_block))
    };
    let fits = |room: &PrefillRoom| room.bytes <= per_block;
    Some(whole).filter(fits).or_else(|| small().filter(fits))
}

/// `Prefill` of `kernels/attention/attention_prefill.cuh`.
fn whole_room(kind: Kind, dim: usize, per_block: usize) -> PrefillRoom {
    let (queries, totals) = (ROWS * dim * 2, ROWS * dim * 4);
    let own = if dim <= 128 { totals } else { queries + totals };
    let rest = prefill_warps(dim) * own;
    let units = ring(kind, dim, 0, per_block.saturating_sub(rest));
    PrefillRoom {
        units,
        bytes: units * unit_bytes(kind, dim) + rest,
        small: false,
    }
}

/// `Prefill` with `SMALL`: up to 128 elements, the units take the place of queries, and 64 elements of results that of units.
fn small_room(kind: Kind, dim: usize, per_block: usize) -> PrefillRoom {
    let own = prefill_warps(dim) * (ROWS * dim * 2).max(ROWS * 64 * 4);
    let kept = if dim <= 128 { 0 } else { own };
    let units = ring(kind, dim, 0, per_block.saturating_sub(kept));
    PrefillRoom {
        units,
        bytes: (units * unit_bytes(kind, dim) + kept).max(own),
        small: true,
    }
}
