//! Matrix multiplications of a warpgroup.

use crate::code::Instruction;
use crate::grid::World;
use crate::warp::{Flow, Warp};

impl Warp {
    pub fn warpgroup(
        &mut self,
        _: &mut World,
        _: &Instruction,
        _: u32,
        _: u32,
        _: u32,
    ) -> Result<Flow, String> {
        Err("wgmma is not supported".to_owned())
    }
}
