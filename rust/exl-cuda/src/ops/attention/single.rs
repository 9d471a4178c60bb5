//! The kernels for one token a sequence (`kernels/attention/attention_few.cuh`, `attention_long.cuh`, `attention_teams.cuh`): the calls that
//! they take, and the blocks of the kernels of sm_90, between which [`super::select`] decides.

use std::fmt;

use super::load::Load;
use super::room::{packed, unit_bytes};
use super::select::{Call, Refusal, Rotated, takes};
use super::tiles::Shares;
use super::{ROWS, SPLIT_UNITS, UNIT, teams};
use crate::capabilities::Capabilities;
use crate::layout::COLUMN_TILE;
use crate::ops::Element;
use crate::ops::kv::{Codec, KINDS, Kind};

/// Head dimensions that these kernels support.
const FEW_DIMS: [usize; 3] = [64, 128, 256];

/// Heads that a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heads {
    /// Heads of this dimension.
    Whole(usize),
    /// Heads of any multiple of 16 between 64 and 128, padded with zeros to 128 in shared memory; up to eight query heads a key head.
    Padded,
}

impl Heads {
    /// The heads of this dimension with `group` query heads a key head, if a kernel takes them.
    fn of(dim: usize, group: usize) -> Option<Self> {
        if FEW_DIMS.contains(&dim) && group <= ROWS {
            Some(Self::Whole(dim))
        } else if dim > 64 && dim < PADDED_DIM && dim.is_multiple_of(16) && group <= ROWS / 2 {
            Some(Self::Padded)
        } else {
            None
        }
    }

    /// The dimension in shared memory.
    pub(super) const fn padded(self) -> usize {
        match self {
            Self::Whole(dim) => dim,
            Self::Padded => PADDED_DIM,
        }
    }

    /// Tiles of eight query heads that kernels exist for.
    const fn most_tiles(self) -> usize {
        match self {
            Self::Whole(_) => ROWS / COLUMN_TILE,
            Self::Padded => 1,
        }
    }
}

impl fmt::Display for Heads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(dim) => write!(f, "{dim}"),
            Self::Padded => f.write_str("padded"),
        }
    }
}

/// Dimension to which heads are padded.
const PADDED_DIM: usize = 128;

/// Element types of their queries.
const FEW_ELEMENTS: [Element; 2] = [Element::F16, Element::BF16];

/// Blocks of the cluster kernel that fit an SM for heads of up to 128 elements, and most blocks of a cluster.
const FEW_BLOCKS: usize = 5;
const MOST_CLUSTER: usize = 8;

/// Most bytes of keys, and of values, that one block prefetches.
const AHEAD_BYTES: usize = 512 * 1024;

fn few_name(kind: Kind, element: Element, heads: Heads, column_tiles: usize) -> String {
    let (kind, element) = (kind.name, element.suffix());
    format!("attention_{kind}_{element}_{heads}_few{column_tiles}")
}

fn long_name(
    kind: Kind,
    element: Element,
    heads: Heads,
    column_tiles: usize,
    teams: usize,
) -> String {
    let (kind, element) = (kind.name, element.suffix());
    format!("attention_{kind}_{element}_{heads}_long{column_tiles}x{teams}")
}

/// Kernels of `attention_few_<kind>.cu`, `attention_long_<kind>.cu` or `attention_teams_<kind>.cu`; None for other files.
pub(super) fn kernels(file: &str) -> Option<Vec<String>> {
    let of = |prefix| {
        let suffix = file.strip_prefix(prefix)?;
        let kind = KINDS.into_iter().find(|k| k.name == suffix)?;
        let elements = |heads, tiles| FEW_ELEMENTS.map(|element| (element, heads, tiles));
        let each = FEW_DIMS
            .map(Heads::Whole)
            .into_iter()
            .chain([Heads::Padded])
            .flat_map(move |heads| {
                (1..=heads.most_tiles()).flat_map(move |tiles| elements(heads, tiles))
            });
        Some((kind, each))
    };
    if let Some((kind, each)) = of("attention_few_") {
        return Some(each.map(|(e, h, t)| few_name(kind, e, h, t)).collect());
    }
    if let Some((kind, each)) = of("attention_teams_") {
        return Some(each.map(|(e, h, t)| teams::name(kind, e, h, t)).collect());
    }
    let (kind, each) = of("attention_long_")?;
    let most = if is_half(kind) { 1 } else { MOST_TEAMS };
    let all = (1..=most).flat_map(|teams| {
        each.clone()
            .filter(move |&(_, heads, tiles)| {
                teams <= most_teams(heads.padded(), COLUMN_TILE * tiles)
            })
            .map(move |(e, h, t)| long_name(kind, e, h, t, teams))
    });
    Some(all.collect())
}

