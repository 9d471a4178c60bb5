//! Read images back through the reference implementation and compare them with the matrix, for many groups and widths.

use exl_format::exl2::{Exl2Tensors, Exl2View};
use exl_format::gptq::{GptqTensors, GptqView, Zeros};
use half::f16;
use proptest::prelude::*;

use super::*;

/// Deterministic words that are not zero.
fn noise(count: usize, seed: u32) -> Vec<i32> {
    let mut state = seed | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as i32
        })
        .collect()
}

struct Exl2 {
    q_weight: Vec<i32>,
    q_scale: Vec<i32>,
    q_scale_max: Vec<f16>,
    q_groups: Vec<i16>,
    q_invperm: Vec<i32>,
    n: usize,
}

impl Exl2 {
    /// Groups as (bits, slices of 32 rows).
    fn new(groups: &[(u32, usize)], n: usize, seed: u32) -> Self {
        let mut q_groups = Vec::new();
        let (mut words, mut k) = (0usize, 0usize);
        for &(bits, slices) in groups {
            q_groups.extend([bits as i16, words as i16]);
            words += bits as usize * slices;
            k += 32 * slices;
        }
        let mut order: Vec<i32> = (0..k as i32).collect();
        for (i, r) in noise(k, seed ^ 0x4d).into_iter().enumerate() {
            order.swap(i, r.unsigned_abs() as usize % k);
        }
        Self {
            q_weight: noise(words * n, seed),
            q_scale: noise(groups.len() * n / 8, seed ^ 0x5),
            q_scale_max: (0..groups.len())
                .map(|g| f16::from_f32(0.01 + g as f32 * 0.003))
                .collect(),
            q_groups,
            q_invperm: order,
            n,
        }
    }

    fn view(&self) -> Exl2View<'_> {
        let groups = self.q_scale_max.len();
        Exl2View::new(
            "m",
            Exl2Tensors {
                q_weight: &self.q_weight,
                q_weight_shape: [self.q_weight.len() / self.n, self.n],
                q_scale: &self.q_scale,
                q_scale_shape: [groups, self.n / 8],
                q_scale_max: &self.q_scale_max,
                q_groups: &self.q_groups,
                q_invperm: &self.q_invperm,
            },
        )
        .expect("well-formed")
    }
}

/// The unused bytes of scales may differ.
fn assert_same_codes(layout: &Layout, image: &[u8], parts: &[u8]) {
    assert_eq!(image.len(), parts.len());
    for tile in 0..layout.tiles() {
        for chunk in 0..layout.rows() / CHUNK_ROWS {
            let (offset, bits) = layout.chunk(chunk);
            let codes = tile * layout.tile_bytes() + offset..;
            let size = 128 * bits;
            assert_eq!(image[codes.clone()][..size], parts[codes][..size]);
        }
    }
}

/// The units that are multiplied as if entries had 128 rows are marked, if entries have 32.
fn assert_marks_units_of_few_scales(layout: &Layout) {
    for (unit, entries) in layout.groups.chunks(layout.entries_per_unit()).enumerate() {
        let few = entries
            .chunks(4)
            .all(|half| half.iter().all(|&group| group == half[0]));
        let marked = layout.units[unit].widths & ONE_SCALE_A_HALF != 0;
        assert_eq!(marked, few && layout.entry_rows == 32, "unit {unit}");
    }
}

fn check_exl2(groups: &[(u32, usize)], n: usize, seed: u32) -> Layout {
    let fine = check_exl2_of(groups, n, seed, true);
    let layout = check_exl2_of(groups, n, seed, false);
    assert_eq!((fine.entry_rows, fine.rows()), (32, layout.rows()));
    layout
}

