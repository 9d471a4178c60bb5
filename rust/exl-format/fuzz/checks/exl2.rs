use arbitrary::Arbitrary;
use exl_format::exl2::{Exl2Matrix, Exl2View, WIDTHS};
use half::f16;

use super::{noise, rejected, set};

/// One change to the tensors of a sound matrix.
#[derive(Arbitrary, Debug)]
enum Edit {
    Group(u16, i16),
    GroupBy(u16, i8),
    Row(u16, i32),
    SameRow(u16, u16),
    Swap(u16, u16),
    ScaleMax(u16, u16),
    Infinite(u16),
    Length(u8, i8),
    Shape(bool, bool, usize),
}

/// An EXL2 matrix: a sound one, then edits.
#[derive(Arbitrary, Debug)]
pub struct Exl2Case {
    /// Index into the widths, and blocks of 32 rows.
    groups: Vec<(u8, u8)>,
    eights: u8,
    seed: u32,
    edits: Vec<Edit>,
}

impl Exl2Case {
    /// Build the matrix, apply the edits and check what the view accepts.
    pub fn check(&self) {
        let groups: Vec<(u32, usize)> = (self.groups.iter().take(16))
            .map(|&(width, blocks)| {
                let width = WIDTHS[usize::from(width) % WIDTHS.len()];
                (width, 32 * (1 + usize::from(blocks) % 4))
            })
            .collect();
        let n = 8 * (1 + usize::from(self.eights) % 8);
        let mut matrix = Exl2Matrix::empty(&groups, n, None).expect("sixteen small groups fit");
        matrix.q_weight = noise(matrix.q_weight.len(), self.seed);
        matrix.q_scale = noise(matrix.q_scale.len(), !self.seed);
        matrix.q_scale_max.fill(f16::ONE);
        let mut shapes = [
            matrix.tensors().q_weight_shape,
            matrix.tensors().q_scale_shape,
        ];
        for edit in &self.edits {
            apply(edit, &mut matrix, &mut shapes);
        }
        let mut tensors = matrix.tensors();
        [tensors.q_weight_shape, tensors.q_scale_shape] = shapes;
        match Exl2View::new("m", tensors) {
            Ok(view) => accessors_agree(&view),
            Err(error) => {
                rejected(&error);
                assert!(!self.edits.is_empty() || groups.is_empty(), "{error}");
            }
        }
    }
}

fn apply(edit: &Edit, matrix: &mut Exl2Matrix, shapes: &mut [[usize; 2]; 2]) {
    match *edit {
        Edit::Group(at, value) => set(&mut matrix.q_groups, at, value),
        Edit::GroupBy(at, by) => {
            let at = usize::from(at) % matrix.q_groups.len().max(1);
            if let Some(value) = matrix.q_groups.get_mut(at) {
                *value = value.wrapping_add(by.into());
            }
        }
        Edit::Row(at, value) => set(&mut matrix.q_invperm, at, value),
        Edit::SameRow(at, other) => {
            let row = matrix.q_invperm.iter().copied().cycle().nth(other.into());
            set(&mut matrix.q_invperm, at, row.unwrap_or(0));
        }
        Edit::Swap(a, b) => {
            let k = matrix.q_invperm.len().max(1);
            if k > 1 {
                matrix
                    .q_invperm
                    .swap(usize::from(a) % k, usize::from(b) % k);
            }
        }
        Edit::ScaleMax(at, bits) => set(&mut matrix.q_scale_max, at, f16::from_bits(bits)),
        Edit::Infinite(at) => set(&mut matrix.q_scale_max, at, f16::INFINITY),
        Edit::Length(tensor, by) => {
            let resized = |len: usize| len.saturating_add_signed(by.into());
            match tensor % 5 {
                0 => matrix.q_weight.resize(resized(matrix.q_weight.len()), 0),
                1 => matrix.q_scale.resize(resized(matrix.q_scale.len()), 0),
                2 => {
                    let len = resized(matrix.q_scale_max.len());
                    matrix.q_scale_max.resize(len, f16::ONE);
                }
                3 => matrix.q_groups.resize(resized(matrix.q_groups.len()), 0),
                _ => matrix.q_invperm.resize(resized(matrix.q_invperm.len()), 0),
            }
        }
        Edit::Shape(tensor, axis, size) => shapes[usize::from(tensor)][usize::from(axis)] = size,
    }
}

fn accessors_agree(view: &Exl2View<'_>) {
    let (k, n) = (view.in_features(), view.out_features());
    let mut words = 0;
    for group in view.groups() {
        assert_eq!(group.words().start, words);
        words = group.words().end;
    }
    assert_eq!(words * n, view.words().len());

    let perm = view.perm();
    let mut weights = vec![f16::NAN; k * n];
    view.dequantize_into(&mut weights);
    let (mut codes, mut scales) = (vec![0; n], vec![0.0; n]);
    for row in 0..k {
        let g = view.group_of(row);
        view.unpack_row(row, &mut codes);
        view.scale_row(g, &mut scales);
        for column in 0..n {
            assert_eq!(u32::from(codes[column]), view.code(row, column));
            assert_eq!(scales[column], view.scale(g, column).to_f32());
            let integer = codes[column] as f32 - view.groups()[g].zero() as f32;
            let expected = f16::from_f32(integer * scales[column]);
            let found = weights[perm[row] as usize * n + column];
            assert!(found.is_finite());
            assert_eq!(found.to_bits(), expected.to_bits());
        }
    }
}
