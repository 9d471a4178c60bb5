//! Packing of codes and scale codes into the tensors of an EXL2 matrix.

use half::f16;

use super::{Exl2Tensors, WIDTHS};
use crate::bits;
use crate::error::Problem;

/// Owned tensors of one EXL2 matrix, in file layout.
#[derive(Debug, Clone, PartialEq)]
pub struct Exl2Matrix {
    /// N, a multiple of 8.
    pub out_features: usize,
    pub q_weight: Vec<i32>,
    pub q_scale: Vec<i32>,
    pub q_scale_max: Vec<f16>,
    pub q_groups: Vec<i16>,
    pub q_invperm: Vec<i32>,
}

impl Exl2Matrix {
    /// Zeroed tensors for `groups` of (bits, rows) and `n` columns; packed row k holds input feature `perm[k]`, or k without `perm`.
    pub fn empty(groups: &[(u32, usize)], n: usize, perm: Option<&[u32]>) -> Result<Self, Problem> {
        if n == 0 || !n.is_multiple_of(8) {
            return Err(Problem::Multiple {
                what: "the number of columns",
                value: n,
                multiple: 8,
                remedy: "pad the columns to a multiple of 32",
            });
        }
        let mut q_groups = Vec::with_capacity(2 * groups.len());
        let (mut words, mut k) = (0usize, 0usize);
        for (group, &(width, rows)) in groups.iter().enumerate() {
            if !WIDTHS.contains(&width) {
                return Err(Problem::GroupWidth {
                    group,
                    bits: width as i32,
                });
            }
            if rows == 0 || !rows.is_multiple_of(32) {
                return Err(Problem::Multiple {
                    what: "the number of rows of a group",
                    value: rows,
                    multiple: 32,
                    remedy: "groups hold whole blocks of 32 rows",
                });
            }
            // Files store the offset in 16 bits; this crate reads it unsigned.
            let first = u16::try_from(words).map_err(|_| Problem::Range {
                tensor: "q_groups",
                row: group,
                column: 1,
                value: words as i64,
                limit: u16::MAX.into(),
            })?;
            q_groups.extend([width as i16, first as i16]);
            words += rows / 32 * width as usize;
            k += rows;
        }
        Ok(Self {
            out_features: n,
            q_weight: vec![0; words * n],
            q_scale: vec![0; groups.len() * n / 8],
            q_scale_max: vec![f16::ZERO; groups.len()],
            q_groups,
            q_invperm: invert(perm, k)?,
        })
    }

    /// Pack codes `[K, N]` (packed rows) and stored scale codes `[G, N]`, 0..16.
    pub fn pack(
        codes: &[u8],
        scale_codes: &[u8],
        q_scale_max: &[f16],
        groups: &[(u32, usize)],
        perm: Option<&[u32]>,
        n: usize,
    ) -> Result<Self, Problem> {
        let mut matrix = Self::empty(groups, n, perm)?;
        let k = matrix.q_invperm.len();
        for (tensor, found, expected) in [
            ("codes", codes.len(), k * n),
            ("scale codes", scale_codes.len(), groups.len() * n),
            ("q_scale_max", q_scale_max.len(), groups.len()),
        ] {
            if found != expected {
                return Err(Problem::Shape {
                    tensor,
                    found: vec![found],
                    expected: format!("{expected} elements"),
                });
            }
        }
        check_range("scale codes", scale_codes, n, 4, 0)?;
        matrix.q_scale_max.copy_from_slice(q_scale_max);
        for (row, codes) in matrix.q_scale.chunks_mut(n / 8).zip(scale_codes.chunks(n)) {
            bits::pack_stream(codes, 4, row);
        }
        let (mut words, mut rest, mut first) = (&mut matrix.q_weight[..], codes, 0);
        for &(width, rows) in groups {
            let (group, other) = words.split_at_mut(rows / 32 * width as usize * n);
            let (block, others) = rest.split_at(rows * n);
            check_range("codes", block, n, width, first)?;
            for (row, codes) in block.chunks(n).enumerate() {
                bits::pack_row(codes, row, width, group);
            }
            (words, rest) = (other, others);
            first += rows;
        }
        Ok(matrix)
    }

    /// The tensors in the form that a view takes.
    pub fn tensors(&self) -> Exl2Tensors<'_> {
        let n = self.out_features;
        Exl2Tensors {
            q_weight: &self.q_weight,
            q_weight_shape: [self.q_weight.len() / n, n],
            q_scale: &self.q_scale,
            q_scale_shape: [self.q_scale_max.len(), n / 8],
            q_scale_max: &self.q_scale_max,
            q_groups: &self.q_groups,
            q_invperm: &self.q_invperm,
        }
    }
}

fn check_range(
    tensor: &'static str,
    codes: &[u8],
    n: usize,
    width: u32,
    first_row: usize,
) -> Result<(), Problem> {
    let limit = bits::mask(width);
    match codes.iter().position(|&code| u32::from(code) > limit) {
        None => Ok(()),
        Some(at) => Err(Problem::Range {
            tensor,
            row: first_row + at / n,
            column: at % n,
            value: codes[at].into(),
            limit: limit.into(),
        }),
    }
}

/// `q_invperm` of `perm`, which must be a permutation of 0..k.
pub(crate) fn invert(perm: Option<&[u32]>, k: usize) -> Result<Vec<i32>, Problem> {
    let Some(perm) = perm else {
        return Ok((0..k as i32).collect());
    };
    if perm.len() != k {
        return Err(Problem::Shape {
            tensor: "perm",
            found: vec![perm.len()],
            expected: format!("[{k}]"),
        });
    }
    let mut inverse = vec![-1i32; k];
    for (row, &feature) in perm.iter().enumerate() {
        match inverse.get_mut(feature as usize) {
            Some(slot) if *slot < 0 => *slot = row as i32,
            other => {
                return Err(Problem::Permutation {
                    tensor: "perm",
                    index: row,
                    value: feature as i32,
                    k,
                    rule: if other.is_some() {
                        "occurs twice; the entries must be a permutation of"
                    } else {
                        "must lie in"
                    },
                });
            }
        }
    }
    Ok(inverse)
}
