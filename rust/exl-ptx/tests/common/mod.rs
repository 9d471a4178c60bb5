//! A launch for the tests of whole kernels.

use exl_ptx::grid::Launch;

/// A launch of one block of `threads` threads.
pub fn one_block(threads: u32, params: Vec<u8>, seed: u64) -> Launch {
    Launch {
        grid: [1; 3],
        block: [threads, 1, 1],
        cluster: [1; 3],
        clustered: false,
        shared_bytes: 0,
        params,
        number: 1,
        seed,
        strict: true,
    }
}
