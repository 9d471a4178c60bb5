//! Address spaces: known ranges of global memory, the shared memory of a block, windows of generic addresses.

use std::collections::HashMap;
use std::ops::Range;

/// First address of a block's shared memory; the cards reserve as much, and a null pointer is then out of bounds.
pub const SHARED_START: usize = 1024;
/// Windows of generic addresses. Global addresses are those of the host.
pub const SHARED_WINDOW: u64 = 1 << 60;
pub const LOCAL_WINDOW: u64 = 2 << 60;
pub const PARAM_WINDOW: u64 = 3 << 60;
pub const WINDOW: u64 = 15 << 60;
/// Bits of an offset in a block's shared memory; the block's rank in its cluster, plus one, is above.
pub const RANK_SHIFT: u32 = 24;

/// Ranges of host memory that kernels may access.
#[derive(Clone, Debug, Default)]
pub struct Ranges {
    /// Starts and ends, sorted, without overlap.
    list: Vec<(u64, u64)>,
}

impl Ranges {
    /// Add a range. It replaces what is known of the ranges that it overlaps: their memory was freed.
    pub fn add(&mut self, start: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let end = start + bytes;
        let first = self.list.partition_point(|&(_, e)| e <= start);
        let last = self.list.partition_point(|&(s, _)| s < end);
        self.list.splice(first..last.max(first), [(start, end)]);
    }

    pub fn remove(&mut self, start: u64) {
        if let Ok(at) = self.list.binary_search_by_key(&start, |&(s, _)| s) {
            self.list.remove(at);
        }
    }

    /// The range that contains an address.
    pub fn find(&self, address: u64) -> Option<(u64, u64)> {
        let at = self.list.partition_point(|&(s, _)| s <= address);
        let found = *self.list.get(at.checked_sub(1)?)?;
        (address < found.1).then_some(found)
    }

    /// The known ranges next to an address, for messages.
    pub fn near(&self, address: u64) -> String {
        let at = self.list.partition_point(|&(s, _)| s <= address);
        let before = at.checked_sub(1).map(|i| self.list[i]);
        let mut text = String::new();
        if let Some((start, end)) = before {
            text += &format!(
                "; {} bytes past the end of an allocation of {}",
                address - end.min(address),
                end - start
            );
        }
        if let Some((start, end)) = self.list.get(at) {
            text += &format!(
                "; {} bytes in front of an allocation of {}",
                start - address,
                end - start
            );
        }
        text
    }
}

/// A barrier object in shared memory.
#[derive(Clone, Debug)]
pub struct Mbarrier {
    pub expected: u32,
    pub pending: u32,
    /// Bytes that are still to come.
    pub bytes: i64,
    pub phase: u64,
}

impl Mbarrier {
    /// Begin the next phase if this one is complete.
    pub fn advance(&mut self) -> bool {
        let complete = self.pending == 0 && self.bytes == 0;
        if complete {
            self.phase += 1;
            self.pending = self.expected;
        }
        complete
    }
}

/// A barrier of a block by number.
#[derive(Clone, Debug, Default)]
pub struct Named {
    pub arrived: u32,
    /// Threads that complete it; 0 for all of the block.
    pub expected: u32,
    pub generation: u64,
    pub count: u32,
    pub all: bool,
    /// Results of the last completed generation.
    pub result: (u32, bool),
}

/// State of a byte of shared memory.
pub const UNKNOWN: u8 = 0;
pub const KNOWN: u8 = 1;
/// An asynchronous copy to it has not been waited for.
pub const COMING: u8 = 2;

/// Written by ordinary stores, and not yet visible to matrix instructions of a warpgroup (kernels that have them).
pub const UNFENCED: u8 = 3;

/// Bytes of shared memory that a matrix instruction of a warpgroup may still read.
pub struct Reading {
    pub warp: u32,
    pub group: u32,
    pub range: Range<usize>,
}

/// A block's state besides its warps.
pub struct Block {
    pub index: [u32; 3],
    pub number: u64,
    pub rank: u32,
    pub shared: Vec<u8>,
    /// State of each byte.
    pub known: Vec<u8>,
    pub barriers: [Named; 16],
    pub mbarriers: HashMap<u32, Mbarrier>,
    pub threads: u32,
    /// Threads that have not exited.
    pub live: u32,
    pub reads: Vec<Reading>,
    /// The thread that wrote each byte; empty in kernels without `wgmma`.
    pub writers: Vec<u16>,
}

impl Block {
    /// Check that no matrix instruction may still read bytes that are about to be written.
    pub fn check_write(&self, range: &Range<usize>) -> Result<(), String> {
        let overlaps =
            |read: &&Reading| read.range.start < range.end && range.start < read.range.end;
        match self.reads.iter().find(overlaps) {
            Some(read) => Err(format!(
                "write at offset {} of shared memory, which a matrix instruction of warp {} may still read",
                range.start, read.warp
            )),
            None => Ok(()),
        }
    }

    /// Complete a named barrier if enough threads have arrived. Returns whether it did.
    pub fn complete(&mut self, id: usize) -> bool {
        let (threads, live) = (self.threads, self.live);
        let barrier = &mut self.barriers[id];
        let needed = if barrier.expected == 0 {
            live.min(threads)
        } else {
            barrier.expected
        };
        if barrier.arrived == 0 || barrier.arrived < needed {
            return false;
        }
        barrier.result = (barrier.count, barrier.all);
        barrier.generation += 1;
        (
            barrier.arrived,
            barrier.expected,
            barrier.count,
            barrier.all,
        ) = (0, 0, 0, true);
        true
    }
}

/// Read `bytes` bytes (at most 8) as a little-endian number.
///
/// # Safety
/// The memory must be readable.
pub unsafe fn read(at: *const u8, bytes: usize) -> u64 {
    // SAFETY: this function's contract.
    unsafe {
        match bytes {
            1 => u64::from(at.read()),
            2 => u64::from(at.cast::<u16>().read_unaligned()),
            4 => u64::from(at.cast::<u32>().read_unaligned()),
            _ => at.cast::<u64>().read_unaligned(),
        }
    }
}

/// Write the low `bytes` bytes of a number.
///
/// # Safety
/// The memory must be writable.
pub unsafe fn write(at: *mut u8, bytes: usize, value: u64) {
    // SAFETY: this function's contract.
    unsafe {
        match bytes {
            1 => at.write(value as u8),
            2 => at.cast::<u16>().write_unaligned(value as u16),
            4 => at.cast::<u32>().write_unaligned(value as u32),
            _ => at.cast::<u64>().write_unaligned(value),
        }
    }
}
