//! Safetensors containers: a header that is checked completely before anything is read, and positional reads.
//!
//! Layout: 8 bytes little-endian header length, a UTF-8 JSON object, data. Offsets in the header count from the data's start.

mod error;
mod file;
mod header;

pub use error::{HeaderProblem, SafetensorsError};
pub use file::{read_at, read_header};
pub use header::{DType, Header, TensorInfo, parse};

/// Longest header taken, in bytes (the format's own limit).
pub const MAX_HEADER: u64 = 100_000_000;
/// Most dimensions a tensor may have (torch's limit).
pub const MAX_DIMENSIONS: usize = 64;
