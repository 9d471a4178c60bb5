//! Sampling: rows of float32 logits to tokens, bitwise identical to `exl-cpu`'s sampling.
//!
//! All inputs of a batch except its logits are written into one piece of pinned host memory ([`Staging`]), which the caller copies to the
//! GPU. The kernels write their answers directly to the front of the pinned memory. A launch has fixed addresses and can be captured.
//! Kernels do not read their rows from pinned memory, because every block would wait for the bus.

pub mod select;

use super::Target;
use crate::abi::{assert_constants, assert_layout};
use crate::device::Device;
use crate::launch::{CudaError, Launch, copy_to_device};
use crate::parameters::kernels;
use select::row::Needs;
use select::{Batch, Kernel};

/// Ids that a block of the shaping kernel handles; edits are grouped by it.
pub const SEGMENT: usize = 2048;
/// Most candidates of a row, and so the largest top-k.
pub const CAPACITY: usize = 2048;
/// Most candidates that are reported.
pub const MOST_TOP: usize = 64;
/// Entries of the maxima and sums of one row.
pub const BLOCKS: usize = 2048;
/// Ids of one such entry. A row has at most [`BLOCKS`] times as many.
pub const BLOCK: usize = 256;

assert_constants!(sampling_rows, {
    SEGMENT == SEGMENT,
    CAPACITY == CAPACITY,
    MOST_TOP == MOST_TOP,
    MOST_BLOCKS == BLOCKS,
    BLOCK == BLOCK,
});

/// Status of a row's answer.
pub mod status {
    pub const OK: i32 = 0;
    pub const EMPTY: i32 = 1;
    pub const NOT_FINITE: i32 = 2;
    /// the CPU has to sample this row
    pub const FALLBACK: i32 = 3;
}

/// Bits of [`Row::flags`].
pub mod flag {
    pub const GREEDY: i32 = 1;
    pub const SMOOTH: i32 = 2;
    pub const DESCENDING: i32 = 4;
    pub const SKIP: i32 = 8;
    /// the weight of all logits is needed
    pub const SUMS: i32 = 16;
    pub const LATE_FIXED: i32 = 32;
    pub const LATE_DYNAMIC: i32 = 64;
    /// the draw is over all logits
    pub const PLAIN: i32 = 128;
    /// passes over all logits, for any candidates
    pub const WIDE: i32 = 256;
}

assert_constants!(sampling_rows, {
    OK == status::OK,
    EMPTY == status::EMPTY,
    NOT_FINITE == status::NOT_FINITE,
    FALLBACK == status::FALLBACK,
    GREEDY == flag::GREEDY,
    SMOOTH == flag::SMOOTH,
    DESCENDING == flag::DESCENDING,
    SKIP == flag::SKIP,
    SUMS == flag::SUMS,
    LATE_FIXED == flag::LATE_FIXED,
    LATE_DYNAMIC == flag::LATE_DYNAMIC,
    PLAIN == flag::PLAIN,
    WIDE == flag::WIDE,
});

/// A change of one logit; the same as `exl_cpu::sampling::Edit`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Edit {
    pub factor: f64,
    pub minus: f64,
    pub id: u32,
}

assert_layout!(Edit, sampling_rows::Edit, { factor, minus, id });

/// One row as the kernels read it. Addresses are of device or pinned host memory; see kernels/sampling/sampling_rows.cuh.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Row {
    pub logits: usize,
    pub positive: usize,
    pub negative: usize,
    pub bias: usize,
    pub mask: usize,
    pub edits: [usize; 2],
    pub starts: [usize; 2],
    pub ignored: usize,
    pub top_p: f64,
    pub top_a: f64,
    pub min_p: f64,
    pub tfs: f64,
    pub typical: f64,
    pub mirostat: f64,
    pub xtc_probability: f64,
    pub xtc_threshold: f64,
    pub low: f64,
    pub high: f64,
    pub exponent: f64,
    pub uniform: f64,
    pub mix: f64,
    pub scale: f32,
    pub late_scale: f32,
    pub size: i32,
    pub bias_length: i32,
    pub mask_words: i32,
    pub ignored_words: i32,
    pub top_k: i32,
    pub top_n: i32,
    pub flags: i32,
    pub width: i32,
}

