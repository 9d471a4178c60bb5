//! The table of instructions, and those on registers and branches.

use super::{Flow, Warp, lanes_of};
use crate::code::{Carry, Instruction, Logic, Op, Value};
use crate::grid::World;
use crate::lanes::Lanes;

impl Warp {
    /// Execute an instruction for the lanes of `exec`; those of `mask` have reached it.
    pub(super) fn operate(
        &mut self,
        world: &mut World,
        i: &Instruction,
        pc: u32,
        mask: u32,
        exec: u32,
    ) -> Result<Flow, String> {
        match i.op {
            Op::Lanes(lanes) => self.apply(world, lanes, i, exec)?,
            Op::Move => self.copy_register(world, i, exec),
            Op::Load(access) => self.load(world, access, i, exec)?,
            Op::Store(access) => self.store(world, access, i, exec)?,
            Op::Atomic(access, update) => self.atomic(world, access, update, i, exec)?,
            Op::Compare(lanes, combine) => self.compare(world, lanes, combine, i, exec)?,
            Op::Logic(logic) => self.combine_predicates(logic, i, exec),
            Op::Select => self.select(world, i, exec),
            Op::Branch(target) => {
                if exec != mask {
                    self.place(mask & !exec, pc + 1);
                }
                self.place(exec, target);
                return Ok(Flow::Moved);
            }
            Op::BranchTable(table) => {
                self.place(mask & !exec, pc + 1);
                self.branch_by_table(world, table, i, exec)?;
                return Ok(Flow::Moved);
            }
            Op::Exit => {
                self.place(mask & !exec, pc + 1);
                self.exit(world, exec, pc)?;
                return Ok(Flow::Moved);
            }
            Op::Trap => return Err("trap".to_owned()),
            Op::Pack(bytes) => self.pack(world, bytes, i, exec),
            Op::Unpack(bytes) => self.unpack(world, bytes, i, exec),
            Op::Carry(carry) => self.add_with_carry(world, carry, i, exec),
            Op::ToGeneric(space) => self.convert_to_generic(world, space, i, exec),
            Op::FromGeneric(space) => self.convert_from_generic(world, space, i, exec),
            Op::IsSpace(space) => self.test_space(world, space, i, exec),
            Op::MapShared { generic } => self.map_shared(world, generic, i, exec)?,
            Op::Rank { .. } => self.rank(world, i, exec),
            Op::Yield => return Ok(Flow::Turn),
            Op::Nothing | Op::GridWait => {}

            // Lanes and warps that work together.
            Op::Shuffle(mode) => self.shuffle(world, mode, i, exec)?,
            Op::Vote(vote) => self.vote(world, vote, i, exec),
            Op::Match { all, .. } => self.match_values(world, all, i, exec),
            Op::Redux(update, ty) => self.reduce(world, update, ty, i, exec)?,
            Op::ActiveMask => self.set_word(i.to[0], &[exec; 32], exec),
            Op::Elect => self.elect(world, i, exec),
            Op::WarpBarrier => {}
            Op::Barrier {
                waits,
                reduce,
                counted,
            } => return self.barrier(world, i, (pc, mask, exec), (waits, reduce, counted)),
            Op::ClusterArrive => self.arrive_at_cluster(world, exec),
            Op::ClusterWait => return self.wait_for_cluster(world, pc, mask, exec),

            // Matrices.
            Op::LoadMatrix(matrices) => self.load_matrices(world, matrices, i, exec)?,
            Op::StoreMatrix(matrices) => self.store_matrices(world, matrices, i)?,
            Op::MoveMatrix => self.transpose_matrix(world, i, exec),
            Op::Product(shape) => self.multiply(world, &shape, i, exec)?,
            Op::WarpgroupProduct(product) => self.wgmma(world, &product, i, exec)?,
            Op::WarpgroupCommit => self.product_group += 1,
            Op::WarpgroupWait => self.wait_for_wgmma(world, i),
            Op::ProxyFence => self.fence_proxies(world, exec),

            // Copies that complete later.
            Op::Copy(copy) => self.begin_copies(world, copy, i, pc, exec)?,
            Op::CommitCopies => lanes_of(exec).for_each(|lane| self.groups[lane] += 1),
            Op::WaitCopies => self.wait_for_copies(world, i, exec)?,
            Op::WaitAllCopies => self.wait_for_all_copies(world, exec)?,
            Op::Mbarrier(kind, offset) => return self.mbarrier(world, i, exec, kind, offset),
            Op::Bulk(kind, to, from) => self.bulk(world, i, (pc, exec), kind, (to, from))?,
            Op::StoreAsync(ty, count, offset) => {
                self.store_async(world, (ty, count, offset), i, exec)?;
            }
        }
        Ok(Flow::Next)
    }

