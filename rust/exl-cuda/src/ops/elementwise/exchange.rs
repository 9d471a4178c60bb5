//! The parts of a matrix that several GPUs computed, gathered on each of them by stores into one another's memory.

use crate::abi::{assert_constants, assert_layout};
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::ops::{Target, index32};
use crate::parameters::kernels;

/// Most GPUs of an exchange.
pub const GPUS: usize = 8;
/// Most exchanges of a step.
pub const EXCHANGES: u32 = 1024;
const THREADS: usize = 256;

/// Most blocks of a launch of [`store_columns`], each of which has a mark.
pub const COLUMN_BLOCKS: usize = 256;
/// Vectors that a thread of [`store_columns`] stores before more blocks are launched.
const VECTORS: usize = 4;

assert_constants!(exchange, {
    EXCHANGE_GPUS == GPUS,
    EXCHANGES == EXCHANGES,
    COLUMN_BLOCKS == COLUMN_BLOCKS,
});

/// Operands of [`exchange`]: addresses, sizes in words of 32 bits.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// Address of each GPU's exchange buffer, zeros at first: `half` words of 64 bits for exchanges of even numbers, then those for odd ones.
    pub buffers: Vec<usize>,
    pub half: usize,
    /// Words after the first half, in the smallest buffer of a receiver.
    pub second: usize,
    /// First column of each GPU, and the number of columns.
    pub begins: Vec<usize>,
    /// Place of this GPU in `buffers`.
    pub me: usize,
    pub rows: usize,
    /// `[rows, width of this GPU]`
    pub own: usize,
    /// `[rows, columns]`
    pub full: usize,
    /// u32, the number of the step
    pub step: usize,
    /// u32, becomes 1 if a word does not arrive in time; from then on this GPU gets NaN and sends nothing
    pub failed: usize,
    pub number: u32,
    /// Bit i: GPU i gets the whole.
    pub receivers: u32,
    pub send: bool,
    pub receive: bool,
    pub limit_ns: u64,
}

/// `ExchangeTask` of exchange.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Task {
    buffer: [u64; GPUS],
    own: u64,
    full: u64,
    step: u64,
    failed: u64,
    half: i64,
    limit: u64,
    begin: [i32; GPUS + 1],
    gpus: i32,
    me: i32,
    rows: i32,
    number: u32,
    receivers: u32,
    phases: u32,
}

assert_layout!(Task, exchange::ExchangeTask, { buffer, own, full, step, failed, half, limit, begin, gpus, me, rows, number, receivers, phases });

pub(in crate::ops) fn kernels() -> Vec<String> {
    vec!["exchange".to_owned(), "store_columns".to_owned()]
}

impl Exchange {
    /// Check the sizes, so that the kernel stays within the stated memory.
    fn check(&self) -> Result<(), CudaError> {
        let gpus = self.buffers.len();
        let wrong = |what: String, limit: &str| {
            Err(CudaError::Argument {
                what,
                limit: limit.to_owned(),
            })
        };
        if !(2..=GPUS).contains(&gpus) || self.me >= gpus || self.begins.len() != gpus + 1 {
            return wrong(
                format!("exchange of {gpus} GPUs"),
                "2 to 8, with a border more",
            );
        }
        if self.begins[0] != 0 || self.begins.windows(2).any(|pair| pair[0] > pair[1]) {
            return wrong(format!("columns {:?}", self.begins), "ascending from 0");
        }
        let most = if self.number.is_multiple_of(2) {
            self.half
        } else {
            self.second
        };
        if self.rows * self.begins[gpus] > most {
            return wrong(
                format!("{} rows of {} words", self.rows, self.begins[gpus]),
                "they must fit half of an exchange buffer",
            );
        }
        if self.number >= EXCHANGES {
            return wrong(
                format!("exchange {} of a step", self.number),
                "at most 1,024 a step",
            );
        }
        index32("words", self.rows * self.begins[gpus]).map(|_| ())
    }

    /// The kernels' operand.
    fn task(&self) -> Result<Task, CudaError> {
        self.check()?;
        let gpus = self.buffers.len();
        let mut task = Task {
            buffer: [0; GPUS],
            own: self.own as u64,
            full: self.full as u64,
            step: self.step as u64,
            failed: self.failed as u64,
            half: self.half as i64,
            limit: self.limit_ns,
            begin: [index32("columns", self.begins[gpus])?; GPUS + 1],
            gpus: gpus as i32,
            me: self.me as i32,
            rows: index32("rows", self.rows)?,
            number: self.number,
            receivers: self.receivers,
            phases: u32::from(self.send) | u32::from(self.receive) << 1,
        };
        for (place, &address) in self.buffers.iter().enumerate() {
            task.buffer[place] = address as u64;
            task.begin[place] = index32("columns", self.begins[place])?;
        }
        Ok(task)
    }

