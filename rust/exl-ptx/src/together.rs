//! Instructions that exchange values between lanes, and barriers.

use crate::code::{Instruction, Op, Reduce, Shuffle, Space, Update, Vote};
use crate::grid::World;
use crate::lanes::{Type, Words};
use crate::memory::{RANK_SHIFT, SHARED_WINDOW, read, write};
use crate::product;
use crate::warp::{Flow, OF_CLUSTER, Warp, lanes_of, updated};

impl Warp {
    #[allow(clippy::too_many_lines)]
    pub fn together(
        &mut self,
        world: &mut World,
        i: &Instruction,
        pc: u32,
        mask: u32,
        exec: u32,
    ) -> Result<Flow, String> {
        match i.op {
            Op::Shuffle(mode) => self.shuffle(world, mode, i, exec)?,
            Op::Vote(vote) => {
                let bits = self.pred(i.from[0]);
                let members = self.word(world, i.from[1]);
                let mut words = [0; 32];
                let mut out = 0;
                for lane in lanes_of(exec) {
                    let group = members[lane] & exec;
                    words[lane] = bits & group;
                    let yes = match vote {
                        Vote::All | Vote::Ballot => bits & group == group,
                        Vote::Any => bits & group != 0,
                        Vote::Uniform => bits & group == group || bits & group == 0,
                    };
                    out |= u32::from(yes) << lane;
                }
                if vote == Vote::Ballot {
                    self.set_word(i.to[0], &words, exec);
                } else {
                    self.set_pred(i.to[0], out, exec);
                }
            }
            Op::Match { all, .. } => {
                let values = self.double(world, i.from[0]);
                let members = self.word(world, i.from[1]);
                let mut words = [0; 32];
                let mut same = 0;
                for lane in lanes_of(exec) {
                    let group = members[lane] & exec;
                    let equal = lanes_of(group)
                        .filter(|&other| values[other] == values[lane])
                        .fold(0u32, |mask, other| mask | (1 << other));
                    words[lane] = if !all || equal == group { equal } else { 0 };
                    same |= u32::from(equal == group) << lane;
                }
                self.set_word(i.to[0], &words, exec);
                if let Some(&to) = i.to.get(1) {
                    self.set_pred(to, same, exec);
                }
            }
            Op::Redux(update, ty) => {
                let values = self.word(world, i.from[0]);
                let members = self.word(world, i.from[1]);
                let mut words = [0; 32];
                for lane in lanes_of(exec) {
                    let mut group = lanes_of(members[lane] & exec);
                    let mut total = group.next().map_or(0, |first| u64::from(values[first]));
                    let ty = if update == Update::Add { Type::U32 } else { ty };
                    for other in group {
                        total = updated(ty, update, total, u64::from(values[other]), 0)?;
                    }
                    words[lane] = total as u32;
                }
                self.set_word(i.to[0], &words, exec);
            }
            Op::ActiveMask => self.set_word(i.to[0], &[exec; 32], exec),
            Op::Elect => {
                let members = self.word(world, i.from[0]);
                let mut words = [0; 32];
                let mut chosen = 0;
                for lane in lanes_of(exec) {
                    let leader = (members[lane] & exec).trailing_zeros();
                    words[lane] = leader;
                    chosen |= u32::from(leader == lane as u32) << lane;
                }
                self.set_word(i.to[0], &words, exec);
                self.set_pred(i.to[1], chosen, exec);
            }
            Op::WarpBarrier => {}
            Op::Barrier {
                waits,
                reduce,
                counted,
            } => {
                return self.barrier(world, i, (pc, mask, exec), (waits, reduce, counted));
            }
            Op::ClusterArrive => {
                self.cluster_arrived |= exec;
                self.cluster_at = world.cluster.generation;
                world.cluster.arrived += exec.count_ones();
                world.complete_cluster();
            }
            Op::ClusterWait => {
                if self.cluster_arrived & exec != exec {
                    return Err("barrier.cluster.wait without an arrival before".to_owned());
                }
                self.cluster_arrived &= !exec;
                if self.cluster_at == world.cluster.generation {
                    return Ok(self.hold(mask, exec, pc, OF_CLUSTER, self.cluster_at));
                }
            }
            Op::LoadMatrix {
                count,
                transposed,
                offset,
            } => {
                let addresses = self.double(world, i.from[0]);
                for matrix in 0..usize::from(count) {
                    let mut rows = [[0u16; 8]; 8];
                    for (row, values) in rows.iter_mut().enumerate() {
                        let lane = matrix * 8 + row;
                        let address = addresses[lane].wrapping_add_signed(offset);
                        let at =
                            self.resolve(world, Space::Shared, lane, shared_of(address), 16, true)?;
                        for (e, value) in values.iter_mut().enumerate() {
                            // SAFETY: `resolve` has checked 16 bytes.
                            *value = unsafe { read(at.add(2 * e), 2) } as u16;
                        }
                    }
                    let words: Words = std::array::from_fn(|lane| {
                        let (row, column) = (lane / 4, lane % 4 * 2);
                        let pick = |e: usize| {
                            u32::from(if transposed {
                                rows[column + e][row]
                            } else {
                                rows[row][column + e]
                            })
                        };
                        pick(0) | (pick(1) << 16)
                    });
                    self.set_word(i.to[matrix], &words, exec);
                }
            }
            Op::StoreMatrix {
                count,
                transposed,
                offset,
            } => {
                let addresses = self.double(world, i.from[0]);
                for matrix in 0..usize::from(count) {
                    let words = self.word(world, i.from[1 + matrix]);
                    for row in 0..8 {
                        let lane = matrix * 8 + row;
                        let address = addresses[lane].wrapping_add_signed(offset);
                        let at = self.resolve(
                            world,
                            Space::Shared,
                            lane,
                            shared_of(address),
                            16,
                            false,
                        )?;
                        for e in 0..8 {
                            let (r, c) = if transposed { (e, row) } else { (row, e) };
                            let value = words[r * 4 + c / 2] >> (16 * (c % 2));
                            // SAFETY: `resolve` has checked 16 bytes.
                            unsafe { write(at.add(2 * e), 2, u64::from(value & 0xffff)) };
                        }
                    }
                }
                world.progress = world.executed;
            }
            Op::MoveMatrix => {
                let words = self.word(world, i.from[0]);
                let get = |row: usize, column: usize| {
                    (words[row * 4 + column / 2] >> (16 * (column % 2))) & 0xffff
                };
                let moved: Words = std::array::from_fn(|lane| {
                    let (row, column) = (lane / 4, lane % 4 * 2);
                    get(column, row) | (get(column + 1, row) << 16)
                });
                self.set_word(i.to[0], &moved, exec);
            }
            Op::Product(shape) => {
                if exec != !0 {
                    return Err("mma by a part of a warp".to_owned());
                }
                let words: Vec<Words> = i
                    .from
                    .iter()
                    .map(|&value| self.word(world, value))
                    .collect();
                let c = i.to.len();
                let eb = product::bytes_of(shape.a);
                let a = 16 * shape.k * eb / 128;
                let (a, rest) = words.split_at_checked(a).ok_or("too few registers")?;
                let (b, c_words) = rest
                    .split_at_checked(rest.len().saturating_sub(c))
                    .ok_or("too few registers")?;
                let out = product::multiply(&shape, a, b, c_words);
                for (&to, values) in i.to.iter().zip(&out) {
                    self.set_word(to, values, exec);
                }
            }
            Op::MapShared { generic } => {
                let (addresses, ranks) =
                    (self.double(world, i.from[0]), self.word(world, i.from[1]));
                let blocks = world.blocks.len() as u32;
                if let Some(lane) = lanes_of(exec).find(|&lane| ranks[lane] >= blocks) {
                    return Err(format!(
                        "mapa to rank {} of {blocks} (lane {lane})",
                        ranks[lane]
                    ));
                }
                let values = std::array::from_fn(|lane| {
                    let offset = addresses[lane] & ((1 << RANK_SHIFT) - 1);
                    let window = if generic { SHARED_WINDOW } else { 0 };
                    window | offset | (u64::from(ranks[lane] + 1) << RANK_SHIFT)
                });
                self.set_double(i.to[0], &values, exec);
            }
            Op::Rank { .. } => {
                let own = world.blocks[self.block].rank;
                let values = self.double(world, i.from[0]).map(|address| {
                    let rank = (address >> RANK_SHIFT) as u32 & 0xff;
                    if rank == 0 { own } else { rank - 1 }
                });
                self.set_word(i.to[0], &values, exec);
            }
            _ => return self.asynchronous(world, i, pc, mask, exec),
        }
        Ok(Flow::Next)
    }

