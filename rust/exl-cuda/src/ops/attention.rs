//! Attention over pages: which kernel, what launch, how much workspace.

use super::kv::{Codec, KINDS, Kind, Pages};
use super::{Target, index32};
use crate::device::Device;
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};

/// Keys of one split, as in `kernels/attention_join.cuh`.
pub const SPLIT: usize = 256;
/// Largest head dimension.
pub const MAX_DIM: usize = 256;
/// Keys of one stage and query rows of one tile of the matrix products, as in the kernels.
const STAGE: usize = 64;
const ROWS: usize = 16;
/// Query rows of a call from which blocks that share keys between eight warps pay.
const PREFILL_ROWS: usize = 64;

/// Padded head dimensions that kernels exist for.
const DIMS: [usize; 3] = [64, 128, 256];

/// Which of the two kernels; results are the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A block a split of the keys; needs workspace and the joining kernel.
    Decode,
    /// Warps with queries of their own share the keys; each joins as it goes.
    Prefill,
}

/// Operands of [`attend`]: device addresses, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// `[tokens, q_heads, head_dim]` of `element` (0 half, 1 bfloat16, 2 float)
    pub q: usize,
    pub out: usize,
    pub element: i32,
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
}

/// What [`plan`] decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub mode: Mode,
    pub splits: usize,
    /// Floats that `parts` and `states` must hold together, states last.
    pub workspace: usize,
}

/// `struct Attention` of `kernels/attention_join.cuh`.
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
    states: usize,
    element: i32,
    tokens: i32,
    q_heads: i32,
    heads: i32,
    dim: i32,
    group: i32,
    tile_heads: i32,
    tile_tokens: i32,
    page_size: i32,
    max_pages: i32,
    num_pages: i32,
    batch: i32,
    mask_width: i32,
    window: i32,
    splits: i32,
    scale: f32,
    softcap: f32,
}

/// The head dimension of the kernel that takes heads of `dim`.
pub fn padded(dim: usize) -> usize {
    DIMS.into_iter().find(|&d| dim <= d).unwrap_or(MAX_DIM)
}

fn name(kind: Kind, dim: usize, mode: Mode) -> String {
    let mode = match mode {
        Mode::Decode => "decode",
        Mode::Prefill => "prefill",
    };
    format!("attention_{}_{dim}_{mode}", kind.name)
}

/// Kernels of `attention_<kind>.cu` or `attention_join.cu`.
pub(super) fn kernels(file: &str) -> Vec<String> {
    let Some(kind) = KINDS
        .into_iter()
        .find(|k| file == format!("attention_{}", k.name))
    else {
        return vec!["attention_join".to_owned()];
    };
    DIMS.into_iter()
        .flat_map(|dim| {
            [
                name(kind, dim, Mode::Decode),
                name(kind, dim, Mode::Prefill),
            ]
        })
        .collect()
}

/// Warps of a block and slots of its ring: the numbers in `kernels/attention_<kind>.cu`.
fn shape(kind: Kind, dim: usize, mode: Mode) -> (usize, usize) {
    let column = DIMS.iter().position(|&d| d == dim).unwrap_or(2);
    match mode {
        Mode::Prefill => ([8, 8, 4][column], 3),
        Mode::Decode => {
            let slots = match kind.name {
                "fp16" => [4, 2, 2],
                "q4" => [4, 4, 4],
                _ => [4, 3, 3],
            };
            (4, slots[column])
        }
    }
}

/// Shared memory of a block: `Shape` in `kernels/attention.cuh`.
fn shared_bytes(kind: Kind, dim: usize, mode: Mode) -> usize {
    let (warps, slots) = shape(kind, dim, mode);
    let unit = |codec: Codec| codec.row_bytes(64) / 8;
    let scales = |codec: Codec| if codec.is_hadamard() { dim / 16 } else { 0 };
    let keys = STAGE * ((dim / 8 + 4) * unit(kind.key) + scales(kind.key));
    let values = STAGE * (dim / 8 * unit(kind.value) + 16 + scales(kind.value));
    let queries = ROWS * (2 * dim + 64);
    let totals = ROWS * dim * 4;
    let rest = match mode {
        Mode::Decode => queries + ROWS * STAGE * 4,
        Mode::Prefill if dim <= 128 => warps * totals,
        Mode::Prefill => warps * (queries + totals),
    };
    slots * keys.max(values) + rest
}