fn is_half(kind: Kind) -> bool {
    kind.key == Codec::F16
}

/// A launch of one of these kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    pub kernel: String,
    /// Blocks of a token's key head; blocks of a cluster, or 0.
    pub count: usize,
    pub cluster: usize,
    pub threads: usize,
    pub shared: usize,
    /// The kernel's parameters `ring` and `ahead`.
    pub ring: usize,
    pub ahead: usize,
}

/// Bytes of a sequence's keys, and of its values, that the first blocks of the kernel without clusters prefetch while they wait for the
/// previous launch. For half pages only, if there are more than two blocks an SM. docs/design/attention.md has the measurements behind the
/// limit.
fn ahead(caps: &Capabilities, call: &Call, splits: usize) -> usize {
    let few = 2 * caps.sms;
    if is_half(call.kind) && call.tokens * call.kv_heads * splits > few {
        AHEAD_BYTES
    } else {
        0
    }
}

/// Division of a call's keys among blocks in clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Few {
    /// Blocks of a cluster, clusters of a key head.
    pub size: usize,
    pub clusters: usize,
    pub shared: usize,
}

/// Bytes of a block of `kernels/attention/attention_few.cuh`.
fn few_shared(kind: Kind, dim: usize, rows: usize, size: usize) -> usize {
    let columns = rows.next_multiple_of(COLUMN_TILE);
    let own = |codec| {
        let (row, scales) = packed(codec, dim);
        (row + scales).next_multiple_of(16)
    };
    let work = columns * dim * 2 + 128 * columns + 16 * columns;
    let items = (rows * dim / 64).div_ceil(size);
    let joins = 16 + 512 + rows * (dim + 4) * 4 + items * SPLIT_UNITS * 68 * 4;
    unit_bytes(kind, dim) + work + own(kind.key) + own(kind.value) + joins
}

/// Blocks of the cluster kernel that fit an SM, in clusters of `size`: memory limits those of long heads and of many query heads.
fn few_blocks(kind: Kind, dim: usize, rows: usize, size: usize, per_block: usize) -> usize {
    if dim <= 128 && rows <= ROWS / 2 {
        return FEW_BLOCKS;
    }
    let block = few_shared(kind, dim, rows, size) + 1024;
    ((per_block + 1024) / block).clamp(1, FEW_BLOCKS)
}

/// Blocks of a cluster and clusters of a key head: one cluster a split, with as many blocks as leave all of them resident. By measurement,
/// clusters of four are used only where [`Load::takes_fours`], and more blocks than are resident only for short rows of half pages. Otherwise
/// None. `of_sm`: blocks of a cluster size that fit an SM.
fn few_clusters(load: &Load, of_sm: impl Fn(usize) -> usize) -> Option<(usize, usize)> {
    let clusters = load.splits();
    let blocks = load.heads * clusters;
    let fits = |size: usize| size * blocks <= of_sm(size) * load.sms;
    let size = if fits(MOST_CLUSTER) {
        MOST_CLUSTER.min(load.units.next_power_of_two().max(2))
    } else if fits(4) && load.takes_fours() {
        4
    } else if fits(2) || (clusters == 1 && load.half && 2 * blocks <= 8 * load.sms) {
        2
    } else {
        return None;
    };
    Some((size, clusters))
}

/// The work of a call.
fn load_of(caps: &Capabilities, call: &Call, shares: &Shares, heads: Heads) -> Load {
    Load {
        half: is_half(call.kind),
        dim: heads.padded(),
        group: call.group(),
        heads: call.tokens * call.kv_heads,
        units: shares.key_limit.div_ceil(UNIT).max(1),
        sms: caps.sms,
    }
}

/// Bytes of shared memory that keep more than an even share of a launch's blocks off an SM. Blocks start as their predecessors end, at
/// different times, and the first free SM would be filled. Few blocks run alongside one of the ring kernel, which leaves no room for this
/// padding.
fn few_room(blocks: usize, sms: usize, per_block: usize) -> usize {
    let share = blocks.div_ceil(sms);
    if (3..=FEW_BLOCKS).contains(&share) {
        (per_block + 1024) / (share + 1) - 1024 + 128
    } else {
        0
    }
}

