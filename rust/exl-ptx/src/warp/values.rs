//! Reading and writing a warp's registers.

use super::{Warp, lanes_of};
use crate::code::{Special, Value};
use crate::grid::World;
use crate::lanes::{Doubles, Words};

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
    pub(super) fn set_lane(&mut self, to: Value, lane: usize, value: u64) {
        match to {
            Value::Word(r) => self.words[r as usize][lane] = value as u32,
            Value::Double(r) => self.doubles[r as usize][lane] = value,
            _ => {}
        }
    }

    pub(super) fn lane(&self, world: &World, value: Value, lane: usize) -> u64 {
        match value {
            Value::Word(r) => u64::from(self.words[r as usize][lane]),
            Value::Double(r) => self.doubles[r as usize][lane],
            Value::Bits(bits) => bits,
            other => self.double(world, other)[lane],
        }
    }

    pub(super) fn special(&self, world: &World, special: Special) -> Doubles {
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
}
