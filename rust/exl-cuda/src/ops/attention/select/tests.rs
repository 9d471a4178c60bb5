//! Tests of the table, as data, without a GPU.

use super::*;
use crate::capabilities::CARDS;
use crate::capabilities::tests::{RELEASE, card, hopper};
use crate::ops::Element;
use crate::ops::kv::KINDS;

pub(in super::super) fn kind(name: &str) -> Kind {
    KINDS.into_iter().find(|kind| kind.name == name).unwrap()
}

/// A call of `batch` sequences with `each` tokens and a block table of 64 pages of 256 keys.
pub(in super::super) fn call(
    kind: Kind,
    head_dim: usize,
    (q_heads, kv_heads): (usize, usize),
    (batch, each): (usize, usize),
    keys: usize,
) -> Call {
    Call {
        kind,
        head_dim,
        q_heads,
        kv_heads,
        element: Element::F16,
        q_stride: q_heads * head_dim,
        batch,
        tokens: batch * each,
        keys,
        page_size: 256,
        max_pages: 64,
        window: 0,
        capped: false,
        masked: false,
        new_keys: None,
        rows: Rows::Sequences,
    }
}

#[test]
fn every_selected_launch_fits_its_card() {
    for name in CARDS.map(|card| card.name) {
        let caps = card(name, RELEASE);
        for (kind, head_dim) in KINDS
            .into_iter()
            .flat_map(|kind| [64, 80, 96, 128, 192, 256].map(|dim| (kind, dim)))
        {
            if check_pages(&caps, kind, head_dim).is_err() {
                continue;
            }
            for heads in [(32, 8), (32, 32), (28, 4), (64, 8), (40, 1)] {
                for rows in [
                    (1, 1),
                    (8, 1),
                    (64, 1),
                    (1, 5),
                    (32, 5),
                    (1, 512),
                    (4, 2048),
                ] {
                    for keys in [256, 4096, 16384] {
                        let found = plan(&caps, &call(kind, head_dim, heads, rows, keys));
                        assert!(
                            found.shared <= caps.shared_per_block,
                            "{name} {head_dim} {heads:?} {rows:?} {keys}: {found:?}"
                        );
                    }
                }
            }
        }
    }
}

/// 64 keys and values of 256 halves exceed a block of Turing. Such pages are refused before they are made.
#[test]
fn pages_that_no_block_of_a_card_holds_are_refused() {
    let refused: Vec<_> = CARDS
        .into_iter()
        .flat_map(|card| KINDS.map(|kind| (card, kind)))
        .flat_map(|pair| [64, 80, 96, 128, 136, 192, 256].map(|dim| (pair, dim)))
        .filter(|&((known, kind), dim)| check_pages(&known.with(RELEASE), kind, dim).is_err())
        .map(|((known, kind), dim)| (known.name, kind.name, dim))
        .collect();
    assert_eq!(refused, [136, 192, 256].map(|dim| ("2080 Ti", "fp16", dim)));
    let turing = card("2080 Ti", RELEASE);
    let why = check_pages(&turing, kind("fp16"), 256).unwrap_err();
    assert!(
        why.to_string().ends_with("and the card's have 65536"),
        "{why}"
    );
    let found = plan(&turing, &call(kind("fp16"), 256, (16, 8), (1, 1), 256));
    assert!(found.refused.contains(&(Kernel::Decode, why)));
}