    /// Whether two neighbouring words can be accessed at once.
    fn in_pairs(&self) -> bool {
        let even =
            self.half.is_multiple_of(2) && self.begins.iter().all(|begin| begin.is_multiple_of(2));
        even && [self.own, self.full].iter().all(|at| at.is_multiple_of(8))
            && self.buffers.iter().all(|at| at.is_multiple_of(16))
    }
}

/// Gather the parts of all GPUs in `full` of each receiver, in the order of the columns.
///
/// # Safety
/// The addresses must be memory of the stated sizes, valid until the stream has passed this launch; buffers of other GPUs must be
/// accessible to this one. All GPUs must launch the exchange, and nothing else may use the buffers meanwhile.
pub unsafe fn exchange(to: Target, op: &Exchange) -> Result<(), CudaError> {
    let mut task = op.task()?;
    let device = Device::get(to.device)?;
    let pairs = op.in_pairs();
    task.phases |= u32::from(pairs) << 2;
    // The largest number of words that a thread sends or receives at once.
    let widths = op.begins.windows(2).map(|pair| pair[1] - pair[0]);
    let words = op.rows * widths.max().unwrap_or(0);
    let most = if pairs { words / 2 } else { words };
    let launch = Launch {
        kernel: "exchange",
        grid: [
            most.div_ceil(THREADS).clamp(1, device.info.caps.sms) as u32,
            1,
            1,
        ],
        block: THREADS as u32,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut kernels::Exchange { task }) }
}

/// Operands of [`store_columns`]: addresses, sizes in words of 32 bits.
#[derive(Clone, Debug)]
pub struct Columns {
    /// Address of each GPU's result, `[rows, columns]`.
    pub fulls: Vec<usize>,
    /// Address of each GPU's marks, u32 `[gpus, COLUMN_BLOCKS]`, zeros at first. Empty where launches neither mark nor wait.
    pub marks: Vec<usize>,
    /// First column of each GPU, and the number of columns.
    pub begins: Vec<usize>,
    /// Place of this GPU.
    pub me: usize,
    pub rows: usize,
    /// `[rows, width of this GPU]`
    pub own: usize,
    /// As of [`Exchange`], where there are marks; so are `failed`, `number` and `limit_ns`.
    pub step: usize,
    pub failed: usize,
    pub number: u32,
    pub limit_ns: u64,
    /// Tell the other GPUs that the columns are there.
    pub mark: bool,
    /// Wait for the columns of the other GPUs.
    pub wait: bool,
}

/// `ColumnsTask` of exchange.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ColumnsTask {
    full: [u64; GPUS],
    marks: [u64; GPUS],
    own: u64,
    step: u64,
    failed: u64,
    limit: u64,
    columns: i32,
    from: i32,
    width: i32,
    gpus: i32,
    me: i32,
    rows: i32,
    number: u32,
    phases: u32,
}

assert_layout!(ColumnsTask, exchange::ColumnsTask, { full, marks, own, step, failed, limit, columns, from, width, gpus, me, rows, number, phases });

impl Columns {
    fn check(&self) -> Result<(), CudaError> {
        let gpus = self.fulls.len();
        let marked = !(self.mark || self.wait) || self.marks.len() == gpus;
        let ascending =
            self.begins.first() == Some(&0) && self.begins.windows(2).all(|pair| pair[0] < pair[1]);
        if (2..=GPUS).contains(&gpus)
            && self.me < gpus
            && self.begins.len() == gpus + 1
            && ascending
            && marked
            && self.number < EXCHANGES
        {
            return Ok(());
        }
        Err(CudaError::Argument {
            what: format!(
                "columns {:?} of {gpus} GPUs, exchange {}",
                self.begins, self.number
            ),
            limit: "2 to 8 GPUs, ascending from 0, with marks of each where launches wait, at most 1,024 a step"
                .to_owned(),
        })
    }

    /// Whether four neighbouring words can be accessed at once.
    fn in_fours(&self) -> bool {
        self.begins.iter().all(|begin| begin.is_multiple_of(4))
            && self.fulls.iter().all(|at| at.is_multiple_of(16))
    }

