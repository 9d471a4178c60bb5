//! Loads, stores, atomic updates, address spaces and copies.

use super::line::{Line, unknown};
use super::{Decoded, Place};
use crate::code::{Access, Bulk, Mbarrier, Op, Participants, SmallCopy, Space, Update, Value};
use crate::lanes::{Suffixes, Type};
use crate::parse::Operand;

impl Line<'_, '_> {
    /// `ld`, `st`, `atom` and `red`.
    pub(super) fn access(&self) -> Result<Decoded, String> {
        let none = Participants::None;
        let s = self.suffixes;
        match self.name {
            "ld" | "ldu" => {
                let (access, base) = self.accessed(1)?;
                Ok((Op::Load(access), none, self.values(0)?, vec![base]))
            }
            "st" if s.has("async") => {
                let (base, offset, _) = self.address(0)?;
                let (barrier, _, _) = self.address(2)?;
                let values = self.values(1)?;
                let op = Op::StoreAsync(self.ty.ok_or("no type")?, values.len() as u8, offset);
                let from = [base, barrier].into_iter().chain(values).collect();
                Ok((op, none, vec![], from))
            }
            "st" => {
                let (access, base) = self.accessed(0)?;
                let mut from = vec![base];
                from.extend(self.values(1)?);
                Ok((Op::Store(access), none, vec![], from))
            }
            _ if s.has("async") => unknown(),
            _ => {
                let at = usize::from(self.name == "atom");
                let (mut access, base) = self.accessed(at)?;
                access.count = 1;
                let update = update(s).ok_or("unknown instruction")?;
                let mut from = vec![base];
                from.extend(self.all(at + 1)?);
                let to = if at == 1 {
                    vec![self.value(0)?]
                } else {
                    vec![]
                };
                Ok((Op::Atomic(access, update), none, to, from))
            }
        }
    }

    /// `cvta`, `isspacep`, `mapa` and `getctarank`.
    pub(super) fn spaces(&self) -> Result<Decoded, String> {
        let s = self.suffixes;
        let generic = !s.has("shared::cluster");
        let op = match self.name {
            "mapa" => return self.to_one(Op::MapShared { generic }),
            "getctarank" => return self.to_one(Op::Rank { generic }),
            "isspacep" => Op::IsSpace(match s.0.first() {
                Some(&"shared" | &"shared::cta") => Space::Shared,
                Some(&"shared::cluster") => Space::Cluster,
                Some(&"local") => Space::Local,
                _ => Space::Global,
            }),
            _ => {
                let space = match () {
                    () if s.has("shared") || s.has("shared::cta") => Space::Shared,
                    () if s.has("local") => Space::Local,
                    () if s.has("param") => Space::Param,
                    () => Space::Global,
                };
                if s.has("to") {
                    Op::FromGeneric(space)
                } else {
                    Op::ToGeneric(space)
                }
            }
        };
        Ok((
            op,
            Participants::None,
            vec![self.value(0)?],
            vec![self.value(1)?],
        ))
    }

    /// The access at address operand `i`, by the suffixes.
    fn accessed(&self, i: usize) -> Result<(Access, Value), String> {
        let (base, offset, place) = self.address(i)?;
        let mut space = Space::Generic;
        let (mut count, mut ty) = (1, None);
        for suffix in self.suffixes.0 {
            match *suffix {
                "global" | "const" => space = Space::Global,
                "shared" | "shared::cta" => space = Space::Shared,
                "shared::cluster" => space = Space::Cluster,
                "local" => space = Space::Local,
                "param" | "param::entry" | "param::func" => {
                    space = if self.instance.end.is_some() {
                        Space::Local
                    } else {
                        Space::Param
                    };
                }
                "v2" => count = 2,
                "v4" => count = 4,
                "v8" => count = 8,
                other => match Type::named(other) {
                    Some(found) => ty = Some(found),
                    None if KNOWN_HINTS.contains(&other)
                        || other.starts_with("L1::")
                        || other.starts_with("L2::") => {}
                    None => return Err(format!("unknown suffix .{other}")),
                },
            }
        }
        if space == Space::Param
            && let Some(place) = place
        {
            space = match place {
                Place::Param(_) => Space::Param,
                Place::Local(_) => Space::Local,
            };
        }
        let ty = ty.ok_or("no type")?;
        Ok((
            Access {
                space,
                ty,
                count,
                offset,
            },
            base,
        ))
    }

