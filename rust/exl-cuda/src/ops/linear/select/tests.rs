//! Tests of the table as data, for cards that need not be present.

mod chains;

use crate::ops::linear::lora::select::Sizes;
use proptest::prelude::*;

use super::*;
use crate::capabilities::CARDS;
use crate::capabilities::tests::{RELEASE, card};
use crate::ops::linear::tests::{matrix, sized};

const PLAIN: Epilogue = Epilogue {
    gate: false,
    activation: false,
    norm: false,
    layer: false,
    residual: false,
    bf16: false,
    adapters: None,
};
const SIZES: Sizes = Sizes {
    levels: 1,
    most_rank: 16,
};
const NORM: Epilogue = Epilogue {
    norm: true,
    ..PLAIN
};
const GATE: Epilogue = Epilogue { gate: true, ..NORM };
const RESIDUAL: Epilogue = Epilogue {
    residual: true,
    ..PLAIN
};

#[test]
fn only_the_ring_adds_adapters_to_one_or_two_rows_of_halves() {
    let made = sized(16, 2064, 4096);
    let long = sized(72, 2064, 4096);
    let joins = |name, matrix: &Matrix, rows, epilogue| {
        let call = Call::aligned(
            rows,
            Epilogue {
                adapters: Some(SIZES),
                ..epilogue
            },
        );
        let found = plan(&card(name, RELEASE), &[matrix, matrix], call);
        assert!(!found.joined || found.kernel == Kernel::GemvRing);
        found.joined
    };
    let gate = Epilogue {
        gate: true,
        ..PLAIN
    };
    for rows in 1..=FEW_ROWS + 1 {
        for epilogue in [PLAIN, NORM, GATE, gate, RESIDUAL] {
            assert_eq!(
                joins("H100", &made, rows, epilogue),
                rows <= GEMV_ROWS,
                "{rows} {epilogue:?}"
            );
            assert!(!joins("3090", &made, rows, epilogue), "it has no ring");
        }
    }
    for epilogue in [
        Epilogue {
            layer: true,
            ..NORM
        },
        Epilogue {
            bf16: true,
            ..PLAIN
        },
        Epilogue {
            activation: true,
            ..PLAIN
        },
    ] {
        assert!(!joins("H100", &made, 1, epilogue), "{epilogue:?}");
    }
    assert!(!joins("H100", &long, 1, PLAIN), "18,432 features");
    for (levels, most_rank, takes) in [(1, 32, true), (1, 33, false), (2, 16, false)] {
        let adapters = Some(Sizes { levels, most_rank });
        let call = Call::aligned(1, Epilogue { adapters, ..PLAIN });
        let found = plan(&card("H100", RELEASE), &[&made], call);
        assert_eq!(found.joined, takes, "{levels} {most_rank}");
        assert_eq!(found.kernel_name() == "gemv_ring_adapted", takes);
        let why: Vec<String> = found
            .refused
            .iter()
            .map(|(_, why)| why.to_string())
            .collect();
        let expected = "it takes one adapter a row, of up to 32 ranks";
        assert_eq!(
            why.first().map(String::as_str),
            (!takes).then_some(expected)
        );
    }
}

#[test]
fn adapters_that_leave_too_little_room_for_weights_are_refused_with_that_reason() {
    let adapters = Some(Sizes {
        levels: 1,
        most_rank: 32,
    });
    for (name, units, n, expected) in [
        ("H100", 8, 4096, None),
        ("H100", 8, 128_256, Some(Refusal::Window)),
        ("H100", 16, 128_256, Some(Refusal::SharedMemory(232_448))),
        ("5090", 8, 4096, Some(Refusal::Window)),
        ("5090", 16, 4096, Some(Refusal::SharedMemory(101_376))),
    ] {
        let made = sized(units, 2064, n);
        let of = |adapters| {
            let call = Call::aligned(2, Epilogue { adapters, ..PLAIN });
            plan(&card(name, RELEASE), &[&made], call)
        };
        let found = of(adapters);
        assert_eq!(of(None).kernel, Kernel::GemvRing, "{name} {units} {n}");
        assert_eq!(found.joined, expected.is_none(), "{name} {units} {n}");
        let why = found.refused.first().map(|(_, why)| *why);
        assert_eq!(why, expected, "{name} {units} {n}");
    }
}

