//! Shuffles, votes and barriers: lanes work together.

use super::Decoded;
use super::line::{Line, unknown};
use super::memory::update;
use crate::code::{Mbarrier, Op, Participants, Reduce, Shuffle, Vote};
use crate::lanes::Type;
use crate::parse::Operand;

impl Line<'_, '_> {
    /// `shfl`, `vote`, `match`, `redux`, `activemask` and `elect`.
    pub(super) fn among_lanes(&self) -> Result<Decoded, String> {
        let s = self.suffixes;
        let (op, participants) = match self.name {
            "shfl" => {
                let mode = match () {
                    () if s.has("up") => Shuffle::Up,
                    () if s.has("down") => Shuffle::Down,
                    () if s.has("bfly") => Shuffle::Butterfly,
                    () => Shuffle::Index,
                };
                (Op::Shuffle(mode), Participants::Mask(3))
            }
            "vote" => {
                let vote = match () {
                    () if s.has("ballot") => Vote::Ballot,
                    () if s.has("all") => Vote::All,
                    () if s.has("any") => Vote::Any,
                    () => Vote::Uniform,
                };
                (Op::Vote(vote), Participants::Mask(1))
            }
            "match" => {
                let (all, double) = (s.has("all"), self.ty == Some(Type::B64));
                (Op::Match { all, double }, Participants::Mask(1))
            }
            "redux" => {
                let update = update(s).ok_or("unknown instruction")?;
                let op = Op::Redux(update, self.ty.ok_or("no type")?);
                (op, Participants::Mask(1))
            }
            "activemask" => (Op::ActiveMask, Participants::None),
            _ => (Op::Elect, Participants::Mask(0)),
        };
        let to = self.results()?;
        if self.name == "elect" && to.len() != 2 {
            return Err("elect needs two results".to_owned());
        }
        Ok((op, participants, to, self.all(1)?))
    }

    /// `bar` and `barrier`.
    pub(super) fn barrier(&self) -> Result<Decoded, String> {
        let s = self.suffixes;
        if s.has("warp") {
            return Ok((Op::WarpBarrier, Participants::Mask(0), vec![], self.all(0)?));
        }
        let participants = if self.name == "bar" || s.has("aligned") {
            Participants::Warp
        } else {
            Participants::None
        };
        if self.name == "barrier" && s.has("cluster") {
            let op = if s.has("arrive") {
                Op::ClusterArrive
            } else {
                Op::ClusterWait
            };
            return Ok((op, participants, vec![], vec![]));
        }
        if s.has("red") {
            let reduce = match () {
                () if s.has("popc") => Reduce::Count,
                () if s.has("and") => Reduce::And,
                () => Reduce::Or,
            };
            let from = self.all(1)?;
            let op = Op::Barrier {
                waits: true,
                reduce,
                counted: from.len() == 3,
            };
            return Ok((op, participants, vec![self.value(0)?], from));
        }
        let from = self.all(0)?;
        let op = Op::Barrier {
            waits: !s.has("arrive"),
            reduce: Reduce::None,
            counted: from.len() == 2,
        };
        Ok((op, participants, vec![], from))
    }

    pub(super) fn mbarrier(&self) -> Result<Decoded, String> {
        let s = self.suffixes;
        let at = self
            .operands
            .iter()
            .position(|o| matches!(o, Operand::Address(..)))
            .ok_or("no address")?;
        let (base, offset, _) = self.address(at)?;
        let mut from = vec![base];
        for i in at + 1..self.operands.len() {
            from.push(self.value(i)?);
        }
        let to = (0..at).map(|i| self.value(i)).collect::<Result<_, _>>()?;
        let kind = match s.0[0] {
            "init" => Mbarrier::Init,
            "inval" => Mbarrier::Invalidate,
            "arrive" => Mbarrier::Arrive {
                expects: s.has("expect_tx"),
                drops: false,
            },
            "arrive_drop" => Mbarrier::Arrive {
                expects: s.has("expect_tx"),
                drops: true,
            },
            "expect_tx" => Mbarrier::ExpectBytes,
            "complete_tx" => Mbarrier::Complete,
            "test_wait" | "try_wait" => Mbarrier::Test {
                parity: s.has("parity"),
            },
            _ => return unknown(),
        };
        Ok((Op::Mbarrier(kind, offset), Participants::None, to, from))
    }
}
