use arbitrary::Arbitrary;
use exl_format::gptq::{GptqTensors, GptqView, WIDTHS, Zeros};
use half::f16;

use super::{noise, rejected, set};

/// One change to the tensors or settings of a sound matrix.
#[derive(Arbitrary, Debug)]
enum Edit {
    Group(u16, i32),
    NearGroup(u16, i8),
    Scale(u16, u16),
    Infinite(u16),
    Length(u8, i8),
    Shape(u8, bool, usize),
    Bits(u32),
    GroupSize(Option<usize>),
    NoGroups,
}

/// A GPTQ matrix: a sound one, then edits.
#[derive(Arbitrary, Debug)]
pub struct GptqCase {
    width: u8,
    blocks: (u8, u8),
    group_size: u8,
    v2: bool,
    seed: u32,
    edits: Vec<Edit>,
}

struct Matrix {
    qweight: Vec<i32>,
    qzeros: Vec<i32>,
    scales: Vec<f16>,
    g_idx: Option<Vec<i32>>,
    shapes: [[usize; 2]; 3],
    bits: u32,
    group_size: Option<usize>,
}

impl GptqCase {
    /// Build the matrix, apply the edits and check what the view accepts.
    pub fn check(&self) {
        let mut matrix = self.matrix();
        for edit in &self.edits {
            apply(edit, &mut matrix);
        }
        let tensors = GptqTensors {
            qweight: &matrix.qweight,
            qweight_shape: matrix.shapes[0],
            qzeros: &matrix.qzeros,
            qzeros_shape: matrix.shapes[1],
            scales: &matrix.scales,
            scales_shape: matrix.shapes[2],
            g_idx: matrix.g_idx.as_deref(),
        };
        let zeros = if self.v2 { Zeros::V2 } else { Zeros::Classic };
        match GptqView::new("m", tensors, matrix.bits, zeros, matrix.group_size) {
            Ok(view) => accessors_agree(&view),
            Err(error) => {
                rejected(&error);
                assert!(!self.edits.is_empty(), "{error}");
            }
        }
    }

    fn matrix(&self) -> Matrix {
        let bits = WIDTHS[usize::from(self.width) % WIDTHS.len()];
        let k = 32 * (1 + usize::from(self.blocks.0) % 4);
        let n = 32 * (1 + usize::from(self.blocks.1) % 2);
        let group_size = 1 + usize::from(self.group_size);
        let groups = k.div_ceil(group_size);
        let width = bits as usize;
        Matrix {
            qweight: noise(k * width / 32 * n, self.seed),
            qzeros: noise(groups * n * width / 32, !self.seed),
            scales: vec![f16::ONE; groups * n],
            g_idx: Some((0..k).map(|row| (row / group_size) as i32).collect()),
            shapes: [[k * width / 32, n], [groups, n * width / 32], [groups, n]],
            bits,
            group_size: Some(group_size),
        }
    }
}

fn apply(edit: &Edit, matrix: &mut Matrix) {
    match *edit {
        Edit::Group(at, value) => set(matrix.g_idx.as_deref_mut().unwrap_or(&mut []), at, value),
        Edit::NearGroup(at, value) => {
            set(
                matrix.g_idx.as_deref_mut().unwrap_or(&mut []),
                at,
                i32::from(value % 8),
            );
        }
        Edit::Scale(at, bits) => set(&mut matrix.scales, at, f16::from_bits(bits)),
        Edit::Infinite(at) => set(&mut matrix.scales, at, f16::INFINITY),
        Edit::Length(tensor, by) => {
            let resized = |len: usize| len.saturating_add_signed(by.into());
            match (tensor % 4, &mut matrix.g_idx) {
                (0, _) => matrix.qweight.resize(resized(matrix.qweight.len()), 0),
                (1, _) => matrix.qzeros.resize(resized(matrix.qzeros.len()), 0),
                (2, _) => matrix.scales.resize(resized(matrix.scales.len()), f16::ONE),
                (_, Some(g_idx)) => g_idx.resize(resized(g_idx.len()), 0),
                (_, None) => {}
            }
        }
        Edit::Shape(tensor, axis, size) => {
            matrix.shapes[usize::from(tensor % 3)][usize::from(axis)] = size;
        }
        Edit::Bits(bits) => matrix.bits = bits,
        Edit::GroupSize(size) => matrix.group_size = size,
        Edit::NoGroups => matrix.g_idx = None,
    }
}

fn accessors_agree(view: &GptqView<'_>) {
    let (k, n) = (view.in_features(), view.out_features());
    assert_eq!(view.group_of().len(), k);
    let mut weights = vec![f16::NAN; k * n];
    view.dequantize_into(&mut weights);
    let mut codes = vec![0; n];
    for row in 0..k {
        let g = view.group_of()[row] as usize;
        assert!(g < view.num_groups());
        view.unpack_row(row, &mut codes);
        for column in 0..n {
            assert_eq!(u32::from(codes[column]), view.code(row, column));
            let zero = f64::from(view.zero(g, column));
            assert!(view.scale(g, column).is_finite());
            let expected = (f64::from(codes[column]) - zero) * view.scale(g, column).to_f64();
            let found = weights[row * n + column];
            assert_eq!(found.to_bits(), f16::from_f64(expected).to_bits());
        }
    }
}
