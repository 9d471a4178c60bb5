//! Properties of both formats over widths, odd shapes, group sizes and permutations: reading returns the packed values.

use std::str::FromStr;
use std::sync::Mutex;

use exl_format::exl2::{self, Exl2Matrix, Exl2View, Plan, Search};
use exl_format::gptq::{self, GptqView, Settings, Zeros};
use exl_format::source::Weight;
use exl_format::{Problem, bits, safetensors, serial};
use half::f16;
use proptest::prelude::*;

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// A small generator, so that large arrays need only one number from proptest.
fn noise(seed: u64) -> impl FnMut() -> u32 {
    let mut state = seed | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u32
    }
}

fn shuffled(k: usize, seed: u64) -> Vec<u32> {
    let mut next = noise(seed);
    let mut perm: Vec<u32> = (0..k as u32).collect();
    for i in (1..k).rev() {
        perm.swap(i, next() as usize % (i + 1));
    }
    perm
}

fn weights(len: usize, seed: u64) -> Vec<f32> {
    let mut next = noise(seed);
    (0..len)
        .map(|_| {
            let unit = next() as f32 / u32::MAX as f32 - 0.5;
            unit * f32::from(1 + (next() % 8) as u8) * 0.01
        })
        .collect()
}

/// An executor that runs tasks backwards on three threads.
fn scattered(tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    let left = Mutex::new((0..tasks).collect::<Vec<_>>());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let next = left.lock().expect("no poison").pop();
                    match next {
                        Some(i) => task(i),
                        None => break,
                    }
                }
            });
        }
    });
}

fn groups() -> impl Strategy<Value = Vec<(u32, usize)>> {
    let width = prop::sample::select(vec![2u32, 3, 4, 5, 6, 8]);
    prop::collection::vec((width, (1usize..5).prop_map(|blocks| 32 * blocks)), 1..7)
}

