//! Instructions against known values, the `half` crate and double precision, through whole kernels of one warp.

mod common;

use common::one_block;
use exl_ptx::card::Card;
use exl_ptx::grid::run;
use exl_ptx::memory::Ranges;
use exl_ptx::module::Module;
use half::{bf16, f16};
use proptest::prelude::*;

/// Run `body` in one warp. Each lane finds its three words of `input` in `%r1`, `%r2`, `%r3`, and leaves its result in `%r9`.
fn warp(body: &str, input: &[[u32; 3]; 32]) -> [u32; 32] {
    let text = format!(
        ".version 9.0\n.target sm_80\n.address_size 64\n\
         .visible .entry test(.param .u64 out, .param .u64 in)\n{{\n\
         .reg .b32 %r<40>;\n.reg .b64 %rd<12>;\n.reg .b16 %h<8>;\n.reg .pred %p<4>;\n.reg .f32 %f<16>;\n.reg .f64 %d<4>;\n\
         ld.param.u64 %rd1, [out];\nld.param.u64 %rd2, [in];\nmov.u32 %r10, %tid.x;\n\
         mul.wide.u32 %rd3, %r10, 12;\nadd.s64 %rd4, %rd2, %rd3;\n\
         ld.global.u32 %r1, [%rd4];\nld.global.u32 %r2, [%rd4+4];\nld.global.u32 %r3, [%rd4+8];\n\
         {body}\n\
         mul.wide.u32 %rd5, %r10, 4;\nadd.s64 %rd6, %rd1, %rd5;\nst.global.u32 [%rd6], %r9;\nret;\n}}\n"
    );
    let mut out = [0u32; 32];
    let mut ranges = Ranges::default();
    ranges.add(out.as_mut_ptr() as u64, 128);
    ranges.add(input.as_ptr() as u64, 384);
    let module = Module::load(&text, &mut ranges).expect("PTX");
    let kernel = module.kernel("test").expect("known instructions");
    let mut params = (out.as_mut_ptr() as u64).to_le_bytes().to_vec();
    params.extend_from_slice(&(input.as_ptr() as u64).to_le_bytes());
    let launch = one_block(32, params, 0);
    run(
        &kernel,
        &launch,
        &Card::named("3090").expect("known"),
        &ranges,
    )
    .expect("a correct kernel");
    out
}

fn same(a: u32, b: u32, c: u32) -> [[u32; 3]; 32] {
    [[a, b, c]; 32]
}

/// The ISA: ordered comparisons with a NaN are false, unordered ones true.
#[test]
fn comparisons_of_floats() {
    let pairs = [(1.0_f32, 2.0_f32), (2.0, 2.0), (3.0, 2.0)];
    for (how, expected) in [
        ("eq", [0, 1, 0]),
        ("ne", [1, 0, 1]),
        ("lt", [1, 0, 0]),
        ("le", [1, 1, 0]),
        ("gt", [0, 0, 1]),
        ("ge", [0, 1, 1]),
    ] {
        for (suffix, with_nan) in [("", 0), ("u", 1)] {
            let body = format!("setp.{how}{suffix}.f32 %p1, %r1, %r2;\nselp.u32 %r9, 1, 0, %p1;");
            for ((a, b), want) in pairs.iter().zip(expected) {
                assert_eq!(
                    warp(&body, &same(a.to_bits(), b.to_bits(), 0)),
                    [want; 32],
                    "{a} {how}{suffix} {b}"
                );
            }
            for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::NAN, f32::NAN)] {
                let found = warp(&body, &same(a.to_bits(), b.to_bits(), 0));
                assert_eq!(found, [with_nan; 32], "{a} {how}{suffix} {b}");
            }
        }
    }
}

