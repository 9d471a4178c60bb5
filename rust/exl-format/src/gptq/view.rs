//! A checked view of the tensors of one GPTQ matrix.

use half::f16;

use super::WIDTHS;
use crate::bits;
use crate::error::{FormatError, Problem};

/// The meaning of a stored zero code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zeros {
    /// Zero point = stored code + 1; the sum does not wrap (a stored 15 gives 16).
    Classic,
    /// `checkpoint_format: gptq_v2`: zero point = stored code.
    V2,
}

/// The tensors of one matrix as stored in the file, C-contiguous. I32 words are bit patterns.
#[derive(Debug, Clone, Copy)]
pub struct GptqTensors<'a> {
    /// Packed codes `[K * bits / 32, N]`.
    pub qweight: &'a [i32],
    pub qweight_shape: [usize; 2],
    /// Packed zero codes `[G, N * bits / 32]`.
    pub qzeros: &'a [i32],
    pub qzeros_shape: [usize; 2],
    /// Scales `[G, N]`.
    pub scales: &'a [f16],
    pub scales_shape: [usize; 2],
    /// Group of each row `[K]`; all zeros means the same as None.
    pub g_idx: Option<&'a [i32]>,
}

/// A well-formed GPTQ matrix.
#[derive(Debug, Clone)]
pub struct GptqView<'a> {
    tensors: GptqTensors<'a>,
    bits: u32,
    zeros: Zeros,
    k: usize,
    group_of: Vec<u32>,
}

impl<'a> GptqView<'a> {
    /// Check shapes, groups and scales. `name` is the matrix's key, for errors.
    ///
    /// Without `g_idx`, row k belongs to group k / group_size. Without a `group_size`, it is the smallest power of two that gives the
    /// file's number of groups, as other loaders assume, else ceil(K / G).
    pub fn new(
        name: &str,
        tensors: GptqTensors<'a>,
        bits: u32,
        zeros: Zeros,
        group_size: Option<usize>,
    ) -> Result<Self, FormatError> {
        Self::check(tensors, bits, zeros, group_size)
            .map_err(|problem| FormatError::new(name, problem))
    }

    fn check(
        tensors: GptqTensors<'a>,
        bits: u32,
        zeros: Zeros,
        group_size: Option<usize>,
    ) -> Result<Self, Problem> {
        let k = check_shapes(&tensors, bits)?;
        for (index, scale) in tensors.scales.iter().enumerate() {
            if !scale.is_finite() {
                return Err(Problem::NonFinite {
                    tensor: "scales",
                    index,
                    value: scale.to_f32(),
                });
            }
        }
        let groups = tensors.scales_shape[0];
        let group_of = match tensors.g_idx {
            Some(g_idx) if g_idx.iter().any(|&g| g != 0) => read_g_idx(g_idx, groups)?,
            _ => sequential_groups(k, groups, group_size)?,
        };
        Ok(Self {
            tensors,
            bits,
            zeros,
            k,
            group_of,
        })
    }

    /// K, input features.
    pub fn in_features(&self) -> usize {
        self.k
    }

    /// N, output features.
    pub fn out_features(&self) -> usize {
        self.tensors.qweight_shape[1]
    }

