//! Activations, norms, residuals, rotation, embedding and the exchange between GPUs.

pub mod embedding;
pub mod exchange;
pub mod norm;
pub mod residual;
pub mod rope;
pub mod select;

use super::{Element, Target};
use crate::abi::assert_constants;
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::parameters::kernels;

/// The activation functions. `Gelu` is the tanh approximation, `QuickGelu` is x * sigmoid(1.702 x).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    Gelu,
    QuickGelu,
}

assert_constants!(activate, {
    SILU == Activation::Silu,
    GELU == Activation::Gelu,
    QUICK_GELU == Activation::QuickGelu,
});

impl Activation {
    /// In the order of their numbers in `kernels/common/activate.cuh`.
    pub const ALL: [Self; 3] = [Self::Silu, Self::Gelu, Self::QuickGelu];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::QuickGelu => "quickgelu",
        }
    }

    /// The activation of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// Operands of [`activation`]: device addresses of `count` contiguous elements.
#[derive(Clone, Copy, Debug)]
pub struct Gated {
    pub gate: usize,
    /// 0: no gating
    pub up: usize,
    /// may be `gate` or `up`
    pub output: usize,
    pub element: Element,
    pub count: usize,
    pub kind: Activation,
}

fn name(element: Element) -> String {
    format!("activation_{}", element.suffix())
}

pub(super) fn kernels() -> Vec<String> {
    let mut all = Element::ALL.map(name).to_vec();
    all.push("softcap_f32".to_owned());
    all
}

/// x = cap * tanh(x / cap), for `count` F32 elements, in place.
///
/// # Safety
/// The address must be device memory of the stated size, valid until the stream has passed this launch.
pub unsafe fn softcap(to: Target, x: usize, count: usize, cap: f32) -> Result<(), CudaError> {
    if count == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let blocks = count.div_ceil(256 * 4).min(device.info.caps.sms * 8);
    let launch = Launch {
        kernel: "softcap_f32",
        grid: [blocks as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernels::SoftcapF32 {
        x,
        count: count as i64,
        cap,
    };
    // SAFETY: the caller guarantees that the address is valid.
    unsafe { launch.run(device, &mut arguments) }
}

/// out = f(gate) * up, in FP32, rounded once.
///
/// # Safety
/// The addresses must be device memory of the stated size, valid until the stream has passed this launch.
pub unsafe fn activation(to: Target, op: &Gated) -> Result<(), CudaError> {
    if op.count == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let kernel = name(op.element);
    // A grid-stride loop: enough blocks to fill the card, but no more than the work needs.
    let blocks = op.count.div_ceil(256 * 8).min(device.info.caps.sms * 8);
    let launch = Launch {
        kernel: &kernel,
        grid: [blocks as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernels::Activation {
        gate: op.gate,
        up: op.up,
        out: op.output,
        count: op.count as i64,
        kind: op.kind as i32,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}
