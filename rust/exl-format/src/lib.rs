//! EXL2 and GPTQ bit layouts, and safetensors header checks. No unsafe code, no GPU, no threads.
//!
//! Every entry point checks its input once and returns a view with accessors that cannot fail: [`exl2::Exl2View`] and [`gptq::GptqView`].
//! Matrices have "row = input feature" orientation, W `[K, N]`, y = x @ W. Float weights have the shape `[N, K]` of torch's `Linear`.
//!
//! | module | holds |
//! |---|---|
//! | [`bits`] | the packing rule both formats share |
//! | [`exl2`], [`gptq`] | view, dequantize, quantize (round to nearest) |
//! | [`safetensors`] | container headers, checked; positional reads |
//! | [`source`] | float weights brought into the order quantizers walk |
#![forbid(unsafe_code)]

pub mod bits;
pub mod error;
pub mod exl2;
pub mod gptq;
pub mod safetensors;
pub mod source;

pub use error::{FormatError, Problem};

/// Runs `task(0)` to `task(tasks - 1)`, in any order and on any threads: the entry point of a thread pool, or [`serial`].
pub type Executor<'e> = &'e (dyn Fn(usize, &(dyn Fn(usize) + Sync)) + Sync);

/// The executor that uses the calling thread.
pub fn serial(tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    (0..tasks).for_each(task);
}