/// Whether the kernels know this rotation of heads of `dim` elements: of all elements, of neighbours, or of the first 64 or fewer, which
/// the lanes exchange; where heads are padded, of any number of elements.
fn rotates(rotated: Rotated, dim: usize, heads: Heads) -> bool {
    let Rotated {
        elements,
        interleaved,
    } = rotated;
    let quarters = (elements <= 64 || heads == Heads::Padded) && elements.is_multiple_of(4);
    elements == 0 || elements == dim || interleaved || quarters
}

/// The heads of a call that the kernels of one token a sequence can take. They need whole heads and units that lie in one page; only the
/// tokens' positions and windows may hide keys.
pub(super) fn heads_of(call: &Call) -> Result<Heads, Refusal> {
    let dim = call.head_dim;
    let heads = Heads::of(dim, call.group()).ok_or(Refusal::Takes(
        "heads of 64, 128 or 256 elements with up to 16 query heads a key head, or multiples of 16 from 80 to 112 with up to 8",
    ))?;
    let elements = (call.tokens * call.q_heads * dim).max(call.tokens * call.q_stride);
    let rotates = call
        .new_keys
        .is_none_or(|rotated| rotates(rotated, dim, heads));
    for (fits, what) in [
        (
            FEW_ELEMENTS.contains(&call.element),
            "float16 and bfloat16 queries",
        ),
        (
            i32::try_from(elements).is_ok(),
            "fewer than 2^31 elements of queries",
        ),
        (!call.masked, "calls without a mask of keys"),
        (
            call.page_size.is_multiple_of(UNIT),
            "pages of multiples of 64 keys",
        ),
        (
            rotates,
            "rotations of all elements of a head, of neighbours, or of up to 64 elements in fours",
        ),
    ] {
        takes(fits, Refusal::Takes(what))?;
    }
    Ok(heads)
}

/// Check that tokens see all keys up to their positions. A window as long as all keys hides no keys.
fn check_sees_all(call: &Call, shares: &Shares) -> Result<(), Refusal> {
    let sees_all = call.window == 0 || call.window >= shares.key_limit;
    takes(sees_all, Refusal::Takes("tokens that see all keys"))
}

/// Check that there is room for the parts of `splits` splits.
pub(super) fn check_parts(shares: &Shares, splits: usize) -> Result<(), Refusal> {
    let fits = splits <= 1 || shares.part_slots >= splits;
    takes(
        fits,
        Refusal::Takes("calls with room in the workspace for all parts"),
    )
}

/// The division of a call's keys among blocks in clusters, if this is faster.
pub(super) fn few(
    caps: &Capabilities,
    call: &Call,
    shares: &Shares,
    heads: Heads,
) -> Result<Few, Refusal> {
    check_sees_all(call, shares)?;
    let (dim, group) = (heads.padded(), call.group());
    let sms = caps.sms;
    let load = load_of(caps, call, shares, heads);
    let per_block = caps.shared_per_block;
    let of_sm = |size| few_blocks(call.kind, dim, group, size, per_block);
    let (size, clusters) = few_clusters(&load, of_sm).ok_or(Refusal::Takes(
        "calls whose clusters all run at the same time",
    ))?;
    check_parts(shares, clusters)?;
    let natural = few_shared(call.kind, dim, group, size);
    // Blocks of one unit end soon.
    let shared = if size == 2 {
        natural.max(few_room(2 * load.heads * clusters, sms, per_block))
    } else {
        natural
    };
    takes(shared <= per_block, Refusal::SharedMemory(per_block))?;
    Ok(Few {
        size,
        clusters,
        shared,
    })
}

impl Few {
    /// The launch.
    pub(super) fn blocks(self, call: &Call, heads: Heads) -> Blocks {
        Blocks {
            kernel: few_name(
                call.kind,
                call.element,
                heads,
                call.group().div_ceil(COLUMN_TILE),
            ),
            count: self.size * self.clusters,
            cluster: self.size,
            threads: 128,
            shared: self.shared,
            ring: self.size.trailing_zeros() as usize,
            ahead: 0,
        }
    }
}

/// Division of a call into blocks of whole splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Long {
    splits: usize,
    /// Units in a block's shared memory, and its total size.
    slots: usize,
    shared: usize,
    /// Teams of four warps; one additional warp fetches.
    teams: usize,
}

/// Most teams of a block.
const MOST_TEAMS: usize = 2;

/// Most teams of a block for `rows` query rows of a key head: results of two teams of more than one column tile of 256 elements never fit.
const fn most_teams(dim: usize, rows: usize) -> usize {
    if dim > 128 && rows > COLUMN_TILE {
        1
    } else {
        MOST_TEAMS
    }
}