    fn shuffle(
        &mut self,
        world: &World,
        mode: Shuffle,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
        let (values, by) = (self.word(world, i.from[0]), self.word(world, i.from[1]));
        let (control, members) = (self.word(world, i.from[2]), self.word(world, i.from[3]));
        let mut words = values;
        let mut valid = 0;
        for lane in lanes_of(exec) {
            if members[lane] >> lane & 1 == 0 {
                return Err(format!(
                    "shfl by lane {lane}, which its mask {:#x} lacks",
                    members[lane]
                ));
            }
            let clamp = (control[lane] & 31) as i32;
            let segment = (control[lane] >> 8 & 31) as i32;
            let (own, b) = (lane as i32, (by[lane] & 31) as i32);
            let highest = (own & segment) | (clamp & !segment);
            let lowest = own & segment;
            let (from, inside) = match mode {
                Shuffle::Up => (own - b, own - b >= highest),
                Shuffle::Down => (own + b, own + b <= highest),
                Shuffle::Butterfly => (own ^ b, own ^ b <= highest),
                Shuffle::Index => {
                    let from = lowest | (b & !segment);
                    (from, from <= highest)
                }
            };
            let from = if inside { from as usize } else { lane };
            if exec >> from & 1 == 0 {
                return Err(format!(
                    "shfl: lane {lane} reads lane {from}, which does not take part"
                ));
            }
            words[lane] = values[from];
            valid |= u32::from(inside) << lane;
        }
        self.set_word(i.to[0], &words, exec);
        if let Some(&to) = i.to.get(1) {
            self.set_pred(to, valid, exec);
        }
        Ok(())
    }

