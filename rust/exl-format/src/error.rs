//! Errors of a quantized matrix: every variant has the value found and the limit.

use thiserror::Error;

/// A matrix whose tensors do not follow their format.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("{name}: {problem}")]
pub struct FormatError {
    /// The matrix's key in its file, or the caller's name for it.
    pub name: String,
    pub problem: Problem,
}

impl FormatError {
    pub fn new(name: &str, problem: Problem) -> Self {
        let name = if name.is_empty() { "matrix" } else { name };
        Self {
            name: name.to_owned(),
            problem,
        }
    }
}

/// One broken rule of a format.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum Problem {
    #[error("{tensor} has shape {found:?}, expected {expected}")]
    Shape {
        tensor: &'static str,
        found: Vec<usize>,
        expected: String,
    },
    #[error("{tensor} holds {found} elements, which does not match its shape {shape:?}")]
    Length {
        tensor: &'static str,
        found: usize,
        shape: Vec<usize>,
    },
    #[error(
        "the matrix is empty (K = {k}, N = {n}, {groups} groups); every size must be at least 1"
    )]
    Empty { k: usize, n: usize, groups: usize },
    #[error("q_groups: group {group} is {bits} bits wide; EXL2 knows 2, 3, 4, 5, 6 and 8")]
    GroupWidth { group: usize, bits: i32 },
    #[error(
        "q_groups: group {group} spans packed rows {first}..{end}; starts must begin at 0, increase, and stay within q_weight's {rows} rows"
    )]
    GroupOrder {
        group: usize,
        first: usize,
        end: usize,
        rows: usize,
    },
    #[error(
        "q_groups: group {group} has {words} packed rows at {bits} bits, which is not a multiple of {bits}; a group must hold a multiple of 32 rows"
    )]
    GroupRows {
        group: usize,
        words: usize,
        bits: u32,
    },
    #[error(
        "q_groups: the groups hold {found} rows in all, but q_invperm has {expected} entries; both must equal in_features"
    )]
    GroupSum { found: usize, expected: usize },
    #[error("{tensor}: entry {index} is {value}; {rule} 0..{k}")]
    Permutation {
        /// `q_invperm` of a file, or `perm` passed to a writer.
        tensor: &'static str,
        index: usize,
        value: i32,
        k: usize,
        /// "must lie in" or "occurs twice; the entries must be a permutation of".
        rule: &'static str,
    },
    #[error("{tensor}[{index}] is {value}; scales must be finite")]
    NonFinite {
        tensor: &'static str,
        index: usize,
        value: f32,
    },
    #[error(
        "q_scale_max[{group}] is {value}; at {bits} bits the weights would leave the half range, so it must be at most {limit}"
    )]
    ScaleTooLarge {
        group: usize,
        value: f32,
        bits: u32,
        limit: f32,
    },
    #[error("{bits}-bit {format} is not a format; use one of {known}")]
    Bits {
        format: &'static str,
        bits: u32,
        known: &'static str,
    },
    #[error("{what} is {value}, which is not a multiple of {multiple}; {remedy}")]
    Multiple {
        what: &'static str,
        value: usize,
        multiple: usize,
        remedy: &'static str,
    },
    #[error("g_idx[{row}] is {value}; groups are numbered 0..{groups}")]
    GroupIndex {
        row: usize,
        value: i32,
        groups: usize,
    },
    #[error(
        "group_size {group_size} cuts {k} rows into {found} groups, but the file has {groups}; check quantization_config.group_size"
    )]
    GroupSize {
        group_size: usize,
        k: usize,
        found: usize,
        groups: usize,
    },
    #[error("{tensor}: value {value} at [{row}, {column}] does not fit; the limit is {limit}")]
    Range {
        tensor: &'static str,
        row: usize,
        column: usize,
        value: i64,
        limit: i64,
    },
    #[error("quantization plan {plan:?}: {why}")]
    Plan { plan: String, why: String },
    #[error(
        "weight[{row}, {column}] is {value}; weights must be finite and within the half range (65504) to be quantized"
    )]
    Weight {
        row: usize,
        column: usize,
        value: f32,
    },
}
