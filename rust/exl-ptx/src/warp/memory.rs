//! Loads, stores and atomic updates of a warp.

use super::{Warp, lanes_of};
use crate::code::{Access, Instruction, Space, Update};
use crate::grid::World;
use crate::lanes::{Lanes, Type};
use crate::memory::{
    COMING, KNOWN, LOCAL_WINDOW, PARAM_WINDOW, RANK_SHIFT, SHARED_START, SHARED_WINDOW, UNFENCED,
    UNKNOWN, WINDOW, read, write,
};

/// A load or store of one lane at an address of a space that is not generic.
struct LaneAccess {
    lane: usize,
    address: u64,
    bytes: usize,
    loads: bool,
}

impl LaneAccess {
    fn name(&self) -> &'static str {
        name_of(self.loads)
    }

    fn global_place(&self, world: &mut World) -> Result<*mut u8, String> {
        let address = self.address;
        let end = address + self.bytes as u64;
        if !(world.last.0 <= address && end <= world.last.1) {
            let Some(found) = world.ranges.find(address).filter(|&(_, e)| end <= e) else {
                return Err(format!(
                    "{} of {} bytes at {address:#x}, which no allocation contains{} (lane {})",
                    self.name(),
                    self.bytes,
                    world.ranges.near(address),
                    self.lane
                ));
            };
            world.last = found;
        }
        Ok(address as *mut u8)
    }

    fn parameter_place(&self, world: &World) -> Result<*mut u8, String> {
        let params = &world.launch.params;
        if !self.loads || self.address as usize + self.bytes > params.len() {
            return Err(format!(
                "{} at offset {} of {} bytes of parameters (lane {})",
                self.name(),
                self.address,
                params.len(),
                self.lane
            ));
        }
        // SAFETY: inside of the vector, as checked.
        Ok(unsafe { params.as_ptr().add(self.address as usize).cast_mut() })
    }
}

fn name_of(loads: bool) -> &'static str {
    if loads { "load" } else { "store" }
}

impl Warp {
    /// The host address of an access, checked for alignment, bounds, and values that a load may not see.
    pub fn resolve(
        &self,
        world: &mut World,
        space: Space,
        lane: usize,
        address: u64,
        bytes: usize,
        loads: bool,
    ) -> Result<*mut u8, String> {
        if !address.is_multiple_of(bytes as u64) {
            let what = name_of(loads);
            return Err(format!(
                "misaligned {what} of {bytes} bytes at {address:#x} (lane {lane})"
            ));
        }
        let (space, address) = match space {
            Space::Generic => match address & WINDOW {
                SHARED_WINDOW => (Space::Cluster, address & !WINDOW),
                LOCAL_WINDOW => (Space::Local, address & !WINDOW),
                PARAM_WINDOW => (Space::Param, address & !WINDOW),
                _ => (Space::Global, address),
            },
            other => (other, address),
        };
        let access = LaneAccess {
            lane,
            address,
            bytes,
            loads,
        };
        match space {
            Space::Shared | Space::Cluster => self.shared_place(world, space, &access),
            Space::Global => access.global_place(world),
            Space::Local => self.local_place(&access),
            Space::Param => access.parameter_place(world),
            Space::Generic => Err("a generic address".to_owned()),
        }
    }

    fn shared_place(
        &self,
        world: &mut World,
        space: Space,
        access: &LaneAccess,
    ) -> Result<*mut u8, String> {
        let LaneAccess {
            lane,
            address,
            bytes,
            loads,
        } = *access;
        let what = access.name();
        let rank = (address >> RANK_SHIFT) as usize;
        let block = if rank == 0 {
            self.block
        } else if space == Space::Shared {
            usize::MAX
        } else {
            rank - 1
        };
        let at = (address & ((1 << RANK_SHIFT) - 1)) as usize;
        let Some(block) = world.blocks.get_mut(block) else {
            return Err(format!(
                "{what} at {address:#x}: no such block in the cluster (lane {lane})"
            ));
        };
        if at < SHARED_START || at + bytes > SHARED_START + block.shared.len() {
            return Err(format!(
                "{what} of {bytes} bytes at offset {} of {} bytes of shared memory (lane {lane})",
                at as i64 - SHARED_START as i64,
                block.shared.len()
            ));
        }
        let at = at - SHARED_START;
        if loads {
            if let Some(bad) = block.known[at..at + bytes]
                .iter()
                .position(|&state| state == COMING || (state == UNKNOWN && world.launch.strict))
            {
                let state = block.known[at + bad];
                return Err(format!(
                    "load of {bytes} bytes at offset {at} of shared memory, byte {bad} {} (lane {lane})",
                    if state == COMING {
                        "belongs to an asynchronous copy that has not been waited for"
                    } else {
                        "was never written"
                    }
                ));
            }
        } else {
            block.check_write(&(at..at + bytes))?;
            if block.writers.is_empty() {
                block.known[at..at + bytes].fill(KNOWN);
            } else {
                block.known[at..at + bytes].fill(UNFENCED);
                block.writers[at..at + bytes].fill((self.number * 32) as u16 + lane as u16);
            }
        }
        // SAFETY: inside of the vector, as checked.
        Ok(unsafe { block.shared.as_mut_ptr().add(at) })
    }

