//! The memory roofline: the bandwidth at which the pool's threads read memory that is not in a cache.

use std::hint::black_box;
use std::time::Instant;

use crate::pool;

/// Words one task reads: 1 MiB.
const CHUNK: usize = 1 << 17;

/// Read `data` once on the pool and return bytes per second.
pub fn read_bandwidth(data: &[u64]) -> f64 {
    let start = Instant::now();
    pool::run(data.len().div_ceil(CHUNK), &|task| {
        let chunk = &data[task * CHUNK..data.len().min((task + 1) * CHUNK)];
        black_box(fold(chunk));
    });
    size_of_val(data) as f64 / start.elapsed().as_secs_f64()
}

#[inline(always)]
fn fold_lanes(data: &[u64]) -> u64 {
    let mut lanes = [0u64; 64];
    for words in data.chunks_exact(64) {
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane ^= word;
        }
    }
    lanes.iter().fold(0, |a, b| a ^ b)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fold_avx2(data: &[u64]) -> u64 {
    fold_lanes(data)
}

fn fold(data: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: just detected.
        return unsafe { fold_avx2(data) };
    }
    fold_lanes(data)
}
