//! The warp ring kernel: matmuls of up to eight rows on cards before Hopper, for both `gemv_ring` (x in rows) and `gemm_few` (x packed).

mod plan;
mod task;

use super::Matrix;
use crate::device::Device;
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};
use crate::ops::Target;
pub use plan::Plan;
pub(super) use plan::{Shape, plan};

impl Plan {
    /// Launch with the addresses of `self.task`.
    ///
    /// # Safety
    /// The addresses must be device memory of the sizes that `kernels/linear/warp_ring_task.cuh` states, valid until the stream has passed this
    /// launch.
    pub(super) unsafe fn launch(
        &self,
        to: Target,
        device: &Device,
        matrix: &Matrix,
    ) -> Result<(), CudaError> {
        let kernel = format!("warp_ring_{}_{}", matrix.kind, matrix.entry_rows);
        let launch = Launch {
            kernel: &kernel,
            grid: [self.blocks as u32, 1, 1],
            block: self.threads(),
            shared_bytes: self.shared as u32,
            stream: to.stream,
            // Only code for sm_90 and later can wait for its predecessor.
            programmatic: false,
        };
        let task = self.task;
        let mut arguments = kernel_arguments![task];
        // SAFETY: the struct is the kernel's; the caller guarantees that the addresses are valid.
        unsafe { launch.run(device, &mut arguments) }
    }
}