#[test]
fn the_table_of_a_layer_on_every_card() {
    let kernel = |caps: &Capabilities, rows, keys| {
        plan(caps, &call(kind("fp16"), 128, (32, 8), rows, keys)).name
    };
    for (caps, single, prompt) in CARDS
        .map(|card| card.with(RELEASE))
        .into_iter()
        .chain([card("H100", &["80+ptx"])])
        .map(|caps| match caps.code {
            90 => (
                caps,
                "attention_fp16_f16_128_few1",
                "attention_fp16_128_wide",
            ),
            // A prefill block's keys and totals exceed 64 KB.
            75 => (
                caps,
                "attention_fp16_128_decode1",
                "attention_fp16_128_small_prefill",
            ),
            _ => (
                caps,
                "attention_fp16_f16_128_teams1",
                "attention_fp16_128_prefill",
            ),
        })
    {
        // Teams need room for the parts of all splits of the table, which small cards plan for long keys only.
        let most = if [75, 90].contains(&caps.code) { 8 } else { 1 };
        for rows in [(1, 1), (most, 1)] {
            assert_eq!(kernel(&caps, rows, 256), single, "{caps:?} {rows:?}");
        }
        for tokens in [512, 2048] {
            assert_eq!(kernel(&caps, (1, tokens), tokens), prompt, "{caps:?}");
        }
    }
    for name in ["3060", "3090", "4090", "5090", "A100", "L4", "L40S", "B200"] {
        let caps = card(name, RELEASE);
        for rows in [(1, 1), (8, 1), (64, 1)] {
            let teams = "attention_fp16_f16_128_teams1";
            assert_eq!(kernel(&caps, rows, 16384), teams, "{name} {rows:?}");
        }
    }
    for (rows, keys) in [((32, 1), 256), ((32, 1), 2048), ((64, 1), 16384)] {
        let long = "attention_fp16_f16_128_long1x1";
        assert_eq!(kernel(&hopper(), rows, keys), long, "{rows:?} {keys}");
    }
    let long = Call {
        max_pages: 256,
        ..call(kind("fp16"), 128, (32, 8), (1, 1), 65_536)
    };
    let name = plan(&hopper(), &long).name;
    assert_eq!(name, "attention_fp16_128_decode1");
}

#[test]
fn one_token_a_sequence_of_other_families_on_hopper() {
    let kernel = |dim, heads, rotation: Option<(usize, bool)>, capped, window, rows| {
        let new_keys = rotation.map(|(elements, interleaved)| Rotated {
            elements,
            interleaved,
        });
        let call = Call {
            window,
            capped,
            new_keys,
            ..call(kind("fp16"), dim, heads, (rows, 1), 256)
        };
        plan(&hopper(), &call).name
    };
    for rows in [1, 8] {
        // GLM-4, heads of 64 of which half is rotated, and Gemma 2 on layers with and without a window.
        let glm = kernel(128, (32, 2), Some((64, true)), false, 0, rows);
        assert_eq!(glm, "attention_fp16_f16_128_few2", "{rows}");
        let half = kernel(64, (8, 8), Some((32, false)), false, 0, rows);
        assert_eq!(half, "attention_fp16_f16_64_few1", "{rows}");
        for window in [0, 4096] {
            let gemma = kernel(256, (16, 8), Some((256, false)), true, window, rows);
            assert_eq!(gemma, "attention_fp16_f16_256_few1", "{rows} {window}");
        }
    }
    let cases = [
        (128, Some((96, false)), 0, "attention_fp16_128_decode1"),
        (128, Some((96, true)), 0, "attention_fp16_f16_128_few1"),
        (128, None, 100, "attention_fp16_128_decode1"),
        (96, None, 0, "attention_fp16_f16_padded_few1"),
        (80, Some((32, false)), 0, "attention_fp16_f16_padded_few1"),
        (112, Some((112, false)), 0, "attention_fp16_f16_padded_few1"),
        (96, Some((96, true)), 100, "attention_fp16_128_decode1"),
        (96, Some((90, false)), 0, "attention_fp16_128_decode1"),
        (72, None, 0, "attention_fp16_128_decode1"),
    ];
    for (dim, rotation, window, expected) in cases {
        let found = kernel(dim, (32, 8), rotation, false, window, 8);
        assert_eq!(found, expected, "{dim} {rotation:?}");
    }
}

/// The faster kernels that do not take a call, with the reasons.
fn refused(caps: &Capabilities, call: &Call) -> Vec<(&'static str, String)> {
    let found = plan(caps, call).refused;
    found
        .iter()
        .map(|(kernel, why)| (kernel.name(), why.to_string()))
        .collect()
}

#[test]
fn a_card_without_the_kernels_of_one_token_says_what_it_lacks() {
    let step = call(kind("fp16"), 128, (32, 8), (1, 1), 256);
    let newer = "it needs clusters as sm_90 cards run them (code for sm_90 on an sm_90 card)";
    let later = "it needs code for sm_80 to sm_89, or for sm_100 or newer";
    let (few, long) = ("attention_few", "attention_long");
    let expected = [(few, newer), (long, newer), ("attention_teams", later)];
    let turing = refused(&card("2080 Ti", RELEASE), &step);
    assert_eq!(turing, expected.map(|(k, why)| (k, why.into())));
    assert!(refused(&hopper(), &step).is_empty());
    for name in ["3090", "5090", "B200"] {
        let found = refused(&card(name, RELEASE), &step);
        assert!(found.iter().all(|(_, why)| why == newer) && found.len() == 2);
    }
}

