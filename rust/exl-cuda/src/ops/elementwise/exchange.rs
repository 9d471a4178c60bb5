//! The parts of a matrix that several GPUs computed, gathered on each of them by stores into one another's memory.

use crate::abi::{assert_constants, assert_layout};
use crate::device::Device;
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};
use crate::ops::{Target, index32};

/// Most GPUs of an exchange.
pub const GPUS: usize = 8;
/// Most exchanges of a step.
pub const EXCHANGES: u32 = 1024;
const THREADS: usize = 256;

assert_constants!(exchange, { EXCHANGE_GPUS == GPUS, EXCHANGES == EXCHANGES });

/// Operands of [`exchange`]: addresses, sizes in words of 32 bits.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// Address of each GPU's exchange buffer, zeros at first: `half` words of 64 bits for exchanges of even numbers, then those for odd ones.
    pub buffers: Vec<usize>,
    pub half: usize,
    /// Words behind the first half, in the smallest buffer of a receiver.
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
    vec!["exchange".to_owned()]
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
    let mut arguments = kernel_arguments![task];
    // SAFETY: the kernel takes one `ExchangeTask`; the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
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
}