/// The matmuls of a layer of an 8B Llama at 4 bits, and its head.
fn layer() -> [(&'static str, Vec<Matrix>, Epilogue); 5] {
    let of = |units, n| sized(units, 2064, n);
    [
        ("qkv", vec![of(16, 4096), of(16, 1024), of(16, 1024)], NORM),
        ("o", vec![of(16, 4096)], RESIDUAL),
        ("gate_up", vec![of(16, 14336), of(16, 14336)], GATE),
        ("down", vec![of(56, 4096)], RESIDUAL),
        ("head", vec![of(16, 128_256)], NORM),
    ]
}

/// A call whose rows need not be batch-invariant, as in a prompt.
fn prompt(rows: usize, epilogue: Epilogue) -> Call {
    Call {
        invariant: false,
        ..Call::aligned(rows, epilogue)
    }
}

/// One word for each matmul of the layer: the kernel, with `+` if one launch includes the epilogue.
fn selected(caps: &Capabilities, rows: usize) -> String {
    let words = layer().map(|(_, matrices, epilogue)| {
        let all: Vec<&Matrix> = matrices.iter().collect();
        let found = plan(caps, &all, prompt(rows, epilogue));
        let word = found.kernel.name().trim_start_matches("gem");
        format!("{word}{}", if found.joined { "+" } else { "" })
    });
    words.join(" ")
}

fn all(word: &str) -> String {
    [word; 5].join(" ")
}

#[test]
fn the_table_of_a_layer_on_every_card() {
    for name in CARDS.map(|card| card.name) {
        let found = [1, 8, 32, 64, 512].map(|rows| selected(&card(name, RELEASE), rows));
        let expected = match name {
            "H100" | "H200" | "B200" => {
                ["v_ring+", "m_few+", "m_batch+", "m_batch+", "m_large"].map(all)
            }
            // `down` has more activations than the ring leaves room for in 99 KB.
            "5090" => [
                "v_ring+ v_ring+ v_ring+ m_direct+ v_ring+".to_owned(),
                all("m_direct+"),
                all("m_batch+"),
                all("m_batch+"),
                all("m_large"),
            ],
            "2080 Ti" => ["m_direct+", "m_direct+", "m_tile", "m_tile", "m_large"].map(all),
            _ => ["m_direct+", "m_direct+", "m_batch+", "m_batch+", "m_large"].map(all),
        };
        assert_eq!(found, expected, "{name}");
    }
}

/// Gated blocks need room for units of two matrices. Where that is too much, the activation is a separate launch.
#[test]
fn cards_of_99_kib_join_the_launches_of_every_width() {
    for name in ["3060", "3090", "4090", "5090", "L4", "L40S"] {
        let caps = card(name, RELEASE);
        for (bytes, rows) in [1040, 1552, 2064, 2576, 3088, 4112]
            .into_iter()
            .flat_map(|bytes| [9, 16, 32, 64].map(|rows| (bytes, rows)))
        {
            let of = |units, n| sized(units, bytes, n);
            let (up, down, o) = (of(16, 14336), of(56, 4096), of(16, 4096));
            let qkv = [of(16, 4096), of(16, 1024), of(16, 1024)];
            let calls: [(Vec<&Matrix>, Epilogue); 4] = [
                (vec![&up, &up], GATE),
                (qkv.iter().collect(), NORM),
                (vec![&down], RESIDUAL),
                (vec![&o], RESIDUAL),
            ];
            for (matrices, epilogue) in calls {
                let plan = plan(&caps, &matrices, Call::aligned(rows, epilogue));
                let found = (plan.kernel, plan.joined);
                assert_eq!(found, (Kernel::GemmBatch, true), "{name} {bytes} {rows}");
                assert!(bytes > 2064 || !plan.separate_gate, "{name} {bytes} {rows}");
            }
        }
    }
}

#[test]
fn a_module_of_older_code_keeps_newer_kernels_off_the_card() {
    let (proxy, native) = (card("H100", &["80+ptx"]), card("H100", &["80+ptx", "90a"]));
    for rows in [1, 2, 3, 8, 9, 64] {
        let direct = rows <= FEW_ROWS;
        let expected = if direct { "m_direct+" } else { "m_batch+" };
        assert_eq!(selected(&proxy, rows), all(expected), "{rows}");
        let found = selected(&native, rows);
        assert!(
            !found.contains("tile") && !found.contains("direct"),
            "{rows}"
        );
    }
    assert!(selected(&card("H100", &["90"]), 64).contains("batch"));
    assert!(selected(&card("H100", &["75+ptx"]), 64).contains("tile"));
}

#[test]
fn tiles_of_a_block_follow_from_the_rows() {
    let (turing, made) = (card("H100", &["75+ptx"]), matrix(16, 2064));
    let tile = |rows| {
        let call = Call::aligned(rows, PLAIN);
        let plan = plan_with(Kernel::GemmTile, &turing, &[&made], call, Tuning::default());
        match plan.unwrap().planned {
            Planned::Tile(tile) => tile,
            other => panic!("{rows} rows run on {other:?}"),
        }
    };
    let borders = [(1, 8, 1), (9, 16, 2), (17, PACKED_ROWS, 4)];
    for (first, last, columns) in borders {
        for rows in first..=last {
            assert_eq!(tile(rows).columns, columns, "{rows}");
        }
    }
}

#[test]
fn rows_decide_the_kernel_at_each_limit() {
    let hopper = card("H100", &["90a"]);
    let made = matrix(16, 2064);
    let kernel = |rows, epilogue| plan(&hopper, &[&made], Call::aligned(rows, epilogue)).kernel;
    let limits = [
        (1, Kernel::GemvRing),
        (GEMV_ROWS, Kernel::GemvRing),
        (GEMV_ROWS + 1, Kernel::GemmFew),
        (FEW_ROWS, Kernel::GemmFew),
        (FEW_ROWS + 1, Kernel::GemmBatch),
        (PACKED_ROWS, Kernel::GemmBatch),
        (PACKED_ROWS + 1, Kernel::GemmBatch),
        (BLOCK_ROWS, Kernel::GemmBatch),
        (BLOCK_ROWS + 1, Kernel::GemmBatch),
    ];
    for (rows, expected) in limits {
        for epilogue in [PLAIN, NORM, RESIDUAL, Epilogue { bf16: true, ..NORM }] {
            assert_eq!(kernel(rows, epilogue), expected, "{rows} {epilogue:?}");
            let fast = plan(&hopper, &[&made], prompt(rows, epilogue)).kernel;
            let many = rows > PACKED_ROWS;
            assert_eq!(fast, if many { Kernel::GemmLarge } else { expected });
        }
        let small = sized(16, 2064, 64);
        let few = expected == Kernel::GemmFew;
        for bf16 in [false, true] {
            let epilogue = Epilogue { bf16, ..PLAIN };
            let alone = |matrix| plan_alone(&hopper, matrix, prompt(rows, epilogue)).kernel;
            let expected = if rows > PACKED_ROWS {
                Kernel::GemmLarge
            } else {
                expected
            };
            assert_eq!(alone(&made), expected, "{rows}");
            let expected = if few { Kernel::GemvRing } else { expected };
            assert_eq!(alone(&small), expected, "{rows}");
        }
    }
}

#[test]
fn a_pass_runs_on_packed_weights_up_to_the_rows_of_its_model() {
    for (whole_blocks, most) in [(true, STEP_ROWS), (false, PACKED_ROWS)] {
        let packed = pass_rows(whole_blocks);
        assert_eq!(packed, most);
        for rows in [1, PACKED_ROWS, PACKED_ROWS + 1, STEP_ROWS, STEP_ROWS + 1] {
            assert_eq!(runs_packed(rows, false, packed), rows <= most, "{rows}");
            assert_eq!(runs_packed(rows, true, packed), rows <= STEP_ROWS, "{rows}");
        }
    }
}

#[test]
fn one_launch_takes_a_block_of_rows_where_there_is_wgmma() {
    for name in CARDS.map(|card| card.name) {
        let (caps, made) = (card(name, RELEASE), matrix(16, 2064));
        let call = Call {
            invariant: true,
            ..Call::aligned(BLOCK_ROWS, PLAIN)
        };
        let whole = plan_alone(&caps, &made, call).is_whole_block();
        assert_eq!(whole, caps.has(Feature::Wgmma), "{name}");
        let half = Call {
            rows: PACKED_ROWS,
            ..call
        };
        assert!(!plan_alone(&caps, &made, half).is_whole_block(), "{name}");
        assert!(
            !plan_alone(&caps, &made, prompt(BLOCK_ROWS, PLAIN)).is_whole_block(),
            "{name}"
        );
    }
}

/// So callers keep one plan for prompts of all lengths.
#[test]
fn prompts_of_all_lengths_have_one_plan() {
    for name in CARDS.map(|card| card.name) {
        let caps = card(name, RELEASE);
        for made in [matrix(16, 2064), sized(16, 2064, 64)] {
            for rows in [PACKED_ROWS + 1, BLOCK_ROWS, STEP_ROWS, 2048, 1 << 20] {
                let found = plan_alone(&caps, &made, prompt(rows, PLAIN));
                let memory = (
                    found.scratch_bytes,
                    found.exchange_bytes,
                    found.input_columns,
                );
                assert_eq!(
                    (found.kernel, memory),
                    (Kernel::GemmLarge, (0, 0, None)),
                    "{name} {rows}"
                );
            }
        }
    }
}

/// Blocks of 128 columns have a gate at every width of weights, on cards with wgmma only.
#[test]
fn more_rows_than_64_join_the_launches_where_there_is_wgmma() {
    for name in CARDS.map(|card| card.name) {
        let caps = card(name, RELEASE);
        for bytes in [1040, 2064, 2576, 3088, 4112] {
            let of = |units, n| sized(units, bytes, n);
            let (up, down) = (of(16, 14336), of(56, 4096));
            let gated = plan(&caps, &[&up, &up], Call::aligned(128, GATE));
            let after = plan(&caps, &[&down], Call::aligned(128, RESIDUAL));
            let wide = caps.has(Feature::Wgmma);
            let rows = if wide { 128 } else { 64 };
            assert!(!wide || (gated.joined && after.joined), "{name} {bytes}");
            let launches = (gated.call.rows, after.call.rows);
            assert_eq!(launches, (rows, rows), "{name} {bytes}");
            assert!(!wide || gated.chains_to(&after), "{name} {bytes}");
        }
    }
}

#[test]
fn a_large_matrix_alone_has_its_input_packed_by_a_launch() {
    let size = sized(16, 2064, 16).image_bytes();
    let tiles = LEAST_PACKED_ALONE.div_ceil(size);
    let kernel = |caps: &Capabilities, tiles, rows| {
        plan_alone(
            caps,
            &sized(16, 2064, 16 * tiles),
            Call::aligned(rows, PLAIN),
        )
        .kernel
    };
    for name in ["H100", "H200", "B200"] {
        let caps = card(name, RELEASE);
        for rows in GEMV_ROWS + 1..=FEW_ROWS {
            assert_eq!(
                kernel(&caps, tiles - 1, rows),
                Kernel::GemvRing,
                "{name} {rows}"
            );
            assert_eq!(kernel(&caps, tiles, rows), Kernel::GemmFew, "{name} {rows}");
        }
    }
    for name in ["2080 Ti", "3090", "4090", "A100"] {
        let caps = card(name, RELEASE);
        for tiles in [1, tiles] {
            for rows in 1..=FEW_ROWS {
                let found = kernel(&caps, tiles, rows);
                assert_eq!(found, Kernel::GemmDirect, "{name} {tiles} {rows}");
            }
            assert_ne!(kernel(&caps, tiles, FEW_ROWS + 1), Kernel::GemmDirect);
        }
    }
    let head = sized(14, 2064, 256_000);
    let plan = plan_alone(&card("H100", RELEASE), &head, Call::aligned(8, PLAIN));
    assert!(plan.joined && plan.scratch_bytes >= 16 * head.in_features());
}

#[test]
fn a_refusal_says_why_the_faster_kernel_is_not_used() {
    let made = matrix(16, 2064);
    let found = plan(&card("2080 Ti", RELEASE), &[&made], Call::aligned(9, PLAIN));
    assert_eq!(found.kernel, Kernel::GemmTile);
    let why: Vec<String> = found
        .refused
        .iter()
        .map(|(kernel, why)| format!("{}: {why}", kernel.name()))
        .collect();
    assert_eq!(
        why,
        ["gemm_batch: it needs asynchronous copies (code for sm_80 or newer)",]
    );
    let found = plan(&card("4090", RELEASE), &[&made], Call::aligned(1, PLAIN));
    assert_eq!((found.kernel, found.joined), (Kernel::GemmDirect, true));
    let why = found
        .refused
        .iter()
        .map(|(kernel, why)| format!("{}: {why}", kernel.name()));
    assert!(why.eq([
        "gemv_ring: it needs bulk copies (code for sm_90 or newer)",
        "gemm_few: it needs bulk copies (code for sm_90 or newer)",
    ]));
    // Two matrices with different permutations share no packed input.
    let mut other = matrix(16, 2064);
    other.features_host.reverse();
    let hopper = card("H100", &["90a"]);
    let apart = plan(&hopper, &[&made, &other], Call::aligned(32, NORM));
    assert_eq!((apart.kernel, apart.joined), (Kernel::GemmBatch, false));
    let last = apart.refused.last().map(|(kernel, _)| *kernel);
    assert_eq!(last, Some(Kernel::GemmBatch));
    assert!(plan(&hopper, &[&made, &other], Call::aligned(8, NORM)).joined);
}

#[test]
fn unaligned_operands_use_kernels_that_take_them() {
    let (hopper, made) = (card("H100", &["90a"]), matrix(16, 2064));
    let kernel = |call| {
        let plan = plan(&hopper, &[&made], call);
        plan.joined.then_some(plan.kernel)
    };
    for rows in [1, 4, 32] {
        let of = |epilogue| Call {
            aligned_input: false,
            ..Call::aligned(rows, epilogue)
        };
        assert_eq!(kernel(of(PLAIN)), Some(Kernel::GemmBatch));
        assert_eq!(kernel(of(NORM)), None);
    }
    let of = |rows| Call {
        aligned_output: false,
        ..Call::aligned(rows, RESIDUAL)
    };
    let kernels = [1, 4, 32].map(|rows| kernel(of(rows)));
    assert_eq!(
        kernels,
        [Some(Kernel::GemvRing), Some(Kernel::GemmFew), None]
    );
    let plain = |rows| Call {
        aligned_output: false,
        ..Call::aligned(rows, PLAIN)
    };
    assert_eq!(kernel(plain(32)), Some(Kernel::GemmBatch));
}

#[test]
fn a_plan_has_memory_for_its_kernel() {
    let (hopper, made) = (card("H100", &["90a"]), matrix(16, 2064));
    for (kernel, rows) in [
        (Kernel::GemmBatch, 9),
        (Kernel::GemmTile, 9),
        (Kernel::GemmBatch, 64),
    ] {
        let call = Call::aligned(rows, PLAIN);
        let plan = plan_with(kernel, &hopper, &[&made], call, Tuning::default()).expect("taken");
        assert_eq!(plan.scratch_bytes, plan.multipliers_at + 4 * rows);
        assert!(
            plan.multipliers_at >= 2 * rows * made.in_features()
                && plan.multipliers_at.is_multiple_of(128)
        );
    }
    let few = plan(&hopper, &[&made], Call::aligned(8, PLAIN));
    assert!(few.scratch_bytes >= 16 * made.in_features() && few.exchange_bytes == 0);
    assert_eq!(
        plan(&hopper, &[&made], Call::aligned(1, PLAIN)).scratch_bytes,
        0
    );
    let pair = [&made, &made];
    let gated = plan(&hopper, &pair, Call::aligned(32, GATE));
    assert!(
        gated.separate_gate && gated.exchange_bytes > 0,
        "small matrices share K"
    );
    assert!(
        plan_with(
            Kernel::GemmTile,
            &hopper,
            &pair,
            Call::aligned(1, GATE),
            Tuning::default()
        )
        .is_err()
    );
}

proptest! {
    /// A selected kernel has a plan within the card's shared memory, and `plan` never takes a kernel that rejects the call.
    #[test]
    fn a_selected_launch_fits_its_card(
        known in proptest::sample::select(CARDS.to_vec()),
        units in 1usize..80,
        bytes in proptest::sample::select(vec![1040u32, 1552, 2064, 2576, 3088, 4112]),
        outs in proptest::collection::vec(1usize..400, 1..4),
        rows in 1usize..100,
        flags in any::<[bool; 5]>(),
    ) {
        let caps = known.with(RELEASE);
        let made: Vec<Matrix> = outs.iter().map(|n| sized(units, bytes, 16 * n)).collect();
        let all: Vec<&Matrix> = made.iter().collect();
        let [gate, norm, residual, bf16, adapted] = flags;
        let gate = gate && all.len() == 2;
        let epilogue = Epilogue { gate, activation: false, norm, layer: false, residual: residual && !gate, bf16, adapters: adapted.then_some(SIZES) };
        let found = plan(&caps, &all, prompt(rows, epilogue));
        prop_assert!(rows <= found.kernel.most_rows());
        let launched = found.joined && found.kernel != Kernel::GemmLarge;
        prop_assert_eq!(!matches!(found.planned, Planned::None), launched, "what a launch needs is planned");
        let taken = if found.joined { &all[..] } else { &all[..1] };
        let asked = if found.joined { epilogue } else { Epilogue { bf16, ..PLAIN } };
        prop_assert_eq!(found.kernel.takes(&caps, taken, Call::aligned(rows, asked)), Ok(()));
        let shared = match found.kernel {
            Kernel::GemvRing => ring::shared_bytes(&caps, taken, rows, asked),
            Kernel::GemmFew => few::shared_bytes(&caps, taken, asked.gate),
            Kernel::GemmBatch => batch::shared_bytes(&caps, taken, rows, asked.gate),
            Kernel::GemmDirect | Kernel::GemmTile | Kernel::GemmLarge => Some(0),
        };
        prop_assert!(shared.is_some_and(|bytes| bytes <= caps.shared_per_block));
    }
}

/// Most rows of one launch by rule: those of the call up to 64, and up to 128 where a kernel takes them.
const BLOCKS: [usize; 2] = [128, 64];

/// The launches of a batch-invariant call as a table: rows of each, and the kernel that joins the matrices, if one does.
fn launches_by_rule(
    caps: &Capabilities,
    all: &[&Matrix],
    call: Call,
) -> Vec<(usize, Option<Kernel>)> {
    let direct = |rows| {
        let call = Call { rows, ..call };
        first_of(&joined_order(caps, all, call), caps, all, call).0
    };
    let [block, part] = BLOCKS;
    let cut = |rows: usize, most: usize| {
        (0..rows.div_ceil(most)).map(move |index| most.min(rows - index * most))
    };
    cut(call.rows, block)
        .flat_map(|rows| match direct(rows) {
            None if rows > part => cut(rows, part).map(|rows| (rows, direct(rows))).collect(),
            kernel => vec![(rows, kernel)],
        })
        .collect()
}

/// The launches of a call by its plan: each block by the plan of its rows, as callers run it.
fn launches_by_plan(
    caps: &Capabilities,
    all: &[&Matrix],
    call: Call,
) -> Vec<(usize, Option<Kernel>)> {
    let made = plan(caps, all, call);
    let size = made.call.rows;
    if size == call.rows {
        return vec![(size, made.joined.then_some(made.kernel))];
    }
    (0..call.rows.div_ceil(size))
        .flat_map(|index| {
            let rows = size.min(call.rows - index * size);
            launches_by_plan(caps, all, Call { rows, ..call })
        })
        .collect()
}

proptest! {
    #[test]
    fn more_rows_than_64_run_in_the_same_blocks_as_by_rule(
        known in proptest::sample::select(CARDS.to_vec()),
        rows in 1usize..700,
        units in proptest::collection::vec(1u32..40, 1..4),
        other in any::<bool>(),
        bytes in proptest::sample::select(vec![1040u32, 1552, 2064, 2576, 3088, 4112]),
        flags in any::<[bool; 7]>(),
    ) {
        let caps = card(known.name, RELEASE);
        let [gate, norm, residual, bf16, aligned_input, aligned_output, invariant] = flags;
        let first = units[0] as usize;
        let all: Vec<Matrix> = units
            .iter()
            .enumerate()
            .map(|(index, _)| sized(first, if other && index == 1 { 2064 } else { bytes }, 1024))
            .collect();
        let all: Vec<&Matrix> = all.iter().collect();
        let gate = gate && all.len() == 2;
        let epilogue = Epilogue { gate, activation: false, norm, layer: false, residual: residual && !gate, bf16, adapters: None };
        let call = Call { rows, epilogue, aligned_input, aligned_output, invariant };
        let made = plan(&caps, &all, call);
        let alone = plan_alone(&caps, all[0], call);
        let few = plan_alone(&caps, all[0], Call { rows: rows.min(64), ..call }).kernel;
        let block = Call::aligned(rows.min(128), Epilogue { bf16, ..PLAIN });
        let expected = match (rows, invariant) {
            (..=64, _) => (few, rows),
            (_, true) if Kernel::GemmBatch.takes(&caps, &all[..1], block).is_ok() => (Kernel::GemmBatch, rows.min(128)),
            (_, true) => (few, 64),
            (_, false) => (Kernel::GemmLarge, rows),
        };
        prop_assert_eq!((alone.kernel, alone.call.rows), expected);
        if rows > 64 && !invariant {
            prop_assert_eq!((made.kernel, made.joined, made.pays_apart), (Kernel::GemmLarge, false, false));
            prop_assert_eq!(made.call.rows, rows);
            return Ok(());
        }
        prop_assert_eq!(launches_by_plan(&caps, &all, call), launches_by_rule(&caps, &all, call));
        // One launch of up to 128 rows, or else of 64, decides whether a block is joined.
        let kernel = |rows: usize| {
            let direct = |rows| {
                let call = Call { rows, ..call };
                first_of(&joined_order(&caps, &all, call), &caps, &all, call).0
            };
            direct(rows).or_else(|| (rows > 64).then(|| direct(64)).flatten())
        };
        let rest = rows % 128;
        let blocks = [(rows >= 128).then_some(128), (rest > 0).then_some(rest)];
        prop_assert_eq!(made.joined, blocks.into_iter().flatten().all(|rows| kernel(rows).is_some()));
        prop_assert_eq!(made.pays_apart, kernel(rows.min(128)) == Some(Kernel::GemmBatch));
    }
}
