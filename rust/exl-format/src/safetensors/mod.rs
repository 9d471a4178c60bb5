//! Safetensors containers: a header that is checked completely before any data is read, and reads at an offset.
//!
//! Layout: 8 bytes little-endian header length, a UTF-8 JSON object, data. Offsets in the header are relative to the start of the data.

mod error;
mod file;
mod header;

pub use error::{HeaderProblem, SafetensorsError};
pub use file::{read_at, read_header};
pub use header::{DType, Header, TensorInfo, parse};

/// Longest accepted header in bytes (the format's own limit).
pub const MAX_HEADER: u64 = 100_000_000;
/// Most dimensions of a tensor (torch's limit).
pub const MAX_DIMENSIONS: usize = 64;
