//! Loads, stores, transpositions and multiplications of matrices that a warp holds.

use super::Warp;
use super::addresses::shared_of;
use crate::code::{Instruction, Matrices, Product, Space};
use crate::grid::World;
use crate::lanes::Words;
use crate::memory::{read, write};
use crate::product;

impl Warp {
    /// `ldmatrix`
    pub(super) fn load_matrices(
        &mut self,
        world: &mut World,
        matrices: Matrices,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
        let addresses = self.double(world, i.from[0]);
        for matrix in 0..usize::from(matrices.count) {
            let mut rows = [[0u16; 8]; 8];
            for (row, values) in rows.iter_mut().enumerate() {
                let lane = matrix * 8 + row;
                let address = addresses[lane].wrapping_add_signed(matrices.offset);
                let at = self.resolve(world, Space::Shared, lane, shared_of(address), 16, true)?;
                for (e, value) in values.iter_mut().enumerate() {
                    // SAFETY: `resolve` has checked 16 bytes.
                    *value = unsafe { read(at.add(2 * e), 2) } as u16;
                }
            }
            let words: Words = std::array::from_fn(|lane| {
                let (row, column) = (lane / 4, lane % 4 * 2);
                let pick = |e: usize| {
                    u32::from(if matrices.transposed {
                        rows[column + e][row]
                    } else {
                        rows[row][column + e]
                    })
                };
                pick(0) | (pick(1) << 16)
            });
            self.set_word(i.to[matrix], &words, exec);
        }
        Ok(())
    }

    /// `stmatrix`
    pub(super) fn store_matrices(
        &mut self,
        world: &mut World,
        matrices: Matrices,
        i: &Instruction,
    ) -> Result<(), String> {
        let addresses = self.double(world, i.from[0]);
        for matrix in 0..usize::from(matrices.count) {
            let words = self.word(world, i.from[1 + matrix]);
            for row in 0..8 {
                let lane = matrix * 8 + row;
                let address = addresses[lane].wrapping_add_signed(matrices.offset);
                let at = self.resolve(world, Space::Shared, lane, shared_of(address), 16, false)?;
                for e in 0..8 {
                    let (r, c) = if matrices.transposed {
                        (e, row)
                    } else {
                        (row, e)
                    };
                    let value = words[r * 4 + c / 2] >> (16 * (c % 2));
                    // SAFETY: `resolve` has checked 16 bytes.
                    unsafe { write(at.add(2 * e), 2, u64::from(value & 0xffff)) };
                }
            }
        }
        world.progress = world.executed;
        Ok(())
    }

    /// `movmatrix`
    pub(super) fn transpose_matrix(&mut self, world: &World, i: &Instruction, exec: u32) {
        let words = self.word(world, i.from[0]);
        let get = |row: usize, column: usize| {
            (words[row * 4 + column / 2] >> (16 * (column % 2))) & 0xffff
        };
        let moved: Words = std::array::from_fn(|lane| {
            let (row, column) = (lane / 4, lane % 4 * 2);
            get(column, row) | (get(column + 1, row) << 16)
        });
        self.set_word(i.to[0], &moved, exec);
    }

    /// `mma`
    pub(super) fn multiply(
        &mut self,
        world: &World,
        shape: &Product,
        i: &Instruction,
        exec: u32,
    ) -> Result<(), String> {
        if exec != !0 {
            return Err("mma by a part of a warp".to_owned());
        }
        let words: Vec<Words> = i
            .from
            .iter()
            .map(|&value| self.word(world, value))
            .collect();
        let c = i.to.len();
        let eb = product::bytes_of(shape.a);
        let a = 16 * shape.k * eb / 128;
        let (a, rest) = words.split_at_checked(a).ok_or("too few registers")?;
        let (b, c_words) = rest
            .split_at_checked(rest.len().saturating_sub(c))
            .ok_or("too few registers")?;
        let out = product::multiply(shape, a, b, c_words);
        for (&to, values) in i.to.iter().zip(&out) {
            self.set_word(to, values, exec);
        }
        Ok(())
    }
}