#[test]
fn integers_and_bits() {
    let cases: [(&str, [u32; 3], u32); 22] = [
        (
            "lop3.b32 %r9, %r1, %r2, %r3, 0xE8;",
            [0b1100, 0b1010, 0b1001],
            0b1000,
        ),
        (
            "lop3.b32 %r9, %r1, %r2, %r3, 0x96;",
            [0xff, 0x0f, 0x3c],
            0xff ^ 0x0f ^ 0x3c,
        ),
        (
            "prmt.b32 %r9, %r1, %r2, 0x5410;",
            [0x4433_2211, 0x8877_6655, 0],
            0x6655_2211,
        ),
        (
            "prmt.b32 %r9, %r1, %r2, 0x0008;",
            [0x0000_0080, 0, 0],
            0x8080_80ff,
        ),
        ("shf.l.wrap.b32 %r9, %r1, %r2, %r3;", [0x8000_0000, 1, 1], 3),
        ("shf.r.clamp.b32 %r9, %r1, %r2, %r3;", [5, 7, 40], 7),
        ("bfe.u32 %r9, %r1, 4, 8;", [0xabcd, 0, 0], 0xbc),
        ("bfe.s32 %r9, %r1, 4, 8;", [0xabcd, 0, 0], 0xffff_ffbc),
        (
            "bfi.b32 %r9, %r1, %r2, 8, 4;",
            [0xf, 0x1234_5078, 0],
            0x1234_5f78,
        ),
        (
            "mul.hi.u32 %r9, %r1, %r2;",
            [0xffff_ffff, 0xffff_ffff, 0],
            0xffff_fffe,
        ),
        (
            "mad.lo.s32 %r9, %r1, %r2, %r3;",
            [7, 0xffff_ffff, 3],
            (-4i32) as u32,
        ),
        ("shr.s32 %r9, %r1, %r2;", [0x8000_0000, 40, 0], 0xffff_ffff),
        ("shl.b32 %r9, %r1, %r2;", [1, 32, 0], 0),
        ("brev.b32 %r9, %r1;", [1, 0, 0], 0x8000_0000),
        ("bfind.u32 %r9, %r1;", [0x900, 0, 0], 11),
        ("bfind.shiftamt.u32 %r9, %r1;", [0x900, 0, 0], 20),
        (
            "dp4a.s32.s32 %r9, %r1, %r2, %r3;",
            [0x01ff_0203, 0x0402_0301, 10],
            10 + 4 - 2 + 6 + 3,
        ),
        (
            "add.cc.u32 %r8, %r1, %r2;\naddc.u32 %r9, %r3, 0;",
            [0xffff_ffff, 1, 5],
            6,
        ),
        ("min.s32 %r9, %r1, %r2;", [0xffff_fffe, 3, 0], 0xffff_fffe),
        ("vote.sync.ballot.b32 %r9, %p1, -1;", [0, 0, 0], 0),
        (
            "setp.lt.u32 %p1, %r10, 4;\nvote.sync.ballot.b32 %r9, %p1, -1;",
            [0, 0, 0],
            15,
        ),
        ("redux.sync.add.s32 %r9, %r10, -1;", [0, 0, 0], 496),
    ];
    for (body, [a, b, c], expected) in cases {
        assert_eq!(warp(body, &same(a, b, c))[0], expected, "{body}");
    }
}

#[test]
fn conversions_round_and_saturate() {
    let f = f32::to_bits;
    let cases: [(&str, u32, u32); 14] = [
        ("cvt.rni.s32.f32 %r9, %f1;", f(2.5), 2),
        ("cvt.rzi.s32.f32 %r9, %f1;", f(-2.9), (-2i32) as u32),
        ("cvt.rzi.u32.f32 %r9, %f1;", f(-2.9), 0),
        ("cvt.rzi.s32.f32 %r9, %f1;", f(3e9), i32::MAX as u32),
        ("cvt.rzi.s32.f32 %r9, %f1;", f(f32::NAN), 0),
        ("cvt.rmi.s32.f32 %r9, %f1;", f(-2.1), (-3i32) as u32),
        (
            "cvt.sat.f32.f32 %f2, %f1;\nmov.b32 %r9, %f2;",
            f(1.5),
            f(1.0),
        ),
        (
            "cvt.rn.f32.u32 %f2, %r1;\nmov.b32 %r9, %f2;",
            0x0100_0001,
            f(16_777_216.0),
        ),
        ("cvt.s32.s16 %r9, %h1;", 0x8001, 0xffff_8001),
        ("cvt.u32.u16 %r9, %h1;", 0x1_8001, 0x8001),
        (
            "fma.rm.f32 %f2, %f1, 0f3F800000, 0fB3000000;\nmov.b32 %r9, %f2;",
            f(1.0),
            f(1.0f32.next_down()),
        ),
        (
            "fma.rn.f32 %f2, %f1, 0f3F800000, 0fB2000000;\nmov.b32 %r9, %f2;",
            f(1.0),
            f(1.0),
        ),
        (
            "ex2.approx.ftz.f32 %f2, %f1;\nmov.b32 %r9, %f2;",
            f(-3.0),
            f(0.125),
        ),
        (
            "min.f32 %f2, %f1, 0f40000000;\nmov.b32 %r9, %f2;",
            f(f32::NAN),
            f(2.0),
        ),
    ];
    for (body, a, expected) in cases {
        let body = format!("mov.b32 %f1, %r1;\ncvt.u16.u32 %h1, %r1;\n{body}");
        assert_eq!(warp(&body, &same(a, 0, 0))[0], expected, "{body}");
    }
}

