//! The scratch memory of shared launches.

use exl_format::exl2::WIDTHS;

use super::{MOST_FLOAT_PAIRS, MOST_PAIRS, select};
use crate::layout::{SLICE_ROWS, UNIT_ROWS};

/// Bytes of `ExpertCall`'s items.
pub(super) const ITEM_BYTES: usize = 16;

/// Padding rows of an EXL2 matrix that has all widths. Groups are whole slices; GPTQ matrices, of one width, have fewer rows of padding.
const MOST_PADDING: usize = WIDTHS.len() * SLICE_ROWS;

/// Sizes of the parts of the scratch memory, each rounded up to 16 bytes.
pub(super) struct Scratch {
    pub tables: usize,
    pub x: usize,
    pub inner: usize,
    pub parts: usize,
}

impl Scratch {
    /// Memory of `pairs` pairs whose packed inputs have `columns` columns: of `x` rows, for gate and up together, and of `inner` rows.
    pub fn of(pairs: usize, columns: usize, x: usize, inner: usize, hidden: usize) -> Self {
        let whole = |bytes: usize| bytes.next_multiple_of(16);
        Self {
            tables: 16 + ITEM_BYTES * pairs + whole(4 * pairs),
            x: whole(2 * columns * x),
            inner: whole(2 * columns * inner),
            parts: whole(2 * pairs * hidden),
        }
    }

    pub const fn bytes(&self) -> usize {
        self.tables + self.x + self.inner + self.parts
    }
}

/// Rows of a launch: those of a call, or as many as have `most` pairs.
pub(super) const fn rows_at_once(rows: usize, chosen: usize, most: usize) -> usize {
    let chosen = if chosen == 0 { 1 } else { chosen };
    if rows < most / chosen {
        rows
    } else {
        most / chosen
    }
}

/// Most bytes of scratch memory of a call on any card: of float experts, and of quantized ones whose gate and up have orders of their own. Matrices have
/// at most [`MOST_PADDING`] padding rows.
pub fn most_scratch_bytes(call: select::Call) -> usize {
    let at_once = |most| select::Call {
        rows: rows_at_once(call.rows, call.chosen, most),
        ..call
    };
    let packed = at_once(MOST_PAIRS);
    let pairs = packed.rows * call.chosen;
    let columns = pairs + (select::most_rows(packed) - 1) * call.experts;
    let [x, inner] = [call.hidden, call.width]
        .map(|features| (features + MOST_PADDING).next_multiple_of(UNIT_ROWS));
    let quantized = Scratch::of(pairs, columns, 2 * x, inner, call.hidden).bytes();
    let pairs = at_once(MOST_FLOAT_PAIRS).rows * call.chosen;
    let float = Scratch::of(pairs, pairs, 0, call.width.next_multiple_of(8), call.hidden).bytes();
    quantized.max(float)
}
