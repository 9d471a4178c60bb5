//! Tests of the operators through their slice API: every instruction set against plain float64 loops.

use exl_cpu::activation::{Activation, activate_in_place};
use exl_cpu::attention::{Attention, AttentionError, paged_attention};
use exl_cpu::isa::Isa;
use exl_cpu::kv::{Codec, KvError, Pages, codecs, load, store};
use exl_cpu::norm::{Norm, normalize, normalize_in_place};
use exl_cpu::rope::{RopeError, Tables, apply};

const ALL: [Isa; 3] = [Isa::Scalar, Isa::Avx2, Isa::Avx512];

/// Pseudo-random numbers in -1..1.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn assert_near(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (&g, &e)) in got.iter().zip(expected).enumerate() {
        assert!(
            (f64::from(g) - e).abs() < tolerance,
            "element {i}: {g} instead of {e}"
        );
    }
}

/// Memory of a cache, and pages over it.
struct Cache {
    data: [Vec<u8>; 2],
    scales: [Vec<u16>; 2],
    shape: [usize; 4],
    codecs: (Codec, Codec),
}

impl Cache {
    fn new(kind: &str, shape: [usize; 4]) -> Self {
        let codecs = codecs(kind).expect("a known kind");
        let rows = shape[0] * shape[1] * shape[2];
        let data = [codecs.0, codecs.1].map(|c| vec![0u8; rows * c.row_bytes(shape[3])]);
        let scales = [codecs.0, codecs.1].map(|c| vec![0u16; rows * c.row_scales(shape[3])]);
        Self {
            data,
            scales,
            shape,
            codecs,
        }
    }

    fn pages(&mut self) -> Pages {
        let [k, v] = &mut self.data;
        let [ks, vs] = &mut self.scales;
        // SAFETY: the buffers were sized by the codecs for this shape, and outlive the pages in these tests.
        unsafe {
            Pages::new(
                self.codecs,
                (k.as_mut_ptr(), v.as_mut_ptr()),
                (ks.as_mut_ptr(), vs.as_mut_ptr()),
                self.shape,
            )
        }
    }
}

// One test for all cases that force an instruction set: the setting is global to the process.
#[test]
fn every_instruction_set_agrees_with_plain_loops() {
    for isa in ALL {
        Isa::force(isa);
        norms();
        rope_turns_pairs();
        activations();
        for kind in ["fp16", "fp8", "q8", "q6", "q4"] {
            attention(kind, 64, 1);
            attention(kind, 40, 3);
        }
    }
}

fn norms() {
    let (rows, dim) = (3, 77);
    let (x, w) = (noise(rows * dim, 1), noise(dim, 2));
    let mut out = vec![0.0; x.len()];
    normalize(
        Norm::Rms {
            weight: &w,
            offset: 1.0,
        },
        &x,
        dim,
        1e-5,
        &mut out,
    );
    let mut expected = Vec::new();
    for row in x.chunks(dim) {
        let square: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / dim as f64;
        let scale = 1.0 / (square + 1e-5).sqrt();
        expected.extend(
            row.iter()
                .zip(&w)
                .map(|(&v, &w)| f64::from(v) * scale * (f64::from(w) + 1.0)),
        );
    }
    assert_near(&out, &expected, 1e-5);
    let mut same = x.clone();
    normalize_in_place(
        Norm::Rms {
            weight: &w,
            offset: 1.0,
        },
        &mut same,
        dim,
        1e-5,
    );
    assert_eq!(same, out);
}

fn rope_turns_pairs() {
    let half = 20;
    let angles = noise(5 * half, 3);
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
    let mut x = noise(2 * 3 * 50, 4);
    let before = x.clone();
    let tables = Tables {
        cos: &cos,
        sin: &sin,
        half,
        interleaved: false,
    };
    apply(&mut x, 3, 50, tables, &[4, 0]).expect("positions are in the tables");
    for (i, (a, b)) in x.chunks(50).zip(before.chunks(50)).enumerate() {
        let row = if i < 3 { 4 } else { 0 };
        for j in 0..half {
            let (c, s) = (cos[row * half + j], sin[row * half + j]);
            assert!((a[j] - (b[j] * c - b[j + half] * s)).abs() < 1e-6);
            assert!((a[j + half] - (b[j + half] * c + b[j] * s)).abs() < 1e-6);
        }
        assert_eq!(a[2 * half..], b[2 * half..]);
    }
    let refused = apply(&mut x, 3, 50, tables, &[0, 5]);
    assert_eq!(
        refused,
        Err(RopeError::Position {
            position: 5,
            rows: 5
        })
    );
}