    /// G.
    pub fn num_groups(&self) -> usize {
        self.tensors.scales_shape[0]
    }

    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// `qweight`'s words, `[K * bits / 32, N]`.
    pub fn words(&self) -> &'a [i32] {
        self.tensors.qweight
    }

    /// Group of each input feature, `[K]`, as in `g_idx`.
    pub fn group_of(&self) -> &[u32] {
        &self.group_of
    }

    /// Code of row `k`, column `n`, in 0..2^bits.
    pub fn code(&self, k: usize, n: usize) -> u32 {
        bits::column_code(self.tensors.qweight, self.out_features(), k, n, self.bits)
    }

    /// Codes of row `k`, all N columns.
    pub fn unpack_row(&self, k: usize, out: &mut [u8]) {
        assert_eq!(out.len(), self.out_features());
        bits::unpack_row(self.tensors.qweight, k, self.bits, out);
    }

    /// Codes of row `k`, columns `begin..begin + out.len()`.
    #[inline(always)]
    pub fn unpack_columns(&self, k: usize, begin: usize, out: &mut [u8]) {
        let n = self.out_features();
        assert!(begin + out.len() <= n, "columns of the matrix");
        bits::unpack_columns(self.tensors.qweight, n, k, self.bits, begin, out);
    }

    /// Zero point of group `g`, column `n`, in 0..=2^bits.
    pub fn zero(&self, g: usize, n: usize) -> u32 {
        let words = self.tensors.qzeros_shape[1];
        let stored = bits::stream_code(&self.tensors.qzeros[g * words..][..words], n, self.bits);
        stored + u32::from(self.zeros == Zeros::Classic)
    }

    /// Scale of group `g`, column `n`.
    pub fn scale(&self, g: usize, n: usize) -> f16 {
        self.tensors.scales[g * self.out_features() + n]
    }

    /// Scales of group `g`, `[N]`.
    pub fn scale_row(&self, g: usize) -> &'a [f16] {
        let n = self.out_features();
        &self.tensors.scales[g * n..][..n]
    }
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

/// Check all shapes against each other and return K.
fn check_shapes(t: &GptqTensors<'_>, bits: u32) -> Result<usize, Problem> {
    if !WIDTHS.contains(&bits) {
        return Err(Problem::Bits {
            format: "GPTQ",
            bits,
            known: "2, 3, 4, 8",
        });
    }
    check_length("qweight", t.qweight.len(), &t.qweight_shape)?;
    check_length("qzeros", t.qzeros.len(), &t.qzeros_shape)?;
    check_length("scales", t.scales.len(), &t.scales_shape)?;
    let [words, n] = t.qweight_shape;
    let groups = t.scales_shape[0];
    if words == 0 || n == 0 || groups == 0 {
        return Err(Problem::Empty {
            k: words,
            n,
            groups,
        });
    }
    if words * 32 % bits as usize != 0 {
        return Err(Problem::Multiple {
            what: "the number of rows of qweight",
            value: words,
            multiple: bits as usize,
            remedy: "check quantization_config.bits",
        });
    }
    let k = words * 32 / bits as usize;
    let columns = 32 / gcd(32, bits as usize);
    if n % columns != 0 {
        return Err(Problem::Multiple {
            what: "out_features of qweight",
            value: n,
            multiple: columns,
            remedy: "zeros are packed in whole 32-bit words",
        });
    }
    let zero_words = n * bits as usize / 32;
    let shapes: [(&'static str, &[usize], Vec<usize>); 2] = [
        ("scales", &t.scales_shape, vec![groups, n]),
        ("qzeros", &t.qzeros_shape, vec![groups, zero_words]),
    ];
    for (tensor, found, expected) in shapes {
        if found != expected {
            return Err(Problem::Shape {
                tensor,
                found: found.to_vec(),
                expected: format!("{expected:?} ({bits} bits, {groups} groups, {n} columns)"),
            });
        }
    }
    match t.g_idx {
        Some(g_idx) if g_idx.len() != k => Err(Problem::Shape {
            tensor: "g_idx",
            found: vec![g_idx.len()],
            expected: format!("[{k}] (in_features at {bits} bits)"),
        }),
        _ => Ok(k),
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn read_g_idx(g_idx: &[i32], groups: usize) -> Result<Vec<u32>, Problem> {
    g_idx
        .iter()
        .enumerate()
        .map(|(row, &value)| match u32::try_from(value) {
            Ok(group) if (group as usize) < groups => Ok(group),
            _ => Err(Problem::GroupIndex { row, value, groups }),
        })
        .collect()
}

fn sequential_groups(
    k: usize,
    groups: usize,
    group_size: Option<usize>,
) -> Result<Vec<u32>, Problem> {
    let size = group_size.unwrap_or_else(|| {
        let power = k.div_ceil(groups).next_power_of_two();
        if k.div_ceil(power) == groups {
            power
        } else {
            k.div_ceil(groups)
        }
    });
    let found = if size == 0 { 0 } else { k.div_ceil(size) };
    if found != groups {
        return Err(Problem::GroupSize {
            group_size: size,
            k,
            found,
            groups,
        });
    }
    Ok((0..k).map(|row| (row / size) as u32).collect())
}