/// Teams of a block, and number of blocks that share an SM. Many short sequences of packed keys are faster in small blocks that are all
/// resident. Half pages are bound by memory bandwidth, which one team saturates.
fn teams(load: &Load) -> (usize, usize) {
    if load.half {
        (1, load.blocks_of_sm())
    } else if load.splits() == 1 && load.heads > 2 * load.sms {
        (1, 4)
    } else {
        (MOST_TEAMS, 2)
    }
}

/// Bytes of a block of `kernels/attention/attention_long.cuh` without its units.
fn long_rest(kind: Kind, dim: usize, rows: usize, teams: usize) -> usize {
    let columns = rows.next_multiple_of(COLUMN_TILE);
    let own = |codec| {
        let (row, scales) = packed(codec, dim);
        (row + scales).next_multiple_of(16)
    };
    let work = columns * dim * 2 + teams * (128 * columns + 16 * columns);
    let parts = if teams == 1 { 1 } else { SPLIT_UNITS };
    let barriers = 4 * 8 * SPLIT_UNITS;
    (work + own(kind.key) + own(kind.value) + barriers + parts * rows * (dim + 4) * 4)
        .next_multiple_of(128)
}

/// Teams of a block and its slots, if at most `most` are useful. Teams take slots in turn and distinguish a slot's iterations by one bit.
/// With fewer slots than teams, a team could read data that has not arrived.
fn long_slots(
    kind: Kind,
    dim: usize,
    rows: usize,
    wanted: usize,
    share: usize,
    per_block: usize,
    most: usize,
) -> Option<(usize, usize)> {
    let slots = |teams: usize| {
        let room =
            ((per_block + 1024) / share - 1024).checked_sub(long_rest(kind, dim, rows, teams))?;
        Some((room / unit_bytes(kind, dim)).min(most))
    };
    let wanted = wanted.min(most_teams(dim, rows));
    match slots(wanted) {
        Some(found) if found >= wanted.min(most) => Some((wanted, found)),
        _ => slots(1).map(|found| (1, found)),
    }
}

/// The division of a call into blocks of whole splits, if this is faster than clusters (`few`, where they are possible).
pub(super) fn long(
    caps: &Capabilities,
    call: &Call,
    shares: &Shares,
    heads: Heads,
    few: Option<Few>,
) -> Result<Long, Refusal> {
    check_sees_all(call, shares)?;
    let (kind, dim, group) = (call.kind, heads.padded(), call.group());
    let load = load_of(caps, call, shares, heads);
    let splits = load.splits();
    check_parts(shares, splits)?;
    let (wanted, share) = teams(&load);
    let most = load.units.min(SPLIT_UNITS);
    let per_block = caps.shared_per_block;
    let (teams, slots) = long_slots(kind, dim, group, wanted, share, per_block, most)
        .filter(|&(_, slots)| slots >= 1)
        .ok_or(Refusal::SharedMemory(per_block))?;
    takes(load.long_is_faster(few), Refusal::Slower)?;
    let rest = long_rest(kind, dim, group, teams);
    Ok(Long {
        splits,
        slots,
        shared: rest + slots * unit_bytes(kind, dim),
        teams,
    })
}

