//! A warp: its registers, its lanes' positions, and the execution of its instructions.

mod addresses;
mod barriers;
mod exchange;
mod matrices;
mod memory;
mod operate;
mod values;
mod warpgroup;

use crate::code::{Instruction, Kernel, Participants};
use crate::grid::World;
use crate::lanes::{Doubles, Words};

pub use addresses::shared_of;
pub use memory::updated;

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
    pub waiting: u32,
    pub held: Vec<Held>,
    pub local: Vec<u8>,
    pub copies: Vec<Copy>,
    /// Groups of copies that each lane has closed.
    pub groups: [u32; 32],
    /// Bulk stores that have not been waited for, as (group, action).
    pub stores: Vec<crate::asynchronous::Store>,
    pub store_groups: [u32; 32],
    /// Groups of warpgroup matrix instructions that the warp has closed.
    pub product_group: u32,
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
            waiting: 0,
            held: Vec::new(),
            local: vec![0; kernel.local_bytes * 32],
            copies: Vec::new(),
            groups: [0; 32],
            stores: Vec::new(),
            store_groups: [0; 32],
            product_group: 0,
            cluster_arrived: 0,
            cluster_at: 0,
        }
    }

    /// Lanes that can run.
    pub fn ready(&self) -> u32 {
        let held = self.held.iter().fold(0, |mask, held| mask | held.mask);
        self.live & !self.waiting & !held
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
        if instruction.participants != Participants::None {
            let present = exec | self.at(pc);
            let wanted = self.wanted(world, instruction, present);
            if wanted & !present & self.live != 0 {
                self.place(mask & !exec, pc + 1);
                self.place(exec, pc);
                self.waiting |= exec;
                return Ok(Flow::Moved);
            }
            let joined = present & !exec;
            if joined != 0 {
                self.waiting &= !joined;
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
        lanes_of(self.waiting)
            .filter(|&lane| self.pcs[lane] == pc)
            .fold(0, |mask, lane| mask | (1 << lane))
    }

    /// The lanes that an instruction needs, for those that are present.
    fn wanted(&self, world: &World, instruction: &Instruction, present: u32) -> u32 {
        match instruction.participants {
            Participants::Mask(at) => match instruction.from.get(at as usize) {
                Some(&value) => {
                    let masks = self.word(world, value);
                    lanes_of(present).fold(0, |all, lane| all | masks[lane])
                }
                None => !0,
            },
            _ => !0,
        }
    }

    fn exit(&mut self, world: &mut World, exec: u32, pc: u32) -> Result<(), String> {
        self.place(exec, pc);
        self.live &= !exec;
        // Lanes that wait for others look again.
        self.waiting = 0;
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
