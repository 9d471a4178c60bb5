//! The thread pool of the CPU kernels: separate threads, never the host process's global pool.
//!
//! Workers spin briefly after each job and then sleep. So the many short matmuls of a decode step find them awake, and an idle process
//! costs nothing. Jobs from several threads alternate; a job started inside a task runs on that task's thread.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

static THREADS: AtomicUsize = AtomicUsize::new(0);

/// Time that a worker polls for the next job before it sleeps: longer than the gap between two matmuls of a decode step.
const SPIN: Duration = Duration::from_micros(150);
/// Polls of the ticket between two readings of the clock.
const SPIN_ROUND: u32 = 64;

/// Number of threads of the kernels, including the calling thread: set by [`set_threads`], else by `EXL_CPU_THREADS`, else the cores.
pub fn threads() -> usize {
    match THREADS.load(Ordering::Relaxed) {
        0 => {
            let wanted = std::env::var("EXL_CPU_THREADS").ok();
            let n = wanted
                .and_then(|n| n.trim().parse::<usize>().ok())
                .filter(|&n| n > 0)
                .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
            // A set number takes precedence over the default found here.
            match THREADS.compare_exchange(0, n, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => n,
                Err(set) => set,
            }
        }
        n => n,
    }
}

/// Set the number of threads, at least 1.
pub fn set_threads(n: usize) {
    THREADS.store(n.max(1), Ordering::Relaxed);
}

/// Pin the calling thread to its first processor and the pool's threads, which start now, to the others cyclically. For measurements: call
/// it before the first job. Returns false if the system does not support pinning.
pub fn pin() -> bool {
    let helpers = threads() - 1;
    let cpus = affinity::allowed();
    if cpus.is_empty() {
        return false;
    }
    let first = cpus[0];
    *lock(&PINNED) = cpus;
    // Start workers before this thread is pinned: a thread inherits its parent's affinity.
    let pool = Pool::get();
    pool.start_workers(&mut lock(&pool.turn), helpers);
    affinity::set(first)
}

/// Processors to which workers pin themselves; empty: none.
static PINNED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

#[cfg(target_os = "linux")]
mod affinity {
    const WORDS: usize = 16;
    type Mask = [u64; WORDS];

    unsafe extern "C" {
        fn sched_getaffinity(pid: i32, len: usize, mask: *mut Mask) -> i32;
        fn sched_setaffinity(pid: i32, len: usize, mask: *const Mask) -> i32;
    }

    /// Processors that the calling thread may use.
    pub fn allowed() -> Vec<usize> {
        let mut mask: Mask = [0; WORDS];
        // SAFETY: the kernel writes at most the given size.
        if unsafe { sched_getaffinity(0, size_of::<Mask>(), &raw mut mask) } < 0 {
            return Vec::new();
        }
        (0..64 * WORDS)
            .filter(|cpu| mask[cpu / 64] >> (cpu % 64) & 1 == 1)
            .collect()
    }

    /// Pin the calling thread.
    pub fn set(cpu: usize) -> bool {
        let mut mask: Mask = [0; WORDS];
        mask[cpu / 64] |= 1 << (cpu % 64);
        // SAFETY: the kernel reads the given size.
        unsafe { sched_setaffinity(0, size_of::<Mask>(), &raw const mask) == 0 }
    }
}

#[cfg(not(target_os = "linux"))]
mod affinity {
    pub fn allowed() -> Vec<usize> {
        Vec::new()
    }

    pub fn set(_cpu: usize) -> bool {
        false
    }
}

/// Run `task(0)` to `task(tasks - 1)`, each exactly once, on the pool, and return when all are done. Tasks must write to disjoint memory.
/// Any thread may run any task, so no result may depend on the assignment.
///
/// # Panics
/// Panics with the first panic of a task, after all tasks have ended.
pub fn run(tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    let workers = threads().min(tasks);
    if workers <= 1 || INSIDE.get() {
        (0..tasks).for_each(task);
        return;
    }
    Pool::get().run(tasks, workers - 1, task);
}