#[test]
fn lanes_exchange_values() {
    let identity = |body: &str| warp(body, &same(0, 0, 0));
    let up = identity("shfl.sync.up.b32 %r9, %r10, 1, 0, -1;");
    assert_eq!(up, std::array::from_fn(|l| (l as u32).saturating_sub(1)));
    let down = identity("shfl.sync.down.b32 %r9, %r10, 4, 31, -1;");
    assert_eq!(
        down,
        std::array::from_fn(|l| if l + 4 < 32 { l as u32 + 4 } else { l as u32 })
    );
    let index = identity("shfl.sync.idx.b32 %r9|%p1, %r10, 3, 0x1807, -1;");
    assert_eq!(index, std::array::from_fn(|l| (l as u32 & 0x18) + 3));
    let moved = identity(
        "shl.b32 %r4, %r10, 1;\nadd.s32 %r5, %r4, 1;\nshl.b32 %r5, %r5, 16;\nor.b32 %r4, %r4, %r5;\n\
         movmatrix.sync.aligned.m8n8.trans.b16 %r9, %r4;",
    );
    // Element (row, column) of the matrix is 8 row + column.
    assert_eq!(
        moved,
        std::array::from_fn(|l| {
            let (row, column) = (l as u32 / 4, l as u32 % 4 * 2);
            (8 * column + row) | ((8 * (column + 1) + row) << 16)
        })
    );
}

/// `m16n8k16` of small integers, which every order of summation gives exactly.
#[test]
fn matrix_products_have_the_layout_of_the_manual() {
    for ty in ["f16", "bf16"] {
        let bits = |v: f32| {
            if ty == "f16" {
                f16::from_f32(v).to_bits()
            } else {
                bf16::from_f32(v).to_bits()
            }
        };
        let a = |row: usize, k: usize| ((row * 5 + k * 3) % 7) as f32 - 3.0;
        let b = |k: usize, n: usize| ((k * 2 + n * 11) % 5) as f32 - 2.0;
        let pack = |low: f32, high: f32| u32::from(bits(low)) | (u32::from(bits(high)) << 16);
        for register in 0..4 {
            let body = format!(
                "mov.u32 %r20, %r1;\nmov.u32 %r21, %r2;\nmov.u32 %r22, %r3;\n\
                 ld.global.u32 %r23, [%rd4+0];\n\
                 mov.f32 %f1, 0f3F800000;\n\
                 mma.sync.aligned.m16n8k16.row.col.f32.{ty}.{ty}.f32 {{%f2,%f3,%f4,%f5}}, {{%r20,%r23,%r23,%r23}}, {{%r21,%r22}}, {{%f1,%f1,%f1,%f1}};\n\
                 mov.b32 %r9, %f{};",
                2 + register
            );
            // A's other three registers repeat the first one: rows g and g + 8 agree, and so do the halves of k.
            let input = std::array::from_fn(|l| {
                let (g, t) = (l / 4, l % 4);
                [
                    pack(a(g, 2 * t), a(g, 2 * t + 1)),
                    pack(b(2 * t, g), b(2 * t + 1, g)),
                    pack(b(2 * t + 8, g), b(2 * t + 9, g)),
                ]
            });
            let out = warp(&body, &input);
            for (l, &got) in out.iter().enumerate() {
                let (g, n) = (l / 4, l % 4 * 2 + register % 2);
                let sum: f32 = (0..16).map(|k| a(g, k % 8) * b(k, n)).sum();
                assert_eq!(
                    f32::from_bits(got),
                    1.0 + sum,
                    "{ty}, register {register}, lane {l}"
                );
            }
        }
    }
}

