//! Asynchronous copies and barrier objects.

use crate::code::{Bulk, Instruction, Mbarrier as Kind, Op, Space, Value};
use crate::grid::World;
use crate::lanes::Type;
use crate::memory::{COMING, KNOWN, Mbarrier, RANK_SHIFT, SHARED_START, read, write};
use crate::warp::{Copy, Flow, Warp, lanes_of};

/// A bulk store that has begun: source in shared memory, target in global memory.
#[derive(Clone, Debug)]
pub struct Store {
    pub lane: u32,
    pub group: u32,
    pub from: u32,
    pub to: u64,
    pub bytes: u32,
    /// Elements are added.
    pub adds: Option<Type>,
    pub pc: u32,
}

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

/// Find a barrier object.
pub fn barrier_at<'w>(
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

fn bytes_arrive(world: &mut World, block: usize, barrier: u32, bytes: u32) -> Result<(), String> {
    let found = barrier_at(world, block, barrier)?;
    found.bytes -= i64::from(bytes);
    found.advance();
    world.progress = world.executed;
    Ok(())
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

    pub fn asynchronous(
        &mut self,
        world: &mut World,
        i: &Instruction,
        pc: u32,
        mask: u32,
        exec: u32,
    ) -> Result<Flow, String> {
        match i.op {
            Op::Copy {
                bytes,
                sized,
                offsets,
            } => {
                let (to, from) = (self.double(world, i.from[0]), self.double(world, i.from[1]));
                let sizes = if sized {
                    self.word(world, i.from[2])
                } else {
                    [u32::from(bytes); 32]
                };
                for lane in lanes_of(exec) {
                    let to = (to[lane] & !crate::memory::WINDOW)
                        .wrapping_add_signed(i64::from(offsets.0))
                        as u32;
                    let from = from[lane].wrapping_add_signed(i64::from(offsets.1));
                    let reads = sizes[lane].min(u32::from(bytes));
                    if reads > 0 && from % u64::from(bytes) != 0 {
                        return Err(format!(
                            "misaligned source {from:#x} of a copy of {bytes} bytes (lane {lane})"
                        ));
                    }
                    let copy = Copy {
                        lane: lane as u32,
                        to,
                        from,
                        bytes: u32::from(bytes),
                        reads,
                        group: self.groups[lane],
                        pc,
                    };
                    // Checks of the target, whenever the copy lands.
                    self.resolve(
                        world,
                        Space::Shared,
                        lane,
                        u64::from(to),
                        bytes.into(),
                        false,
                    )?;
                    if world.copies_land_early() {
                        self.perform(world, &copy)?;
                    } else {
                        let at = to as usize - SHARED_START;
                        world.blocks[self.block].known[at..at + usize::from(bytes)].fill(COMING);
                        self.copies.push(copy);
                    }
                }
            }
            Op::CommitCopies => lanes_of(exec).for_each(|lane| self.groups[lane] += 1),
            Op::WaitCopies => {
                let pending = self.word(world, i.from[0]);
                for lane in lanes_of(exec) {
                    let before = self.groups[lane].saturating_sub(pending[lane]);
                    self.land(world, lane as u32, before)?;
                }
            }
            Op::WaitAllCopies => {
                for lane in lanes_of(exec) {
                    self.land(world, lane as u32, u32::MAX)?;
                }
            }
            Op::Mbarrier(kind, offset) => return self.mbarrier(world, i, exec, kind, offset),
            Op::Bulk(kind, to, from) => return self.bulk(world, i, (pc, exec), kind, (to, from)),
            Op::StoreAsync(ty, count, offset) => {
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
                        return Err(
                            "st.async: target and barrier are in different blocks".to_owned()
                        );
                    }
                    let bytes = data.len() as u32;
                    let data = Source::Held(data);
                    self.post(
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
            }
            Op::WarpgroupProduct(..) | Op::WarpgroupWait => {
                return self.warpgroup(world, i, pc, mask, exec);
            }
            _ => return Err("unknown instruction".to_owned()),
        }
        Ok(Flow::Next)
    }

    fn post(&mut self, world: &mut World, event: Event) -> Result<(), String> {
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
                world.blocks[block].known[start..start + *bytes as usize].fill(COMING);
            }
            if let Source::Global(from) = data {
                Self::global(world, *from, u64::from(*bytes), "bulk copy")?;
            }
        }
        world.events.push(event);
        Ok(())
    }

    fn mbarrier(
        &mut self,
        world: &mut World,
        i: &Instruction,
        exec: u32,
        kind: Kind,
        offset: i64,
    ) -> Result<Flow, String> {
        let addresses = self.double(world, i.from[0]);
        let mut flow = Flow::Next;
        let mut tokens = [0u64; 32];
        let mut done = 0u32;
        for lane in lanes_of(exec) {
            let (block, at) = split(self.block, addresses[lane].wrapping_add_signed(offset));
            if at % 8 != 0 {
                return Err(format!("misaligned mbarrier at {at:#x} (lane {lane})"));
            }
            let operand =
                |warp: &Self, n: usize| i.from.get(n).map(|&value| warp.double(world, value)[lane]);
            let (first, second) = (operand(self, 1), operand(self, 2));
            match kind {
                Kind::Init => {
                    let start = Self::shared(world, block, at, 8, "mbarrier.init")?;
                    let count = first.unwrap_or(0) as u32;
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
                }
                Kind::Invalidate => {
                    barrier_at(world, block, at)?;
                    world.blocks[block].mbarriers.remove(&at);
                }
                Kind::Arrive { expects, drops } => {
                    let barrier = barrier_at(world, block, at)?;
                    tokens[lane] = barrier.phase;
                    let count = if expects {
                        barrier.bytes += first.unwrap_or(0) as u32 as i64;
                        second.map_or(1, |count| count as u32)
                    } else {
                        first.map_or(1, |count| count as u32)
                    };
                    if count > barrier.pending {
                        return Err(format!(
                            "mbarrier at {at:#x}: {count} arrivals, but the phase waits for {} only (lane {lane})",
                            barrier.pending
                        ));
                    }
                    barrier.pending -= count;
                    if drops {
                        barrier.expected -= count;
                    }
                    barrier.advance();
                    world.progress = world.executed;
                }
                Kind::ExpectBytes => {
                    barrier_at(world, block, at)?.bytes += first.unwrap_or(0) as u32 as i64;
                }
                Kind::Complete => bytes_arrive(world, block, at, first.unwrap_or(0) as u32)?,
                Kind::Test { parity } => {
                    let barrier = barrier_at(world, block, at)?;
                    let wanted = first.unwrap_or(0);
                    let complete = if parity {
                        barrier.phase & 1 != wanted & 1
                    } else {
                        barrier.phase > wanted
                    };
                    done |= u32::from(complete) << lane;
                    if !complete {
                        flow = Flow::Turn;
                    }
                }
                Kind::ArriveCopies { counted } => {
                    let barrier = barrier_at(world, block, at)?;
                    if counted {
                        barrier.pending += 1;
                    }
                    // Copies that this lane begins later belong to another group.
                    let upto = self.groups[lane] + 1;
                    self.groups[lane] += 1;
                    let warp = world.current;
                    let event = Event::Arrival {
                        warp,
                        lane: lane as u32,
                        upto,
                        barrier: (block, at),
                    };
                    world.events.push(event);
                }
            }
        }
        if let Some(&to) = i.to.first() {
            match to {
                Value::Pred(..) => self.set_pred(to, done, exec),
                _ => self.set_double(to, &tokens, exec),
            }
        }
        Ok(flow)
    }

    fn bulk(
        &mut self,
        world: &mut World,
        i: &Instruction,
        (pc, exec): (u32, u32),
        kind: Bulk,
        (to_offset, from_offset): (i64, i64),
    ) -> Result<Flow, String> {
        match kind {
            Bulk::Commit => {
                lanes_of(exec).for_each(|lane| self.store_groups[lane] += 1);
                return Ok(Flow::Next);
            }
            Bulk::Wait { .. } => {
                let pending = self.word(world, i.from[0]);
                for lane in lanes_of(exec) {
                    let before = self.store_groups[lane].saturating_sub(pending[lane]);
                    self.store_all(world, |store| {
                        store.lane == lane as u32 && store.group < before
                    })?;
                }
                return Ok(Flow::Next);
            }
            _ => {}
        }
        let (to, from) = (self.double(world, i.from[0]), self.double(world, i.from[1]));
        let sizes = self.word(world, i.from[2]);
        for lane in lanes_of(exec) {
            let (to, from) = (
                to[lane].wrapping_add_signed(to_offset),
                from[lane].wrapping_add_signed(from_offset),
            );
            let bytes = sizes[lane];
            if !bytes.is_multiple_of(16) || from % 16 != 0 || to % 16 != 0 {
                return Err(format!(
                    "bulk copy of {bytes} bytes from {from:#x} to {to:#x}: not multiples of 16"
                ));
            }
            let (block, at) = split(self.block, to);
            match kind {
                Bulk::Load { multicast } => {
                    let (of, barrier) = split(self.block, self.double(world, i.from[3])[lane]);
                    let blocks = if multicast {
                        let chosen = self.word(world, i.from[4])[lane] & 0xffff;
                        lanes_of(chosen).collect()
                    } else {
                        if of != block {
                            return Err(
                                "bulk copy: target and barrier are in different blocks".to_owned()
                            );
                        }
                        vec![block]
                    };
                    let data = Source::Global(from);
                    self.post(
                        world,
                        Event::Bytes {
                            blocks,
                            to: at,
                            data,
                            bytes,
                            barrier,
                        },
                    )?;
                }
                Bulk::ToCluster => {
                    let (source_block, source) = split(self.block, from);
                    let start = Self::shared(world, source_block, source, bytes, "bulk copy")?;
                    let data =
                        world.blocks[source_block].shared[start..start + bytes as usize].to_vec();
                    let (_, barrier) = split(self.block, self.double(world, i.from[3])[lane]);
                    let data = Source::Held(data);
                    self.post(
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
                Bulk::Store | Bulk::ReduceAdd(_) => {
                    let (_, source) = split(self.block, from);
                    Self::shared(world, self.block, source, bytes, "bulk store")?;
                    Self::global(world, to, u64::from(bytes), "bulk store")?;
                    let adds = if let Bulk::ReduceAdd(ty) = kind {
                        Some(ty)
                    } else {
                        None
                    };
                    self.stores.push(Store {
                        lane: lane as u32,
                        group: self.store_groups[lane],
                        from: source,
                        to,
                        bytes,
                        adds,
                        pc,
                    });
                }
                _ => {}
            }
        }
        Ok(Flow::Next)
    }

    /// Perform the bulk stores that `which` chooses.
    pub fn store_all(
        &mut self,
        world: &mut World,
        which: impl Fn(&Store) -> bool,
    ) -> Result<(), String> {
        let (now, later): (Vec<Store>, Vec<Store>) = std::mem::take(&mut self.stores)
            .into_iter()
            .partition(which);
        self.stores = later;
        for store in now {
            let start = Self::shared(world, self.block, store.from, store.bytes, "bulk store")?;
            let block = &world.blocks[self.block];
            let range = start..start + store.bytes as usize;
            if block.known[range.clone()]
                .iter()
                .any(|&state| state != KNOWN)
            {
                return Err(format!(
                    "bulk store of shared memory that was not written\n  begun at {}",
                    world.kernel.describe(store.pc)
                ));
            }
            let data = &block.shared[range];
            let size = store.adds.map_or(1, Type::bytes);
            for (e, chunk) in data.chunks(size).enumerate() {
                let mut value = [0u8; 8];
                value[..size].copy_from_slice(chunk);
                let value = u64::from_le_bytes(value);
                // SAFETY: the range was checked when the store began.
                unsafe {
                    let at = (store.to as *mut u8).add(e * size);
                    let new = match store.adds {
                        Some(ty) => crate::warp::updated(
                            ty,
                            crate::code::Update::Add,
                            read(at, size),
                            value,
                            0,
                        )?,
                        None => value,
                    };
                    write(at, size, new);
                }
            }
            world.progress = world.executed;
        }
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