/// The results of `task(0)` to `task(tasks - 1)`, in this order; otherwise like [`run`].
pub fn map<T: Send>(tasks: usize, task: &(dyn Fn(usize) -> T + Sync)) -> Vec<T> {
    if tasks < 2 {
        return (0..tasks).map(task).collect();
    }
    let results: Vec<Mutex<Option<T>>> = (0..tasks).map(|_| Mutex::new(None)).collect();
    run(tasks, &|i| *lock(&results[i]) = Some(task(i)));
    let take = |slot: Mutex<Option<T>>| slot.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().filter_map(take).collect()
}

thread_local! {
    /// Whether this thread is running a task, which occupies the pool.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

type Task = dyn Fn(usize) + Sync + 'static;

/// State of the current job that the workers share.
struct Job {
    /// Tasks not yet claimed; at or below zero if there are none. Only a thread that claimed a task may read `task`.
    unclaimed: AtomicI64,
    tasks: AtomicUsize,
    task: AtomicPtr<&'static Task>,
    finished: AtomicUsize,
    /// Workers with numbers below this may claim.
    workers: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

struct Worker {
    thread: Thread,
    asleep: &'static AtomicBool,
}

struct Pool {
    job: Job,
    /// Locked during a job; the workers started so far.
    turn: Mutex<Vec<Worker>>,
}

/// The pool of this process; null before the first job, and in a forked child, where the parent's threads do not exist.
static POOL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    fn get() -> &'static Self {
        let mut pool = POOL.load(Ordering::Acquire);
        if pool.is_null() {
            forget_pool_after_fork();
            let fresh = Box::into_raw(Box::new(Self {
                job: Job {
                    unclaimed: AtomicI64::new(0),
                    tasks: AtomicUsize::new(0),
                    task: AtomicPtr::new(std::ptr::null_mut()),
                    finished: AtomicUsize::new(0),
                    workers: AtomicUsize::new(0),
                    panic: Mutex::new(None),
                },
                turn: Mutex::new(Vec::new()),
            }));
            let null = std::ptr::null_mut();
            pool = match POOL.compare_exchange(null, fresh, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => fresh,
                Err(other) => {
                    // SAFETY: no other thread has seen `fresh`.
                    drop(unsafe { Box::from_raw(fresh) });
                    other
                }
            };
        }
        // SAFETY: a published pool is never freed: its workers live as long as the process.
        unsafe { &*pool }
    }

    fn run(&'static self, tasks: usize, helpers: usize, task: &(dyn Fn(usize) + Sync)) {
        let mut workers = lock(&self.turn);
        self.start_workers(&mut workers, helpers);
        let job = &self.job;
        // SAFETY: only the lifetime changes. Only threads that claimed a task read the reference, and this function returns after the last
        // claimed task has finished.
        let task: &'static Task =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static Task>(task) };
        let slot = &task;
        job.task
            .store(std::ptr::from_ref(slot).cast_mut(), Ordering::Relaxed);
        job.tasks.store(tasks, Ordering::Relaxed);
        job.finished.store(0, Ordering::Relaxed);
        job.workers.store(helpers, Ordering::Relaxed);
        job.unclaimed.store(tasks as i64, Ordering::Release);
        // Either a worker that is about to sleep sees the tasks, or this thread sees it asleep.
        fence(Ordering::SeqCst);
        for worker in workers.iter().take(helpers) {
            if worker.asleep.swap(false, Ordering::Relaxed) {
                worker.thread.unpark();
            }
        }
        while job.run_one() {}
        let mut rounds = 0u32;
        while job.finished.load(Ordering::Acquire) < tasks {
            rounds += 1;
            if rounds < 1 << 12 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        let panic = lock(&job.panic).take();
        drop(workers);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    fn start_workers(&'static self, workers: &mut Vec<Worker>, wanted: usize) {
        while workers.len() < wanted {
            match self.start_worker(workers.len()) {
                Some(worker) => workers.push(worker),
                // The system has no more threads: fewer threads do the same work.
                None => break,
            }
        }
    }

    fn start_worker(&'static self, index: usize) -> Option<Worker> {
        let asleep: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
        let handle = std::thread::Builder::new()
            .name(format!("exl-cpu-{}", index + 1))
            .spawn(move || {
                let cpus = lock(&PINNED).clone();
                if !cpus.is_empty() {
                    affinity::set(cpus[(index + 1) % cpus.len()]);
                }
                self.job.work(index, asleep);
            })
            .ok()?;
        Some(Worker {
            thread: handle.thread().clone(),
            asleep,
        })
    }
}

impl Job {
    /// Claim and run one task; false if there was none.
    fn run_one(&self) -> bool {
        if self.unclaimed.load(Ordering::Relaxed) <= 0 {
            return false;
        }
        let left = self.unclaimed.fetch_sub(1, Ordering::Acquire);
        if left <= 0 {
            return false;
        }
        // The claim keeps the job open, so these belong to it.
        let index = self.tasks.load(Ordering::Relaxed) - left as usize;
        // SAFETY: `run` keeps the slot alive until this task is counted as finished.
        let task = unsafe { *self.task.load(Ordering::Relaxed) };
        INSIDE.set(true);
        let result = catch_unwind(AssertUnwindSafe(|| task(index)));
        INSIDE.set(false);
        if let Err(panic) = result {
            lock(&self.panic).get_or_insert(panic);
        }
        self.finished.fetch_add(1, Ordering::Release);
        true
    }

    fn work(&self, index: usize, asleep: &AtomicBool) {
        loop {
            let mine = index < self.workers.load(Ordering::Relaxed);
            if mine && self.run_one() {
                continue;
            }
            if mine && self.spin() {
                continue;
            }
            asleep.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let wanted = index < self.workers.load(Ordering::Relaxed);
            if wanted && self.unclaimed.load(Ordering::Relaxed) > 0 {
                asleep.store(false, Ordering::Relaxed);
                continue;
            }
            while asleep.load(Ordering::Relaxed) {
                std::thread::park();
            }
        }
    }

    /// Poll briefly for a task; true if there is one.
    fn spin(&self) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..SPIN_ROUND {
                if self.unclaimed.load(Ordering::Relaxed) > 0 {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > SPIN {
                return false;
            }
        }
    }
}

/// A forked child has the parent's memory but none of its threads. It starts without a pool and creates a new one.
#[cfg(unix)]
fn forget_pool_after_fork() {
    static ONCE: AtomicBool = AtomicBool::new(false);
    type Handler = Option<unsafe extern "C" fn()>;
    unsafe extern "C" {
        fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> i32;
    }
    unsafe extern "C" fn child() {
        POOL.store(std::ptr::null_mut(), Ordering::Relaxed);
        INSIDE.set(false);
    }
    if !ONCE.swap(true, Ordering::Relaxed) {
        // SAFETY: the handler only stores to static memory of this module.
        unsafe { pthread_atfork(None, None, Some(child)) };
    }
}

#[cfg(not(unix))]
fn forget_pool_after_fork() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_at_any_size() {
        for threads in [1, 2, 3, 8] {
            set_threads(threads);
            for tasks in [0, 1, 2, 7, 100] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                run(tasks, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn jobs_from_many_threads_and_from_inside_tasks() {
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        run(5, &|_| {
                            run(3, &|_| {
                                total.fetch_add(1, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 500 * 5 * 3);
    }

    #[test]
    fn sleeping_workers_wake_up() {
        set_threads(3);
        for _ in 0..20 {
            std::thread::sleep(2 * SPIN);
            let total = AtomicUsize::new(0);
            run(10, &|i| {
                total.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(total.load(Ordering::Relaxed), 45);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        set_threads(3);
        let result = catch_unwind(|| run(8, &|i| assert!(i != 5, "task five")));
        assert!(result.is_err());
        let total = AtomicUsize::new(0);
        run(8, &|_| {
            total.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(total.load(Ordering::Relaxed), 8);
    }
}
