//! EXL2: mixed-width groups of rows, 4-bit square-root scales, row permutation.

mod dequantize;
mod pack;
mod plan;
mod quantize;
mod view;

pub use pack::Exl2Matrix;
pub(crate) use pack::invert;
pub use plan::{Part, Plan};
pub use quantize::{Search, quantize};
pub use view::{Exl2Tensors, Exl2View, Group, read_groups};

/// The widths of groups.
pub const WIDTHS: [u32; 6] = [2, 3, 4, 5, 6, 8];
