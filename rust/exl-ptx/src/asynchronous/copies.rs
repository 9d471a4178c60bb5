//! Copies of a few bytes to shared memory (`cp.async`, `st.async`).

use super::{Event, Source, split};
use crate::code::{Instruction, SmallCopy, Space};
use crate::grid::World;
use crate::lanes::Type;
use crate::memory::{COMING, SHARED_START};
use crate::warp::{Copy, Warp, lanes_of, shared_of};

impl Warp {
    /// `cp.async`
    pub fn begin_copies(
        &mut self,
        world: &mut World,
        copy: SmallCopy,
        i: &Instruction,
        pc: u32,
        exec: u32,
    ) -> Result<(), String> {
        let (to, from) = (self.double(world, i.from[0]), self.double(world, i.from[1]));
        let bytes = u32::from(copy.bytes);
        let sizes = if copy.sized {
            self.word(world, i.from[2])
        } else {
            [bytes; 32]
        };
        for lane in lanes_of(exec) {
            let to = shared_of(to[lane]).wrapping_add_signed(copy.to_offset) as u32;
            let from = from[lane].wrapping_add_signed(copy.from_offset);
            let reads = sizes[lane].min(bytes);
            if reads > 0 && from % u64::from(bytes) != 0 {
                return Err(format!(
                    "misaligned source {from:#x} of a copy of {bytes} bytes (lane {lane})"
                ));
            }
            let begun = Copy {
                lane: lane as u32,
                to,
                from,
                bytes,
                reads,
                group: self.groups[lane],
                pc,
            };
            // Checks of the target, whenever the copy lands.
            let (target, size) = (u64::from(to), bytes as usize);
            self.resolve(world, Space::Shared, lane, target, size, false)?;
            if world.copies_land_early() {
                self.perform(world, &begun)?;
            } else {
                let at = to as usize - SHARED_START;
                world.blocks[self.block].known[at..at + size].fill(COMING);
                self.copies.push(begun);
            }
        }
        Ok(())
    }

    /// `cp.async.wait_group`
    pub fn wait_for_copies(
        &mut self,
        world: &mut World,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
        let pending = self.word(world, i.from[0]);
        for lane in lanes_of(exec) {
            let before = self.groups[lane].saturating_sub(pending[lane]);
            self.land(world, lane as u32, before)?;
        }
        Ok(())
    }

    /// `cp.async.wait_all`
    pub fn wait_for_all_copies(&mut self, world: &mut World, exec: u32) -> Result<(), String> {
        for lane in lanes_of(exec) {
            self.land(world, lane as u32, u32::MAX)?;
        }
        Ok(())
    }

    /// Let a lane's copies of groups before `before` land.
    pub fn land(&mut self, world: &mut World, lane: u32, before: u32) -> Result<(), String> {
        let mut at = 0;
        while at < self.copies.len() {
            if self.copies[at].lane == lane && self.copies[at].group < before {
                let copy = self.copies.remove(at);
                self.perform(world, &copy)?;
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    fn perform(&self, world: &mut World, copy: &Copy) -> Result<(), String> {
        let lane = copy.lane as usize;
        let bytes = copy.bytes as usize;
        if copy.reads > 0 {
            Self::global(
                world,
                copy.from,
                u64::from(copy.reads),
                "asynchronous copy from global memory",
            )
            .map_err(|why| format!("{why}\n  begun at {}", world.kernel.describe(copy.pc)))?;
        }
        let to = self.resolve(world, Space::Shared, lane, u64::from(copy.to), bytes, false)?;
        // SAFETY: both ranges are checked.
        unsafe {
            std::ptr::copy_nonoverlapping(copy.from as *const u8, to, copy.reads as usize);
            to.add(copy.reads as usize)
                .write_bytes(0, bytes - copy.reads as usize);
        }
        world.progress = world.executed;
        Ok(())
    }

    /// `st.async`: store `count` values of a type at an offset, completing on a barrier object.
    pub fn store_async(
        &mut self,
        world: &mut World,
        (ty, count, offset): (Type, u8, i64),
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
        let (to, barrier) = (self.double(world, i.from[0]), self.double(world, i.from[1]));
        for lane in lanes_of(exec) {
            let mut data = Vec::new();
            for e in 0..usize::from(count) {
                let value = self.double(world, i.from[2 + e])[lane];
                data.extend_from_slice(&value.to_le_bytes()[..ty.bytes()]);
            }
            let (block, at) = split(self.block, to[lane].wrapping_add_signed(offset));
            let (of, barrier) = split(self.block, barrier[lane]);
            if of != block {
                return Err("st.async: target and barrier are in different blocks".to_owned());
            }
            let bytes = data.len() as u32;
            let data = Source::Held(data);
            Self::post(
                world,
                Event::Bytes {
                    blocks: vec![block],
                    to: at,
                    data,
                    bytes,
                    barrier,
                },
            )?;
        }
        Ok(())
    }
}