fn near(x: u32, y: u32) -> bool {
    x == y || (f16::from_bits(x as u16).is_nan() && f16::from_bits(y as u16).is_nan())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn halves_round_once(words in prop::array::uniform32(prop::array::uniform3(any::<u16>()))) {
        let input = words.map(|w| w.map(u32::from));
        let to = "cvt.u16.u32 %h1, %r1;\ncvt.u16.u32 %h2, %r2;\ncvt.u16.u32 %h3, %r3;\n";
        let h = |bits: u16| f64::from(f16::from_bits(bits).to_f32());
        for (op, exact) in [
            ("add.rn.f16 %h4, %h1, %h2;", (|a, b, _| a + b) as fn(f64, f64, f64) -> f64),
            ("sub.rn.f16 %h4, %h1, %h2;", |a, b, _| a - b),
            ("mul.rn.f16 %h4, %h1, %h2;", |a, b, _| a * b),
            ("fma.rn.f16 %h4, %h1, %h2, %h3;", |a, b, c| a * b + c),
        ] {
            let out = warp(&format!("{to}{op}\ncvt.u32.u16 %r9, %h4;"), &input);
            for (lane, w) in words.iter().enumerate() {
                // Sums and products of halves are exact in double precision except for the widest fused sums.
                let value = exact(h(w[0]), h(w[1]), h(w[2]));
                let candidates = [f16::from_f64(value), f16::from_f32(value as f32)];
                let error = |bits: u16| (f64::from(f16::from_bits(bits).to_f32()) - value).abs();
                let got = out[lane] as u16;
                prop_assert!(
                    candidates.iter().any(|c| near(out[lane], u32::from(c.to_bits())))
                        || error(got) <= candidates.iter().map(|c| error(c.to_bits())).fold(f64::MAX, f64::min),
                    "{op} {w:?} gave {got:#x}"
                );
            }
        }
    }

    #[test]
    fn pairs_are_two_halves(words in prop::array::uniform32(prop::array::uniform3(any::<u32>()))) {
        for name in ["add.rn", "sub.rn", "mul.rn"] {
            let pairs = warp(&format!("{name}.f16x2 %r9, %r1, %r2;"), &words);
            for part in [0, 16] {
                let one = words.map(|w| w.map(|v| (v >> part) & 0xffff));
                let body = format!("cvt.u16.u32 %h1, %r1;\ncvt.u16.u32 %h2, %r2;\n{name}.f16 %h4, %h1, %h2;\ncvt.u32.u16 %r9, %h4;");
                let single = warp(&body, &one);
                for lane in 0..32 {
                    prop_assert!(near((pairs[lane] >> part) & 0xffff, single[lane]), "{name} {:x?}", words[lane]);
                }
            }
        }
    }

    #[test]
    fn narrowing_is_that_of_the_half_crate(words in prop::array::uniform32(any::<u32>())) {
        let input = words.map(|w| [w, 0, 0]);
        let half = warp("mov.b32 %f1, %r1;\ncvt.rn.f16.f32 %h1, %f1;\ncvt.u32.u16 %r9, %h1;", &input);
        let brain = warp("mov.b32 %f1, %r1;\ncvt.rn.bf16.f32 %h1, %f1;\ncvt.u32.u16 %r9, %h1;", &input);
        for lane in 0..32 {
            let value = f32::from_bits(words[lane]);
            if value.is_nan() {
                prop_assert_eq!((half[lane], brain[lane]), (0x7fff, 0x7fff));
            } else {
                prop_assert_eq!(half[lane], u32::from(f16::from_f32(value).to_bits()));
                prop_assert_eq!(brain[lane], u32::from(bf16::from_f32(value).to_bits()));
            }
        }
    }

    #[test]
    fn single_precision_is_that_of_the_processor(words in prop::array::uniform32(prop::array::uniform3(any::<u32>()))) {
        let to = "mov.b32 %f1, %r1;\nmov.b32 %f2, %r2;\nmov.b32 %f3, %r3;\n";
        for (op, exact) in [
            ("add.rn.f32 %f4, %f1, %f2;", (|a, b, _| a + b) as fn(f32, f32, f32) -> f32),
            ("mul.f32 %f4, %f1, %f2;", |a, b, _| a * b),
            ("div.rn.f32 %f4, %f1, %f2;", |a, b, _| a / b),
            ("fma.rn.f32 %f4, %f1, %f2, %f3;", f32::mul_add),
        ] {
            let out = warp(&format!("{to}{op}\nmov.b32 %r9, %f4;"), &words);
            for lane in 0..32 {
                let [a, b, c] = words[lane].map(f32::from_bits);
                let want = exact(a, b, c);
                let got = f32::from_bits(out[lane]);
                prop_assert!(want.to_bits() == got.to_bits() || (want.is_nan() && out[lane] == 0x7fff_ffff), "{op} {a} {b} {c}");
            }
        }
    }
}