    /// Apply a function of all 32 lanes.
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

    fn copy_register(&mut self, world: &World, i: &Instruction, exec: u32) {
        if matches!(i.to[0], Value::Word(_)) {
            let values = self.word(world, i.from[0]);
            self.set_word(i.to[0], &values, exec);
        } else {
            let values = self.double(world, i.from[0]);
            self.set_double(i.to[0], &values, exec);
        }
    }

    /// `setp`: compare, combine the outcome with a predicate, and write it and its negation.
    fn compare(
        &mut self,
        world: &World,
        lanes: Lanes,
        combine: Option<Logic>,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
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
        Ok(())
    }

    fn combine_predicates(&mut self, logic: Logic, i: &Instruction, exec: u32) {
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

    fn select(&mut self, world: &World, i: &Instruction, exec: u32) {
        let chosen = self.pred(i.from[2]);
        if matches!(i.to[0], Value::Word(_)) {
            let (a, b) = (self.word(world, i.from[0]), self.word(world, i.from[1]));
            let values = std::array::from_fn(|l| if chosen >> l & 1 == 1 { a[l] } else { b[l] });
            self.set_word(i.to[0], &values, exec);
        } else {
            let (a, b) = (self.double(world, i.from[0]), self.double(world, i.from[1]));
            let values = std::array::from_fn(|l| if chosen >> l & 1 == 1 { a[l] } else { b[l] });
            self.set_double(i.to[0], &values, exec);
        }
    }

    /// `brx.idx`: each lane branches to the target that its index names in a table.
    fn branch_by_table(
        &mut self,
        world: &World,
        table: u32,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
        let index = self.word(world, i.from[0]);
        let table = &world.kernel.tables[table as usize];
        for lane in lanes_of(exec) {
            self.pcs[lane] = *table.get(index[lane] as usize).ok_or_else(|| {
                format!(
                    "index {} of a table of {} targets",
                    index[lane],
                    table.len()
                )
            })?;
        }
        Ok(())
    }

    /// Join registers of `bytes` each into a wider one.
    fn pack(&mut self, world: &World, bytes: u8, i: &Instruction, exec: u32) {
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

    /// Split a register into parts of `bytes` each.
    fn unpack(&mut self, world: &World, bytes: u8, i: &Instruction, exec: u32) {
        let shift = 8 * u32::from(bytes);
        let kept = (1u64 << shift) - 1;
        let whole = self.double(world, i.from[0]);
        for (e, &to) in i.to.iter().enumerate() {
            let values = whole.map(|v| (v >> (shift * e as u32)) & kept);
            self.set_double(to, &values, exec);
        }
    }

    fn add_with_carry(&mut self, world: &World, carry: Carry, i: &Instruction, exec: u32) {
        let (a, b) = (self.double(world, i.from[0]), self.double(world, i.from[1]));
        let mut values = [0u64; 32];
        for lane in lanes_of(exec) {
            let flag = u128::from(carry.takes && self.carry >> lane & 1 == 1);
            let (a, b) = (u128::from(a[lane]), u128::from(b[lane]));
            let wide = if carry.subtract {
                a.wrapping_sub(b).wrapping_sub(flag)
            } else {
                a + b + flag
            };
            values[lane] = wide as u64;
            let out = (wide >> carry.bits) & 1;
            if carry.sets {
                self.carry = (self.carry & !(1 << lane)) | ((out as u32) << lane);
            }
        }
        self.set_double(i.to[0], &values, exec);
    }
}
