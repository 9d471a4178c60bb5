//! Matrix instructions of a warpgroup (`wgmma`). Each warp multiplies its 16 rows of A as soon as it reaches the instruction.
//!
//! A card may read later, so what it relies on is checked: shared memory must be visible to the instruction (`fence.proxy.async` after
//! ordinary stores) and must not be written before a `wgmma.wait_group` that covers the instruction. Registers that are used too early are
//! not found.

use super::{Warp, lanes_of};
use crate::code::{Element, Instruction, Space, WarpgroupProduct};
use crate::grid::World;
use crate::lanes::Words;
use crate::memory::{KNOWN, Reading, SHARED_START, UNFENCED, read};
use crate::product;

/// Values of K in an instruction for elements of 16 bits, and the bytes of a chunk, which has eight of them.
const DEPTH: usize = 16;
const CHUNK: usize = 16;
const ROWS_OF_A_WARP: usize = 16;

/// A matrix in shared memory, as its descriptor says ("Asynchronous warpgroup-level matrix shared memory layout" in the PTX ISA).
#[derive(Clone, Copy)]
struct Stored {
    start: u64,
    /// Bytes between neighbours along the leading dimension and along the other one.
    leading: u64,
    stride: u64,
    /// Bytes in which chunks are exchanged by address: 128, 64, 32, or 16 for none.
    swizzle: u64,
    /// Whether rows of A (columns of B) are contiguous instead of values of K.
    transposed: bool,
}

impl Stored {
    fn of(descriptor: u64, transposed: bool) -> Result<Self, String> {
        let field = |at: u32| (descriptor >> at & 0x3fff) * 16;
        if descriptor >> 49 & 7 != 0 {
            return Err(format!(
                "descriptor {descriptor:#x} of a matrix has a base offset, which is not supported"
            ));
        }
        let swizzle = [16, 128, 64, 32][(descriptor >> 62) as usize];
        Ok(Self {
            start: field(0),
            leading: field(16),
            stride: field(32),
            swizzle,
            transposed,
        })
    }

    /// The address of the chunk with value `k` of row (or column) `at`.
    fn address(&self, at: u64, k: u64) -> u64 {
        let in_row = self.swizzle / 16;
        let offset = match (self.transposed, in_row) {
            (false, 1) => at % 8 * 16 + at / 8 * self.stride + k / 8 * self.leading,
            (false, _) => at % 8 * self.swizzle + at / 8 * self.stride + k / 8 * 16,
            (true, 1) => k % 8 * 16 + at / 8 * self.stride + k / 8 * self.leading,
            (true, _) => {
                let across = at / 8 % in_row * 16 + at / 8 / in_row * self.leading;
                across + k % 8 * self.swizzle + k / 8 * self.stride
            }
        };
        let address = self.start + offset;
        // Bits 4.. are exchanged with bits 7.., as many as number the chunks of a row.
        address ^ (address >> 3 & (self.swizzle - 16))
    }
}

impl Warp {
    /// `wgmma.mma_async`
    pub(super) fn wgmma(
        &mut self,
        world: &mut World,
        product: &WarpgroupProduct,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
        let shape = &product.shape;
        let two_bytes = |e: Element| matches!(e, Element::F16 | Element::BF16);
        if exec != !0 {
            return Err("wgmma by a part of a warp".to_owned());
        }
        if !two_bytes(shape.a)
            || shape.a != shape.b
            || shape.k != DEPTH
            || !shape.n.is_multiple_of(8)
        {
            return Err("wgmma of other types than f16 and bf16 is not supported".to_owned());
        }
        let sums = i.to.len();
        let (b_at, needed) = if product.a_in_registers {
            (sums + 4, 5)
        } else {
            (sums + 1, 6)
        };
        if i.from.len() != b_at + needed || !sums.is_multiple_of(shape.n / 8) {
            return Err("wrong number of operands".to_owned());
        }
        let flag = |at: usize| self.word(world, i.from[at])[0];
        if flag(b_at + 2) != 1 || flag(b_at + 3) != 1 {
            return Err("wgmma with a negated operand is not supported".to_owned());
        }
        let adds = self.pred(i.from[b_at + 1]) & 1 != 0;
        let b_transposed = flag(b_at + needed - 1) != 0;
        let a = if product.a_in_registers {
            (0..4).map(|r| self.word(world, i.from[sums + r])).collect()
        } else {
            let stored = Stored::of(self.descriptor(world, i, sums)?, flag(b_at + 4) != 0)?;
            self.fragment_of_a(world, &stored)?
        };
        let stored = Stored::of(self.descriptor(world, i, b_at)?, b_transposed)?;
        let each = sums / (shape.n / 8);
        for block in 0..shape.n / 8 {
            let b = self.fragment(world, &stored, 8 * block, 1)?;
            let to = &i.to[each * block..each * (block + 1)];
            let before: Vec<Words> = i.from[each * block..each * (block + 1)]
                .iter()
                .map(|&value| {
                    if adds {
                        self.word(world, value)
                    } else {
                        [0; 32]
                    }
                })
                .collect();
            for (&to, values) in to.iter().zip(&product::multiply(shape, &a, &b, &before)) {
                self.set_word(to, values, exec);
            }
        }
        Ok(())
    }