#[test]
fn a_call_says_why_faster_kernels_do_not_take_it() {
    let step = call(kind("q4"), 128, (32, 8), (8, 1), 4096);
    let quarter = Rotated {
        elements: 96,
        interleaved: false,
    };
    for (call, kernel, why) in [
        (
            Call {
                window: 100,
                ..step
            },
            "attention_few",
            "tokens that see all keys",
        ),
        (
            Call {
                head_dim: 72,
                ..step
            },
            "attention_few",
            "heads of 64, 128 or 256",
        ),
        (
            Call {
                q_heads: 256,
                ..step
            },
            "attention_long",
            "up to 16 query heads",
        ),
        (
            Call {
                masked: true,
                ..step
            },
            "attention_few",
            "without a mask",
        ),
        (
            Call {
                page_size: 16,
                ..step
            },
            "attention_few",
            "multiples of 64 keys",
        ),
        (
            Call {
                element: Element::F32,
                ..step
            },
            "attention_few",
            "bfloat16 queries",
        ),
        (
            Call {
                new_keys: Some(quarter),
                ..step
            },
            "attention_few",
            "rotations",
        ),
    ] {
        let found = refused(&hopper(), &call);
        let says = |(name, text): &(&str, String)| *name == kernel && text.contains(why);
        assert!(found.iter().any(says), "{call:?}: {found:?}");
        assert_eq!(plan(&hopper(), &call).kernel, Kernel::Decode);
    }
    let long = Call {
        max_pages: 256,
        ..call(kind("fp16"), 128, (32, 8), (1, 1), 65_536)
    };
    let found = refused(&hopper(), &long);
    assert!(
        found[0].1.contains("run at the same time")
            && found[1].1.contains("another kernel is faster")
    );
}

#[test]
fn a_prompt_says_why_it_runs_without_wgmma() {
    let prompt = call(kind("fp16"), 128, (32, 8), (1, 512), 512);
    let why = |caps: &Capabilities, call: &Call| {
        let found = refused(caps, call);
        found
            .iter()
            .map(|(k, why)| format!("{k}: {why}"))
            .collect::<Vec<_>>()
            .join("; ")
    };
    assert_eq!(why(&hopper(), &prompt), "");
    assert!(why(&card("A100", RELEASE), &prompt).starts_with("attention_wide: it needs wgmma"));
    let long_heads = Call {
        head_dim: 256,
        ..prompt
    };
    let turing = why(&card("2080 Ti", RELEASE), &long_heads);
    assert!(
        turing.contains("attention_prefill: its buffers do not fit 65536 bytes"),
        "{turing}"
    );
    for (call, text) in [
        (
            Call {
                kind: kind("q4"),
                ..prompt
            },
            "float16 pages",
        ),
        (
            Call {
                capped: true,
                ..prompt
            },
            "scores without a limit",
        ),
        (
            Call {
                head_dim: 256,
                ..prompt
            },
            "heads of up to 128 elements",
        ),
    ] {
        assert_eq!(
            why(&hopper(), &call),
            format!("attention_wide: it takes {text}")
        );
        assert_eq!(plan(&hopper(), &call).kernel, Kernel::Prefill);
    }
}

