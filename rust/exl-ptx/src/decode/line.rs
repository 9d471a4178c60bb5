//! One instruction without control flow: its operands, and what moves, compares and converts registers.

use super::{Decoded, Decoder, Instance, Place};
use crate::code::{Carry, Logic, Op, Participants, Value};
use crate::lanes::{self, Suffixes, Type};
use crate::parse::{Operand, Raw};

/// An instruction of one inlined function.
pub(super) struct Line<'d, 'a> {
    decoder: &'d Decoder<'a>,
    pub(super) instance: &'d Instance<'a>,
    pub(super) name: &'d str,
    pub(super) operands: &'d [Operand],
    pub(super) suffixes: Suffixes<'d>,
    /// The last type among the suffixes.
    pub(super) ty: Option<Type>,
}

pub(super) fn unknown<T>() -> Result<T, String> {
    Err("unknown instruction".to_owned())
}

impl<'d, 'a> Line<'d, 'a> {
    pub(super) fn new(
        decoder: &'d Decoder<'a>,
        instance: &'d Instance<'a>,
        raw: &'d Raw,
        name: &'d str,
        suffixes: Suffixes<'d>,
    ) -> Self {
        Self {
            decoder,
            instance,
            name,
            operands: &raw.operands,
            suffixes,
            ty: suffixes.0.iter().rev().find_map(|name| Type::named(name)),
        }
    }

    pub(super) fn decode(&self) -> Result<Decoded, String> {
        let predicate = self.ty == Some(Type::Pred);
        let carries = self.name.ends_with('c') || self.suffixes.has("cc");
        match self.name {
            "ld" | "ldu" | "st" | "atom" | "red" => self.access(),
            "cvta" | "isspacep" | "mapa" | "getctarank" => self.spaces(),
            "cp" => self.copy(),
            "ldmatrix" | "stmatrix" => self.matrix(),
            "movmatrix" => Ok((
                Op::MoveMatrix,
                Participants::Warp,
                vec![self.value(0)?],
                self.all(1)?,
            )),
            "mma" => self.product(),
            "wgmma" => self.warpgroup(),
            "shfl" | "vote" | "match" | "redux" | "activemask" | "elect" => self.among_lanes(),
            "bar" | "barrier" => self.barrier(),
            "mbarrier" => self.mbarrier(),
            "mov" => self.moved(),
            "setp" => self.comparison(),
            "and" | "or" | "xor" | "not" if predicate => self.logic(),
            "add" | "sub" | "addc" | "subc" | "mad" | "madc" if carries => self.carry(),
            "cvt" => self.to_one(self.conversion()?),
            "selp" => self.to_one(Op::Select),
            "createpolicy" => {
                let policy = vec![Value::Bits(0)];
                Ok((Op::Move, Participants::None, vec![self.value(0)?], policy))
            }
            "griddepcontrol" if self.suffixes.has("wait") => Ok(alone(Op::GridWait)),
            "fence" if self.suffixes.has("proxy") && self.suffixes.has("async") => {
                Ok(alone(Op::ProxyFence))
            }
            "nanosleep" => Ok(alone(Op::Yield)),
            "griddepcontrol" | "membar" | "fence" | "prefetch" | "prefetchu" | "applypriority"
            | "discard" | "setmaxnreg" | "pmevent" => Ok(alone(Op::Nothing)),
            "trap" | "brkpt" => Ok(alone(Op::Trap)),
            _ => {
                let ty = self.ty.ok_or("unknown instruction")?;
                match lanes::arithmetic(self.name, self.suffixes, ty) {
                    Some(lanes) => self.to_one(Op::Lanes(lanes)),
                    None => unknown(),
                }
            }
        }
    }

