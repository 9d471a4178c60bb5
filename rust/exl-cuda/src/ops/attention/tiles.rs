//! Tiles of query rows, and the division of a tile's keys among blocks.

use super::select::Call;
use super::{BLOCKS_PER_SM, ROWS, SPLIT_UNITS, UNIT, UNIT_PARTS, padded};

/// Most floats of parts (256 MiB). For more, one block processes a tile alone.
pub(super) const MOST_PARTS: usize = 1 << 26;

/// Packing of query rows into tiles. For uneven sequences it affects the speed, not the results. A tile may hold tokens of several
/// sequences, one run after the other. Results do not depend on tiles or on the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    /// Query heads and tokens of a tile.
    pub heads: usize,
    pub tokens: usize,
    /// Tiles of the query heads of a key head.
    pub count: usize,
}

impl Tile {
    /// Tiles of blocks with `warps` warps of [`ROWS`] query rows each, of at most `most` tokens.
    pub fn of(call: &Call, warps: usize, most: usize) -> Self {
        let heads = call.group().min(ROWS);
        Self {
            heads,
            tokens: (ROWS * warps / heads).clamp(1, most.max(1)),
            count: call.group().div_ceil(heads),
        }
    }

    pub const fn rows(&self) -> usize {
        self.heads * self.tokens
    }
}

/// Tiles whose keys several blocks may share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shares {
    pub tile: Tile,
    /// Blocks that share a tile's keys, and parts that they may write.
    pub chunks: usize,
    pub part_slots: usize,
    /// Keys at or beyond this index are not read.
    pub key_limit: usize,
    /// Floats of workspace, and counters (u32) that are zero before and after the launch.
    pub workspace: usize,
    pub tickets: usize,
}

impl Shares {
    /// The division for a GPU of `sms` SMs; `lone`: tiles of one token each.
    pub fn of(sms: usize, call: &Call, lone: bool) -> Self {
        let most = if lone { 1 } else { call.tokens_of_sequence() };
        let (tile, dim) = (Tile::of(call, 1, most), padded(call.head_dim));
        let keys = call.keys.min(call.capacity());
        let groups = call.tokens.div_ceil(tile.tokens) * call.kv_heads * tile.count;
        let units = keys.div_ceil(UNIT).max(1);
        // Keys may begin at any unit (sliding window), so they may touch one more split than they fill.
        let splits = units.div_ceil(SPLIT_UNITS) + 1;
        let wanted = (BLOCKS_PER_SM * sms).div_ceil(groups.max(1)).min(units);
        let slots = if wanted > 1 {
            splits.max(units.min(UNIT_PARTS) + 1)
        } else {
            splits
        };
        // Blocks of whole splits write parts for any number of splits.
        let whole_splits = tile.tokens == 1 && units > SPLIT_UNITS;
        let fits = groups * slots * tile.rows() * dim <= MOST_PARTS;
        if !(fits && (wanted > 1 || whole_splits)) {
            return Self::alone(call, tile);
        }
        Self {
            tile,
            chunks: wanted,
            part_slots: slots,
            key_limit: keys,
            workspace: groups * slots * tile.rows() * (dim + 4),
            // One a token of a tile, or one for 64 dimensions of a row, as the kernels need.
            tickets: groups * tile.tokens.max(tile.rows() * dim / 64),
        }
    }

    /// The division of a prompt's tiles of blocks with `warps` warps, of which an SM runs one at a time. `totals`: blocks keep a tile's totals in
    /// the workspace, as its first part.
    pub fn of_prompt(sms: usize, call: &Call, warps: usize, totals: bool) -> Self {
        let tile = Tile::of(call, warps, call.tokens_of_prompt());
        let dim = padded(call.head_dim);
        let keys = call.keys.min(call.capacity());
        let groups = call.tokens.div_ceil(tile.tokens) * call.kv_heads * tile.count;
        let splits = keys.div_ceil(UNIT * SPLIT_UNITS);
        let chunks = (sms / groups.max(1)).min(splits);
        // Sums, largest logit and sum of weights of a part, as lanes hold them: `part_at` of `attention_prefill.cuh`.
        let part = ROWS * warps * (dim + 8);
        let room = MOST_PARTS / (groups * part).max(1);
        if chunks < 2 || room < 2 {
            let parts = usize::from(totals);
            return Self {
                part_slots: parts,
                workspace: groups * parts * part,
                ..Self::alone(call, tile)
            };
        }
        // The first block writes one part, the others one a split.
        let part_slots = (1 + splits - splits.div_ceil(chunks)).min(room);
        Self {
            tile,
            chunks,
            part_slots,
            key_limit: keys,
            workspace: groups * part_slots * part,
            tickets: 0,
        }
    }

    /// One block a tile, without parts.
    pub const fn alone(call: &Call, tile: Tile) -> Self {
        Self {
            tile,
            chunks: 1,
            part_slots: 0,
            key_limit: call.capacity(),
            workspace: 0,
            tickets: 0,
        }
    }
}