#[test]
fn prompts_after_many_keys_share_them_among_blocks() {
    let kernel = |card: &str, kind: &str, tokens, keys| {
        let caps = self::card(card, RELEASE);
        let found = plan(
            &caps,
            &call(self::kind(kind), 128, (32, 8), (1, tokens), keys),
        );
        (found.kernel, found.chunks())
    };
    for (tokens, keys, expected) in [
        (16, 16_384, (Kernel::Wide, 16)),
        (64, 600, (Kernel::Wide, 2)),
        (64, 512, (Kernel::Wide, 1)),
        (256, 16_384, (Kernel::Wide, 2)),
        (512, 16_384, (Kernel::Wide, 1)),
    ] {
        assert_eq!(
            kernel("H100", "fp16", tokens, keys),
            expected,
            "{tokens} {keys}"
        );
    }
    for (kind, tokens, keys, expected) in [
        ("fp16", 16, 16_384, Kernel::Decode),
        ("fp16", 32, 600, Kernel::Decode),
        ("fp16", 32, 1100, Kernel::Prefill),
        ("q4", 64, 1100, Kernel::Decode),
        ("q4", 64, 4096, Kernel::Prefill),
        ("q4", 256, 16_384, Kernel::Prefill),
    ] {
        for card in ["3090", "4090", "A100", "L40S"] {
            let found = kernel(card, kind, tokens, keys).0;
            assert_eq!(found, expected, "{card} {kind} {tokens} {keys}");
        }
    }
    assert_eq!(kernel("3090", "q4", 64, 16_384), (Kernel::Prefill, 5));
}

#[test]
fn a_prompt_on_decode_blocks_says_why() {
    let why = |card: &str, kind: &str, tokens, keys| {
        let caps = self::card(card, RELEASE);
        let call = call(self::kind(kind), 128, (32, 8), (1, tokens), keys);
        let kernel = plan(&caps, &call).kernel;
        let mut found = refused(&caps, &call).into_iter();
        let of_prefill = found.find(|(name, _)| *name == "attention_prefill");
        (kernel, of_prefill.map(|(_, why)| why).unwrap_or_default())
    };
    for (card, kind, tokens, keys, says) in [
        (
            "3090",
            "fp16",
            2,
            16_384,
            "8 query rows a key head, it is faster from 64 on",
        ),
        ("H100", "fp16", 8, 16_384, "32 query rows a key head"),
        ("3090", "fp16", 16, 16_384, "its 8 tiles do not fill 82 SMs"),
        ("A100", "q4", 64, 1100, "do not fill 108 SMs"),
    ] {
        let (kernel, why) = why(card, kind, tokens, keys);
        assert_eq!(kernel, Kernel::Decode, "{card} {kind} {tokens} {keys}");
        assert!(why.contains(says), "{card} {kind} {tokens} {keys}: {why}");
    }
    for (card, tokens, kernel) in [
        ("2080 Ti", 512, Kernel::Prefill),
        ("3090", 512, Kernel::Prefill),
        ("H100", 512, Kernel::Wide),
        ("H100", 16, Kernel::Wide),
        ("3090", 1, Kernel::Teams),
    ] {
        let found = why(card, "fp16", tokens, 1024);
        assert_eq!(found, (kernel, String::new()), "{card} {tokens}");
    }
}

#[test]
fn the_launch_of_one_token_a_sequence_stores_its_keys() {
    assert_eq!([1, 2, 16].map(stores_own_keys), [true, false, false]);
}

#[test]
fn the_table_decides_how_rows_of_some_tokens_are_read() {
    for (tokens, apart, windows) in [
        (1, Rows::Apart, Rows::Windows),
        (16, Rows::Apart, Rows::Windows),
        (17, Rows::Sequences, Rows::Sequences),
    ] {
        assert_eq!(Rows::of(tokens, false), apart);
        assert_eq!(Rows::of(tokens, true), windows);
        assert_eq!(is_decode_step(tokens), apart == Rows::Apart);
    }
}

/// Blocks of one token each take half types; other queries run in tiles, with the reason.
#[test]
fn tokens_apart_of_float32_are_refused_with_a_reason() {
    let few = Call {
        rows: Rows::of(4, false),
        element: Element::F32,
        ..call(kind("fp16"), 128, (32, 8), (2, 4), 256)
    };
    for name in CARDS.map(|card| card.name) {
        let found = plan(&card(name, RELEASE), &few);
        assert_eq!(found.kernel, Kernel::Decode, "{name}");
        let needs = Refusal::Takes("float16 and bfloat16 queries");
        let reason =
            |(_, why): &(Kernel, Refusal)| *why == needs || matches!(why, Refusal::Needs(_));
        assert!(
            found.refused.iter().any(reason),
            "{name}: {:?}",
            found.refused
        );
    }
    let found = refused(&hopper(), &few);
    assert!(
        found
            .iter()
            .any(|(_, why)| why.contains("bfloat16 queries")),
        "{found:?}"
    );
}

