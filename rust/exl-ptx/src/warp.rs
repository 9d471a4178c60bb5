//! A warp: its registers, its lanes' positions, and the execution of its instructions.

use crate::code::{Access, Instruction, Kernel, Logic, Meeting, Op, Space, Special, Update, Value};
use crate::grid::World;
use crate::lanes::{Doubles, Lanes, Type, Words};
use crate::memory::{
    COMING, KNOWN, LOCAL_WINDOW, PARAM_WINDOW, RANK_SHIFT, SHARED_START, SHARED_WINDOW, WINDOW,
    read, write,
};

/// Lanes that wait at a barrier of their block, or of their cluster.
#[derive(Clone, Debug)]
pub struct Held {
    pub mask: u32,
    pub pc: u32,
    pub id: usize,
    pub generation: u64,
}

/// The number that `Held::id` has for the barrier of the cluster.
pub const OF_CLUSTER: usize = 16;

/// A copy to shared memory that a lane has begun.
#[derive(Clone, Debug)]
pub struct Copy {
    pub lane: u32,
    /// Address in the block's shared memory.
    pub to: u32,
    pub from: u64,
    pub bytes: u32,
    /// Bytes that are read; the rest is zero.
    pub reads: u32,
    pub group: u32,
    pub pc: u32,
}

pub struct Warp {
    /// The block's place in its unit.
    pub block: usize,
    /// The warp's place in its block.
    pub number: u32,
    pub words: Vec<Words>,
    pub doubles: Vec<Doubles>,
    pub preds: Vec<u32>,
    pub carry: u32,
    pub pcs: [u32; 32],
    /// Lanes that have not exited.
    pub live: u32,
    /// Lanes that wait for others of the warp.
    pub meeting: u32,
    pub held: Vec<Held>,
    pub local: Vec<u8>,
    pub copies: Vec<Copy>,
    /// Groups of copies that each lane has closed.
    pub groups: [u32; 32],
    /// Bulk stores that have not been waited for, as (group, action).
    pub stores: Vec<crate::bulk::Store>,
    pub store_groups: [u32; 32],
    pub cluster_arrived: u32,
    /// Generation of the cluster's barrier at the last arrival.
    pub cluster_at: u64,
}

pub fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        if rest == 0 {
            return None;
        }
        let lane = rest.trailing_zeros() as usize;
        rest &= rest - 1;
        Some(lane)
    })
}

/// The outcome of an instruction.
pub enum Flow {
    Next,
    /// The lanes' positions have changed, or they wait.
    Moved,
    /// As `Next`, and another warp should run.
    Turn,
}

/// Write the lanes of `mask` of a register.
fn write_lanes<T: std::marker::Copy>(register: &mut [T; 32], values: &[T; 32], mask: u32) {
    if mask == !0 {
        *register = *values;
    } else {
        for lane in lanes_of(mask) {
            register[lane] = values[lane];
        }
    }
}

impl Warp {
    pub fn new(kernel: &Kernel, block: usize, number: u32, threads: u32) -> Self {
        Self {
            block,
            number,
            words: vec![[0; 32]; kernel.words],
            doubles: vec![[0; 32]; kernel.doubles],
            preds: vec![0; kernel.preds],
            carry: 0,
            pcs: [0; 32],
            live: if threads >= 32 {
                !0
            } else {
                (1 << threads) - 1
            },
            meeting: 0,
            held: Vec::new(),
            local: vec![0; kernel.local_bytes * 32],
            copies: Vec::new(),
            groups: [0; 32],
            stores: Vec::new(),
            store_groups: [0; 32],
            cluster_arrived: 0,
            cluster_at: 0,
        }
    }

    /// Lanes that can run.
    pub fn ready(&self) -> u32 {
        let held = self.held.iter().fold(0, |mask, held| mask | held.mask);
        self.live & !self.meeting & !held
    }

    /// The runnable lanes with the lowest position (or those of a lane by chance), that position, and the lowest one of the others.
    fn group(&self, ready: u32, by_chance: Option<u32>) -> (u32, u32, u32) {
        let mut pc = u32::MAX;
        if let Some(chance) = by_chance {
            let lane = lanes_of(ready).nth((chance % ready.count_ones()) as usize);
            pc = self.pcs[lane.unwrap_or(0)];
        } else {
            lanes_of(ready).for_each(|lane| pc = pc.min(self.pcs[lane]));
        }
        let (mut mask, mut others) = (0, u32::MAX);
        for lane in lanes_of(ready) {
            if self.pcs[lane] == pc {
                mask |= 1 << lane;
            } else if by_chance.is_none() || self.pcs[lane] > pc {
                others = others.min(self.pcs[lane]);
            }
        }
        (mask, pc, others)
    }

