//! Attention over pages: the launch of the kernel that [`select`] plans.

mod load;
mod ordered;
mod room;
pub mod select;
mod single;
mod teams;
mod tiles;

pub use ordered::Ordered;
use room::SMALL_DIMS;
pub use select::{Call, Plan, Rows};
use select::{Rotated, decode_name, join_name, prefill_name, small_name, wide_name};

use super::kv::{KINDS, Kind, Pages};
use super::{Element, Target, index32};
use crate::abi::{assert_constants, assert_layout};
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::parameters::kernels;

/// Largest head dimension.
pub const MAX_DIM: usize = 256;
/// Head dimensions are multiples of this number.
pub const DIM_STEP: usize = 8;
/// Keys of a unit (also of a stage), units of a split, most parts of single units, as in `kernels/attention/attention_common.cuh`.
const UNIT: usize = 64;
const SPLIT_UNITS: usize = 8;
const UNIT_PARTS: usize = 32;
/// Query rows of a decode tile, and of a warp in prefill.
const ROWS: usize = 16;

assert_constants!(attention_common, { UNIT == UNIT, SPLIT_UNITS == SPLIT_UNITS, UNIT_PARTS == UNIT_PARTS });
assert_constants!(attention_prefill, { ROWS == ROWS });
assert_constants!(rope_store, { MAX_DIM == MAX_DIM });

/// Target number of decode blocks per SM.
const BLOCKS_PER_SM: usize = 2;

/// Padded head dimensions that kernels exist for.
const DIMS: [usize; 3] = [64, 128, 256];

/// Head dimensions that the prefill kernel of sm_90a supports.
const WIDE_DIMS: [usize; 2] = [64, 128];

/// Operands of [`attend`]: device addresses, row-major and contiguous, except that `q_stride` separates the tokens of q.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// `[tokens, q_heads, head_dim]` of `element`; `q_stride` elements between tokens of q
    pub q: usize,
    pub q_stride: usize,
    pub out: usize,
    pub element: Element,
    pub tokens: usize,
    pub q_heads: usize,
    pub pages: Pages,
    /// `[batch, max_pages]` int32
    pub block_table: usize,
    pub batch: usize,
    pub max_pages: usize,
    /// `[tokens]` int32 each
    pub rows: usize,
    pub positions: usize,
    /// `[batch, mask_width]` FP32, or 0
    pub key_mask: usize,
    pub mask_width: usize,
    pub scale: f32,
    pub window: usize,
    pub softcap: f32,
    /// Keys and values that are not in the pages yet: one token a row, decode only.
    pub own: Option<Own>,
    /// The meaning of the block table's rows.
    pub table_rows: Rows,
    /// Destination of results instead of `out`; only with `own` or [`Rows::Apart`] or [`Rows::Windows`].
    pub ordered: Option<Ordered>,
}

impl Attention {
    /// The properties that decide the kernel. `keys`: no token sees a key at or beyond this index.
    pub fn call(&self, keys: usize) -> Call {
        let pages = &self.pages;
        Call {
            kind: pages.kind,
            head_dim: pages.head_dim,
            q_heads: self.q_heads,
            kv_heads: pages.heads,
            element: self.element,
            q_stride: self.q_stride,
            batch: self.batch,
            tokens: self.tokens,
            keys,
            page_size: pages.page_size,
            max_pages: self.max_pages,
            window: self.window,
            capped: self.softcap != 0.0,
            masked: self.key_mask != 0,
            new_keys: self.own.map(|own| Rotated {
                elements: if own.cos == 0 { 0 } else { own.rotated },
                interleaved: own.interleaved,
            }),
            rows: self.table_rows,
        }
    }
}

/// The tokens' own keys and values, which are rotated, stored and attended to; queries are rotated too.
#[derive(Clone, Copy, Debug, Default)]
pub struct Own {
    /// `[tokens, pages.heads, head_dim]` of the queries' type; `stride` elements between tokens
    pub key: usize,
    pub value: usize,
    pub stride: usize,
    /// `[table_rows, rotated / 2]` FP32 each
    pub cos: usize,
    pub sin: usize,
    pub table_rows: usize,
    pub rotated: usize,
    pub interleaved: bool,
    /// `[tokens]` int64 each; a slot outside the pages is not stored, and a position outside the tables is not rotated
    pub rope_positions: usize,
    pub slots: usize,
    /// Whether all operands except q, key and value may be read before the previous launch has ended.
    pub early: bool,
    pub norms: HeadNorms,
}