#[test]
fn windows_of_prompts_fill_tiles_together() {
    let steps = Call {
        rows: Rows::Apart,
        ..call(kind("fp16"), 128, (32, 8), (16, 16), 16_384)
    };
    assert_eq!(plan(&hopper(), &steps).kernel, Kernel::Decode);
    let windows = Call {
        rows: Rows::Windows,
        ..steps
    };
    let found = plan(&hopper(), &windows);
    let alone = plan(
        &hopper(),
        &call(kind("fp16"), 128, (32, 8), (1, 256), 16_384),
    );
    assert_eq!((found.kernel, found.shares), (Kernel::Wide, alone.shares));
    let short = Call {
        keys: 512,
        ..windows
    };
    assert_ne!(plan(&hopper(), &short).kernel, Kernel::Wide);
}

/// Cards whose blocks have no room for a tile's totals keep them in the workspace.
#[test]
fn prompts_of_every_card_have_a_kernel_of_prompts() {
    let of = |name: &str, kind_name: &str, dim, tokens| {
        let prompt = call(kind(kind_name), dim, (16, 8), (1, tokens), tokens);
        plan(&card(name, RELEASE), &prompt)
    };
    for name in ["3060", "3090", "4090", "5090", "L4", "L40S"] {
        for kind in KINDS.map(|kind| kind.name) {
            let found = of(name, kind, 256, 2048);
            let small = format!("attention_{kind}_256_small_prefill");
            assert_eq!(
                (found.name.as_str(), found.chunks()),
                (&*small, 1),
                "{name}"
            );
            // 2048 tokens with 16 heads of 256 sums, a largest logit and a sum of weights as lanes hold them.
            assert_eq!(found.workspace(), 2048 * 16 * (256 + 8), "{name} {kind}");
            assert!(of(name, kind, 128, 2048).name.ends_with("_128_prefill"));
        }
    }
    for name in ["A100", "H100", "B200"] {
        let found = of(name, "q4", 256, 2048);
        assert_eq!(
            (found.name.as_str(), found.workspace()),
            ("attention_q4_256_prefill", 0)
        );
    }
    for (kind, dim, name) in [
        ("fp16", 64, "attention_fp16_64_prefill"),
        ("fp16", 128, "attention_fp16_128_small_prefill"),
        ("q8", 128, "attention_q8_128_small_prefill"),
        ("q4", 256, "attention_q4_256_small_prefill"),
        ("q8", 256, "attention_q8_256_decode2"),
    ] {
        assert_eq!(of("2080 Ti", kind, dim, 2048).name, name);
    }
    let many = of("3090", "fp16", 256, 16_384);
    let why = Refusal::Workspace {
        floats: 16_384 * 16 * (256 + 8),
    };
    assert!(many.refused.contains(&(Kernel::Prefill, why)), "{many:?}");
    // Few tokens after many keys: several blocks share a tile, and the first has its totals in its part.
    let short = call(kind("fp16"), 256, (16, 8), (1, 128), 16_384);
    let found = plan(&card("3090", RELEASE), &short);
    assert!(found.chunks() > 1 && found.join.is_some(), "{found:?}");
    assert_eq!(found.name, "attention_fp16_256_small_prefill");
}

/// The first block of a tile also takes the splits for which the workspace has no room.
#[test]
fn parts_of_a_prompt_fit_the_workspace() {
    let heads = (32, 8);
    for (dim, tokens) in [(64, 64), (128, 100), (128, 256), (256, 100)] {
        for keys in [1 << 14, 1 << 17, 1 << 20] {
            let call = Call {
                max_pages: 4096,
                ..call(kind("fp16"), dim, heads, (1, tokens), keys)
            };
            let found = plan(&hopper(), &call);
            let (splits, chunks) = (keys.div_ceil(UNIT * SPLIT_UNITS), found.chunks());
            assert!(chunks > 1 && found.join.is_some());
            let slots = found.shares.part_slots;
            assert!(found.workspace() <= 1 << 26 && slots <= 1 + splits - splits.div_ceil(chunks));
            assert_eq!(found.workspace() % slots, 0);
        }
    }
}
