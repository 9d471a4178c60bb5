//! Asynchronous copies, barrier objects, and the events that complete them some time later.

mod bulk;
mod copies;
mod mbarrier;

use crate::grid::World;
use crate::memory::{COMING, KNOWN, RANK_SHIFT, SHARED_START};
use crate::warp::Warp;

pub use bulk::Store;
use mbarrier::{barrier_at, bytes_arrive};

/// Something that happens to a barrier object some time later.
#[derive(Clone, Debug)]
pub enum Event {
    /// Bytes arrive in the shared memory of blocks and complete there on the barrier at this offset.
    Bytes {
        blocks: Vec<usize>,
        to: u32,
        data: Source,
        bytes: u32,
        barrier: u32,
    },
    /// A lane's copies up to `upto` arrive, and then the lane at a barrier.
    Arrival {
        warp: usize,
        lane: u32,
        upto: u32,
        barrier: (usize, u32),
    },
}

#[derive(Clone, Debug)]
pub enum Source {
    Global(u64),
    Held(Vec<u8>),
}

/// Block of the unit and offset in it of a shared address.
fn split(own: usize, address: u64) -> (usize, u32) {
    let address = address & !crate::memory::WINDOW;
    let rank = (address >> RANK_SHIFT) as usize & 0xff;
    (
        if rank == 0 { own } else { rank - 1 },
        (address & ((1 << RANK_SHIFT) - 1)) as u32,
    )
}

impl Warp {
    /// Check a range of global memory of any size.
    fn global(world: &World, address: u64, bytes: u64, what: &str) -> Result<(), String> {
        match world.ranges.find(address) {
            Some((_, end)) if address + bytes <= end => Ok(()),
            _ if bytes == 0 => Ok(()),
            _ => Err(format!(
                "{what} of {bytes} bytes at {address:#x}, which no allocation contains{}",
                world.ranges.near(address)
            )),
        }
    }

    /// Check a range of a block's shared memory and return its place in the vector.
    fn shared(
        world: &World,
        block: usize,
        at: u32,
        bytes: u32,
        what: &str,
    ) -> Result<usize, String> {
        let size = world
            .blocks
            .get(block)
            .ok_or("no such block in the cluster")?
            .shared
            .len();
        let start = (at as usize).wrapping_sub(SHARED_START);
        if (at as usize) < SHARED_START || start + bytes as usize > size {
            return Err(format!(
                "{what} of {bytes} bytes at offset {} of {size} bytes of shared memory",
                start as i64
            ));
        }
        Ok(start)
    }

    /// Check an event's ranges, and let it happen later.
    fn post(world: &mut World, event: Event) -> Result<(), String> {
        if let Event::Bytes {
            blocks,
            to,
            bytes,
            data,
            ..
        } = &event
        {
            for &block in blocks {
                let start = Self::shared(world, block, *to, *bytes, "asynchronous copy")?;
                let range = start..start + *bytes as usize;
                world.blocks[block].check_write(&range)?;
                world.blocks[block].known[range].fill(COMING);
            }
            if let Source::Global(from) = data {
                Self::global(world, *from, u64::from(*bytes), "bulk copy")?;
            }
        }
        world.events.push(event);
        Ok(())
    }
}

/// Let an event happen. `warps` are those of the unit.
pub fn happen(world: &mut World, warps: &mut [Warp], event: Event) -> Result<(), String> {
    match event {
        Event::Bytes {
            blocks,
            to,
            data,
            bytes,
            barrier,
        } => {
            for block in blocks {
                let start = Warp::shared(world, block, to, bytes, "asynchronous copy")?;
                let range = start..start + bytes as usize;
                world.blocks[block].known[range.clone()].fill(KNOWN);
                let target = &mut world.blocks[block].shared[range];
                match &data {
                    // SAFETY: the range was checked when the copy began.
                    Source::Global(from) => unsafe {
                        std::ptr::copy_nonoverlapping(
                            *from as *const u8,
                            target.as_mut_ptr(),
                            bytes as usize,
                        );
                    },
                    Source::Held(held) => target.copy_from_slice(held),
                }
                bytes_arrive(world, block, barrier, bytes)?;
            }
        }
        Event::Arrival {
            warp,
            lane,
            upto,
            barrier: (block, at),
        } => {
            warps[warp].land(world, lane, upto)?;
            let found = barrier_at(world, block, at)?;
            if found.pending == 0 {
                return Err(format!(
                    "mbarrier at {at:#x}: copies arrive, but the phase waits for no arrival"
                ));
            }
            found.pending -= 1;
            found.advance();
            world.progress = world.executed;
        }
    }
    Ok(())
}
