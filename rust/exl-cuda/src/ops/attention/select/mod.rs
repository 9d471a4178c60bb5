//! The table that picks the kernel of attention and its launch by rows, tokens, heads, keys, format of the pages and card.
//!
//! All kernels give bitwise identical results, so the choice only affects speed. The kernels' modules report what they cannot take as a
//! [`Refusal`]; this module has the order in which kernels are tried. Launches and reports use the same function, [`plan`].

mod call;
#[cfg(test)]
pub(super) mod tests;

use super::room::{PrefillRoom, decode_shared, prefill_room, prefill_warps, wide_shared};
use super::single::{self, Blocks};
use super::tiles::{MOST_PARTS, Shares};
use super::{ROWS, SPLIT_UNITS, UNIT, WIDE_DIMS, padded, teams};
use crate::capabilities::Capabilities;
use crate::features::Feature;
use crate::layout::COLUMN_TILE;
use crate::ops::kv::Kind;
use call::needs;
pub(super) use call::takes;
pub use call::{Call, Refusal, Refused, Rotated, Rows};

/// From this number of query rows of a sequence on, prefill blocks, whose eight warps share keys, are faster.
const PREFILL_ROWS: usize = 64;

/// Most keys that each token, or all tokens, of [`Rows::Apart`] or [`Rows::Windows`] read, if every token has its own blocks. Beyond both,
/// tiles of several tokens read a sequence's keys once.
const APART_KEYS: (usize, usize) = (512, 16 * 1024);

/// From this number of keys on, windows of prompts run as prompts.
const WINDOW_KEYS: usize = 1024;

/// Least numbers of query rows times keys for which blocks of [`Kernel::Prefill`] that share a tile's keys are faster than blocks of
/// [`Kernel::Decode`], with half pages and with packed ones. They have a whole split of the keys at least, decode blocks a unit.
const SHARED_WORK: [usize; 2] = [1 << 17, 1 << 19];

/// Warps of a block of [`Kernel::Wide`]: two warpgroups that compute, one that loads.
const WIDE_WARPS: usize = 12;

/// Kernels of attention, named after their files in `kernels/attention`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// One token a sequence: blocks in clusters share a key head's keys.
    Few,
    /// One token a sequence: blocks of whole splits of the keys.
    Long,
    /// One token a sequence: blocks of teams of warps, each with units of its own.
    Teams,
    /// Blocks share the keys of a tile of query rows; the last one joins their parts.
    Decode,
    /// Warps with different queries share the keys; each warp joins its results incrementally. Where tiles are fewer than SMs, blocks share
    /// a tile's keys, and another launch joins their parts.
    Prefill,
    /// [`Kernel::Prefill`] with warpgroup matrix instructions.
    Wide,
}

impl Kernel {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Few => "attention_few",
            Self::Long => "attention_long",
            Self::Teams => "attention_teams",
            Self::Decode => "attention_decode",
            Self::Prefill => "attention_prefill",
            Self::Wide => "attention_wide",
        }
    }
}

/// The kernel of a call, its launch, and the memory that it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub call: Call,
    pub kernel: Kernel,
    /// Name of its function for this call.
    pub name: String,
    /// Why faster kernels do not take the call.
    pub refused: Refused,
    pub(super) grid: [usize; 3],
    pub(super) threads: usize,
    /// Bytes of shared memory of a block.
    pub shared: usize,
    /// Blocks of a cluster; 0 for a launch without clusters.
    pub(super) cluster: usize,
    /// The kernel's parameters `ring` and `ahead`.
    pub(super) ring: usize,
    pub(super) ahead: usize,
    pub(super) shares: Shares,
    /// The launch that joins the parts of blocks that share a prompt's tile.
    pub(super) join: Option<Join>,
}

/// A launch that follows that of a [`Plan`] and takes the same argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    pub name: String,
    pub(super) grid: [usize; 3],
    pub(super) threads: usize,
}

