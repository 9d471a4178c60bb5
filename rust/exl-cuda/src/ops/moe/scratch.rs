//! The scratch memory of shared launches.

use exl_format::exl2::WIDTHS;

use super::{MOST_PAIRS, select, sorts_first};
use crate::layout::{SLICE_ROWS, UNIT_ROWS};

/// Bytes of `ExpertCall`'s items.
pub(super) const ITEM_BYTES: usize = 16;

/// Padding rows of an EXL2 matrix that has all widths. Groups are whole slices; GPTQ matrices, of one width, have fewer rows of padding.
const MOST_PADDING: usize = WIDTHS.len() * SLICE_ROWS;

/// Sizes of the parts of the scratch memory, each rounded up to 16 bytes.
pub(super) struct Scratch {
    pub tables: usize,
    /// 0 if inputs are packed while pairs are sorted, or not at all.
    pub item_of_pair: usize,
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
            item_of_pair: if x > 0 && sorts_first(pairs) {
                whole(8 * pairs)
            } else {
                0
            },
            x: whole(2 * columns * x),
            inner: whole(2 * columns * inner),
            parts: whole(2 * pairs * hidden),
        }
    }

    pub const fn bytes(&self) -> usize {
        self.tables + self.item_of_pair + self.x + self.inner + self.parts
    }
}

/// Rows of a launch: those of a call, or as many as have [`MOST_PAIRS`] pairs.
pub fn rows_at_once(rows: usize, chosen: usize) -> usize {
    rows.min(MOST_PAIRS / chosen.max(1))
}

/// Most bytes of scratch memory of a call on any card, for experts whose gate and up have orders of their own. Matrices have at most [`MOST_PADDING`]
/// padding rows. Float experts need less.
pub fn most_scratch_bytes(call: select::Call) -> usize {
    let rows = rows_at_once(call.rows, call.chosen);
    let call = select::Call { rows, ..call };
    let (hidden, pairs) = (call.hidden, rows * call.chosen);
    let columns = pairs + (select::most_rows(call) - 1) * call.experts;
    let [x, inner] =
        [hidden, call.width].map(|features| (features + MOST_PADDING).next_multiple_of(UNIT_ROWS));
    Scratch::of(pairs, columns, 2 * x, inner, hidden).bytes()
}