    /// Blocks of a launch, the same on all GPUs.
    fn blocks(&self) -> usize {
        let columns = self.begins.last().copied().unwrap_or(0);
        let words = if self.in_fours() { 4 } else { 1 };
        (self.rows * columns)
            .div_ceil(words * self.fulls.len() * THREADS * VECTORS)
            .clamp(1, COLUMN_BLOCKS)
    }

    fn task(&self) -> Result<ColumnsTask, CudaError> {
        self.check()?;
        let gpus = self.fulls.len();
        let (from, end) = (self.begins[self.me], self.begins[self.me + 1]);
        index32("words", self.rows * self.begins[gpus])?;
        let fours = self.in_fours();
        if fours && !self.own.is_multiple_of(16) {
            return Err(CudaError::Argument {
                what: "columns that do not begin at a multiple of 16 bytes".to_owned(),
                limit: "they must".to_owned(),
            });
        }
        let mut task = ColumnsTask {
            full: [0; GPUS],
            marks: [0; GPUS],
            own: self.own as u64,
            step: self.step as u64,
            failed: self.failed as u64,
            limit: self.limit_ns,
            columns: index32("columns", self.begins[gpus])?,
            from: from as i32,
            width: (end - from) as i32,
            gpus: gpus as i32,
            me: self.me as i32,
            rows: index32("rows", self.rows)?,
            number: self.number,
            phases: u32::from(self.mark) | u32::from(self.wait) << 1 | u32::from(fours) << 2,
        };
        for (place, &address) in self.fulls.iter().enumerate() {
            task.full[place] = address as u64;
        }
        for (place, &address) in self.marks.iter().enumerate() {
            task.marks[place] = address as u64;
        }
        Ok(task)
    }
}

/// Store this GPU's columns into the results of all GPUs.
///
/// # Safety
/// The addresses must be memory of the stated sizes, valid until the stream has passed this launch; that of other GPUs must be accessible
/// to this one. Nothing else may use the results meanwhile. Where launches wait, all GPUs must launch the same.
pub unsafe fn store_columns(to: Target, op: &Columns) -> Result<(), CudaError> {
    let task = op.task()?;
    let device = Device::get(to.device)?;
    let launch = Launch {
        kernel: "store_columns",
        grid: [op.blocks() as u32, 1, 1],
        block: THREADS as u32,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut kernels::StoreColumns { task }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(begins: &[usize], rows: usize, half: usize) -> Exchange {
        Exchange {
            buffers: vec![8; begins.len() - 1],
            half,
            second: half,
            begins: begins.to_vec(),
            me: 0,
            rows,
            own: 8,
            full: 8,
            step: 8,
            failed: 8,
            number: 0,
            receivers: 3,
            send: true,
            receive: true,
            limit_ns: 1,
        }
    }

    #[test]
    fn sizes_that_exceed_the_buffer_are_rejected() {
        assert!(of(&[0, 3, 8], 2, 16).check().is_ok());
        assert!(of(&[0, 3, 8], 3, 16).check().is_err());
        assert!(of(&[0, 8], 1, 16).check().is_err());
        assert!(of(&[0, 5, 3], 1, 16).check().is_err());
        assert!(of(&[1, 5, 8], 1, 16).check().is_err());
        let mut late = of(&[0, 3, 8], 1, 16);
        late.number = EXCHANGES;
        assert!(late.check().is_err());
        let mut odd = of(&[0, 3, 8], 3, 16);
        odd.second = 24;
        assert!(odd.check().is_err());
        odd.number = 1;
        assert!(odd.check().is_ok());
        odd.second = 23;
        assert!(odd.check().is_err());
    }

    #[test]
    fn columns_need_marks_where_a_launch_waits_and_one_grid_for_all_gpus() {
        let mut columns = Columns {
            fulls: vec![16, 16],
            marks: Vec::new(),
            begins: vec![0, 512, 4096],
            me: 0,
            rows: 64,
            own: 16,
            step: 0,
            failed: 0,
            number: 0,
            limit_ns: 1,
            mark: false,
            wait: false,
        };
        assert!(columns.task().is_ok());
        let blocks = columns.blocks();
        columns.me = 1;
        assert_eq!(columns.blocks(), blocks);
        columns.wait = true;
        assert!(columns.task().is_err());
        columns.marks = vec![4, 4];
        assert!(columns.task().is_ok());
        columns.own = 8;
        assert!(columns.task().is_err());
        columns.begins[1] = 4098;
        assert!(columns.task().is_err());
    }
}
