//! Instructions of one lane's registers, branches and spaces.

use super::{Flow, Warp, lanes_of};
use crate::code::{Instruction, Logic, Op, Space, Value};
use crate::grid::World;
use crate::lanes::Lanes;
use crate::memory::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW};

impl Warp {
    pub(super) fn apply(
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
}