impl Plan {
    /// Blocks that share a tile's keys.
    pub const fn chunks(&self) -> usize {
        self.shares.chunks
    }

    /// Floats of workspace that the launch needs.
    pub const fn workspace(&self) -> usize {
        self.shares.workspace
    }

    /// Counters (u32) that the launch needs, zero before and after it.
    pub const fn tickets(&self) -> usize {
        self.shares.tickets
    }
}

/// Plan a call on a card of these capabilities, which need not be present.
pub fn plan(caps: &Capabilities, call: &Call) -> Plan {
    let mut refused = Vec::new();
    if let Some(kernel) = prompt_kernel(caps, call, &mut refused) {
        return plan_prompt(caps, call, kernel, refused);
    }
    let lone = call.new_keys.is_some();
    let apart = call.rows != Rows::Sequences;
    let each = apart && (call.keys <= APART_KEYS.0 || call.tokens * call.keys <= APART_KEYS.1);
    let shares = Shares::of(caps.sms, call, lone || each);
    if shares.tile.tokens == 1
        && let Some((kernel, blocks)) = single_kernel(caps, call, &shares, &mut refused)
    {
        return plan_single(call, kernel, blocks, shares, refused);
    }
    let shares = if each {
        Shares::of(caps.sms, call, lone)
    } else {
        shares
    };
    plan_decode(caps, call, shares, refused)
}

/// Whether the launch of attention rotates and stores the keys of a step of `tokens` tokens a sequence; a launch before it does otherwise.
pub const fn stores_own_keys(tokens: usize) -> bool {
    tokens == 1
}

/// Whether sequences of `tokens` tokens each are read as those of a decode step; longer ones are read as prompts.
pub const fn is_decode_step(tokens: usize) -> bool {
    Rows::of(tokens, false).are_few()
}

/// The kernel for a call of many query rows a sequence; None where blocks that share keys are faster or none takes it.
fn prompt_kernel(caps: &Capabilities, call: &Call, refused: &mut Refused) -> Option<Kernel> {
    let rows = call.tokens_of_prompt() * call.group();
    let stepped = match call.rows {
        Rows::Sequences => call.new_keys.is_some(),
        Rows::Apart => true,
        Rows::Windows => call.keys < WINDOW_KEYS,
    };
    if stepped {
        return None;
    }
    if rows < PREFILL_ROWS {
        if call.tokens_of_prompt() > 1 {
            let least = PREFILL_ROWS;
            refused.push((Kernel::Prefill, Refusal::FewRows { rows, least }));
        }
        return None;
    }
    let wide = takes_wide(caps, call, padded(call.head_dim));
    let room = check_prefill(caps, call);
    let prefill = match wide {
        Ok(()) => room,
        Err(_) => room.and_then(|()| fills_card(caps, call, rows)),
    };
    refused.extend(wide.err().map(|why| (Kernel::Wide, why)));
    refused.extend(prefill.err().map(|why| (Kernel::Prefill, why)));
    match (wide, prefill) {
        (_, Err(_)) => None,
        (Ok(()), _) => Some(Kernel::Wide),
        _ => Some(Kernel::Prefill),
    }
}

/// Shared memory of a block of [`Kernel::Prefill`]; None if none fits the card.
fn room_of(caps: &Capabilities, call: &Call) -> Option<PrefillRoom> {
    let dim = padded(call.head_dim);
    let small = caps.has(if dim > 128 {
        Feature::SmallBlocks
    } else {
        Feature::TuringBlocks
    });
    prefill_room(call.kind, dim, caps.shared_per_block).filter(|room| small || !room.small)
}

/// The division of a prompt of tiles of prefill blocks.
fn shares_of_prompt(caps: &Capabilities, call: &Call) -> Shares {
    let small = room_of(caps, call).is_some_and(|room| room.small);
    let warps = prefill_warps(padded(call.head_dim));
    Shares::of_prompt(caps.sms, call, warps, small)
}