fn check_exl2_of(groups: &[(u32, usize)], n: usize, seed: u32, fine: bool) -> Layout {
    let matrix = Exl2::new(groups, n, seed);
    let view = matrix.view();
    let layout = Layout::exl2(&view, fine).expect("fits");
    assert_eq!(
        has_fine_scales(view.groups()),
        Layout::exl2(&view, false).expect("fits").entry_rows == 32
    );
    let mut image = vec![0xa5u8; layout.bytes()];
    layout.pack(&view, &mut image, 3);
    let parts = [0..1, 1..layout.tiles()].map(|tiles| {
        let mut part = vec![0u8; tiles.len() * layout.tile_bytes()];
        layout.pack_tiles(&view, tiles, &mut part, 2);
        part
    });
    assert_same_codes(&layout, &image, &parts.concat());
    assert_marks_units_of_few_scales(&layout);
    let mut seen = vec![false; view.in_features()];
    for row in 0..layout.rows() {
        let feature = layout.features[row];
        if feature < 0 {
            let same =
                |column| layout.code(&image, row, column) == layout.code(&image, row - 1, column);
            assert!((0..n).all(same), "row {row} of padding");
            continue;
        }
        let packed = view.invperm()[feature as usize] as usize;
        assert!(!std::mem::replace(&mut seen[packed], true), "each row once");
        let group = view.group_of(packed);
        assert_eq!(layout.maxima[row / layout.entry_rows], view.smax(group));
        for column in 0..n {
            // A code may be stored with more bits than it has.
            let stored = layout.chunk(row / CHUNK_ROWS).1;
            let zero = view.groups()[group].zero();
            assert_eq!(
                layout.code(&image, row, column) as i32 - (1 << (stored - 1)),
                view.code(packed, column) as i32 - zero as i32,
                "row {row} column {column}"
            );
            let (unit, entry) = (row / UNIT_ROWS, row % UNIT_ROWS / layout.entry_rows);
            let byte = image[column / TILE * layout.tile_bytes()
                + layout.scales_offset(unit)
                + column % 8 * layout.entries_per_unit()
                + entry];
            let code = u32::from(byte) >> (4 * (column % 16 / 8)) & 15;
            assert_eq!(code, view.scale_code(group, column));
        }
    }
    assert!(seen.into_iter().all(|s| s));
    layout
}

#[test]
fn a_plain_matrix_has_the_size_of_its_codes() {
    let layout = check_exl2(&[(4, 4); 16], 64, 1);
    assert_eq!((layout.entry_rows, layout.rows()), (128, 2048));
    assert_eq!(layout.bytes(), 2048 * 64 / 2 + 64 / 16 * 8 * 16);
}

#[test]
fn widths_that_split_an_entry_fall_back_to_short_entries() {
    assert_eq!(check_exl2(&[(5, 4), (4, 4), (4, 4)], 32, 2).entry_rows, 128);
    assert_eq!(check_exl2(&[(5, 2), (4, 4), (4, 4)], 32, 3).entry_rows, 128);
    assert_eq!(check_exl2(&[(5, 2), (4, 4), (4, 2)], 32, 3).entry_rows, 32);
    let odd = check_exl2(&[(8, 1), (6, 1), (5, 1), (4, 1), (3, 1), (2, 1)], 32, 4);
    assert_eq!(
        (odd.entry_rows, odd.rows(), odd.units.len()),
        (32, 6 * 32, 2)
    );
}

#[test]
fn a_matrix_has_units_of_many_and_of_few_scales() {
    let many: Vec<_> = [(5, 1); 8].into_iter().chain([(4, 4); 6]).collect();
    assert_eq!(widths(&many), [0x14444, 0x14444, 0x14444, 0x5555, 0]);
    // Groups that begin within a half.
    assert_eq!(widths(&[(4, 2), (4, 4), (4, 2)]), [0x4444, 0]);
    assert_eq!(widths(&[(4, 3), (4, 3), (4, 2)]), [0x4444, 0]);
    assert_eq!(widths(&[(4, 4), (4, 3)]), [0x14444, 0]);
    // The rest of 4 bits does not shift the runs of 3.
    let groups = [(4, 4), (4, 2), (3, 4), (3, 4), (2, 1), (2, 1)];
    assert_eq!(widths(&groups), [0x13344, 0x2433, 0]);
}

#[test]
fn a_slice_without_a_partner_takes_one_of_fewer_bits() {
    // 13 slices of 5 bits, 19 of 4: no padding, and the order of the file.
    let groups: Vec<_> = [(5, 1); 13].into_iter().chain([(4, 1); 19]).collect();
    let layout = check_exl2(&groups, 64, 6);
    assert_eq!(layout.rows(), layout.in_features);
    assert!(layout.source_rows.iter().is_sorted());
    assert_eq!(widths(&groups), [0x5555, 0x4555, 0x4444, 0x4444, 0]);
    // No partner of fewer bits: rows of padding.
    let layout = check_exl2(&[(5, 4), (4, 3), (4, 4)], 64, 7);
    assert_eq!(layout.rows(), layout.in_features + SLICE_ROWS);
}