assert_layout!(Row, sampling_rows::Row, { logits, positive, negative, bias, mask, edits, starts, ignored, top_p, top_a, min_p, tfs, typical, mirostat, xtc_probability, xtc_threshold, low, high, exponent, uniform, mix, scale, late_scale, size, bias_length, mask_words, ignored_words, top_k, top_n, flags, width });

/// Answer of the kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Answer {
    pub token: i32,
    pub status: i32,
    pub top: i32,
    pub padding: i32,
    pub weight: u64,
    pub total: u64,
    pub top_weights: [u64; MOST_TOP],
    pub top_ids: [u32; MOST_TOP],
}

assert_layout!(Answer, sampling_rows::Answer, { token, status, top, padding, weight, total, top_weights, top_ids });

/// Bump allocator over pinned host memory: answers, rows, then the data that rows point to.
#[derive(Debug)]
pub struct Staging {
    base: usize,
    /// beginning of the copy on the GPU
    device: usize,
    bytes: usize,
    used: usize,
    rows: usize,
}

impl Staging {
    /// A staging area of `bytes` bytes at `base`, aligned to 16, for `rows` rows, with a copy of the same size on the GPU at `device`.
    ///
    /// # Safety
    /// The memory must be writable, pinned, unused by pending launches, and outlive this value and the launches made from it.
    pub unsafe fn new(base: usize, device: usize, bytes: usize, rows: usize) -> Option<Self> {
        let used = rows * (size_of::<Answer>() + size_of::<Row>());
        (used <= bytes).then_some(Self {
            base,
            device,
            bytes,
            used,
            rows,
        })
    }

    /// Offset of the rows; the memory before them need not be copied.
    pub fn rows_at(&self) -> usize {
        self.rows * size_of::<Answer>()
    }

    /// Bytes in use, or bytes needed if these exceed the capacity.
    pub fn used(&self) -> usize {
        self.used
    }

    pub fn overflows(&self) -> bool {
        self.used > self.bytes
    }

    /// Copy `items` and return their address on the GPU, or 0 if there is no room (the needed bytes are still counted).
    pub fn push<T: Copy>(&mut self, items: &[T]) -> usize {
        let at = self.used.next_multiple_of(16);
        self.used = at + size_of_val(items);
        if self.overflows() {
            return 0;
        }
        let to = (self.base + at) as *mut T;
        // SAFETY: inside the memory that `new` was promised; alignment of 16 fits every item here.
        unsafe { std::ptr::copy_nonoverlapping(items.as_ptr(), to, items.len()) };
        self.device + at
    }

    /// Write row `i` and its answer's status: FALLBACK for a row that the kernels skip.
    pub fn set_row(&mut self, i: usize, row: &Row) {
        assert!(i < self.rows, "no such row");
        let status = if row.flags & flag::SKIP != 0 {
            status::FALLBACK
        } else {
            status::EMPTY
        };
        // SAFETY: answers and rows are at the front of the memory that `new` was promised.
        unsafe {
            *((self.base + self.rows_at() + i * size_of::<Row>()) as *mut Row) = *row;
            let answer = (self.base + i * size_of::<Answer>()) as *mut Answer;
            (*answer).status = status;
            (*answer).top = 0;
        }
    }
}

/// Read answer `i` of the staging memory at `base`.
///
/// # Safety
/// `base` must be memory that `Staging` filled for more than `i` rows, and no launch may be writing to it.
pub unsafe fn answer(base: usize, i: usize) -> Answer {
    // SAFETY: this function's contract.
    unsafe { std::ptr::read_volatile((base + i * size_of::<Answer>()) as *const Answer) }
}

