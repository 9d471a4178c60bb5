//! Numeric test vectors of the formats from another implementation (Python tests check hashes).

use exl_format::bits;
use exl_format::exl2::{Exl2Tensors, Exl2View};
use exl_format::gptq::{GptqTensors, GptqView, Zeros};
use half::f16;

fn words(hex: &str) -> Vec<u32> {
    hex.split_whitespace()
        .map(|word| u32::from_str_radix(word, 16).expect("hex"))
        .collect()
}

fn halves(hex: &str) -> Vec<u16> {
    hex.split_whitespace()
        .map(|word| u16::from_str_radix(word, 16).expect("hex"))
        .collect()
}

#[test]
fn packing_of_one_column() {
    // code(r) = (7 r + 3) mod 2^bits.
    for (width, expected) in [
        (2, "1b1b1b1b 1b1b1b1b"),
        (3, "53977053 70539770 97705397"),
        (4, "4d6f81a3 c5e7092b 4d6f81a3 c5e7092b"),
        (5, "4dfc4543 78245ba3 0753617d 4b276cf4 e55c7066"),
        (6, "9f611283 90bbd2d9 b2579740 8f201eb3 9cab91d5 71538703"),
        (
            8,
            "18110a03 342d261f 5049423b 6c655e57 88817a73 a49d968f c0b9b2ab dcd5cec7",
        ),
    ] {
        let codes: Vec<u8> = (0..32u32)
            .map(|r| ((7 * r + 3) & bits::mask(width)) as u8)
            .collect();
        let mut packed = vec![0i32; width as usize];
        bits::pack_stream(&codes, width, &mut packed);
        let packed: Vec<u32> = packed.iter().map(|&w| w as u32).collect();
        assert_eq!(packed, words(expected), "{width} bits");
    }
}

struct Exl2Case {
    q_weight: Vec<i32>,
    q_scale: Vec<i32>,
    q_scale_max: Vec<f16>,
    q_groups: Vec<i16>,
    q_invperm: Vec<i32>,
    n: usize,
}

impl Exl2Case {
    fn view(&self) -> Exl2View<'_> {
        Exl2View::new(
            "case",
            Exl2Tensors {
                q_weight: &self.q_weight,
                q_weight_shape: [self.q_weight.len() / self.n, self.n],
                q_scale: &self.q_scale,
                q_scale_shape: [self.q_scale_max.len(), self.n / 8],
                q_scale_max: &self.q_scale_max,
                q_groups: &self.q_groups,
                q_invperm: &self.q_invperm,
            },
        )
        .expect("well-formed")
    }
}

fn one_group(scale_max: u16, nibble: u32) -> Exl2Case {
    Exl2Case {
        q_weight: vec![0; 4 * 8],
        q_scale: vec![(nibble * 0x1111_1111) as i32],
        q_scale_max: vec![f16::from_bits(scale_max)],
        q_groups: vec![4, 0],
        q_invperm: (0..32).collect(),
        n: 8,
    }
}

#[test]
fn scale_chain() {
    // Half bits of q_scale_max, of smax, the stored nibble, half bits of s.
    for (max, smax, nibble, scale) in [
        (0x3800, 0x1800, 9, 0x3240),
        (0x224c, 0x0326, 15, 0x224c),
        (0x224c, 0x0326, 0, 0x0326),
        (0x128e, 0x0034, 15, 0x1280),
        (0x128e, 0x0034, 7, 0x0a80),
        (0x3f00, 0x1f00, 4, 0x3178),
    ] {
        let case = one_group(max, nibble);
        let view = case.view();
        assert_eq!(view.smax(0).to_bits(), smax);
        assert_eq!(view.scale(0, 3).to_bits(), scale);
    }
}

fn complete_tensor() -> Exl2Case {
    let (k, n) = (192usize, 128usize);
    let widths = [8u32, 6, 5, 4, 3, 2];
    let (mut q_weight, mut q_groups) = (Vec::new(), Vec::new());
    for (g, &width) in widths.iter().enumerate() {
        q_groups.extend([width as i16, (q_weight.len() / n) as i16]);
        let mut block = vec![0i32; width as usize * n];
        for row in 0..32 {
            let codes: Vec<u8> = (0..n)
                .map(|c| ((11 * (32 * g + row) + 7 * c + 5) as u32 & bits::mask(width)) as u8)
                .collect();
            bits::pack_row(&codes, row, width, &mut block);
        }
        q_weight.extend(block);
    }
    let mut q_scale = vec![0i32; 6 * n / 8];
    for (g, row) in q_scale.chunks_mut(n / 8).enumerate() {
        let nibbles: Vec<u8> = (0..n).map(|c| ((3 * g + c) % 16) as u8).collect();
        bits::pack_stream(&nibbles, 4, row);
    }
    Exl2Case {
        q_weight,
        q_scale,
        q_scale_max: halves("0cea 184d 2074 2474 2bcf 3400")
            .into_iter()
            .map(f16::from_bits)
            .collect(),
        q_groups,
        q_invperm: (0..k).map(|i| ((77 * i + 13) % k) as i32).collect(),
        n,
    }
}