    fn barrier(
        &mut self,
        world: &mut World,
        i: &Instruction,
        (pc, mask, exec): (u32, u32, u32),
        (waits, reduce, counted): (bool, Reduce, bool),
    ) -> Result<Flow, String> {
        let first = exec.trailing_zeros() as usize;
        let ids = self.word(world, i.from[0]);
        let id = ids[first] as usize;
        if id >= 16 || lanes_of(exec).any(|lane| ids[lane] as usize != id) {
            return Err(format!(
                "barrier {id}: the number must be below 16 and the same in all lanes"
            ));
        }
        let expected = if counted {
            self.word(world, i.from[1])[first]
        } else {
            0
        };
        if !expected.is_multiple_of(32) {
            return Err(format!(
                "barrier {id} of {expected} threads, which is no multiple of 32"
            ));
        }
        let votes = match reduce {
            Reduce::None => 0,
            _ => self.pred(i.from[i.from.len() - 1]) & exec,
        };
        let block = &mut world.blocks[self.block];
        let barrier = &mut block.barriers[id];
        if barrier.arrived > 0 && barrier.expected != expected {
            return Err(format!(
                "barrier {id} of {expected} threads, but others arrived at it as one of {} (0: the block)",
                barrier.expected
            ));
        }
        if barrier.arrived == 0 {
            barrier.all = true;
        }
        barrier.expected = expected;
        // An aligned barrier counts whole warps.
        barrier.arrived += if exec == self.live {
            exec.count_ones().max(if expected > 0 { 32 } else { 0 })
        } else {
            exec.count_ones()
        };
        barrier.count += votes.count_ones();
        barrier.all &= reduce != Reduce::And || votes == exec;
        if expected > 0 && barrier.arrived > expected {
            return Err(format!(
                "barrier {id} of {expected} threads: more have arrived"
            ));
        }
        let generation = barrier.generation;
        if block.complete(id) {
            world.progress = world.executed;
        }
        if waits {
            return Ok(self.hold(mask, exec, pc, id, generation));
        }
        Ok(Flow::Next)
    }

    /// Let lanes go whose barrier is complete. Returns whether there were some.
    pub fn release(&mut self, world: &mut World) -> bool {
        if self.held.is_empty() {
            return false;
        }
        let held = std::mem::take(&mut self.held);
        let mut some = false;
        for lanes in held {
            let generation = if lanes.id == OF_CLUSTER {
                world.cluster.generation
            } else {
                world.blocks[self.block].barriers[lanes.id].generation
            };
            if generation == lanes.generation {
                self.held.push(lanes);
                continue;
            }
            some = true;
            let i = &world.kernel.code[lanes.pc as usize];
            if let Op::Barrier { reduce, .. } = i.op
                && reduce != Reduce::None
            {
                let (count, all) = world.blocks[self.block].barriers[lanes.id].result;
                match reduce {
                    Reduce::Count => self.set_word(i.to[0], &[count; 32], lanes.mask),
                    Reduce::And => self.set_pred(i.to[0], if all { !0 } else { 0 }, lanes.mask),
                    _ => self.set_pred(i.to[0], if count > 0 { !0 } else { 0 }, lanes.mask),
                }
            }
            for lane in lanes_of(lanes.mask) {
                self.pcs[lane] = lanes.pc + 1;
            }
        }
        some
    }
}

/// The address in shared memory of a generic or shared address.
fn shared_of(address: u64) -> u64 {
    address & !crate::memory::WINDOW
}