/// State that the blocks of a launch over many candidates share; `struct WideControl` of `kernels/sampling/sampling_wide.cuh`.
#[allow(dead_code)] // used by the kernels only
#[repr(C)]
struct WideControl {
    active: u32,
    arrived: u32,
    passed: u32,
    padding: u32,
}

assert_layout!(WideControl, sampling_wide::WideControl, { active, arrived, passed, padding });

/// Candidates whose ids a row of such a launch can list.
const MOST_NEAR: usize = 8192;

/// A row of such a launch: its state, which the host never reads, and the sums of a pass; `struct WideRow` of the same file.
#[allow(dead_code)] // used by the kernels only
#[repr(C)]
struct WideRow {
    state: [u64; 34],
    list: [[u64; 2]; MOST_TOP],
    sums: [u64; CAPACITY],
    counts: [u32; CAPACITY],
    near: [u32; MOST_NEAR],
}

assert_layout!(WideRow, sampling_wide::WideRow, { state, list, sums, counts, near });
assert_constants!(sampling_wide, { MOST_NEAR == MOST_NEAR });

/// Bytes before the rows of [`Workspace::wide`].
pub const WIDE_CONTROL_BYTES: usize = size_of::<WideControl>();
/// Bytes of a row in [`Workspace::wide`].
pub const WIDE_ROW_BYTES: usize = size_of::<WideRow>();

/// Buffers of a launch, as device addresses: `shaped` f32 [rows, pitch], `maxima` i32 and `sums` u64 [rows, BLOCKS]. `wide` has
/// [`WIDE_CONTROL_BYTES`] and [`WIDE_ROW_BYTES`] a row, zero before the first launch over them. `tails` u32 [rows, 2, pitch], or 0 where no
/// row has a tail-free cut.
#[derive(Clone, Copy, Debug)]
pub struct Workspace {
    pub shaped: usize,
    pub maxima: usize,
    pub sums: usize,
    pub wide: usize,
    pub tails: usize,
    pub pitch: usize,
}

pub(super) fn kernels(file: &str) -> Vec<String> {
    let kernels = Kernel::ALL.into_iter();
    let in_file = kernels.filter(|kernel| kernel.file() == file);
    in_file.map(|kernel| kernel.name().to_owned()).collect()
}

/// Destination of sampled tokens in addition to the answers: i64 a row, clamped to ids below `limit`. Rows with [`flag::SKIP`] write nothing.
#[derive(Clone, Copy, Debug)]
pub struct Next {
    pub ids: usize,
    pub limit: usize,
    pub inputs: Inputs,
}

/// Words of 32 bits to be copied from pinned host memory before tokens are written; `struct Inputs` of `kernels/sampling/sampling.cu`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Inputs {
    pub from: usize,
    pub to: usize,
    pub words: i32,
}

assert_layout!(Inputs, sampling::Inputs, { from, to, words });

/// Copy `bytes` bytes from `start` on of the staging memory at `host` to its copy on the GPU, in stream order.
///
/// # Safety
/// As for [`sample`].
pub unsafe fn send(
    to: Target,
    host: usize,
    device_copy: usize,
    start: usize,
    bytes: usize,
) -> Result<(), CudaError> {
    let device = Device::get(to.device)?;
    // SAFETY: this function's contract.
    unsafe { copy_to_device(device, device_copy + start, host + start, bytes, to.stream) }
}

