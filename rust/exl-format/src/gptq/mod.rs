//! GPTQ in AutoGPTQ's safetensors layout: 2, 3, 4 and 8 bits, act-order, both zero conventions.
//!
//! `qweight` packs codes along the columns and `qzeros` along the rows, both as little-endian bit streams. At 3 bits, 32 codes take 3
//! words.

mod dequantize;
mod quantize;
mod view;

pub use quantize::{GptqMatrix, Settings, quantize};
pub use view::{GptqTensors, GptqView, Zeros};

/// The widths of matrices.
pub const WIDTHS: [u32; 4] = [2, 3, 4, 8];
