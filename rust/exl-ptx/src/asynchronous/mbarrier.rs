//! Barrier objects in shared memory.

use super::{Event, split};
use crate::code::{Instruction, Mbarrier as Kind, Value};
use crate::grid::World;
use crate::memory::{KNOWN, Mbarrier};
use crate::warp::{Flow, Warp, lanes_of};

/// Find a barrier object.
pub(super) fn barrier_at<'w>(
    world: &'w mut World,
    block: usize,
    at: u32,
) -> Result<&'w mut Mbarrier, String> {
    world
        .blocks
        .get_mut(block)
        .and_then(|b| b.mbarriers.get_mut(&at))
        .ok_or_else(|| {
            format!(
                "no initialised mbarrier at shared address {at:#x} of block {block} of the cluster"
            )
        })
}

pub(super) fn bytes_arrive(
    world: &mut World,
    block: usize,
    barrier: u32,
    bytes: u32,
) -> Result<(), String> {
    let found = barrier_at(world, block, barrier)?;
    found.bytes -= i64::from(bytes);
    found.advance();
    world.progress = world.executed;
    Ok(())
}

fn initialise(world: &mut World, block: usize, at: u32, count: u32) -> Result<(), String> {
    let start = Warp::shared(world, block, at, 8, "mbarrier.init")?;
    if count == 0 {
        return Err("mbarrier.init with a count of 0".to_owned());
    }
    world.blocks[block].known[start..start + 8].fill(KNOWN);
    let made = Mbarrier {
        expected: count,
        pending: count,
        bytes: 0,
        phase: 0,
    };
    world.blocks[block].mbarriers.insert(at, made);
    Ok(())
}

/// Arrive `count` times; `drops` also lowers the number of arrivals of later phases.
fn arrive(barrier: &mut Mbarrier, count: u32, drops: bool) -> Result<(), String> {
    if count > barrier.pending {
        return Err(format!(
            "{count} arrivals, but the phase waits for {} only",
            barrier.pending
        ));
    }
    barrier.pending -= count;
    if drops {
        barrier.expected -= count;
    }
    barrier.advance();
    Ok(())
}

impl Warp {
    /// An operation on the barrier object of each lane.
    pub fn mbarrier(
        &mut self,
        world: &mut World,
        i: &Instruction,
        exec: u32,
        kind: Kind,
        offset: i64,
    ) -> Result<Flow, String> {
        let addresses = self.double(world, i.from[0]);
        let mut tokens = [0u64; 32];
        let mut done = 0u32;
        for lane in lanes_of(exec) {
            let (block, at) = split(self.block, addresses[lane].wrapping_add_signed(offset));
            if at % 8 != 0 {
                return Err(format!("misaligned mbarrier at {at:#x} (lane {lane})"));
            }
            let operand = |n: usize| i.from.get(n).map(|&value| self.double(world, value)[lane]);
            let (first, second) = (operand(1), operand(2));
            let number = first.unwrap_or(0) as u32;
            match kind {
                Kind::Init => initialise(world, block, at, number)?,
                Kind::Invalidate => {
                    barrier_at(world, block, at)?;
                    world.blocks[block].mbarriers.remove(&at);
                }
                Kind::Arrive { expects, drops } => {
                    let (bytes, count) = if expects {
                        (number, second)
                    } else {
                        (0, first)
                    };
                    let count = count.map_or(1, |count| count as u32);
                    let barrier = barrier_at(world, block, at)?;
                    tokens[lane] = barrier.phase;
                    barrier.bytes += i64::from(bytes);
                    arrive(barrier, count, drops)
                        .map_err(|why| format!("mbarrier at {at:#x}: {why} (lane {lane})"))?;
                    world.progress = world.executed;
                }
                Kind::ExpectBytes => barrier_at(world, block, at)?.bytes += i64::from(number),
                Kind::Complete => bytes_arrive(world, block, at, number)?,
                Kind::Test { parity } => {
                    let phase = barrier_at(world, block, at)?.phase;
                    let wanted = first.unwrap_or(0);
                    let complete = if parity {
                        phase & 1 != wanted & 1
                    } else {
                        phase > wanted
                    };
                    done |= u32::from(complete) << lane;
                }
                Kind::ArriveCopies { counted } => {
                    self.arrive_after_copies(world, lane, counted, (block, at))?;
                }
            }
        }
        match i.to.first() {
            Some(&to @ Value::Pred(..)) => self.set_pred(to, done, exec),
            Some(&to) => self.set_double(to, &tokens, exec),
            None => {}
        }
        let waits = matches!(kind, Kind::Test { .. }) && done != exec;
        Ok(if waits { Flow::Turn } else { Flow::Next })
    }

    /// `cp.async.mbarrier.arrive`: arrive once the lane's copies have landed.
    fn arrive_after_copies(
        &mut self,
        world: &mut World,
        lane: usize,
        counted: bool,
        (block, at): (usize, u32),
    ) -> Result<(), String> {
        let barrier = barrier_at(world, block, at)?;
        if counted {
            barrier.pending += 1;
        }
        // Copies that this lane begins later belong to another group.
        self.groups[lane] += 1;
        world.events.push(Event::Arrival {
            warp: world.current,
            lane: lane as u32,
            upto: self.groups[lane],
            barrier: (block, at),
        });
        Ok(())
    }
}