    /// Run up to `quantum` instructions.
    pub fn run(&mut self, world: &mut World, quantum: u32) -> Result<(), String> {
        let kernel = world.kernel;
        let mut left = quantum;
        let mut chance = (world.random(4) == 0).then(|| world.random(32));
        'groups: while left > 0 {
            let ready = self.ready();
            if ready == 0 {
                break;
            }
            let (mask, mut pc, others) = self.group(ready, chance.take());
            while left > 0 && pc < others {
                left -= 1;
                world.executed += 1;
                let Some(instruction) = kernel.code.get(pc as usize) else {
                    return Err("ran past the end".to_owned());
                };
                let exec = match instruction.guard {
                    None => mask,
                    Some((p, negated)) => {
                        mask & if negated {
                            !self.preds[p as usize]
                        } else {
                            self.preds[p as usize]
                        }
                    }
                };
                if exec == 0 {
                    pc += 1;
                    continue;
                }
                let flow = self
                    .execute(world, instruction, pc, mask, exec)
                    .map_err(|why| {
                        format!(
                            "{why}\n  at {}\n  block {:?}, warp {}, lanes {exec:#010x}",
                            kernel.describe(pc),
                            world.blocks[self.block].index,
                            self.number
                        )
                    })?;
                match flow {
                    Flow::Next => pc += 1,
                    Flow::Moved => continue 'groups,
                    Flow::Turn => {
                        pc += 1;
                        left = 0;
                    }
                }
            }
            for lane in lanes_of(mask) {
                self.pcs[lane] = pc;
            }
        }
        Ok(())
    }

    fn place(&mut self, mask: u32, pc: u32) {
        for lane in lanes_of(mask) {
            self.pcs[lane] = pc;
        }
    }

    /// Let the lanes of `exec` at `pc` wait for a barrier.
    pub fn hold(&mut self, mask: u32, exec: u32, pc: u32, id: usize, generation: u64) -> Flow {
        self.place(mask & !exec, pc + 1);
        self.place(exec, pc);
        self.held.push(Held {
            mask: exec,
            pc,
            id,
            generation,
        });
        Flow::Moved
    }

    fn execute(
        &mut self,
        world: &mut World,
        instruction: &Instruction,
        pc: u32,
        mask: u32,
        exec: u32,
    ) -> Result<Flow, String> {
        let mut exec = exec;
        if instruction.meeting != Meeting::None {
            let present = exec | self.at(pc);
            let wanted = self.wanted(world, instruction, present);
            if wanted & !present & self.live != 0 {
                self.place(mask & !exec, pc + 1);
                self.place(exec, pc);
                self.meeting |= exec;
                return Ok(Flow::Moved);
            }
            let joined = present & !exec;
            if joined != 0 {
                self.meeting &= !joined;
                // The lanes that waited go on with these; run the instruction once for all of them.
                self.place(mask & !exec, pc + 1);
                exec = present;
                let flow = self.operate(world, instruction, pc, exec, exec)?;
                if matches!(flow, Flow::Next | Flow::Turn) {
                    self.place(exec, pc + 1);
                }
                return Ok(Flow::Moved);
            }
        }
        self.operate(world, instruction, pc, mask, exec)
    }

    /// Lanes that wait at an instruction for others of the warp.
    fn at(&self, pc: u32) -> u32 {
        lanes_of(self.meeting)
            .filter(|&lane| self.pcs[lane] == pc)
            .fold(0, |mask, lane| mask | (1 << lane))
    }

    /// The lanes that an instruction needs, for those that are present.
    fn wanted(&self, world: &World, instruction: &Instruction, present: u32) -> u32 {
        match instruction.meeting {
            Meeting::Mask(at) => match instruction.from.get(at as usize) {
                Some(&value) => {
                    let masks = self.word(world, value);
                    lanes_of(present).fold(0, |all, lane| all | masks[lane])
                }
                None => !0,
            },
            _ => !0,
        }
    }

    /// The value of a source in each lane, in 32 bits.
    pub fn word(&self, world: &World, value: Value) -> Words {
        match value {
            Value::Word(r) => self.words[r as usize],
            Value::Bits(bits) => [bits as u32; 32],
            Value::Double(r) => self.doubles[r as usize].map(|v| v as u32),
            Value::Pred(r, negated) => {
                let bits = if negated {
                    !self.preds[r as usize]
                } else {
                    self.preds[r as usize]
                };
                std::array::from_fn(|lane| (bits >> lane) & 1)
            }
            Value::Special(special) => self.special(world, special).map(|v| v as u32),
            Value::Sink => [0; 32],
        }
    }

    /// The value of a source in each lane, in 64 bits.
    pub fn double(&self, world: &World, value: Value) -> Doubles {
        match value {
            Value::Double(r) => self.doubles[r as usize],
            Value::Bits(bits) => [bits; 32],
            Value::Special(special) => self.special(world, special),
            other => self.word(world, other).map(u64::from),
        }
    }

    /// A predicate as a mask of lanes.
    pub fn pred(&self, value: Value) -> u32 {
        match value {
            Value::Pred(r, negated) => {
                if negated {
                    !self.preds[r as usize]
                } else {
                    self.preds[r as usize]
                }
            }
            Value::Bits(bits) if bits != 0 => !0,
            _ => 0,
        }
    }

    pub fn set_word(&mut self, to: Value, values: &Words, mask: u32) {
        match to {
            Value::Word(r) => {
                write_lanes(&mut self.words[r as usize], values, mask);
            }
            Value::Double(_) => self.set_double(to, &values.map(u64::from), mask),
            _ => {}
        }
    }

    pub fn set_double(&mut self, to: Value, values: &Doubles, mask: u32) {
        match to {
            Value::Double(r) => {
                write_lanes(&mut self.doubles[r as usize], values, mask);
            }
            Value::Word(_) => self.set_word(to, &values.map(|v| v as u32), mask),
            _ => {}
        }
    }

    pub fn set_pred(&mut self, to: Value, bits: u32, mask: u32) {
        if let Value::Pred(r, _) = to {
            let slot = &mut self.preds[r as usize];
            *slot = (*slot & !mask) | (bits & mask);
        }
    }

    /// Set one lane of a destination of any width.
    fn set_lane(&mut self, to: Value, lane: usize, value: u64) {
        match to {
            Value::Word(r) => self.words[r as usize][lane] = value as u32,
            Value::Double(r) => self.doubles[r as usize][lane] = value,
            _ => {}
        }
    }

    fn lane(&self, world: &World, value: Value, lane: usize) -> u64 {
        match value {
            Value::Word(r) => u64::from(self.words[r as usize][lane]),
            Value::Double(r) => self.doubles[r as usize][lane],
            Value::Bits(bits) => bits,
            other => self.double(world, other)[lane],
        }
    }

    fn special(&self, world: &World, special: Special) -> Doubles {
        let block = &world.blocks[self.block];
        let launch = world.launch;
        let uniform = |value: u32| [u64::from(value); 32];
        let cluster = launch.cluster;
        match special {
            Special::Tid(axis) => std::array::from_fn(|lane| {
                let thread = self.number * 32 + lane as u32;
                let [x, y, _] = launch.block;
                u64::from(match axis {
                    0 => thread % x,
                    1 => thread / x % y,
                    _ => thread / (x * y),
                })
            }),
            Special::Ntid(axis) => uniform(launch.block[axis as usize]),
            Special::Ctaid(axis) => uniform(block.index[axis as usize]),
            Special::Nctaid(axis) => uniform(launch.grid[axis as usize]),
            Special::Clusterid(axis) => {
                uniform(block.index[axis as usize] / cluster[axis as usize])
            }
            Special::Nclusterid(axis) => {
                uniform(launch.grid[axis as usize] / cluster[axis as usize])
            }
            Special::ClusterCtaid(axis) => {
                uniform(block.index[axis as usize] % cluster[axis as usize])
            }
            Special::ClusterNctaid(axis) => uniform(cluster[axis as usize]),
            Special::ClusterCtarank => uniform(block.rank),
            Special::ClusterNctarank => uniform(cluster.iter().product()),
            Special::IsExplicitCluster => uniform(u32::from(launch.clustered)),
            Special::Lane => std::array::from_fn(|lane| lane as u64),
            Special::Warp => uniform(self.number),
            Special::Nwarp => uniform(block.threads.div_ceil(32)),
            Special::Sm => [block.number % world.card.sms as u64; 32],
            Special::Nsm => uniform(world.card.sms as u32),
            Special::Grid => [launch.number; 32],
            Special::Mask(kind) => std::array::from_fn(|lane| {
                let one = 1u32 << lane;
                u64::from(match kind {
                    0 => one,
                    1 => one - 1,
                    2 => (one - 1) | one,
                    3 => !((one - 1) | one),
                    _ => !(one - 1),
                })
            }),
            Special::Clock | Special::Time => [world.executed; 32],
            Special::DynamicShared => uniform(launch.shared_bytes),
            Special::TotalShared => uniform(block.shared.len() as u32),
        }
    }

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
        let what = if loads { "load" } else { "store" };
        if !address.is_multiple_of(bytes as u64) {
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
        match space {
            Space::Shared | Space::Cluster => {
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
                    if let Some(bad) = block.known[at..at + bytes].iter().position(|&state| {
                        state == COMING || (state != KNOWN && world.launch.strict)
                    }) {
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
                    block.known[at..at + bytes].fill(KNOWN);
                }
                // SAFETY: inside of the vector, as checked.
                Ok(unsafe { block.shared.as_mut_ptr().add(at) })
            }
            Space::Global => {
                let end = address + bytes as u64;
                if !(world.last.0 <= address && end <= world.last.1) {
                    let Some(found) = world.ranges.find(address).filter(|&(_, e)| end <= e) else {
                        return Err(format!(
                            "{what} of {bytes} bytes at {address:#x}, which no allocation contains{} (lane {lane})",
                            world.ranges.near(address)
                        ));
                    };
                    world.last = found;
                }
                Ok(address as *mut u8)
            }
            Space::Local => {
                let size = self.local.len() / 32;
                if address as usize + bytes > size {
                    return Err(format!(
                        "{what} at offset {address} of {size} bytes of local memory (lane {lane})"
                    ));
                }
                // SAFETY: inside of the vector, as checked.
                Ok(unsafe {
                    self.local
                        .as_ptr()
                        .add(lane * size + address as usize)
                        .cast_mut()
                })
            }
            Space::Param => {
                let size = world.launch.params.len();
                if !loads || address as usize + bytes > size {
                    return Err(format!(
                        "{what} at offset {address} of {size} bytes of parameters (lane {lane})"
                    ));
                }
                // SAFETY: inside of the vector, as checked.
                Ok(unsafe {
                    world
                        .launch
                        .params
                        .as_ptr()
                        .add(address as usize)
                        .cast_mut()
                })
            }
            Space::Generic => Err("a generic address".to_owned()),
        }
    }

    fn load(
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

    fn store(
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

    fn atomic(
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

    fn apply(
        &mut self,
        world: &World,
        lanes: Lanes,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
        let from = &i.from;
        let need = match lanes {
            Lanes::W1(_) | Lanes::W1d(_) | Lanes::D1w(_) | Lanes::D1(_) => 1,
            Lanes::W2(_)
            | Lanes::D2(_)
            | Lanes::D2dw(_)
            | Lanes::D2ww(_)
            | Lanes::C2(_)
            | Lanes::C2d(_) => 2,
            Lanes::W4(_) | Lanes::D4(_) => 4,
            _ => 3,
        };
        if from.len() < need {
            return Err("too few operands".to_owned());
        }
        macro_rules! w {
            ($n:expr) => {
                &self.word(world, from[$n])
            };
        }
        macro_rules! d {
            ($n:expr) => {
                &self.double(world, from[$n])
            };
        }
        let to = i.to[0];
        match lanes {
            Lanes::W1(f) => self.set_word(to, &f(w!(0)), exec),
            Lanes::W1d(f) => self.set_word(to, &f(d!(0)), exec),
            Lanes::D1w(f) => self.set_double(to, &f(w!(0)), exec),
            Lanes::D1(f) => self.set_double(to, &f(d!(0)), exec),
            Lanes::W2(f) => self.set_word(to, &f(w!(0), w!(1)), exec),
            Lanes::D2(f) => self.set_double(to, &f(d!(0), d!(1)), exec),
            Lanes::D2dw(f) => self.set_double(to, &f(d!(0), w!(1)), exec),
            Lanes::D2ww(f) => self.set_double(to, &f(w!(0), w!(1)), exec),
            Lanes::W3(f) => self.set_word(to, &f(w!(0), w!(1), w!(2)), exec),
            Lanes::D3(f) => self.set_double(to, &f(d!(0), d!(1), d!(2)), exec),
            Lanes::D3wwd(f) => self.set_double(to, &f(w!(0), w!(1), d!(2)), exec),
            Lanes::W4(f) => self.set_word(to, &f(w!(0), w!(1), w!(2), w!(3)), exec),
            Lanes::D4(f) => self.set_double(to, &f(d!(0), d!(1), w!(2), w!(3)), exec),
            Lanes::W3dww(f) => self.set_word(to, &f(d!(0), w!(1), w!(2)), exec),
            Lanes::D3dww(f) => self.set_double(to, &f(d!(0), w!(1), w!(2)), exec),
            Lanes::C2(_) | Lanes::C2d(_) => return Err("a comparison".to_owned()),
        }
        Ok(())
    }

    fn operate(
        &mut self,
        world: &mut World,
        i: &Instruction,
        pc: u32,
        mask: u32,
        exec: u32,
    ) -> Result<Flow, String> {
        match i.op {
            Op::Lanes(lanes) => self.apply(world, lanes, i, exec)?,
            Op::Move => {
                if matches!(i.to[0], Value::Word(_)) {
                    let values = self.word(world, i.from[0]);
                    self.set_word(i.to[0], &values, exec);
                } else {
                    let values = self.double(world, i.from[0]);
                    self.set_double(i.to[0], &values, exec);
                }
            }
            Op::Load(access) => self.load(world, access, i, exec)?,
            Op::Store(access) => self.store(world, access, i, exec)?,
            Op::Compare(lanes, combine) => {
                let bits = match lanes {
                    Lanes::C2(f) => f(&self.word(world, i.from[0]), &self.word(world, i.from[1])),
                    Lanes::C2d(f) => f(
                        &self.double(world, i.from[0]),
                        &self.double(world, i.from[1]),
                    ),
                    _ => return Err("no comparison".to_owned()),
                };
                let other = i.from.get(2).map_or(!0, |&value| self.pred(value));
                let with = |bits: u32| match combine {
                    None | Some(Logic::And) => bits & other,
                    Some(Logic::Or) => bits | other,
                    Some(_) => bits ^ other,
                };
                self.set_pred(i.to[0], with(bits), exec);
                if let Some(&second) = i.to.get(1) {
                    self.set_pred(second, with(!bits), exec);
                }
            }
            Op::Logic(logic) => {
                let first = self.pred(i.from[0]);
                let second = i.from.get(1).map_or(0, |&value| self.pred(value));
                let bits = match logic {
                    Logic::And => first & second,
                    Logic::Or => first | second,
                    Logic::Xor => first ^ second,
                    Logic::Not => !first,
                    Logic::Move => first,
                };
                self.set_pred(i.to[0], bits, exec);
            }
            Op::Select => {
                let chosen = self.pred(i.from[2]);
                if matches!(i.to[0], Value::Word(_)) {
                    let (a, b) = (self.word(world, i.from[0]), self.word(world, i.from[1]));
                    let values =
                        std::array::from_fn(|l| if chosen >> l & 1 == 1 { a[l] } else { b[l] });
                    self.set_word(i.to[0], &values, exec);
                } else {
                    let (a, b) = (self.double(world, i.from[0]), self.double(world, i.from[1]));
                    let values =
                        std::array::from_fn(|l| if chosen >> l & 1 == 1 { a[l] } else { b[l] });
                    self.set_double(i.to[0], &values, exec);
                }
            }
            Op::Branch(target) => {
                if exec != mask {
                    self.place(mask & !exec, pc + 1);
                }
                self.place(exec, target);
                return Ok(Flow::Moved);
            }
            Op::BranchTable(table) => {
                let index = self.word(world, i.from[0]);
                self.place(mask & !exec, pc + 1);
                for lane in lanes_of(exec) {
                    let table = &world.kernel.tables[table as usize];
                    self.pcs[lane] = *table.get(index[lane] as usize).ok_or_else(|| {
                        format!(
                            "index {} of a table of {} targets",
                            index[lane],
                            table.len()
                        )
                    })?;
                }
                return Ok(Flow::Moved);
            }
            Op::Exit => {
                self.place(mask & !exec, pc + 1);
                self.exit(world, exec, pc)?;
                return Ok(Flow::Moved);
            }
            Op::Trap => return Err("trap".to_owned()),
            Op::Pack(bytes) => {
                let shift = 8 * u32::from(bytes);
                let kept = if shift >= 64 { !0 } else { (1u64 << shift) - 1 };
                let mut values = [0u64; 32];
                for (e, &from) in i.from.iter().enumerate() {
                    let part = self.double(world, from);
                    for lane in 0..32 {
                        values[lane] |= (part[lane] & kept) << (shift * e as u32);
                    }
                }
                self.set_double(i.to[0], &values, exec);
            }
            Op::Unpack(bytes) => {
                let shift = 8 * u32::from(bytes);
                let kept = (1u64 << shift) - 1;
                let whole = self.double(world, i.from[0]);
                for (e, &to) in i.to.iter().enumerate() {
                    let values = whole.map(|v| (v >> (shift * e as u32)) & kept);
                    self.set_double(to, &values, exec);
                }
            }
            Op::Carry {
                subtract,
                takes,
                sets,
                double,
            } => {
                let (a, b) = (self.double(world, i.from[0]), self.double(world, i.from[1]));
                let mut values = [0u64; 32];
                for lane in lanes_of(exec) {
                    let carry = u128::from(takes && self.carry >> lane & 1 == 1);
                    let (a, b) = (u128::from(a[lane]), u128::from(b[lane]));
                    let wide = if subtract {
                        a.wrapping_sub(b).wrapping_sub(carry)
                    } else {
                        a + b + carry
                    };
                    values[lane] = wide as u64;
                    let out = (wide >> if double { 64 } else { 32 }) & 1;
                    if sets {
                        self.carry = (self.carry & !(1 << lane)) | ((out as u32) << lane);
                    }
                }
                self.set_double(i.to[0], &values, exec);
            }
            Op::Atomic(access, update) => self.atomic(world, access, update, i, exec)?,
            Op::ToGeneric(space) | Op::FromGeneric(space) => {
                let window = match space {
                    Space::Shared => SHARED_WINDOW,
                    Space::Local => LOCAL_WINDOW,
                    Space::Param => PARAM_WINDOW,
                    _ => 0,
                };
                let to_generic = matches!(i.op, Op::ToGeneric(_));
                let values = self
                    .double(world, i.from[0])
                    .map(|v| if to_generic { v | window } else { v & !window });
                self.set_double(i.to[0], &values, exec);
            }
            Op::IsSpace(space) => {
                let values = self.double(world, i.from[0]);
                let mut bits = 0;
                for lane in 0..32 {
                    let of = match values[lane] & WINDOW {
                        SHARED_WINDOW if space == Space::Cluster => Space::Cluster,
                        SHARED_WINDOW => Space::Shared,
                        LOCAL_WINDOW => Space::Local,
                        _ => Space::Global,
                    };
                    bits |= u32::from(of == space) << lane;
                }
                self.set_pred(i.to[0], bits, exec);
            }
            Op::Yield => return Ok(Flow::Turn),
            Op::Nothing | Op::GridWait => {}
            _ => return self.together(world, i, pc, mask, exec),
        }
        Ok(Flow::Next)
    }

    fn exit(&mut self, world: &mut World, exec: u32, pc: u32) -> Result<(), String> {
        self.place(exec, pc);
        self.live &= !exec;
        // Lanes that wait for others look again.
        self.meeting = 0;
        if let Some(copy) = self.copies.iter().find(|copy| exec >> copy.lane & 1 == 1) {
            return Err(format!(
                "lane {} exits with an asynchronous copy that it never waited for ({})",
                copy.lane,
                world.kernel.describe(copy.pc)
            ));
        }
        let block = &mut world.blocks[self.block];
        block.live -= exec.count_ones();
        world.progress = world.executed;
        for id in 0..16 {
            block.complete(id);
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
