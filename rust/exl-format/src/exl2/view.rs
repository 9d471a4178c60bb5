//! A checked view of the five tensors of one EXL2 matrix.

use std::ops::Range;

use half::f16;

use super::WIDTHS;
use crate::bits;
use crate::error::{FormatError, Problem};

/// The tensors of one matrix as stored in the file, C-contiguous. I32 words are bit patterns.
#[derive(Debug, Clone, Copy)]
pub struct Exl2Tensors<'a> {
    /// Packed codes `[R, N]`.
    pub q_weight: &'a [i32],
    pub q_weight_shape: [usize; 2],
    /// Scale codes `[G, N / 8]`.
    pub q_scale: &'a [i32],
    pub q_scale_shape: [usize; 2],
    /// Largest scale of each group `[G]`, not yet divided by 256.
    pub q_scale_max: &'a [f16],
    /// Pairs (bits, first packed row) `[2 G]`.
    pub q_groups: &'a [i16],
    /// Packed row of each input feature `[K]`.
    pub q_invperm: &'a [i32],
}

/// One quantization group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Width of its codes: 2, 3, 4, 5, 6 or 8.
    pub bits: u32,
    /// The packed rows of the group; start and length are multiples of 32.
    pub rows: Range<usize>,
    /// The group's first row of words in `q_weight`; it has `rows.len() / 32 * bits` rows of words.
    pub first_word: usize,
}

impl Group {
    /// The code of the value zero, 2^(bits-1).
    #[inline(always)]
    pub fn zero(&self) -> u32 {
        1 << (self.bits - 1)
    }

    /// The group's rows of words in `q_weight`.
    pub fn words(&self) -> Range<usize> {
        self.first_word..self.first_word + self.rows.len() / 32 * self.bits as usize
    }
}

/// A well-formed EXL2 matrix.
///
/// Packed row k holds input feature `perm()[k]`. Groups may have any order of widths.
#[derive(Debug, Clone)]
pub struct Exl2View<'a> {
    tensors: Exl2Tensors<'a>,
    groups: Vec<Group>,
    smax: Vec<f16>,
}

impl<'a> Exl2View<'a> {
    /// Check all rules of the format. `name` is the matrix's key, for errors.
    pub fn new(name: &str, tensors: Exl2Tensors<'a>) -> Result<Self, FormatError> {
        Self::check(tensors).map_err(|problem| FormatError::new(name, problem))
    }

    fn check(tensors: Exl2Tensors<'a>) -> Result<Self, Problem> {
        check_shapes(&tensors)?;
        let groups = read_groups(tensors.q_groups, tensors.q_weight_shape[0])?;
        let (found, expected) = (
            groups.last().map_or(0, |group| group.rows.end),
            tensors.q_invperm.len(),
        );
        if found != expected {
            return Err(Problem::GroupSum { found, expected });
        }
        check_permutation(tensors.q_invperm)?;
        let smax = read_scales(tensors.q_scale_max, &groups)?;
        Ok(Self {
            tensors,
            groups,
            smax,
        })
    }

    /// K, input features.
    pub fn in_features(&self) -> usize {
        self.tensors.q_invperm.len()
    }