    fn local_place(&self, access: &LaneAccess) -> Result<*mut u8, String> {
        let size = self.local.len() / 32;
        if access.address as usize + access.bytes > size {
            return Err(format!(
                "{} at offset {} of {size} bytes of local memory (lane {})",
                access.name(),
                access.address,
                access.lane
            ));
        }
        // SAFETY: inside of the vector, as checked.
        Ok(unsafe {
            self.local
                .as_ptr()
                .add(access.lane * size + access.address as usize)
                .cast_mut()
        })
    }

    pub(super) fn load(
        &mut self,
        world: &mut World,
        access: Access,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
        let size = access.ty.bytes();
        let total = size * access.count as usize;
        let signed = access.ty.is_signed();
        for lane in lanes_of(exec) {
            let address = self
                .lane(world, i.from[0], lane)
                .wrapping_add_signed(access.offset);
            let at = self.resolve(world, access.space, lane, address, total, true)?;
            for (e, &to) in i.to.iter().enumerate() {
                // SAFETY: `resolve` has checked `total` bytes.
                let mut value = unsafe { read(at.add(e * size), size) };
                if signed && size < 8 {
                    let shift = 64 - 8 * size as u32;
                    value = (((value << shift) as i64) >> shift) as u64;
                }
                self.set_lane(to, lane, value);
            }
        }
        Ok(())
    }

    pub(super) fn store(
        &mut self,
        world: &mut World,
        access: Access,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
        let size = access.ty.bytes();
        let total = size * access.count as usize;
        for lane in lanes_of(exec) {
            let address = self
                .lane(world, i.from[0], lane)
                .wrapping_add_signed(access.offset);
            let at = self.resolve(world, access.space, lane, address, total, false)?;
            for (e, &from) in i.from[1..].iter().enumerate() {
                let value = self.lane(world, from, lane);
                // SAFETY: `resolve` has checked `total` bytes.
                unsafe {
                    let at = at.add(e * size);
                    let mask = if size == 8 { !0 } else { (1 << (8 * size)) - 1 };
                    if access.space != Space::Local && read(at, size) != value & mask {
                        world.progress = world.executed;
                    }
                    write(at, size, value);
                }
            }
        }
        Ok(())
    }

    pub(super) fn atomic(
        &mut self,
        world: &mut World,
        access: Access,
        update: Update,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
        let size = access.ty.bytes();
        for lane in lanes_of(exec) {
            let address = self
                .lane(world, i.from[0], lane)
                .wrapping_add_signed(access.offset);
            // A reader first: an atomic on memory that was never written is an error.
            self.resolve(world, access.space, lane, address, size, true)?;
            let at = self.resolve(world, access.space, lane, address, size, false)?;
            let (a, b) = (
                self.lane(world, i.from[1], lane),
                i.from.get(2).map_or(0, |&v| self.lane(world, v, lane)),
            );
            // SAFETY: `resolve` has checked these bytes.
            let old = unsafe { read(at, size) };
            let new = updated(access.ty, update, old, a, b)?;
            if new != old {
                world.progress = world.executed;
            }
            // SAFETY: as above.
            unsafe { write(at, size, new) };
            if let Some(&to) = i.to.first() {
                self.set_lane(to, lane, old);
            }
        }
        Ok(())
    }
}

/// The new value of an atomic update.
pub fn updated(ty: Type, update: Update, old: u64, a: u64, b: u64) -> Result<u64, String> {
    let size = ty.bytes();
    let kept = if size == 8 {
        !0
    } else {
        (1u64 << (8 * size)) - 1
    };
    let a = a & kept;
    let (x, y) = (f32::from_bits(old as u32), f32::from_bits(a as u32));
    let signed = |v: u64| {
        if size == 8 {
            v as i64
        } else {
            i64::from(v as u32 as i32)
        }
    };
    let new = match (update, ty) {
        (Update::Add, Type::F32) => u64::from((x + y).to_bits()),
        (Update::Add, Type::F64) => (f64::from_bits(old) + f64::from_bits(a)).to_bits(),
        (Update::Add, Type::F16 | Type::F16x2 | Type::BF16 | Type::BF16x2) => {
            let lanes = crate::halves::halves("add", crate::lanes::Suffixes(&[]), ty);
            let Some(Lanes::W2(f)) = lanes else {
                return Err("unknown atomic".to_owned());
            };
            u64::from(f(&[old as u32; 32], &[a as u32; 32])[0])
        }
        (Update::Add, _) => old.wrapping_add(a),
        (Update::Min, Type::S32 | Type::S64) => signed(old).min(signed(a)) as u64,
        (Update::Max, Type::S32 | Type::S64) => signed(old).max(signed(a)) as u64,
        (Update::Min, Type::U32 | Type::U64) => old.min(a),
        (Update::Max, Type::U32 | Type::U64) => old.max(a),
        (Update::And, _) => old & a,
        (Update::Or, _) => old | a,
        (Update::Xor, _) => old ^ a,
        (Update::Exchange, _) => a,
        (Update::Compare, _) => {
            if old == a {
                b & kept
            } else {
                old
            }
        }
        (Update::Increment, _) => {
            if old >= a {
                0
            } else {
                old + 1
            }
        }
        (Update::Decrement, _) => {
            if old == 0 || old > a {
                a
            } else {
                old - 1
            }
        }
        _ => return Err("unknown atomic".to_owned()),
    };
    Ok(new & kept)
}
