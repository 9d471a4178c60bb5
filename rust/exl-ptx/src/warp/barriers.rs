//! Barriers of a block and of a cluster.

use super::{Flow, OF_CLUSTER, Warp, lanes_of};
use crate::code::{Instruction, Op, Reduce};
use crate::grid::World;

impl Warp {
    pub(super) fn barrier(
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

    pub(super) fn arrive_at_cluster(&mut self, world: &mut World, exec: u32) {
        self.cluster_arrived |= exec;
        self.cluster_at = world.cluster.generation;
        world.cluster.arrived += exec.count_ones();
        world.complete_cluster();
    }

    pub(super) fn wait_for_cluster(
        &mut self,
        world: &World,
        pc: u32,
        mask: u32,
        exec: u32,
    ) -> Result<Flow, String> {
        if self.cluster_arrived & exec != exec {
            return Err("barrier.cluster.wait without an arrival before".to_owned());
        }
        self.cluster_arrived &= !exec;
        if self.cluster_at == world.cluster.generation {
            return Ok(self.hold(mask, exec, pc, OF_CLUSTER, self.cluster_at));
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