impl Long {
    /// The launch.
    pub(super) fn blocks(self, caps: &Capabilities, call: &Call, heads: Heads) -> Blocks {
        let tiles = call.group().div_ceil(COLUMN_TILE);
        Blocks {
            kernel: long_name(call.kind, call.element, heads, tiles, self.teams),
            count: self.splits,
            cluster: 0,
            threads: 128 * self.teams + 32,
            shared: self.shared,
            ring: self.slots,
            ahead: ahead(caps, call, self.splits),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::tests::hopper;
    use crate::ops::attention::load::load;
    use crate::ops::attention::select::tests::{call, kind};

    #[test]
    fn keys_are_prefetched_if_there_are_more_than_two_blocks_an_sm() {
        let bytes = |name: &str, tokens, splits| {
            let call = call(kind(name), 128, (32, 8), (tokens, 1), 512);
            ahead(&hopper(), &call, splits)
        };
        assert_eq!(bytes("fp16", 64, 1), 512 * 1024);
        assert_eq!(
            (bytes("fp16", 33, 1), bytes("fp16", 34, 1)),
            (0, AHEAD_BYTES)
        );
        assert_eq!(
            (bytes("fp16", 1, 33), bytes("fp16", 1, 34)),
            (0, AHEAD_BYTES)
        );
        assert_eq!((bytes("q8", 64, 1), bytes("fp8", 64, 1)), (0, 0));
    }

    #[test]
    fn clusters_of_one_token_a_sequence() {
        // The 8 key heads of an 8B Llama on 132 SMs: by keys, then by sequences of 512 keys.
        let of_keys = |keys: usize| few_clusters(&load(true, 128, 4, 8, keys), |_| FEW_BLOCKS);
        assert_eq!(of_keys(64), Some((2, 1)));
        assert_eq!(of_keys(512), Some((8, 1)));
        assert_eq!(of_keys(5120), Some((8, 10)));
        assert_eq!(of_keys(8192), Some((4, 16)));
        assert_eq!(of_keys(8704), Some((2, 17)));
        assert_eq!(of_keys(20480), Some((2, 40)));
        assert_eq!(of_keys(32768), None);
        let of_batch = |batch: usize, packed: bool| {
            few_clusters(&load(!packed, 128, 4, 8 * batch, 512), |_| FEW_BLOCKS)
        };
        assert_eq!(of_batch(8, true), Some((8, 1)));
        assert_eq!(of_batch(16, true), Some((4, 1)));
        assert_eq!(of_batch(32, true), Some((2, 1)));
        assert_eq!(
            (of_batch(64, true), of_batch(64, false)),
            (None, Some((2, 1)))
        );
        let clusters = |size, clusters| {
            Some(Few {
                size,
                clusters,
                shared: 0,
            })
        };
        let long = |half| {
            let few = [(8, 1), (4, 1), (2, 1), (2, 32)].map(|(size, count)| clusters(size, count));
            few.map(|few| load(half, 128, 4, 128, 512).long_is_faster(few))
        };
        assert_eq!(long(false), [false, false, true, true]);
        assert_eq!(long(true), [false, false, true, false]);
        assert!(load(false, 128, 4, 8, 32_768).long_is_faster(None));
        assert!(load(true, 64, 4, 128, 1024).long_is_faster(None));
        assert!(!load(true, 64, 4, 128, 32_768).long_is_faster(None));
        // Half pages: clusters of two blocks while their key heads leave SMs free.
        assert!(!load(true, 128, 4, 64, 512).long_is_faster(clusters(2, 1)));
        assert!(load(false, 128, 4, 64, 512).long_is_faster(clusters(2, 1)));
        // Half pages of 16 sequences: clusters of four lose to blocks of whole splits, unless many query heads share a key head.
        assert_eq!(of_batch(16, false), Some((2, 1)));
        let many = |batch: usize, of_sm: usize| {
            few_clusters(&load(true, 128, 16, 2 * batch, 512), |_| of_sm)
        };
        assert_eq!((many(32, 5), many(32, 3)), (Some((8, 1)), Some((4, 1))));
        // Four blocks of 512 on each SM, not five; no padding for few blocks.
        let room = few_room(512, 132, 227 * 1024);
        assert!(4 * (room + 1024) <= 228 * 1024 && 5 * (room + 1024) > 228 * 1024);
        assert_eq!(few_room(128, 132, 227 * 1024), 0);
        for kind in KINDS {
            for dim in FEW_DIMS {
                let most = if dim > 128 { 170 } else { 99 } * 1024;
                for size in [2, 4, 8] {
                    assert!(few_shared(kind, dim, ROWS, size) <= most);
                }
                assert!(few_shared(kind, dim, 4, 8) <= if dim > 128 { 90 } else { 45 } * 1024);
                let blocks = few_blocks(kind, dim, 4, 8, 227 * 1024);
                assert!(blocks * (few_shared(kind, dim, 4, 8) + 1024) <= 228 * 1024);
                assert!(blocks >= 2 && (dim > 128 || blocks == FEW_BLOCKS));
                for (heads, keys) in [(256_usize, 512), (512, 512), (8, 16_384)] {
                    let (teams, share) = teams(&load(is_half(kind), dim, 4, heads, keys));
                    let fit = |rows, most| {
                        long_slots(kind, dim, rows, teams, share, 227 * 1024, most).unwrap()
                    };
                    let one = dim > 128 && is_half(kind);
                    assert!(fit(4, 8).0 == teams || one, "{} {dim}", kind.name);
                    for rows in 1..=ROWS {
                        for most in 1..=8 {
                            let (teams, slots) = fit(rows, most);
                            assert!(
                                slots >= teams.min(most) || (dim > 128 && rows > COLUMN_TILE),
                                "{} {dim} {rows} {most}",
                                kind.name
                            );
                        }
                    }
                }
            }
        }
    }
}
