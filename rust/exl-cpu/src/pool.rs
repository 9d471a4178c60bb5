//! The thread pool of the CPU kernels: own threads, never the host process's global pool.

use std::sync::atomic::{AtomicUsize, Ordering};

static THREADS: AtomicUsize = AtomicUsize::new(0);

/// Number of threads the kernels use, the calling one included: set by [`set_threads`], else `EXL_CPU_THREADS`, else the cores.
pub fn threads() -> usize {
    match THREADS.load(Ordering::Relaxed) {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    }
}

/// Sets the number of threads, at least 1.
pub fn set_threads(n: usize) {
    THREADS.store(n.max(1), Ordering::Relaxed);
}

/// Runs `task(0)` to `task(tasks - 1)`, each exactly once, on the pool; returns when all are done. Tasks must write to disjoint
/// places. Which thread runs which task is not fixed, so no result may depend on it.
pub fn run(tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    let workers = threads().min(tasks);
    if workers <= 1 {
        (0..tasks).for_each(task);
        return;
    }
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= tasks {
                break;
            }
            task(i);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..workers {
            scope.spawn(work);
        }
        work();
    });
}
