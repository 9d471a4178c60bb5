//! Errors of a safetensors file.

use std::fmt;

use thiserror::Error;

/// A file that was rejected, with its name and the tensor that caused the error, if there is one.
#[derive(Debug, Error)]
pub struct SafetensorsError {
    pub file: String,
    pub tensor: Option<String>,
    #[source]
    pub problem: HeaderProblem,
}

impl SafetensorsError {
    pub(crate) fn new(file: &str, tensor: Option<&str>, problem: HeaderProblem) -> Self {
        Self {
            file: file.to_owned(),
            tensor: tensor.map(clip),
            problem,
        }
    }
}

impl fmt::Display for SafetensorsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.tensor {
            Some(tensor) => write!(f, "{}: tensor {tensor:?}: {}", self.file, self.problem),
            None => write!(f, "{}: {}", self.file, self.problem),
        }
    }
}

/// One broken rule, with the value and the limit.
#[derive(Debug, Error)]
pub enum HeaderProblem {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("is not a regular file")]
    NotAFile,
    #[error("holds {length} bytes; a safetensors file has at least 8. Download it again")]
    TooShort { length: u64 },
    #[error("header length is {length} bytes, beyond the limit of {limit}")]
    HeaderTooLong { length: u64, limit: u64 },
    #[error(
        "header is {length} bytes long, but only {available} bytes follow. The file is truncated: download it again"
    )]
    HeaderTruncated { length: u64, available: u64 },
    #[error("header is not a JSON object of tensor entries: {0}")]
    Json(String),
    #[error("occurs twice in the header")]
    Duplicate,
    #[error("dtype {0:?} is not known; expected one of {known}", known = super::header::KNOWN)]
    DType(String),
    #[error("has {count} dimensions; the limit is {limit}")]
    Dimensions { count: usize, limit: usize },
    #[error("shape {shape:?} has more elements than fit in 63 bits")]
    Overflow { shape: Vec<u64> },
    #[error("offsets [{begin}, {end}] run backwards")]
    Backwards { begin: u64, end: u64 },
    #[error(
        "ends at byte {end} of the data, which holds {available}. The file is truncated or its header is wrong: download it again"
    )]
    OutOfRange { end: u64, available: u64 },
    #[error("shape and dtype ask for {expected} bytes, its offsets hold {found}")]
    Size { expected: u64, found: u64 },
    #[error(
        "overlaps tensor {other:?}, which ends at byte {other_end} while this one begins at {begin}"
    )]
    Overlap {
        other: String,
        other_end: u64,
        begin: u64,
    },
    #[error(
        "ended after {found} of {expected} bytes at offset {offset}; the file has changed or is truncated"
    )]
    ShortRead {
        offset: u64,
        found: u64,
        expected: u64,
    },
}

/// A name short enough to print, for any content of the file.
pub(crate) fn clip(name: &str) -> String {
    const LIMIT: usize = 200;
    match name.char_indices().nth(LIMIT) {
        None => name.to_owned(),
        Some((end, _)) => format!("{}... ({} bytes)", &name[..end], name.len()),
    }
}
