//! Matrices in registers: loads, stores and multiplications.

use super::Decoded;
use super::line::{Line, unknown};
use crate::code::{Element, Matrices, Op, Participants, Product, WarpgroupProduct};
use crate::lanes::Suffixes;
use crate::parse::Operand;

impl Line<'_, '_> {
    /// `ldmatrix` and `stmatrix`.
    pub(super) fn matrix(&self) -> Result<Decoded, String> {
        let s = self.suffixes;
        if !s.has("m8n8") || !s.has("b16") {
            return unknown();
        }
        let count = match () {
            () if s.has("x4") => 4,
            () if s.has("x2") => 2,
            () => 1,
        };
        let transposed = s.has("trans");
        let loads = self.name == "ldmatrix";
        let (base, offset, _) = self.address(usize::from(loads))?;
        let registers = self.values(usize::from(!loads))?;
        let matrices = Matrices {
            count,
            transposed,
            offset,
        };
        if loads {
            return Ok((
                Op::LoadMatrix(matrices),
                Participants::Warp,
                registers,
                vec![base],
            ));
        }
        let mut from = vec![base];
        from.extend(registers);
        Ok((Op::StoreMatrix(matrices), Participants::Warp, vec![], from))
    }

    /// `mma`.
    pub(super) fn product(&self) -> Result<Decoded, String> {
        let op = Op::Product(product(self.suffixes)?);
        Ok((op, Participants::Warp, self.values(0)?, self.all(1)?))
    }

    /// `wgmma`.
    pub(super) fn warpgroup(&self) -> Result<Decoded, String> {
        let s = self.suffixes;
        let participants = Participants::Warp;
        if s.has("fence") {
            return Ok((Op::Nothing, participants, vec![], vec![]));
        }
        if s.has("commit_group") {
            return Ok((Op::WarpgroupCommit, participants, vec![], vec![]));
        }
        if s.has("wait_group") {
            return Ok((
                Op::WarpgroupWait,
                participants,
                vec![],
                vec![self.value(0)?],
            ));
        }
        if !s.has("mma_async") {
            return unknown();
        }
        let shape = product(s)?;
        let sums = self.values(0)?;
        let mut from = sums.clone();
        from.extend(self.all(1)?);
        let a_in_registers = matches!(self.operand(1)?, Operand::Vector(_));
        let op = Op::WarpgroupProduct(WarpgroupProduct {
            shape,
            a_in_registers,
        });
        Ok((op, participants, sums, from))
    }
}

/// Shape and types of `mma` or `wgmma`.
fn product(s: Suffixes) -> Result<Product, String> {
    let shape = s
        .0
        .iter()
        .find(|name| {
            name.starts_with('m') && name.contains('n') && name.contains('k') && !name.contains('_')
        })
        .ok_or("no shape")?;
    let (_, rest) = shape.split_once('n').ok_or("no shape")?;
    let (n, k) = rest.split_once('k').ok_or("no shape")?;
    let number = |text: &str| text.parse::<usize>().map_err(|_| format!("shape {shape}"));
    let element = |name: &str| {
        Some(match name {
            "f16" => Element::F16,
            "bf16" => Element::BF16,
            "tf32" => Element::Tf32,
            "f32" => Element::F32,
            "s8" => Element::S8,
            "u8" => Element::U8,
            "s32" => Element::S32,
            "e4m3" => Element::E4m3,
            "e5m2" => Element::E5m2,
            _ => return None,
        })
    };
    let types: Vec<Element> = s.0.iter().filter_map(|name| element(name)).collect();
    if types.len() < 3 || (s.has("sync") && !(s.has("row") && s.has("col")) && !s.has("mma_async"))
    {
        return Err("unknown form of a matrix multiplication".to_owned());
    }
    Ok(Product {
        n: number(n)?,
        k: number(k)?,
        result: types[0],
        a: types[1],
        b: types[2],
        saturate: s.has("satfinite"),
    })
}
