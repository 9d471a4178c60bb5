//! Kernels for measurement: see `kernels/common/probe.cu`.

use super::Target;
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::parameters::kernels;

pub(super) fn kernels() -> Vec<String> {
    vec!["probe_read".to_owned(), "probe_empty".to_owned()]
}

/// Reads `bytes` (a multiple of 16) at `buffer`; `sink` is four bytes that may be written.
///
/// # Safety
/// The addresses must be device memory of these sizes, valid until the stream has passed this launch.
pub unsafe fn read(to: Target, buffer: usize, bytes: usize, sink: usize) -> Result<(), CudaError> {
    let device = Device::get(to.device)?;
    let launch = Launch {
        kernel: "probe_read",
        grid: [device.info.caps.sms as u32 * 8, 1, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: false,
    };
    let mut arguments = kernels::ProbeRead {
        p: buffer,
        count: bytes as u64 / 16,
        sink,
    };
    // SAFETY: validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments) }
}

/// Launch an empty kernel with one block per SM.
pub fn empty(to: Target) -> Result<(), CudaError> {
    let device = Device::get(to.device)?;
    let launch = Launch {
        kernel: "probe_empty",
        grid: [device.info.caps.sms as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    // SAFETY: the kernel has no parameters.
    unsafe { launch.run(device, &mut kernels::ProbeEmpty {}) }
}