/// RMS norms of each head of the queries and of the tokens' own keys, before the rotation.
#[derive(Clone, Copy, Debug, Default)]
pub struct HeadNorms {
    /// `[head_dim]` FP32 each, aligned to 8 bytes; both 0 for none
    pub q: usize,
    pub k: usize,
    pub eps: f32,
}

/// `struct Attention` of `kernels/attention/attention_common.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Argument {
    q: usize,
    out: usize,
    key: usize,
    value: usize,
    key_scales: usize,
    value_scales: usize,
    block_table: usize,
    rows: usize,
    positions: usize,
    key_mask: usize,
    parts: usize,
    tickets: usize,
    new_key: usize,
    new_value: usize,
    cos: usize,
    sin: usize,
    rope_positions: usize,
    slots: usize,
    q_stride: i32,
    new_stride: i32,
    rotated: i32,
    table_rows: i32,
    interleaved: i32,
    early: i32,
    element: i32,
    ordered: usize,
    row_of_feature: usize,
    columns: i32,
    tokens: i32,
    q_heads: i32,
    heads: i32,
    dim: i32,
    group: i32,
    tile_heads: i32,
    tile_tokens: i32,
    page_size: i32,
    page_shift: i32,
    max_pages: i32,
    num_pages: i32,
    batch: i32,
    mask_width: i32,
    window: i32,
    chunks: i32,
    part_slots: i32,
    ring: i32,
    page_inverse: u32,
    key_limit: i32,
    scale: f32,
    softcap: f32,
    ahead: i32,
    norm_eps: f32,
    q_norm: usize,
    k_norm: usize,
}

assert_layout!(Argument, attention_common::Attention, { q, out, key, value, key_scales, value_scales, block_table, rows, positions, key_mask, parts, tickets, new_key, new_value, cos, sin, rope_positions, slots, q_stride, new_stride, rotated, table_rows, interleaved, early, element, ordered, row_of_feature, columns, tokens, q_heads, heads, dim, group, tile_heads, tile_tokens, page_size, page_shift, max_pages, num_pages, batch, mask_width, window, chunks, part_slots, ring, page_inverse, key_limit, scale, softcap, ahead, norm_eps, q_norm, k_norm });

/// Counters for a stream's launches whose blocks share tiles on a GPU of `sms` SMs ([`Plan::tickets`] where [`Plan::chunks`] exceeds one).
///
/// Such a launch has at most as many tiles as it aims at blocks. A tile has at most [`ROWS`] tokens, and 64 parts of 64 dimensions.
pub const fn shared_tickets(sms: usize) -> usize {
    ROWS * MAX_DIM / 64 * (BLOCKS_PER_SM * sms + 1)
}

/// The head dimension of the kernel that takes heads of `dim`.
pub fn padded(dim: usize) -> usize {
    DIMS.into_iter().find(|&d| dim <= d).unwrap_or(MAX_DIM)
}

/// Kernels of `attention_wide.cu`, `attention_decode_<kind>.cu` or `attention_prefill_<kind>.cu`.
pub(super) fn kernels(file: &str) -> Vec<String> {
    let all = |suffix: &str, names: &dyn Fn(Kind, usize) -> Vec<String>| {
        let kind = KINDS.into_iter().find(|k| k.name == suffix)?;
        Some(DIMS.into_iter().flat_map(|dim| names(kind, dim)).collect())
    };
    if file == "attention_wide" {
        return WIDE_DIMS.into_iter().map(wide_name).collect();
    }
    if let Some(names) = single::kernels(file) {
        return names;
    }
    for dim in SMALL_DIMS {
        if let Some(suffix) = file.strip_prefix(&format!("attention_small_{dim}_")) {
            let kind = KINDS.into_iter().find(|kind| kind.name == suffix);
            return kind.map(|kind| small_name(kind, dim)).into_iter().collect();
        }
    }
    if let Some(suffix) = file.strip_prefix("attention_decode_") {
        return all(suffix, &|kind, dim| {
            (1..=2).map(|tiles| decode_name(kind, dim, tiles)).collect()
        })
        .unwrap_or_default();
    }
    file.strip_prefix("attention_prefill_")
        .and_then(|suffix| {
            all(suffix, &|kind, dim| {
                vec![prefill_name(kind, dim), join_name(kind, dim)]
            })
        })
        .unwrap_or_default()
}

