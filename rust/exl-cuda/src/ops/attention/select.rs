//! Selection of the attention kernel and its launch.

use super::room::{decode_shared, prefill_shared, prefill_warps, wide_shared};
use super::{Attention, Mode, Plan, WIDE_DIMS, WIDE_WARPS, padded, plan_on, single, tile};
use crate::capabilities::{Capabilities, Feature};
use crate::ops::kv::Kind;

/// The kernel of a call, and its launch parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    pub kernel: String,
    pub(super) grid: [usize; 3],
    pub(super) threads: usize,
    /// Bytes of shared memory of a block.
    pub shared: usize,
    /// Blocks of a cluster; 0 for a launch without clusters.
    pub(super) cluster: usize,
    /// The kernel's parameters `ring` and `ahead`.
    pub(super) ring: usize,
    pub(super) ahead: usize,
    /// Heads and tokens of a tile of query rows.
    pub(super) tile: (usize, usize),
}

/// The kernel for a planned call on a card of these capabilities.
pub(super) fn select(caps: &Capabilities, op: &Attention, plan: &Plan) -> Selection {
    if let Some(blocks) = single::blocks(caps, op, plan) {
        return Selection {
            kernel: blocks.kernel,
            grid: [op.tokens, op.pages.heads, blocks.count],
            threads: blocks.threads,
            shared: blocks.shared,
            cluster: blocks.cluster,
            ring: blocks.ring,
            ahead: blocks.ahead,
            tile: (op.q_heads / op.pages.heads, 1),
        };
    }
    let (kind, dim) = (op.pages.kind, padded(op.pages.head_dim));
    let decode = plan.mode == Mode::Decode;
    let wide = !decode && is_wide(caps, op, dim);
    let warps = if decode { 4 } else { prefill_warps(dim) };
    let (tile_heads, tile_tokens, head_tiles) = tile(op, if decode { 1 } else { warps }, plan.lone);
    let column_tiles = (tile_heads * tile_tokens).div_ceil(8);
    let per_block = caps.shared_per_block;
    let (kernel, (ring, shared)) = if decode {
        (
            decode_name(kind, dim, column_tiles),
            decode_shared(kind, dim, column_tiles, per_block),
        )
    } else if wide {
        (wide_name(dim), (0, wide_shared(dim)))
    } else {
        (
            prefill_name(kind, dim),
            prefill_shared(kind, dim, per_block),
        )
    };
    let (tiles, heads) = (op.tokens.div_ceil(tile_tokens), op.pages.heads * head_tiles);
    // Wide blocks stay resident and take one tile after another.
    let resident = (tiles * heads).min(caps.sms);
    let (grid, warps) = if wide {
        ([resident, 1, 1], WIDE_WARPS)
    } else {
        ([tiles, heads, plan.chunks], warps)
    };
    Selection {
        kernel,
        grid,
        threads: 32 * warps,
        shared,
        cluster: 0,
        ring,
        ahead: 0,
        tile: (tile_heads, tile_tokens),
    }
}

/// The kernel that [`plan`] and [`attend`] use for a call on a card of these capabilities, which need not be present.
pub fn selected(caps: &Capabilities, op: &Attention, max_keys: usize) -> Selection {
    select(caps, op, &plan_on(caps, op, max_keys))
}

pub(super) fn decode_name(kind: Kind, dim: usize, column_tiles: usize) -> String {
    format!("attention_{}_{dim}_decode{column_tiles}", kind.name)
}

pub(super) fn prefill_name(kind: Kind, dim: usize) -> String {
    format!("attention_{}_{dim}_prefill", kind.name)
}

pub(super) fn wide_name(dim: usize) -> String {
    format!("attention_fp16_{dim}_wide")
}

