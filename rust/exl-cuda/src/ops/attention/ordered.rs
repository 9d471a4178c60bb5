//! Results of attention where a product of few rows wants its input.

use crate::layout::UNIT_ROWS;
use crate::ops::linear::Matrix;

/// Results (halves) in the order in which a product of few rows wants its input, as the launch before that product would lay them out.
#[derive(Clone, Copy, Debug)]
pub struct Ordered {
    /// Device memory of [`Ordered::bytes`], aligned to 16.
    pub to: usize,
    /// Row of K of each feature (u16), or 0: the same.
    pub row_of_feature: usize,
    /// 8: the layout of `kernels/linear/rows.cuh`; 16, 32, 64: that of `kernels/linear/prepared.cuh` for the tensor cores of a warpgroup.
    pub columns: usize,
}

/// How many tokens a product's input may be laid out for.
pub const ORDERED_COLUMNS: [usize; 4] = [8, 16, 32, 64];

impl Ordered {
    /// Bytes that are written within, for `features` of K.
    pub fn bytes(&self, features: usize) -> usize {
        features.div_ceil(UNIT_ROWS) * UNIT_ROWS * self.columns * 2
    }

    /// What `matrix` wants as its input of up to `columns` rows, laid out at `to`; None where rows of it are not input features.
    pub fn of(matrix: &Matrix, columns: usize, to: usize) -> Option<Self> {
        let whole = matrix.rows() == matrix.in_features() && matrix.rows() <= 1 << 16;
        (whole && ORDERED_COLUMNS.contains(&columns)).then_some(Self {
            to,
            row_of_feature: matrix.argument.row_of_feature,
            columns,
        })
    }
}