proptest! {
    #![proptest_config(config(512))]

    #[test]
    fn streams_round_trip(
        width in 1u32..9,
        rows in (1usize..5).prop_map(|blocks| 32 * blocks),
        columns in 1usize..40,
        seed: u64,
    ) {
        let mut next = noise(seed);
        let codes: Vec<u8> = (0..rows * columns).map(|_| (next() & bits::mask(width)) as u8).collect();
        let mut words = vec![0i32; rows * width as usize / 32 * columns];
        for (row, codes) in codes.chunks(columns).enumerate() {
            bits::pack_row(codes, row, width, &mut words);
        }
        let mut found = vec![0u8; columns];
        for (row, codes) in codes.chunks(columns).enumerate() {
            bits::unpack_row(&words, row, width, &mut found);
            prop_assert_eq!(&found[..], codes);
            for (column, &code) in codes.iter().enumerate() {
                prop_assert_eq!(bits::column_code(&words, columns, row, column, width), u32::from(code));
            }
        }
    }

    #[test]
    fn exl2_matrices_round_trip(
        groups in groups(),
        columns in (1usize..6).prop_map(|eights| 8 * eights),
        seed: u64,
        identity: bool,
    ) {
        let k: usize = groups.iter().map(|group| group.1).sum();
        let mut next = noise(seed);
        let mut codes = Vec::new();
        for &(width, rows) in &groups {
            codes.extend((0..rows * columns).map(|_| (next() & bits::mask(width)) as u8));
        }
        let scale_codes: Vec<u8> = (0..groups.len() * columns).map(|_| (next() & 15) as u8).collect();
        let maxima: Vec<f16> = groups.iter().map(|_| f16::from_bits((next() % 0x5c00) as u16)).collect();
        let perm = shuffled(k, seed);
        let perm = (!identity).then_some(&perm[..]);
        let matrix = Exl2Matrix::pack(&codes, &scale_codes, &maxima, &groups, perm, columns).unwrap();
        let view = Exl2View::new("m", matrix.tensors()).unwrap();

        prop_assert_eq!((view.in_features(), view.out_features()), (k, columns));
        let found: Vec<_> = view.groups().iter().map(|group| (group.bits, group.rows.len())).collect();
        prop_assert_eq!(found, groups);
        let order: Vec<u32> = perm.map_or_else(|| (0..k as u32).collect(), <[u32]>::to_vec);
        prop_assert_eq!(view.perm(), order.clone());

        let mut weights = vec![f16::ZERO; k * columns];
        view.dequantize_into(&mut weights);
        let mut row_codes = vec![0u8; columns];
        for row in 0..k {
            let g = view.group_of(row);
            view.unpack_row(row, &mut row_codes);
            prop_assert_eq!(&row_codes[..], &codes[row * columns..][..columns]);
            let smax = f16::from_f64(maxima[g].to_f64() / 256.0).to_f64();
            for column in 0..columns {
                let code = codes[row * columns + column];
                prop_assert_eq!(view.code(row, column), u32::from(code));
                let steps = f64::from(scale_codes[g * columns + column]) + 1.0;
                let scale = f16::from_f64(steps * steps * smax);
                prop_assert_eq!(view.scale(g, column), scale);
                let integer = f64::from(code) - f64::from(1u32 << (view.groups()[g].bits - 1));
                let expected = f16::from_f64(integer * scale.to_f64());
                let at = order[row] as usize * columns + column;
                prop_assert_eq!(weights[at].to_bits(), expected.to_bits());
            }
        }
    }

    #[test]
    fn plans_cover_every_row(
        k in (1usize..200).prop_map(|blocks| 32 * blocks),
        share in 0.001f64..0.999,
        sizes in (1usize..9, 1usize..9),
        widths in prop::sample::subsequence(vec![8u32, 6, 5, 4, 3, 2], 2),
    ) {
        let text = format!("{share}:{}b_{}g/{}:{}b_{}g", widths[0], 32 * sizes.0, 1.0 - share, widths[1], 32 * sizes.1);
        let plan = Plan::from_str(&text).unwrap();
        prop_assert_eq!(Plan::from_str(&plan.to_string()).unwrap(), plan.clone());
        let groups = plan.groups(k).unwrap();
        prop_assert_eq!(groups.iter().map(|group| group.1).sum::<usize>(), k);
        prop_assert!(groups.iter().all(|group| group.1 > 0 && group.1 % 32 == 0));
        prop_assert!(groups.windows(2).all(|pair| pair[0].0 >= pair[1].0));
        let wide: usize = groups.iter().filter(|group| group.0 == widths[0]).map(|group| group.1).sum();
        prop_assert!(wide as f64 >= (share * k as f64).floor().min(k as f64));
        prop_assert!(wide as f64 <= share * k as f64 + (32 * sizes.0) as f64);
    }

    #[test]
    fn plan_texts_never_panic(text in "[0-9.:b_g/naif -]{0,24}") {
        if let Ok(plan) = Plan::from_str(&text) {
            prop_assert!(plan.groups(320).is_ok());
        }
    }
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn quantizing_does_not_depend_on_threads_or_element_type(
        out in 1usize..140,
        k in (1usize..8).prop_map(|blocks| 32 * blocks),
        plan in prop::sample::select(vec!["1:4b_64g", "0.3:5b_32g/0.7:3b_128g", "1:8b_32g", "1:2b_96g"]),
        grid: bool,
        seed: u64,
    ) {
        let halves: Vec<f16> = weights(out * k, seed).into_iter().map(f16::from_f32).collect();
        let floats: Vec<f32> = halves.iter().map(|w| w.to_f32()).collect();
        let plan: Plan = plan.parse().unwrap();
        let perm = shuffled(k, seed);
        let search = if grid { Search::Grid } else { Search::None };
        let first = exl2::quantize(Weight::F16(&halves), [out, k], &plan, Some(&perm), search, &serial).unwrap();
        let second = exl2::quantize(Weight::F32(&floats), [out, k], &plan, Some(&perm), search, &scattered).unwrap();
        prop_assert_eq!(&first, &second);

        let view = Exl2View::new("m", first.tensors()).unwrap();
        let n = view.out_features();
        prop_assert_eq!(n, out.next_multiple_of(32));
        let mut back = vec![f16::ZERO; k * n];
        view.dequantize_into(&mut back);
        // Half a step, and the last rounding to half: at most 127 steps times 2^-11.
        for row in 0..k {
            let g = view.group_of(row);
            let feature = perm[row] as usize;
            let extreme = (view.groups()[g].zero() - 1) as f32;
            for column in 0..n {
                let (w, s) = (if column < out { floats[column * k + feature] } else { 0.0 }, view.scale(g, column).to_f32());
                let found = back[feature * n + column].to_f32();
                if w.abs() <= extreme * s {
                    prop_assert!((found - w).abs() <= 0.57 * s, "{} for {} with step {}", found, w, s);
                }
            }
        }
    }

    #[test]
    fn gptq_matrices_round_trip(
        width in prop::sample::select(vec![2u32, 3, 4, 8]),
        blocks in (1usize..5, 1usize..4),
        group_size in 1usize..200,
        symmetric: bool,
        v2: bool,
        act_order: bool,
        seed: u64,
    ) {
        let (k, n) = (32 * blocks.0, 32 * blocks.1);
        let floats = weights(k * n, seed);
        let zeros = if v2 { Zeros::V2 } else { Zeros::Classic };
        let settings = Settings { bits: width, group_size, symmetric, zeros };
        let perm = shuffled(k, seed);
        let perm = act_order.then_some(&perm[..]);
        let matrix = gptq::quantize(Weight::F32(&floats), [n, k], settings, perm, &serial).unwrap();
        let again = gptq::quantize(Weight::F32(&floats), [n, k], settings, perm, &scattered).unwrap();
        prop_assert_eq!(&matrix, &again);
        let view = GptqView::new("m", matrix.tensors(), width, zeros, Some(group_size)).unwrap();
        let mut back = vec![f16::ZERO; k * n];
        view.dequantize_into(&mut back);
        for row in 0..k {
            let g = view.group_of()[row] as usize;
            prop_assert_eq!(g, matrix.g_idx[row] as usize);
            for column in 0..n {
                let expected = (f64::from(view.code(row, column)) - f64::from(view.zero(g, column))) * view.scale(g, column).to_f64();
                prop_assert_eq!(back[row * n + column].to_bits(), f16::from_f64(expected).to_bits());
            }
        }
    }
}