/// Plan a call on GPU `device`. `keys`: no token sees a key at or beyond this index.
pub fn plan(device: u32, op: &Attention, keys: usize) -> Result<Plan, CudaError> {
    Ok(select::plan(
        &Device::get(device)?.info.caps,
        &op.call(keys),
    ))
}

/// Attend all tokens to their sequence's keys. `memory`: device memory of [`Plan::workspace`] floats, aligned to 16 bytes, and of
/// [`Plan::tickets`] zeros.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch. No other launch may use the
/// workspace or the tickets at the same time. The plan must be made for these operands and this device.
pub unsafe fn attend(
    to: Target,
    op: &Attention,
    plan: &Plan,
    memory: [usize; 2],
) -> Result<(), CudaError> {
    if op.tokens == 0 || op.q_heads == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    debug_assert_eq!(plan.call, op.call(plan.call.keys));
    let argument = argument(op, plan, memory)?;
    let launch = Launch {
        kernel: &plan.name,
        grid: plan.grid.map(|n| n as u32),
        block: plan.threads as u32,
        shared_bytes: plan.shared as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernels::Attention { a: argument };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run_in_clusters(device, plan.cluster as u32, &mut arguments)? };
    let Some(join) = &plan.join else {
        return Ok(());
    };
    let launch = Launch {
        kernel: &join.name,
        grid: join.grid.map(|n| n as u32),
        block: join.threads as u32,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    // SAFETY: as above; the parts are those of the launch before.
    unsafe { launch.run(device, &mut arguments) }
}

fn argument(
    op: &Attention,
    plan: &Plan,
    [workspace, tickets]: [usize; 2],
) -> Result<Argument, CudaError> {
    let (pages, shares) = (&op.pages, &plan.shares);
    index32("page rows", pages.num_pages * pages.page_size * pages.heads)?;
    index32("keys of a sequence", op.max_pages * pages.page_size)?;
    let own = op.own.as_ref();
    let address = |field: fn(&Own) -> usize| own.map_or(0, field);
    let ordered = op.ordered.as_ref();
    let order = |field: fn(&Ordered) -> usize| ordered.map_or(0, field);
    Ok(Argument {
        q: op.q,
        out: op.out,
        key: pages.data[0],
        value: pages.data[1],
        key_scales: pages.scales[0],
        value_scales: pages.scales[1],
        block_table: op.block_table,
        rows: op.rows,
        positions: op.positions,
        key_mask: op.key_mask,
        parts: workspace,
        tickets,
        new_key: address(|o| o.key),
        new_value: address(|o| o.value),
        cos: address(|o| o.cos),
        sin: address(|o| o.sin),
        rope_positions: address(|o| o.rope_positions),
        slots: address(|o| o.slots),
        q_stride: index32("values per token", op.q_stride)?,
        new_stride: index32("values per token", address(|o| o.stride))?,
        rotated: index32("rotated dimensions", address(|o| o.rotated))?,
        table_rows: index32("table rows", address(|o| o.table_rows))?,
        interleaved: i32::from(own.is_some_and(|o| o.interleaved)),
        early: i32::from(own.is_some_and(|o| o.early)),
        element: op.element as i32,
        ordered: order(|o| o.to),
        row_of_feature: order(|o| o.row_of_feature),
        columns: index32("columns", order(|o| o.columns))?,
        tokens: index32("tokens", op.tokens)?,
        q_heads: index32("query heads", op.q_heads)?,
        heads: index32("heads", pages.heads)?,
        dim: index32("head_dim", pages.head_dim)?,
        group: index32("group", op.q_heads / pages.heads)?,
        tile_heads: index32("tile heads", shares.tile.heads)?,
        tile_tokens: index32("tile tokens", shares.tile.tokens)?,
        page_size: index32("page size", pages.page_size)?,
        page_shift: if pages.page_size.is_power_of_two() {
            pages.page_size.trailing_zeros() as i32
        } else {
            -1
        },
        max_pages: index32("max_pages", op.max_pages)?,
        num_pages: index32("pages", pages.num_pages)?,
        batch: index32("batch", op.batch)?,
        mask_width: index32("mask width", op.mask_width)?,
        window: index32("window", op.window.min(i32::MAX as usize))?,
        chunks: index32("chunks", shares.chunks)?,
        part_slots: index32("part slots", shares.part_slots)?,
        ring: index32("ring", plan.ring)?,
        page_inverse: ((1_u64 << 32) / pages.page_size.max(1) as u64 + 1) as u32,
        key_limit: index32("keys", shares.key_limit)?,
        scale: op.scale,
        softcap: op.softcap,
        ahead: index32("bytes ahead", plan.ahead)?,
        norm_eps: own.map_or(0.0, |o| o.norms.eps),
        q_norm: address(|o| o.norms.q),
        k_norm: address(|o| o.norms.k),
    })
}

#[cfg(test)]
mod tests {
    use super::room::{decode_shared, prefill_room};
    use super::select::{Kernel, tests::call};
    use super::*;
    use crate::capabilities::tests::hopper;

    /// The batches of `test_any_number_of_blocks_that_share_a_row_is_bitwise_identical` in tests/kernels/test_cuda_attention.py share keys
    /// in several ways. So do the first two batches alone, which run under the sanitizer.
    #[test]
    fn nine_sequences_are_divided_among_several_blocks() {
        for kind in KINDS {
            for head_dim in DIMS {
                let chunks = [2, 9, 5, 16, 64].map(|tokens| {
                    let call = Call {
                        page_size: 16,
                        max_pages: 188,
                        tokens,
                        ..call(kind, head_dim, (32, 8), (9, 1), 3000)
                    };
                    let plan = select::plan(&hopper(), &call);
                    assert_eq!(plan.kernel, Kernel::Decode);
                    plan.chunks()
                });
                assert_eq!(chunks, [17, 4, 7, 5, 3]);
            }
        }
    }

    #[test]
    fn every_decode_kernel_fits_an_ampere_card() {
        for kind in KINDS {
            for dim in DIMS {
                for tiles in 1..=2 {
                    for per_block in [64 * 1024, 99 * 1024, 227 * 1024] {
                        let (units, bytes) = decode_shared(kind, dim, tiles, per_block);
                        assert!(units >= 1 && bytes <= per_block.max(99 * 1024));
                    }
                }
                assert!(
                    prefill_room(kind, dim, 99 * 1024)
                        .is_some_and(|room| room.small == (dim == 256))
                );
                assert!(prefill_room(kind, dim, 227 * 1024).is_some_and(|room| !room.small));
            }
        }
    }

    #[test]
    fn tiles_that_blocks_share_have_enough_counters() {
        let caps = hopper();
        let most = shared_tickets(caps.sms);
        let mut largest = 0;
        for (head_dim, heads, group) in [(256, 1, 16), (256, 8, 2), (128, 8, 4), (64, 2, 1)] {
            for tokens in 1..=600_usize {
                for batch in [1, tokens.div_ceil(16), tokens] {
                    let call = Call {
                        tokens,
                        ..call(
                            KINDS[0],
                            head_dim,
                            (heads * group, heads),
                            (batch, 1),
                            16_000,
                        )
                    };
                    let plan = select::plan(&caps, &call);
                    if plan.chunks() > 1 {
                        largest = largest.max(plan.tickets());
                    }
                }
            }
        }
        assert!(largest <= most && largest > most / 2, "{largest} of {most}");
    }

    #[test]
    fn names_and_padding() {
        assert_eq!(
            (padded(8), padded(96), padded(128), padded(136)),
            (64, 128, 128, 256)
        );
        assert_eq!(kernels("attention_decode_q6").len(), 6);
        assert_eq!(kernels("attention_few_q6").len(), 14);
        assert_eq!(kernels("attention_long_q6").len(), 26);
        assert_eq!(kernels("attention_teams_q6").len(), 14);
        assert_eq!(kernels("attention_long_fp16").len(), 14);
        assert!(kernels("attention_few_q6").contains(&"attention_q6_bf16_64_few2".into()));
        assert_eq!(
            kernels("attention_prefill_q6"),
            [64, 128, 256]
                .map(|dim| ["prefill", "join"].map(|n| format!("attention_q6_{dim}_{n}")))
                .concat()
        );
        for dim in SMALL_DIMS {
            assert_eq!(
                kernels(&format!("attention_small_{dim}_q6")),
                [format!("attention_q6_{dim}_small_prefill")]
            );
        }
    }
}