    /// A descriptor, the same in all lanes.
    fn descriptor(&self, world: &World, i: &Instruction, at: usize) -> Result<u64, String> {
        let values = self.double(world, i.from[at]);
        if values.iter().any(|&value| value != values[0]) {
            return Err("lanes have different descriptors of a matrix".to_owned());
        }
        Ok(values[0])
    }

    fn fragment_of_a(&self, world: &mut World, stored: &Stored) -> Result<Vec<Words>, String> {
        let first = self.number as usize % 4 * ROWS_OF_A_WARP;
        self.fragment(world, stored, first, 2)
    }

    /// Registers of `eights` times 8 rows of A, or of 8 columns of B, in the order of `mma`.
    fn fragment(
        &self,
        world: &mut World,
        stored: &Stored,
        first: usize,
        eights: usize,
    ) -> Result<Vec<Words>, String> {
        let mut words = vec![[0u32; 32]; 2 * eights];
        for (number, register) in words.iter_mut().enumerate() {
            let (eight, half) = (number % eights, number / eights);
            let values = self.core_matrix(world, stored, first + 8 * eight, 8 * half)?;
            *register = std::array::from_fn(|lane| {
                let (row, k) = (lane / 4, lane % 4 * 2);
                u32::from(values[row][k]) | u32::from(values[row][k + 1]) << 16
            });
        }
        Ok(words)
    }

    /// Eight values of K, from `k` on, of eight rows of A or columns of B, from `first` on.
    fn core_matrix(
        &self,
        world: &mut World,
        stored: &Stored,
        first: usize,
        k: usize,
    ) -> Result<[[u16; 8]; 8], String> {
        let mut values = [[0u16; 8]; 8];
        for chunk in 0..8 {
            let (row, depth) = if stored.transposed {
                (first, k + chunk)
            } else {
                (first + chunk, k)
            };
            let address = stored.address(row as u64, depth as u64);
            let from = self.chunk(world, address)?;
            for e in 0..8 {
                // SAFETY: `chunk` has checked 16 bytes.
                let value = unsafe { read(from.add(2 * e), 2) } as u16;
                if stored.transposed {
                    values[e][chunk] = value;
                } else {
                    values[chunk][e] = value;
                }
            }
        }
        Ok(values)
    }

    /// Checks a chunk of shared memory, and notes that the warp reads it until it waits.
    fn chunk(&self, world: &mut World, address: u64) -> Result<*const u8, String> {
        let from = self.resolve(world, Space::Shared, 0, address, CHUNK, true)?;
        let start = address as usize - SHARED_START;
        let block = &mut world.blocks[self.block];
        let range = start..start + CHUNK;
        if block.known[range.clone()].contains(&UNFENCED) {
            return Err(format!(
                "a matrix instruction reads offset {start} of shared memory, which was written without a `fence.proxy.async` after it"
            ));
        }
        let (warp, group) = (self.number, self.product_group);
        let before =
            |read: &&mut Reading| (read.warp, read.group, read.range.end) == (warp, group, start);
        match block.reads.iter_mut().rev().take(8).find(before) {
            Some(read) => read.range.end = range.end,
            None => block.reads.push(Reading { warp, group, range }),
        }
        Ok(from)
    }

    /// `wgmma.wait_group`: the groups before the last `pending` have read their operands.
    pub(super) fn wait_for_wgmma(&self, world: &mut World, i: &Instruction) {
        let pending = self.word(world, i.from[0])[0];
        let finished = self.product_group.saturating_sub(pending);
        world.blocks[self.block]
            .reads
            .retain(|read| read.warp != self.number || read.group >= finished);
    }

    /// `fence.proxy.async`: what these lanes have written is visible to matrix instructions and bulk copies.
    pub(super) fn fence_proxies(&self, world: &mut World, exec: u32) {
        let block = &mut world.blocks[self.block];
        let lanes: u32 = lanes_of(exec).fold(0, |mask, lane| mask | 1 << lane);
        for (state, &writer) in block.known.iter_mut().zip(&block.writers) {
            let (warp, lane) = (u32::from(writer) / 32, writer % 32);
            if *state == UNFENCED && warp == self.number && lanes >> lane & 1 != 0 {
                *state = KNOWN;
            }
        }
    }
}
