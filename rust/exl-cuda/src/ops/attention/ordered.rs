//! Results of attention in the input layout of a matmul of few rows.

use crate::layout::UNIT_ROWS;
use crate::ops::linear::{Matrix, input_columns};

/// Results (halves) packed as the input of a matmul of few rows, as the launch before that matmul would pack them.
#[derive(Clone, Copy, Debug)]
pub struct Ordered {
    /// Device memory of [`Ordered::bytes`], aligned to 16.
    pub to: usize,
    /// Row of K of each feature (u16), or 0: the same.
    pub row_of_feature: usize,
    /// One of [`input_columns`].
    pub columns: usize,
}

impl Ordered {
    /// Bytes of the packed results, for `features` of K.
    pub fn bytes(&self, features: usize) -> usize {
        features.div_ceil(UNIT_ROWS) * UNIT_ROWS * self.columns * 2
    }

    /// The packed input of `matrix` for up to `columns` rows, at `to`; None if some of its rows are padding.
    pub fn of(matrix: &Matrix, columns: usize, to: usize) -> Option<Self> {
        let whole = matrix.rows() == matrix.in_features() && matrix.rows() <= 1 << 16;
        (whole && input_columns().any(|of| of == columns)).then_some(Self {
            to,
            row_of_feature: matrix.argument.row_of_feature,
            columns,
        })
    }
}
