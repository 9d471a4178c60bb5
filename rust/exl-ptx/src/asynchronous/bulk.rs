//! Bulk copies (`cp.async.bulk`).

use super::{Event, Source, split};
use crate::code::{Bulk, Instruction};
use crate::grid::World;
use crate::lanes::Type;
use crate::memory::{KNOWN, UNFENCED, read, write};
use crate::warp::{Warp, lanes_of};

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

/// A lane's bulk copy; the addresses are as the instruction has them.
struct BulkCopy {
    lane: usize,
    to: u64,
    from: u64,
    bytes: u32,
}

impl BulkCopy {
    fn check(&self) -> Result<(), String> {
        let (bytes, from, to) = (self.bytes, self.from, self.to);
        if bytes % 16 != 0 || from % 16 != 0 || to % 16 != 0 {
            return Err(format!(
                "bulk copy of {bytes} bytes from {from:#x} to {to:#x}: not multiples of 16"
            ));
        }
        Ok(())
    }
}

impl Warp {
    /// A bulk copy, or an operation on the groups of bulk stores.
    pub fn bulk(
        &mut self,
        world: &mut World,
        i: &Instruction,
        (pc, exec): (u32, u32),
        kind: Bulk,
        (to_offset, from_offset): (i64, i64),
    ) -> Result<(), String> {
        match kind {
            Bulk::Commit => {
                lanes_of(exec).for_each(|lane| self.store_groups[lane] += 1);
                return Ok(());
            }
            Bulk::Wait { .. } => return self.wait_for_stores(world, i, exec),
            Bulk::Load { .. } | Bulk::ToCluster | Bulk::Store | Bulk::ReduceAdd(_) => {}
        }
        let (to, from) = (self.double(world, i.from[0]), self.double(world, i.from[1]));
        let sizes = self.word(world, i.from[2]);
        for lane in lanes_of(exec) {
            let copy = BulkCopy {
                lane,
                to: to[lane].wrapping_add_signed(to_offset),
                from: from[lane].wrapping_add_signed(from_offset),
                bytes: sizes[lane],
            };
            copy.check()?;
            match kind {
                Bulk::Load { multicast } => self.bulk_load(world, i, &copy, multicast)?,
                Bulk::ToCluster => self.bulk_to_cluster(world, i, &copy)?,
                Bulk::ReduceAdd(ty) => self.bulk_store(world, &copy, Some(ty), pc)?,
                _ => self.bulk_store(world, &copy, None, pc)?,
            }
        }
        Ok(())
    }

    /// Let the lanes' bulk stores land, but for those of the latest groups.
    fn wait_for_stores(
        &mut self,
        world: &mut World,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
        let pending = self.word(world, i.from[0]);
        for lane in lanes_of(exec) {
            let before = self.store_groups[lane].saturating_sub(pending[lane]);
            self.store_all(world, |store| {
                store.lane == lane as u32 && store.group < before
            })?;
        }
        Ok(())
    }

    /// From global to shared memory, of several blocks if `multicast`.
    fn bulk_load(
        &self,
        world: &mut World,
        i: &Instruction,
        copy: &BulkCopy,
        multicast: bool,
    ) -> Result<(), String> {
        let (block, to) = split(self.block, copy.to);
        let (of, barrier) = split(self.block, self.double(world, i.from[3])[copy.lane]);
        let blocks = if multicast {
            let chosen = self.word(world, i.from[4])[copy.lane] & 0xffff;
            lanes_of(chosen).collect()
        } else {
            if of != block {
                return Err("bulk copy: target and barrier are in different blocks".to_owned());
            }
            vec![block]
        };
        let event = Event::Bytes {
            blocks,
            to,
            data: Source::Global(copy.from),
            bytes: copy.bytes,
            barrier,
        };
        Self::post(world, event)
    }

    /// From shared memory to that of another block of the cluster.
    fn bulk_to_cluster(
        &self,
        world: &mut World,
        i: &Instruction,
        copy: &BulkCopy,
    ) -> Result<(), String> {
        let (block, to) = split(self.block, copy.to);
        let (source_block, source) = split(self.block, copy.from);
        let start = Self::shared(world, source_block, source, copy.bytes, "bulk copy")?;
        let data = world.blocks[source_block].shared[start..start + copy.bytes as usize].to_vec();
        let (_, barrier) = split(self.block, self.double(world, i.from[3])[copy.lane]);
        let event = Event::Bytes {
            blocks: vec![block],
            to,
            data: Source::Held(data),
            bytes: copy.bytes,
            barrier,
        };
        Self::post(world, event)
    }

    /// Begin a store from shared to global memory, or an addition of elements of type `adds`.
    fn bulk_store(
        &mut self,
        world: &World,
        copy: &BulkCopy,
        adds: Option<Type>,
        pc: u32,
    ) -> Result<(), String> {
        let (_, from) = split(self.block, copy.from);
        Self::shared(world, self.block, from, copy.bytes, "bulk store")?;
        Self::global(world, copy.to, u64::from(copy.bytes), "bulk store")?;
        self.stores.push(Store {
            lane: copy.lane as u32,
            group: self.store_groups[copy.lane],
            from,
            to: copy.to,
            bytes: copy.bytes,
            adds,
            pc,
        });
        Ok(())
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
            if let Some(state) = block.known[range.clone()]
                .iter()
                .find(|&&state| state != KNOWN)
            {
                let why = if *state == UNFENCED {
                    "was written without a `fence.proxy.async` after it"
                } else {
                    "was not written"
                };
                return Err(format!(
                    "bulk store of shared memory that {why}\n  begun at {}",
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