/// The kernel for a call and the workspace it needs. `max_keys`: no token sees a key at or beyond it.
pub fn plan(device: u32, op: &Attention, max_keys: usize) -> Result<Plan, CudaError> {
    let device = Device::get(device)?;
    let dim = padded(op.pages.head_dim);
    let group = op.q_heads / op.pages.heads;
    let capacity = op.max_pages * op.pages.page_size;
    let splits = max_keys.min(capacity).div_ceil(SPLIT).max(1);
    let (warps, _) = shape(op.pages.kind, dim, Mode::Prefill);
    let rows_of_sequence = op.tokens.div_ceil(op.batch.max(1)) * group;
    let blocks = (op.tokens * group).div_ceil(ROWS * warps) * op.pages.heads;
    let fits = shared_bytes(op.pages.kind, dim, Mode::Prefill)
        <= device.info.shared_bytes_per_block as usize;
    let enough = 2 * blocks >= device.info.multiprocessors as usize || splits == 1;
    if rows_of_sequence >= PREFILL_ROWS && fits && enough {
        return Ok(Plan {
            mode: Mode::Prefill,
            splits: 1,
            workspace: 0,
        });
    }
    Ok(Plan {
        mode: Mode::Decode,
        splits,
        workspace: op.tokens * op.q_heads * splits * (dim + 2),
    })
}

/// Attention of every token over its sequence's keys. `workspace`: device memory of [`Plan::workspace`] floats, aligned to 16 bytes.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn attend(
    to: Target,
    op: &Attention,
    plan: &Plan,
    workspace: usize,
) -> Result<(), CudaError> {
    if op.tokens == 0 || op.q_heads == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let dim = padded(op.pages.head_dim);
    let (warps, _) = shape(op.pages.kind, dim, plan.mode);
    let tiles = if plan.mode == Mode::Prefill { warps } else { 1 };
    let argument = argument(op, plan, workspace, tiles)?;
    let ceil = |n: i32, d: i32| (n + d - 1) / d;
    let head_tiles = ceil(argument.group, argument.tile_heads);
    let kernel = name(op.pages.kind, dim, plan.mode);
    let launch = Launch {
        kernel: &kernel,
        grid: [
            ceil(argument.tokens, argument.tile_tokens) as u32,
            (argument.heads * head_tiles) as u32,
            plan.splits as u32,
        ],
        block: 32 * warps as u32,
        shared_bytes: shared_bytes(op.pages.kind, dim, plan.mode) as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    // SAFETY: both kernels take this struct; validity is the caller's promise.
    unsafe { launch.run(device, &mut kernel_arguments![argument])? };
    if plan.mode == Mode::Prefill {
        return Ok(());
    }
    let flags = i32::from(op.pages.kind.value == Codec::F16)
        | (i32::from(op.pages.kind.value.is_hadamard()) << 1);
    let join = Launch {
        kernel: "attention_join",
        grid: [argument.tokens as u32, argument.q_heads as u32, 1],
        block: dim as u32,
        shared_bytes: 0,
        ..launch
    };
    // SAFETY: as above.
    unsafe { join.run(device, &mut kernel_arguments![argument, flags]) }
}

fn argument(
    op: &Attention,
    plan: &Plan,
    workspace: usize,
    tiles: usize,
) -> Result<Argument, CudaError> {
    let pages = &op.pages;
    let group = op.q_heads / pages.heads;
    let tile_heads = group.min(ROWS);
    let tile_tokens =
        (ROWS * tiles / tile_heads).clamp(1, op.tokens.div_ceil(op.batch.max(1)).max(1));
    let dim = padded(pages.head_dim);
    index32("page rows", pages.num_pages * pages.page_size * pages.heads)?;
    index32("keys of a sequence", op.max_pages * pages.page_size)?;
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
        states: workspace + 4 * op.tokens * op.q_heads * plan.splits * dim,
        element: op.element,
        tokens: index32("tokens", op.tokens)?,
        q_heads: index32("query heads", op.q_heads)?,
        heads: index32("heads", pages.heads)?,
        dim: index32("head_dim", pages.head_dim)?,
        group: index32("group", group)?,
        tile_heads: index32("tile heads", tile_heads)?,
        tile_tokens: index32("tile tokens", tile_tokens)?,
        page_size: index32("page size", pages.page_size)?,
        max_pages: index32("max_pages", op.max_pages)?,
        num_pages: index32("pages", pages.num_pages)?,
        batch: index32("batch", op.batch)?,
        mask_width: index32("mask width", op.mask_width)?,
        window: index32("window", op.window.min(i32::MAX as usize))?,
        splits: index32("splits", plan.splits)?,
        scale: op.scale,
        softcap: op.softcap,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_decode_kernel_fits_an_ampere_card() {
        for kind in KINDS {
            for dim in DIMS {
                assert!(shared_bytes(kind, dim, Mode::Decode) <= 99 * 1024);
                assert!(shared_bytes(kind, dim, Mode::Prefill) <= 227 * 1024);
            }
        }
    }

    #[test]
    fn names_and_padding() {
        assert_eq!(
            (padded(8), padded(96), padded(128), padded(136)),
            (64, 128, 128, 256)
        );
        assert_eq!(kernels("attention_q6").len(), 6);
        assert_eq!(kernels("attention_join"), ["attention_join"]);
    }
}