fn activations() {
    let (x, up) = (noise(1000, 5), noise(1000, 6));
    let mut got = x.clone();
    activate_in_place(Activation::Silu, &mut got, Some(&up));
    let expected: Vec<f64> = x
        .iter()
        .zip(&up)
        .map(|(&v, &u)| f64::from(v) / (1.0 + (-f64::from(v)).exp()) * f64::from(u))
        .collect();
    assert_near(&got, &expected, 1e-6);
}

/// 90 tokens in pages of 16, three queries, against softmax over what `load` returns.
fn attention(kind: &str, dim: usize, groups: usize) {
    let (heads, tokens, page) = (2, 90usize, 16);
    let mut cache = Cache::new(kind, [8, page, heads, dim]);
    let pages = cache.pages();
    let table: Vec<i32> = vec![7, 2, 5, 0, 3, 6, -9];
    let slots: Vec<i64> = (0..tokens)
        .map(|j| i64::from(table[j / page]) * page as i64 + (j % page) as i64)
        .collect();
    let (k, v) = (
        noise(tokens * heads * dim, 7),
        noise(tokens * heads * dim, 8),
    );
    store(&pages, &k, &v, &slots).expect("slots are in range");
    let (mut dk, mut dv) = (vec![0.0; k.len()], vec![0.0; v.len()]);
    load(&pages, &slots, &mut dk, &mut dv).expect("slots are in range");
    let positions = [89, 0, 64];
    let q_heads = heads * groups;
    let q = noise(3 * q_heads * dim, 9);
    let args = Attention {
        q: &q,
        q_heads,
        pages: &pages,
        block_table: &table,
        max_pages: table.len(),
        rows: &[0, 0, 0],
        positions: &positions,
        scale: 0.2,
        window: 0,
        softcap: 0.0,
        key_mask: None,
    };
    let mut out = vec![0.0; q.len()];
    paged_attention(&args, &mut out).expect("everything is in range");
    let mut expected = vec![0.0f64; q.len()];
    for (t, &position) in positions.iter().enumerate() {
        for h in 0..q_heads {
            let at = (t * q_heads + h) * dim;
            let row = |j: usize| (j * heads + h / groups) * dim;
            let dot = |j: usize| -> f64 {
                (0..dim)
                    .map(|d| f64::from(q[at + d]) * f64::from(dk[row(j) + d]))
                    .sum::<f64>()
                    * 0.2
            };
            let weights: Vec<f64> = (0..=position as usize).map(|j| dot(j).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (j, w) in weights.iter().enumerate() {
                for d in 0..dim {
                    expected[at + d] += w / sum * f64::from(dv[row(j) + d]);
                }
            }
        }
    }
    // `load` rounds to half, attention does not.
    assert_near(
        &out,
        &expected,
        if kind.starts_with('q') { 2e-3 } else { 2e-6 },
    );
}

#[test]
fn errors_name_the_value() {
    let mut cache = Cache::new("fp16", [2, 4, 1, 8]);
    let pages = cache.pages();
    let x = vec![0.0; 8];
    assert_eq!(
        store(&pages, &x, &x, &[8]),
        Err(KvError::Slot { slot: 8, last: 7 })
    );
    assert!(matches!(
        store(&pages, &x, &x[..4], &[0]),
        Err(KvError::Length { what: "v", .. })
    ));
    let args = Attention {
        q: &x,
        q_heads: 1,
        pages: &pages,
        block_table: &[0, 2],
        max_pages: 2,
        rows: &[0],
        positions: &[3],
        scale: 1.0,
        window: 0,
        softcap: 0.0,
        key_mask: None,
    };
    let mut out = vec![0.0; 8];
    assert_eq!(paged_attention(&args, &mut out), Ok(()));
    let page = Attention {
        positions: &[4],
        ..args
    };
    assert_eq!(
        paged_attention(&page, &mut out),
        Err(AttentionError::Page {
            row: 0,
            index: 1,
            page: 2,
            last: 1
        })
    );
    let row = Attention { rows: &[1], ..args };
    assert!(matches!(
        paged_attention(&row, &mut out),
        Err(AttentionError::Row { row: 1, .. })
    ));
    let heads = Attention { q_heads: 0, ..args };
    assert!(matches!(
        paged_attention(&heads, &mut out),
        Err(AttentionError::Heads { .. })
    ));
}