/// Whether prefill uses the kernel of sm_90a: for half pages without softcap and mask. Results are bitwise identical.
fn is_wide(caps: &Capabilities, op: &Attention, dim: usize) -> bool {
    caps.has(Feature::Wgmma)
        && op.pages.kind.name == "fp16"
        && WIDE_DIMS.contains(&dim)
        && op.softcap == 0.0
        && op.key_mask == 0
        && wide_shared(dim) <= caps.shared_per_block
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::CARDS;
    use crate::capabilities::tests::{RELEASE, card, hopper};
    use crate::ops::attention::Own;
    use crate::ops::kv::{KINDS, Pages};

    fn call(kind: Kind, head_dim: usize, heads: (usize, usize), rows: (usize, usize)) -> Attention {
        let ((q_heads, kv_heads), (batch, tokens)) = (heads, rows);
        let pages = Pages {
            kind,
            data: [0; 2],
            scales: [0; 2],
            num_pages: 64 * batch,
            page_size: 256,
            heads: kv_heads,
            head_dim,
        };
        Attention::of_shape(pages, batch * tokens, q_heads, (batch, 64))
    }

    #[test]
    fn every_selected_launch_fits_its_card() {
        for name in CARDS.map(|card| card.name) {
            let caps = card(name, RELEASE);
            for (kind, head_dim) in KINDS
                .into_iter()
                .flat_map(|kind| [64, 80, 96, 128, 192, 256].map(|dim| (kind, dim)))
            {
                // 64 keys and values of 256 halves exceed a Turing block; the error of the launch has both numbers.
                let too_large = name == "2080 Ti" && kind.name == "fp16" && head_dim > 128;
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
                            let op = call(kind, head_dim, heads, rows);
                            let found = select(&caps, &op, &plan_on(&caps, &op, keys));
                            assert_eq!(
                                found.shared > caps.shared_per_block,
                                too_large,
                                "{name} {head_dim} {heads:?} {rows:?} {keys}: {found:?}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_table_of_a_layer_on_every_card() {
        let kind = KINDS.into_iter().find(|kind| kind.name == "fp16").unwrap();
        let kernel = |caps: &Capabilities, rows, keys| {
            let op = call(kind, 128, (32, 8), rows);
            select(caps, &op, &plan_on(caps, &op, keys)).kernel
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
                    "attention_fp16_128_decode2",
                ),
                80..90 => (
                    caps,
                    "attention_fp16_f16_128_teams1",
                    "attention_fp16_128_prefill",
                ),
                _ => (
                    caps,
                    "attention_fp16_128_decode1",
                    "attention_fp16_128_prefill",
                ),
            })
        {
            // Teams need room for the parts of all splits of the table, which small cards plan for long keys only.
            let most = if (80..90).contains(&caps.code) { 1 } else { 8 };
            for rows in [(1, 1), (most, 1)] {
                assert_eq!(kernel(&caps, rows, 256), single, "{caps:?} {rows:?}");
            }
            for tokens in [512, 2048] {
                assert_eq!(kernel(&caps, (1, tokens), tokens), prompt, "{caps:?}");
            }
        }
        for name in ["3060", "3090", "4090", "A100", "L4", "L40S"] {
            let caps = card(name, RELEASE);
            for rows in [(1, 1), (8, 1), (64, 1)] {
                let teams = "attention_fp16_f16_128_teams1";
                assert_eq!(kernel(&caps, rows, 16384), teams, "{name} {rows:?}");
            }
        }
        for (rows, keys) in [((32, 1), 256), ((32, 1), 2048)] {
            let long = "attention_fp16_f16_128_long1x1";
            assert_eq!(kernel(&hopper(), rows, keys), long, "{rows:?} {keys}");
        }
        let plain = "attention_fp16_128_decode1";
        assert_eq!(kernel(&hopper(), (64, 1), 16384), plain);
    }

    #[test]
    fn one_token_a_sequence_of_other_families_on_hopper() {
        let fp16 = KINDS.into_iter().find(|kind| kind.name == "fp16").unwrap();
        let own = |rotated, interleaved| Own {
            key: 16,
            value: 16,
            cos: 16,
            sin: 16,
            table_rows: 1024,
            rotated,
            interleaved,
            ..Own::default()
        };
        let kernel = |dim, heads, rotation: Option<(usize, bool)>, softcap, window, rows| {
            let mut op = call(fp16, dim, heads, (rows, 1));
            op.own = rotation.map(|(rotated, interleaved)| own(rotated, interleaved));
            (op.softcap, op.window) = (softcap, window);
            select(&hopper(), &op, &plan_on(&hopper(), &op, 256)).kernel
        };
        for rows in [1, 8] {
            // GLM-4, heads of 64 of which half is rotated, and Gemma 2 on layers with and without a window.
            let glm = kernel(128, (32, 2), Some((64, true)), 0.0, 0, rows);
            assert_eq!(glm, "attention_fp16_f16_128_few2", "{rows}");
            let half = kernel(64, (8, 8), Some((32, false)), 0.0, 0, rows);
            assert_eq!(half, "attention_fp16_f16_64_few1", "{rows}");
            for window in [0, 4096] {
                let gemma = kernel(256, (16, 8), Some((256, false)), 50.0, window, rows);
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
            let found = kernel(dim, (32, 8), rotation, 0.0, window, 8);
            assert_eq!(found, expected, "{dim} {rotation:?}");
        }
    }
}