/// Sample `count` rows whose staging memory is at `host` and, copied, at `device_copy`. `next`: memory for the tokens of as many rows.
///
/// # Safety
/// The workspace must be device memory of the stated sizes, and no row may be wider than its pitch. The workspace, the staging memory and
/// all memory that the rows point to must stay valid and unchanged until the stream has passed this launch.
pub unsafe fn sample(
    to: Target,
    host: usize,
    device_copy: usize,
    count: usize,
    workspace: Workspace,
    needs: Needs,
    next: Option<Next>,
) -> Result<(), CudaError> {
    let device = Device::get(to.device)?;
    let sampled = Sampled {
        rows: device_copy + count * size_of::<Answer>(),
        answers: host,
        count: super::index32("rows", count)?,
        pitch: super::index32("pitch", workspace.pitch)?,
        workspace,
        inputs: next.map_or_else(Inputs::default, |next| next.inputs),
        next: next.map_or(0, |next| next.ids),
        limit: super::index32("limit", next.map_or(1, |next| next.limit))?,
    };
    let batch = Batch {
        rows: count,
        pitch: workspace.pitch,
        needs,
        copies: sampled.inputs.words > 0,
    };
    for planned in select::plan(&device.info.caps, &batch) {
        let launch = Launch {
            kernel: planned.kernel.name(),
            grid: planned.grid,
            block: planned.threads,
            shared_bytes: planned.shared,
            stream: to.stream,
            programmatic: to.programmatic && planned.overlaps,
        };
        // SAFETY: this function's contract.
        unsafe { sampled.launch(device, &launch, planned.kernel)? };
    }
    Ok(())
}

/// Operands of all launches of a batch: device addresses, those of `rows` and `answers` in the staging memory.
struct Sampled {
    rows: usize,
    answers: usize,
    count: i32,
    pitch: i32,
    workspace: Workspace,
    inputs: Inputs,
    next: usize,
    limit: i32,
}

impl Sampled {
    fn choose(&self) -> kernels::SampleChoose {
        kernels::SampleChoose {
            rows: self.rows,
            shaped: self.workspace.shaped,
            maxima: self.workspace.maxima,
            sums: self.workspace.sums,
            answers: self.answers,
            pitch: self.pitch,
            next: self.next,
            limit: self.limit,
            wide: self.wide_rows(),
            control: self.workspace.wide,
        }
    }

    fn wide(&self) -> kernels::SampleWide {
        kernels::SampleWide {
            rows: self.rows,
            shaped: self.workspace.shaped,
            memory: self.wide_rows(),
            control: self.workspace.wide,
            answers: self.answers,
            pitch: self.pitch,
            count: self.count,
            next: self.next,
            limit: self.limit,
            tails: self.workspace.tails,
        }
    }

    /// Memory of rows with many candidates.
    fn wide_rows(&self) -> usize {
        self.workspace.wide + WIDE_CONTROL_BYTES
    }

    /// # Safety
    /// As for [`sample`].
    unsafe fn launch(
        &self,
        device: &Device,
        launch: &Launch<'_>,
        kernel: Kernel,
    ) -> Result<(), CudaError> {
        let &Self { rows, pitch, .. } = self;
        let Workspace {
            shaped,
            maxima,
            sums,
            ..
        } = self.workspace;
        // SAFETY: this function's contract.
        unsafe {
            match kernel {
                Kernel::MixMaxima => {
                    launch.run(device, &mut kernels::SampleMixMaxima { rows, maxima })
                }
                Kernel::MixSums => {
                    launch.run(device, &mut kernels::SampleMixSums { rows, maxima, sums })
                }
                Kernel::Mix => {
                    let mut arguments = kernels::SampleMix {
                        rows,
                        maxima,
                        sums,
                        shaped,
                        pitch,
                    };
                    launch.run(device, &mut arguments)
                }
                Kernel::Shape => {
                    let mut arguments = kernels::SampleShape {
                        rows,
                        shaped,
                        maxima,
                        pitch,
                        count: self.count,
                        inputs: self.inputs,
                        control: self.workspace.wide,
                    };
                    launch.run(device, &mut arguments)
                }
                Kernel::Sums => {
                    let mut arguments = kernels::SampleSums {
                        rows,
                        shaped,
                        maxima,
                        sums,
                        pitch,
                    };
                    launch.run(device, &mut arguments)
                }
                Kernel::Choose => launch.run(device, &mut self.choose()),
                Kernel::Wide => launch.run(device, &mut self.wide()),
            }
        }
    }
}
