//! Checks of hostile input, shared by the libFuzzer targets and by `tests/hostile.rs`.
//!
//! Each check hands input to an entry point of the crate. Rejected input must give an error that prints. For accepted input
//! every accessor must work and agree with what the view says of itself.
#![allow(dead_code)] // A libFuzzer target uses one of the checks.

mod exl2;
mod file;
mod gptq;

pub use exl2::Exl2Case;
pub use file::safetensors;
pub use gptq::GptqCase;

/// Fill a new array with numbers that one seed gives.
fn noise(len: usize, seed: u32) -> Vec<i32> {
    let mut state = seed | 1;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as i32
    })
    .take(len)
    .collect()
}

/// Overwrite one element; `at` is taken modulo the length.
fn set<T>(values: &mut [T], at: u16, value: T) {
    if !values.is_empty() {
        let at = usize::from(at) % values.len();
        values[at] = value;
    }
}

/// Require that a rejection has a message.
fn rejected(error: &dyn std::error::Error) {
    assert!(!error.to_string().is_empty());
}