    /// N as stored, including padding.
    pub fn out_features(&self) -> usize {
        self.tensors.q_weight_shape[1]
    }

    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// `q_weight`'s words, `[R, N]`.
    pub fn words(&self) -> &'a [i32] {
        self.tensors.q_weight
    }

    /// The words of group `g`, `[rows / 32 * bits, N]`.
    pub fn group_words(&self, g: usize) -> &'a [i32] {
        let range = self.groups[g].words();
        let n = self.out_features();
        &self.tensors.q_weight[range.start * n..range.end * n]
    }

    /// Group of packed row `k`.
    pub fn group_of(&self, k: usize) -> usize {
        self.groups.partition_point(|group| group.rows.end <= k)
    }

    /// Code of packed row `k`, column `n`, in 0..2^bits.
    pub fn code(&self, k: usize, n: usize) -> u32 {
        let g = self.group_of(k);
        let group = &self.groups[g];
        bits::column_code(
            self.group_words(g),
            self.out_features(),
            k - group.rows.start,
            n,
            group.bits,
        )
    }

    /// Codes of packed row `k`, all N columns.
    pub fn unpack_row(&self, k: usize, out: &mut [u8]) {
        assert_eq!(out.len(), self.out_features());
        let g = self.group_of(k);
        let group = &self.groups[g];
        bits::unpack_row(self.group_words(g), k - group.rows.start, group.bits, out);
    }

    /// Codes of packed row `k`, columns `begin..begin + out.len()`.
    #[inline(always)]
    pub fn unpack_columns(&self, k: usize, begin: usize, out: &mut [u8]) {
        let n = self.out_features();
        assert!(begin + out.len() <= n, "columns of the matrix");
        let g = self.group_of(k);
        let group = &self.groups[g];
        let row = k - group.rows.start;
        bits::unpack_columns(self.group_words(g), n, row, group.bits, begin, out);
    }

    /// Stored scale code of group `g`, column `n`, in 0..16; its scale is (code + 1)^2 / 256 of the group's largest scale.
    pub fn scale_code(&self, g: usize, n: usize) -> u32 {
        let words = self.tensors.q_scale_shape[1];
        bits::stream_code(&self.tensors.q_scale[g * words..][..words], n, 4)
    }

    /// `q_scale_max[g] / 256` rounded to half: the first of the format's two roundings, for prescale 1.
    pub fn smax(&self, g: usize) -> f16 {
        self.smax[g]
    }

    /// Scale of group `g`, column `n`, after both roundings of the format.
    pub fn scale(&self, g: usize, n: usize) -> f16 {
        scale(self.smax[g], self.scale_code(g, n))
    }

    /// Scales of group `g`, all N columns, as exact float32 values of the halves.
    pub fn scale_row(&self, g: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.out_features());
        let table: [f32; 16] =
            std::array::from_fn(|code| scale(self.smax[g], code as u32).to_f32());
        let words = self.tensors.q_scale_shape[1];
        let row = &self.tensors.q_scale[g * words..][..words];
        for (eight, &word) in out.chunks_mut(8).zip(row) {
            for (j, s) in eight.iter_mut().enumerate() {
                *s = table[(word as u32 >> (4 * j)) as usize & 15];
            }
        }
    }

    /// `q_invperm`: packed row of each input feature; checked to be a permutation of 0..K.
    pub fn invperm(&self) -> &'a [i32] {
        self.tensors.q_invperm
    }

    /// `q_perm`: input feature of each packed row.
    pub fn perm(&self) -> Vec<u32> {
        let mut perm = vec![0; self.in_features()];
        for (feature, &row) in self.tensors.q_invperm.iter().enumerate() {
            perm[row as usize] = feature as u32;
        }
        perm
    }

    /// Average bits per weight of the codes only.
    pub fn code_bits(&self) -> f64 {
        let bits: usize = self
            .groups
            .iter()
            .map(|group| group.rows.len() * group.bits as usize)
            .sum();
        bits as f64 / self.in_features() as f64
    }
}

/// h16((code + 1)^2 * smax); the multiplication is exact in float32.
#[inline(always)]
pub(crate) fn scale(smax: f16, code: u32) -> f16 {
    f16::from_f32(((code + 1) * (code + 1)) as f32 * smax.to_f32())
}

/// h16(q_scale_max / 256).
#[inline(always)]
pub(crate) fn smax(q_scale_max: f16) -> f16 {
    f16::from_f32(q_scale_max.to_f32() / 256.0)
}

fn check_length(tensor: &'static str, found: usize, shape: &[usize]) -> Result<(), Problem> {
    let expected = shape.iter().try_fold(1usize, |a, &b| a.checked_mul(b));
    if expected == Some(found) {
        return Ok(());
    }
    Err(Problem::Length {
        tensor,
        found,
        shape: shape.to_vec(),
    })
}