proptest! {
    #![proptest_config(config(4096))]

    #[test]
    fn headers_of_any_bytes_never_panic(header in prop::collection::vec(any::<u8>(), 0..200), length: u64) {
        let _ = safetensors::parse("file", &header, length);
    }

    #[test]
    fn checked_headers_are_consistent(
        entries in prop::collection::vec((prop::collection::vec(0u64..5, 0..3), 0u64..60, 0u64..60, 0usize..4), 0..4),
        data in 0u64..60,
    ) {
        let dtypes = ["U8", "F16", "F32", "I64"];
        let text: Vec<String> = entries
            .iter()
            .enumerate()
            .map(|(i, (shape, begin, end, dtype))| {
                let dtype = dtypes[*dtype];
                format!(r#""t{i}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#)
            })
            .collect();
        let text = format!("{{{}}}", text.join(","));
        let file = 8 + text.len() as u64 + data;
        if let Ok(header) = safetensors::parse("file", text.as_bytes(), file) {
            let mut end = 8 + text.len() as u64;
            for tensor in header.tensors.iter().filter(|tensor| tensor.nbytes > 0) {
                prop_assert!(tensor.offset >= end);
                end = tensor.offset + tensor.nbytes;
                prop_assert!(end <= file);
                prop_assert_eq!(tensor.shape.iter().product::<u64>() * tensor.dtype.size, tensor.nbytes);
            }
        }
    }
}

#[test]
fn a_plan_of_three_widths_divides_4096_rows() {
    let plan: Plan = "0.05:8b_32g/0.1:4b_128g/0.85:3b_128g".parse().unwrap();
    let groups = plan.groups(4096).unwrap();
    let count = |width| groups.iter().filter(|group| group.0 == width).count();
    assert_eq!([count(8), count(4), count(3)], [7, 4, 27]);
    assert_eq!(groups.last(), Some(&(3, 32)));
}

#[test]
fn offsets_beyond_sixteen_bits_are_rejected() {
    // 8 bits: 8 words of 32 rows, so group 8193 would begin at word 65544.
    let groups = vec![(8, 32); 8194];
    match Exl2Matrix::empty(&groups, 8, None) {
        Err(Problem::Range { value, limit, .. }) => assert_eq!((value, limit), (65536, 65535)),
        other => panic!("{other:?}"),
    }
    // Half of that fits this crate and, past 32767, exceeds signed offsets.
    let matrix = Exl2Matrix::empty(&vec![(8, 32); 8192], 8, None).unwrap();
    let view = Exl2View::new("m", matrix.tensors()).unwrap();
    assert_eq!(view.in_features(), 262_144);
    assert_eq!(view.groups()[8191].first_word, 65528);
}
