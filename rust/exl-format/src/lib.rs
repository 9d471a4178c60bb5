//! EXL2 and GPTQ bit layouts, and safetensors header checks. No unsafe code, no GPU, no threads.
//!
//! Every door checks its input once and hands out a view whose accessors cannot fail: [`exl2::Exl2View`] and [`gptq::GptqView`].
//! Matrices stand in "row = input feature" orientation, W `[K, N]`, y = x @ W.
#![forbid(unsafe_code)]

pub mod bits;
pub mod error;
pub mod exl2;
pub mod gptq;

pub use error::{FormatError, Problem};