fn check_shapes(t: &Exl2Tensors<'_>) -> Result<(), Problem> {
    check_length("q_weight", t.q_weight.len(), &t.q_weight_shape)?;
    check_length("q_scale", t.q_scale.len(), &t.q_scale_shape)?;
    let (k, n, groups) = (t.q_invperm.len(), t.q_weight_shape[1], t.q_scale_shape[0]);
    if k == 0 || n == 0 || groups == 0 {
        return Err(Problem::Empty { k, n, groups });
    }
    if n % 8 != 0 {
        return Err(Problem::Multiple {
            what: "out_features of q_weight",
            value: n,
            multiple: 8,
            remedy: "writers pad the columns to a multiple of 32",
        });
    }
    let shapes: [(&'static str, Vec<usize>, Vec<usize>); 3] = [
        ("q_scale", t.q_scale_shape.to_vec(), vec![groups, n / 8]),
        ("q_scale_max", vec![t.q_scale_max.len()], vec![groups]),
        (
            "q_groups",
            vec![t.q_groups.len()],
            vec![groups.saturating_mul(2)],
        ),
    ];
    for (tensor, found, expected) in shapes {
        if found != expected {
            return Err(Problem::Shape {
                tensor,
                found,
                expected: format!("{expected:?} ({groups} groups, {n} columns)"),
            });
        }
    }
    Ok(())
}

/// The groups of a matrix whose `q_weight` has `rows` rows of words.
///
/// `q_groups` is read as unsigned 16-bit row offsets, which doubles the range of signed ones.
pub fn read_groups(q_groups: &[i16], rows: usize) -> Result<Vec<Group>, Problem> {
    let count = q_groups.len() / 2;
    let mut groups = Vec::with_capacity(count);
    let mut next_row = 0;
    for group in 0..count {
        let (width, first) = (q_groups[2 * group], q_groups[2 * group + 1] as u16 as usize);
        let end = match q_groups.get(2 * group + 3) {
            Some(&next) => next as u16 as usize,
            None => rows,
        };
        let bits = u32::try_from(width).unwrap_or(0);
        if !WIDTHS.contains(&bits) {
            return Err(Problem::GroupWidth {
                group,
                bits: width.into(),
            });
        }
        if first >= end || end > rows || (group == 0 && first != 0) {
            return Err(Problem::GroupOrder {
                group,
                first,
                end,
                rows,
            });
        }
        let words = end - first;
        if words % bits as usize != 0 {
            return Err(Problem::GroupRows { group, words, bits });
        }
        let len = words / bits as usize * 32;
        groups.push(Group {
            bits,
            rows: next_row..next_row + len,
            first_word: first,
        });
        next_row += len;
    }
    Ok(groups)
}

fn check_permutation(invperm: &[i32]) -> Result<(), Problem> {
    let k = invperm.len();
    let mut seen = vec![false; k];
    for (index, &value) in invperm.iter().enumerate() {
        let bad = |rule| Problem::Permutation {
            tensor: "q_invperm",
            index,
            value,
            k,
            rule,
        };
        let slot = usize::try_from(value)
            .ok()
            .and_then(|row| seen.get_mut(row))
            .ok_or_else(|| bad("must lie in"))?;
        if std::mem::replace(slot, true) {
            return Err(bad("occurs twice; the entries must be a permutation of"));
        }
    }
    Ok(())
}

fn read_scales(q_scale_max: &[f16], groups: &[Group]) -> Result<Vec<f16>, Problem> {
    let mut out = Vec::with_capacity(groups.len());
    for (index, (&max, group)) in q_scale_max.iter().zip(groups).enumerate() {
        let value = max.to_f32();
        if !value.is_finite() {
            return Err(Problem::NonFinite {
                tensor: "q_scale_max",
                index,
                value,
            });
        }
        // The widest column of a group uses the whole scale, so above this limit its extreme code would be infinite.
        let limit = f16::MAX.to_f32() / group.zero() as f32;
        if value.abs() > limit {
            return Err(Problem::ScaleTooLarge {
                group: index,
                value,
                bits: group.bits,
                limit,
            });
        }
        out.push(smax(max));
    }
    Ok(out)
}