#[test]
fn few_rows_of_a_wide_width_are_spread_over_the_units() {
    // As a converter gives `down` of 14,336 inputs: 8 bits in 5 % of the rows, and a short last group.
    let wide = [(8, 1)].into_iter().cycle();
    let groups: Vec<_> = wide.take(23).chain([(4, 4); 106]).chain([(4, 1)]).collect();
    let found = widths(&groups);
    assert_eq!(found.len(), 14_336 / UNIT_ROWS + 1);
    let count = |kind: u32| found.iter().filter(|&&unit| unit == kind).count();
    assert_eq!((count(0x4488), count(0x14444)), (6, 50));
    let places: Vec<_> = (0..found.len()).filter(|&u| found[u] == 0x4488).collect();
    assert!(places.windows(2).all(|two| two[1] - two[0] >= 9));
    let layout = check_exl2(&groups[23 + 90..], 32, 8);
    assert_eq!(layout.rows(), layout.in_features.next_multiple_of(64));
}

fn widths(groups: &[(u32, usize)]) -> Vec<u32> {
    let layout = check_exl2_of(groups, 32, 5, true);
    layout.units.iter().map(|unit| unit.widths).collect()
}

#[test]
fn every_bit_of_a_chunk_is_used_once() {
    for bits in [2usize, 3, 4, 5, 6, 8] {
        let mut used = vec![0u32; bits];
        for field in 0..16 {
            let covered: usize = pieces(bits, field)
                .map(|p| ((1 << p.count) - 1) << p.shift)
                .sum();
            assert_eq!(covered, (1 << bits) - 1, "{bits} bits, field {field}");
            for p in pieces(bits, field) {
                assert!(p.bit + p.count <= 16);
                let mask = ((1u32 << p.count) - 1) << p.bit;
                assert_eq!(used[p.word] & mask, 0);
                used[p.word] |= mask;
            }
        }
        assert!(used.iter().all(|&u| u == 0xffff), "{bits} bits");
        let mut offsets: Vec<usize> = (0..32)
            .flat_map(|l| (0..bits).map(move |w| word_offset(bits, l, w)))
            .collect();
        offsets.sort_unstable();
        assert!(offsets.iter().enumerate().all(|(i, &o)| o == 4 * i));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn exl2_survives(
        groups in prop::collection::vec((prop::sample::select(vec![2u32, 3, 4, 5, 6, 8]), 1usize..5), 1..7),
        n in prop::sample::select(vec![32usize, 64, 96]),
        seed in 1u32..1000,
    ) {
        check_exl2(&groups, n, seed);
    }

    #[test]
    fn gptq_survives(
        bits in prop::sample::select(vec![2u32, 4, 8, 3]),
        groups in 1usize..5,
        slices in 1usize..6,
        n in prop::sample::select(vec![32usize, 64]),
        shuffled: bool,
        v2: bool,
        seed in 1u32..1000,
    ) {
        let k = groups * slices * 32;
        let qweight = noise(k / 32 * bits as usize * n, seed);
        let qzeros = noise(groups * n / 32 * bits as usize, seed ^ 9);
        let scales: Vec<f16> = noise(groups * n, seed ^ 3).iter().map(|v| f16::from_f32((v % 1000) as f32 * 1e-5)).collect();
        let g_idx: Vec<i32> = noise(k, seed ^ 8).iter().map(|v| v.unsigned_abs() as i32 % groups as i32).collect();
        let zeros = if v2 { Zeros::V2 } else { Zeros::Classic };
        let tensors = GptqTensors {
            qweight: &qweight,
            qweight_shape: [qweight.len() / n, n],
            qzeros: &qzeros,
            qzeros_shape: [groups, n / 32 * bits as usize],
            scales: &scales,
            scales_shape: [groups, n],
            g_idx: shuffled.then_some(&g_idx[..]),
        };
        let view = GptqView::new("m", tensors, bits, zeros, Some(slices * 32)).expect("well-formed");
        let layout = Layout::gptq(&view).expect("fits");
        let mut image = vec![0x5au8; layout.bytes()];
        layout.pack(&view, &mut image, 2);
        for (feature, &row) in layout.row_of_feature().iter().enumerate() {
            let row = row as usize;
            let group = view.group_of()[feature] as usize;
            for column in 0..n {
                prop_assert_eq!(layout.code(&image, row, column), view.code(feature, column));
                let (unit, entry) = (row / UNIT_ROWS, row % UNIT_ROWS / layout.entry_rows);
                let at = column / TILE * layout.tile_bytes() + layout.scales_offset(unit) + (entry * 8 + column % 8) * 8;
                let half = |i: usize| f16::from_le_bytes([image[at + 2 * i], image[at + 2 * i + 1]]);
                let upper = column % 16 / 8;
                prop_assert_eq!(half(upper), view.scale(group, column));
                prop_assert_eq!(half(2 + upper).to_f32(), view.zero(group, column) as f32);
            }
        }
    }
}
