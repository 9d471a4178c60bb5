//! Instructions that exchange values between the lanes of a warp.

use super::{Warp, lanes_of, updated};
use crate::code::{Instruction, Shuffle, Update, Vote};
use crate::grid::World;
use crate::lanes::Type;

impl Warp {
    pub(super) fn shuffle(
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

    pub(super) fn vote(&mut self, world: &World, vote: Vote, i: &Instruction, exec: u32) {
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

    /// `match.any` and `match.all`: the lanes that have the same value.
    pub(super) fn match_values(&mut self, world: &World, all: bool, i: &Instruction, exec: u32) {
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

    /// `redux`: combine the values of all lanes.
    pub(super) fn reduce(
        &mut self,
        world: &World,
        update: Update,
        ty: Type,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
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
        Ok(())
    }

    /// `elect`: choose the lowest lane.
    pub(super) fn elect(&mut self, world: &World, i: &Instruction, exec: u32) {
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
}
