//! Conversions between addresses of the state spaces, and addresses in other blocks of a cluster.

use super::{Warp, lanes_of};
use crate::code::{Instruction, Space};
use crate::grid::World;
use crate::memory::{LOCAL_WINDOW, PARAM_WINDOW, RANK_SHIFT, SHARED_WINDOW, WINDOW};

/// The generic addresses of a space.
fn window_of(space: Space) -> u64 {
    match space {
        Space::Shared => SHARED_WINDOW,
        Space::Local => LOCAL_WINDOW,
        Space::Param => PARAM_WINDOW,
        _ => 0,
    }
}

/// The address in shared memory of a generic or shared address.
pub fn shared_of(address: u64) -> u64 {
    address & !WINDOW
}

impl Warp {
    pub(super) fn convert_to_generic(
        &mut self,
        world: &World,
        space: Space,
        i: &Instruction,
        exec: u32,
    ) {
        let window = window_of(space);
        let values = self.double(world, i.from[0]).map(|v| v | window);
        self.set_double(i.to[0], &values, exec);
    }

    pub(super) fn convert_from_generic(
        &mut self,
        world: &World,
        space: Space,
        i: &Instruction,
        exec: u32,
    ) {
        let window = window_of(space);
        let values = self.double(world, i.from[0]).map(|v| v & !window);
        self.set_double(i.to[0], &values, exec);
    }

    /// `isspacep`
    pub(super) fn test_space(&mut self, world: &World, space: Space, i: &Instruction, exec: u32) {
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

    /// `mapa`: the address of the same variable in the shared memory of another block of the cluster.
    pub(super) fn map_shared(
        &mut self,
        world: &World,
        generic: bool,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
        let (addresses, ranks) = (self.double(world, i.from[0]), self.word(world, i.from[1]));
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
        Ok(())
    }

    /// `getctarank`: the rank of the block whose shared memory contains an address.
    pub(super) fn rank(&mut self, world: &World, i: &Instruction, exec: u32) {
        let own = world.blocks[self.block].rank;
        let values = self.double(world, i.from[0]).map(|address| {
            let rank = (address >> RANK_SHIFT) as u32 & 0xff;
            if rank == 0 { own } else { rank - 1 }
        });
        self.set_word(i.to[0], &values, exec);
    }
}