/// Check that a block of [`Kernel::Prefill`] fits a card, and its totals the workspace where they are kept there.
fn check_prefill(caps: &Capabilities, call: &Call) -> Result<(), Refusal> {
    let room = caps.shared_per_block;
    takes(room_of(caps, call).is_some(), Refusal::SharedMemory(room))?;
    let floats = shares_of_prompt(caps, call).workspace;
    takes(floats <= MOST_PARTS, Refusal::Workspace { floats })
}

/// Check that a prompt of `rows` query rows a sequence does not have so few tiles and so little work that blocks of [`Kernel::Decode`] are
/// faster than blocks of [`Kernel::Prefill`] that share a tile's keys.
fn fills_card(caps: &Capabilities, call: &Call, rows: usize) -> Result<(), Refusal> {
    let of_tile = ROWS * prefill_warps(padded(call.head_dim));
    let tiles = (call.tokens * call.group()).div_ceil(of_tile) * call.kv_heads;
    let keys = call.keys.min(call.capacity());
    let least = SHARED_WORK[usize::from(call.kind.name != "fp16")];
    let slow = 2 * tiles < caps.sms
        && keys > UNIT * SPLIT_UNITS
        && (rows < of_tile || rows.saturating_mul(keys) < least);
    let sms = caps.sms;
    takes(!slow, Refusal::FewTiles { tiles, sms })
}

/// Check that the kernel of sm_90a takes a call of many query rows: half pages without softcap and mask.
fn takes_wide(caps: &Capabilities, call: &Call, dim: usize) -> Result<(), Refusal> {
    needs(caps, Feature::Wgmma)?;
    for (fits, what) in [
        (call.kind.name == "fp16", "float16 pages"),
        (WIDE_DIMS.contains(&dim), "heads of up to 128 elements"),
        (!call.capped, "scores without a limit"),
        (!call.masked, "calls without a mask of keys"),
    ] {
        takes(fits, Refusal::Takes(what))?;
    }
    let room = caps.shared_per_block;
    takes(wide_shared(dim) <= room, Refusal::SharedMemory(room))
}

/// The kernel for a call whose tiles have one token each, and its blocks.
fn single_kernel(
    caps: &Capabilities,
    call: &Call,
    shares: &Shares,
    refused: &mut Refused,
) -> Option<(Kernel, Blocks)> {
    let heads = single::heads_of(call);
    let tested = needs(caps, Feature::TestedClusters).and(heads);
    let few = tested.and_then(|heads| single::few(caps, call, shares, heads));
    let long = tested.and_then(|heads| single::long(caps, call, shares, heads, few.ok()));
    match (heads, long, few) {
        (Ok(heads), Ok(long), _) => return Some((Kernel::Long, long.blocks(caps, call, heads))),
        (Ok(heads), _, Ok(few)) => return Some((Kernel::Few, few.blocks(call, heads))),
        (_, Err(long), Err(few)) => refused.extend([(Kernel::Few, few), (Kernel::Long, long)]),
        _ => {}
    }
    match needs(caps, Feature::AsyncCopy)
        .and(heads)
        .and_then(|heads| teams::blocks(caps, call, shares, heads))
    {
        Ok(blocks) => Some((Kernel::Teams, blocks)),
        Err(why) => {
            refused.push((Kernel::Teams, why));
            None
        }
    }
}

fn plan_single(
    call: &Call,
    kernel: Kernel,
    blocks: Blocks,
    shares: Shares,
    refused: Refused,
) -> Plan {
    Plan {
        call: *call,
        kernel,
        name: blocks.kernel,
        refused,
        grid: [call.tokens, call.kv_heads, blocks.count],
        threads: blocks.threads,
        shared: blocks.shared,
        cluster: blocks.cluster,
        ring: blocks.ring,
        ahead: blocks.ahead,
        shares,
        join: None,
    }
}