#[test]
fn complete_exl2_tensor() {
    let case = complete_tensor();
    assert_eq!(case.q_groups, [8, 0, 6, 8, 5, 14, 4, 19, 3, 23, 2, 26]);
    let at = |row: usize| -> Vec<u32> {
        case.q_weight[row * 128..][..4]
            .iter()
            .map(|&w| w as u32)
            .collect()
    };
    assert_eq!(at(0), words("261b1005 2d22170c 34291e13 3b30251a"));
    assert_eq!(at(8), words("111bbc25 d8342dec 9f509fb3 666d017a"));
    assert_eq!(
        [at(14)[0], at(19)[0], at(23)[0], at(26)[0]].to_vec(),
        words("f9136e05 27c16b05 c55e1cc5 b1b1b1b1")
    );
    assert_eq!(case.q_scale[0] as u32, 0x7654_3210);
    assert_eq!(case.q_scale[16] as u32, 0xa987_6543);

    let view = case.view();
    assert_eq!(view.perm()[..8], [127, 132, 137, 142, 147, 152, 157, 162]);
    let smax: Vec<u16> = (0..6).map(|g| view.smax(g).to_bits()).collect();
    assert_eq!(smax, halves("0014 008a 023a 0474 0bcf 1400"));
    let mut weights = vec![f16::ZERO; 192 * 128];
    view.dequantize_into(&mut weights);
    for (row, expected) in [
        (0, "0190 0838 0dfa 1268 15dc 18d6"),
        (1, "a58b a2ae 19a3 26f5 2be5 aa42"),
        (2, "0000 9400 a000 2080 0000 a640"),
        (95, "1164 190e 1dc3 215d a42e a418"),
        (191, "2928 0000 aadd afcf 91db 9bcf"),
    ] {
        let found: Vec<u16> = weights[row * 128..][..6]
            .iter()
            .map(|w| w.to_bits())
            .collect();
        assert_eq!(found, halves(expected), "row {row}");
    }
}

#[test]
fn accessors_agree_with_the_whole_matrix() {
    let case = complete_tensor();
    let view = case.view();
    let (k, n) = (view.in_features(), view.out_features());
    let mut weights = vec![f16::ZERO; k * n];
    view.dequantize_into(&mut weights);
    let perm = view.perm();
    for row in 0..k {
        let g = view.group_of(row);
        let zero = view.groups()[g].zero() as f32;
        for column in (0..n).step_by(5) {
            let expected = f16::from_f32(
                (view.code(row, column) as f32 - zero) * view.scale(g, column).to_f32(),
            );
            assert_eq!(
                weights[perm[row] as usize * n + column].to_bits(),
                expected.to_bits()
            );
        }
    }
}

#[test]
fn gptq_tensor() {
    let (k, n, groups) = (64usize, 8usize, 2usize);
    let mut qweight = vec![0i32; k / 8 * n];
    for row in 0..k {
        let codes: Vec<u8> = (0..n).map(|c| ((3 * row + 5 * c + 1) % 16) as u8).collect();
        bits::pack_row(&codes, row, 4, &mut qweight);
    }
    let mut qzeros = vec![0i32; groups];
    for g in 0..groups {
        let codes: Vec<u8> = (0..n).map(|c| ((3 * g + c + 4) % 16) as u8).collect();
        bits::pack_stream(&codes, 4, &mut qzeros[g..=g]);
    }
    let scales: Vec<f16> = (0..groups * n)
        .map(|i| f16::from_f64(0.01 * (1 + i / n) as f64 + 0.001 * (i % n) as f64))
        .collect();
    let hex: Vec<u32> = qweight[..8].iter().map(|&w| w as u32).collect();
    assert_eq!(
        hex,
        words("630da741 b852fc96 0da741eb 52fc9630 a741eb85 fc9630da 41eb852f 9630da74")
    );
    assert_eq!(
        [qzeros[0] as u32, qzeros[1] as u32].to_vec(),
        words("ba987654 edcba987")
    );
    let bits_of: Vec<u16> = scales.iter().map(|s| s.to_bits()).collect();
    assert_eq!(
        bits_of,
        halves("211f 21a2 2225 22a8 232b 23ae 2419 245a 251f 2560 25a2 25e3 2625 2666 26a8 26e9")
    );
    for (zeros, first, later) in [
        (Zeros::Classic, "a91f 0000 2a25 aea8", "ad1f 0000 2da2 b1e3"),
        (Zeros::V2, "a7ae 21a2 2bae add3", "abae 2560 2f0a b127"),
    ] {
        let tensors = GptqTensors {
            qweight: &qweight,
            qweight_shape: [k / 8, n],
            qzeros: &qzeros,
            qzeros_shape: [groups, 1],
            scales: &scales,
            scales_shape: [groups, n],
            g_idx: None,
        };
        let view = GptqView::new("case", tensors, 4, zeros, None).expect("well-formed");
        let mut weights = vec![f16::ZERO; k * n];
        view.dequantize_into(&mut weights);
        let row =
            |r: usize| -> Vec<u16> { weights[r * n..][..4].iter().map(|w| w.to_bits()).collect() };
        assert_eq!(row(0), halves(first));
        assert_eq!(row(33), halves(later));
    }
}
