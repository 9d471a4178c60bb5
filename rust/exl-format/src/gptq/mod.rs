//! GPTQ in AutoGPTQ's safetensors layout: 2, 3, 4 and 8 bits, act-order, both zero conventions (formats.md section 3).
//!
//! `qweight` packs codes down the columns and `qzeros` along the rows, both as little-endian bit streams; at 3 bits that is 32
//! codes in 3 words.

mod dequantize;
mod quantize;
mod view;

pub use quantize::{GptqMatrix, Settings, quantize};
pub use view::{GptqTensors, GptqView, Zeros};

/// The widths a matrix may have.
pub const WIDTHS: [u32; 4] = [2, 3, 4, 8];