fn plan_prompt(caps: &Capabilities, call: &Call, kernel: Kernel, refused: Refused) -> Plan {
    let dim = padded(call.head_dim);
    let warps = prefill_warps(dim);
    let room = room_of(caps, call);
    // A wide block has its totals in shared memory.
    let shares = if kernel == Kernel::Wide {
        Shares::of_prompt(caps.sms, call, warps, false)
    } else {
        shares_of_prompt(caps, call)
    };
    let (tiles, heads) = (
        call.tokens.div_ceil(shares.tile.tokens),
        call.kv_heads * shares.tile.count,
    );
    let join = (shares.chunks > 1).then(|| Join {
        name: join_name(call.kind, dim),
        grid: [tiles, heads, warps],
        threads: dim / 2,
    });
    let (name, grid, warps, (ring, shared)) = if kernel == Kernel::Wide {
        // Wide blocks stay resident and take one tile after another.
        let resident = (tiles * heads * shares.chunks).min(caps.sms);
        let grid = [resident, 1, 1];
        (wide_name(dim), grid, WIDE_WARPS, (0, wide_shared(dim)))
    } else {
        let grid = [tiles, heads, shares.chunks];
        let room = room.expect("`check_prefill` found it");
        let name = if room.small {
            small_name(call.kind, dim)
        } else {
            prefill_name(call.kind, dim)
        };
        (name, grid, warps, (room.units, room.bytes))
    };
    Plan {
        call: *call,
        kernel,
        name,
        refused,
        grid,
        threads: 32 * warps,
        shared,
        cluster: 0,
        ring,
        ahead: 0,
        shares,
        join,
    }
}

/// Check that a card has kernels for pages of `kind` with heads of `head_dim` elements: blocks of [`Kernel::Decode`], which take every call,
/// need room for a unit.
///
/// # Errors
/// [`Refusal::SmallBlocks`], for launches of a plan, too.
pub fn check_pages(caps: &Capabilities, kind: Kind, head_dim: usize) -> Result<(), Refusal> {
    let (most, room) = (ROWS / COLUMN_TILE, caps.shared_per_block);
    let needed = decode_shared(kind, padded(head_dim), most, room).1;
    takes(needed <= room, Refusal::SmallBlocks { needed, room })
}

fn plan_decode(caps: &Capabilities, call: &Call, shares: Shares, mut refused: Refused) -> Plan {
    let (dim, tile) = (padded(call.head_dim), shares.tile);
    let column_tiles = tile.rows().div_ceil(COLUMN_TILE);
    let (ring, shared) = decode_shared(call.kind, dim, column_tiles, caps.shared_per_block);
    let fits = check_pages(caps, call.kind, call.head_dim);
    refused.extend(fits.err().map(|why| (Kernel::Decode, why)));
    Plan {
        call: *call,
        kernel: Kernel::Decode,
        name: decode_name(call.kind, dim, column_tiles),
        refused,
        grid: [
            call.tokens.div_ceil(tile.tokens),
            call.kv_heads * tile.count,
            shares.chunks,
        ],
        threads: 128,
        shared,
        cluster: 0,
        ring,
        ahead: 0,
        shares,
        join: None,
    }
}

pub(super) fn decode_name(kind: Kind, dim: usize, column_tiles: usize) -> String {
    format!("attention_{}_{dim}_decode{column_tiles}", kind.name)
}

pub(super) fn prefill_name(kind: Kind, dim: usize) -> String {
    format!("attention_{}_{dim}_prefill", kind.name)
}

pub(super) fn small_name(kind: Kind, dim: usize) -> String {
    format!("attention_{}_{dim}_small_prefill", kind.name)
}

pub(super) fn join_name(kind: Kind, dim: usize) -> String {
    format!("attention_{}_{dim}_join", kind.name)
}

pub(super) fn wide_name(dim: usize) -> String {
    format!("attention_fp16_{dim}_wide")
}