    pub(super) fn copy(&self) -> Result<Decoded, String> {
        let s = self.suffixes;
        let none = Participants::None;
        if s.0.first() == Some(&"reduce") || s.has("bulk") {
            return self.bulk();
        }
        if s.has("commit_group") {
            return Ok((Op::CommitCopies, none, vec![], vec![]));
        }
        if s.has("wait_group") {
            let pending = self.value(0)?;
            return Ok((Op::WaitCopies, none, vec![], vec![pending]));
        }
        if s.has("wait_all") {
            return Ok((Op::WaitAllCopies, none, vec![], vec![]));
        }
        if s.has("mbarrier") {
            let (base, offset, _) = self.address(0)?;
            let op = Op::Mbarrier(
                Mbarrier::ArriveCopies {
                    counted: !s.has("noinc"),
                },
                offset,
            );
            return Ok((op, none, vec![], vec![base]));
        }
        let (target, to_offset, _) = self.address(0)?;
        let (source, from_offset, _) = self.address(1)?;
        let Operand::Integer(bytes) = self.operand(2)? else {
            return Err("a copy's size is no constant".to_owned());
        };
        let mut from = vec![target, source];
        // A policy of the cache is the last operand; the number of bytes to read precedes it.
        let hints = usize::from(s.has("L2::cache_hint"));
        let sized = self.operands.len() > 3 + hints;
        if sized {
            from.push(self.value(3)?);
        }
        let copy = SmallCopy {
            bytes: *bytes as u8,
            sized,
            to_offset,
            from_offset,
        };
        Ok((Op::Copy(copy), none, vec![], from))
    }

    pub(super) fn bulk(&self) -> Result<Decoded, String> {
        let s = self.suffixes;
        let none = Participants::None;
        if s.has("commit_group") {
            return Ok((Op::Bulk(Bulk::Commit, 0, 0), none, vec![], vec![]));
        }
        if s.has("wait_group") {
            let pending = self.value(0)?;
            return Ok((
                Op::Bulk(
                    Bulk::Wait {
                        reads: s.has("read"),
                    },
                    0,
                    0,
                ),
                none,
                vec![],
                vec![pending],
            ));
        }
        if s.has("prefetch") {
            return Ok((Op::Nothing, none, vec![], vec![]));
        }
        if s.has("tensor") {
            return unknown();
        }
        let (target, to_offset, _) = self.address(0)?;
        let (source, from_offset, _) = self.address(1)?;
        let size = self.value(2)?;
        let mut from = vec![target, source, size];
        let spaces: Vec<&str> =
            s.0.iter()
                .copied()
                .filter(|n| n.starts_with("shared") || *n == "global")
                .collect();
        let kind = match spaces.as_slice() {
            ["shared::cluster" | "shared::cta", "global"] => {
                from.push(self.address(3)?.0);
                let multicast = s.has("multicast::cluster");
                if multicast {
                    from.push(self.value(4)?);
                }
                Bulk::Load { multicast }
            }
            ["shared::cluster", "shared::cta"] => {
                from.push(self.address(3)?.0);
                Bulk::ToCluster
            }
            ["global", "shared::cta"] if s.0.first() == Some(&"reduce") => {
                let ty =
                    s.0.iter()
                        .rev()
                        .find_map(|name| Type::named(name))
                        .ok_or("no type")?;
                Bulk::ReduceAdd(ty)
            }
            ["global", "shared::cta"] => Bulk::Store,
            _ => return unknown(),
        };
        Ok((Op::Bulk(kind, to_offset, from_offset), none, vec![], from))
    }
}

/// The update that the suffixes of `atom`, `red` or `redux` name.
pub(super) fn update(s: Suffixes) -> Option<Update> {
    Some(match () {
        () if s.has("add") => Update::Add,
        () if s.has("min") => Update::Min,
        () if s.has("max") => Update::Max,
        () if s.has("and") => Update::And,
        () if s.has("or") => Update::Or,
        () if s.has("xor") => Update::Xor,
        () if s.has("exch") => Update::Exchange,
        () if s.has("cas") => Update::Compare,
        () if s.has("inc") => Update::Increment,
        () if s.has("dec") => Update::Decrement,
        () => return None,
    })
}

/// Suffixes of accesses that change nothing here: caches, ordering and scopes.
const KNOWN_HINTS: &[&str] = &[
    "volatile", "relaxed", "acquire", "release", "acq_rel", "weak", "mmio", "cta", "cluster",
    "gpu", "sys", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc", "add", "min", "max", "and", "or",
    "xor", "exch", "cas", "inc", "dec", "noftz", "unified",
];