    pub(super) fn operand(&self, i: usize) -> Result<&'d Operand, String> {
        self.operands
            .get(i)
            .ok_or_else(|| format!("operand {i} is missing"))
    }

    pub(super) fn value(&self, i: usize) -> Result<Value, String> {
        self.decoder.value(self.instance, self.operand(i)?)
    }

    /// The elements of operand `i`, or itself.
    pub(super) fn values(&self, i: usize) -> Result<Vec<Value>, String> {
        self.decoder.values(self.instance, self.operand(i)?)
    }

    /// The values of operand `first` and of those after it.
    pub(super) fn all(&self, first: usize) -> Result<Vec<Value>, String> {
        let mut list = Vec::new();
        for i in first..self.operands.len() {
            list.extend(self.values(i)?);
        }
        Ok(list)
    }

    /// The first operand as one result, or as a pair `d|p`.
    pub(super) fn results(&self) -> Result<Vec<Value>, String> {
        match self.operand(0)? {
            Operand::Pair(d, p) => Ok(vec![
                self.decoder.value(self.instance, d)?,
                self.decoder.value(self.instance, p)?,
            ]),
            _ => Ok(vec![self.value(0)?]),
        }
    }

    /// Base and offset of an address, and the place of a named parameter or local variable.
    pub(super) fn address(&self, i: usize) -> Result<(Value, i64, Option<Place>), String> {
        self.decoder.address(self.instance, self.operand(i)?)
    }

    /// An operation with one result that takes all other operands.
    pub(super) fn to_one(&self, op: Op) -> Result<Decoded, String> {
        Ok((op, Participants::None, vec![self.value(0)?], self.all(1)?))
    }

    fn moved(&self) -> Result<Decoded, String> {
        if self.ty == Some(Type::Pred) {
            return self.to_one(Op::Logic(Logic::Move));
        }
        let part = |list: &[Operand]| {
            let bytes = self.ty.ok_or("no type")?.bytes();
            Ok::<_, String>((bytes / list.len()) as u8)
        };
        match (self.operand(0)?, self.operand(1)?) {
            (Operand::Vector(list), _) => {
                let op = Op::Unpack(part(list)?);
                Ok((op, Participants::None, self.values(0)?, self.values(1)?))
            }
            (_, Operand::Vector(list)) => self.to_one(Op::Pack(part(list)?)),
            _ => self.to_one(Op::Move),
        }
    }

    fn comparison(&self) -> Result<Decoded, String> {
        let (how, rest) = self.suffixes.0.split_first().ok_or("no comparison")?;
        let ty = self.ty.ok_or("no type")?;
        let lanes = lanes::comparison(how, ty).ok_or("unknown comparison")?;
        if matches!(ty, Type::F16x2 | Type::BF16x2) {
            return unknown();
        }
        let combine = rest.iter().find_map(|name| match *name {
            "and" => Some(Logic::And),
            "or" => Some(Logic::Or),
            "xor" => Some(Logic::Xor),
            _ => None,
        });
        let op = Op::Compare(lanes, combine);
        Ok((op, Participants::None, self.results()?, self.all(1)?))
    }

    fn logic(&self) -> Result<Decoded, String> {
        self.to_one(Op::Logic(match self.name {
            "and" => Logic::And,
            "or" => Logic::Or,
            "xor" => Logic::Xor,
            _ => Logic::Not,
        }))
    }

    fn carry(&self) -> Result<Decoded, String> {
        if self.name.starts_with("mad") {
            return unknown();
        }
        self.to_one(Op::Carry(Carry {
            subtract: self.name.starts_with("sub"),
            takes: self.name.ends_with('c'),
            sets: self.suffixes.has("cc"),
            bits: if self.ty.is_some_and(|t| t.bytes() == 8) {
                64
            } else {
                32
            },
        }))
    }

    fn conversion(&self) -> Result<Op, String> {
        let s = self.suffixes;
        let types: Vec<&str> = s
            .0
            .iter()
            .copied()
            .filter(|name| Type::named(name).is_some() || name.ends_with("x2") || *name == "tf32")
            .collect();
        let &[to, from] = types.as_slice() else {
            return Err(format!("conversion between {types:?}"));
        };
        let found = if self.operands.len() == 3 {
            lanes::pair_conversion(s, to)
        } else if to.ends_with("x2") || from.ends_with("x2") {
            lanes::eight_bit_conversion(to, from)
        } else if to == "tf32" {
            Some(crate::product::to_tf32())
        } else {
            match (Type::named(to), Type::named(from)) {
                (Some(to), Some(from)) => lanes::conversion(s, to, from),
                _ => None,
            }
        };
        found
            .map(Op::Lanes)
            .ok_or_else(|| "unknown conversion".to_owned())
    }
}

/// An operation without results and operands.
fn alone(op: Op) -> Decoded {
    (op, Participants::None, vec![], vec![])
}
