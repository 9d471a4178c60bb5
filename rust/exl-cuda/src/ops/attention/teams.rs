//! The kernel for one token a sequence in code for sm_80 to sm_89 and from sm_100 on (`kernels/attention/attention_teams.cuh`): its blocks.

use super::room::{packed, unit_bytes};
use super::select::{Call, Refusal};
use super::single::{Blocks, Heads, check_parts};
use super::tiles::Shares;
use super::{SPLIT_UNITS, UNIT};
use crate::abi::assert_constants;
use crate::capabilities::Capabilities;
use crate::layout::COLUMN_TILE;
use crate::ops::Element;
use crate::ops::kv::Kind;

/// Most teams of a block, of four warps each. Up to 128 registers a thread allow as many on an SM.
const MOST_TEAMS: usize = 4;
assert_constants!(attention_teams, { MOST_TEAMS == MOST_TEAMS });

/// Most slots of a team.
const MOST_SLOTS: usize = 2;

pub(super) fn name(kind: Kind, element: Element, heads: Heads, column_tiles: usize) -> String {
    let (kind, element) = (kind.name, element.suffix());
    format!("attention_{kind}_{element}_{heads}_teams{column_tiles}")
}

/// Bytes of a block with `teams` teams of `slots` units each.
fn shared(kind: Kind, dim: usize, rows: usize, teams: usize, slots: usize) -> usize {
    let columns = rows.next_multiple_of(COLUMN_TILE);
    let own = |codec| {
        let (row, scales) = packed(codec, dim);
        (row + scales).next_multiple_of(16)
    };
    let queries = columns * dim * 2;
    let of_team = 128 * columns + 16 * columns;
    let rest = queries + own(kind.key) + own(kind.value) + teams * of_team + rows * (dim + 4) * 4;
    rest.next_multiple_of(128) + teams * slots * unit_bytes(kind, dim)
}

/// Splits that a token's keys may touch. A window's keys may begin at any key of a unit, and at any unit of a split.
fn splits(call: &Call, shares: &Shares) -> usize {
    let all = shares.key_limit.div_ceil(UNIT).max(1).div_ceil(SPLIT_UNITS);
    if call.window == 0 {
        return all;
    }
    let units = (call.window - 1).div_ceil(UNIT) + 1;
    all.min((units - 1).div_ceil(SPLIT_UNITS) + 1)
}

/// Teams and slots of a block, for splits of `units` units. Where all blocks are resident with one on each SM, a block has as many teams as fit.
/// More blocks share an SM, with fewer teams each.
fn shape(
    caps: &Capabilities,
    (kind, dim, rows): (Kind, usize, usize),
    blocks: usize,
    units: usize,
) -> Option<(usize, usize)> {
    let wanted = match blocks.div_ceil(caps.sms.max(1)) {
        0 | 1 => 1,
        2 => 2,
        _ => MOST_TEAMS,
    };
    (1..=wanted).rev().find_map(|share| {
        // Each resident block reserves 1 KiB of the SM's memory.
        let room = ((caps.shared_per_block + 1024) / share).saturating_sub(1024);
        let fits = |teams, slots| shared(kind, dim, rows, teams, slots) <= room;
        let most = units.clamp(1, MOST_TEAMS / share);
        let teams = (1..=most).rev().find(|&teams| fits(teams, 1))?;
        let more = units > teams && fits(teams, MOST_SLOTS);
        Some((teams, if more { MOST_SLOTS } else { 1 }))
    })
}

/// The launch of a call of one token a sequence.
pub(super) fn blocks(
    caps: &Capabilities,
    call: &Call,
    shares: &Shares,
    heads: Heads,
) -> Result<Blocks, Refusal> {
    let (kind, dim, group) = (call.kind, heads.padded(), call.group());
    let splits = splits(call, shares);
    check_parts(shares, splits)?;
    let units = shares.key_limit.div_ceil(UNIT).clamp(1, SPLIT_UNITS);
    let groups = call.tokens * call.kv_heads;
    let (teams, slots) = shape(caps, (kind, dim, group), groups * splits, units)
        .ok_or(Refusal::SharedMemory(caps.shared_per_block))?;
    Ok(Blocks {
        kernel: name(kind, call.element, heads, group.div_ceil(COLUMN_TILE)),
        count: splits,
        cluster: 0,
        threads: 128 * teams,
        shared: shared(kind, dim, group, teams, slots),
        ring: slots,
        ahead: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::tests::{RELEASE, card};
    use crate::ops::attention::select::tests::{call, kind};
    use crate::ops::kv::KINDS;

    #[test]
    fn teams_and_slots_of_an_8b_llama() {
        let of = |name: &str, kind_name: &str, blocks, units| {
            let caps = card(name, RELEASE);
            shape(&caps, (kind(kind_name), 128, 4), blocks, units).unwrap()
        };
        // One sequence of 256 keys: every unit has a team where the halves of four units fit.
        assert_eq!(of("A100", "fp16", 8, 4), (4, 1));
        assert_eq!(of("3090", "fp16", 8, 4), (2, 1));
        for packed in ["fp8", "q8", "q6", "q4"] {
            assert_eq!(of("4090", packed, 8, 4), (4, 1), "{packed}");
        }
        assert_eq!(of("4090", "q4", 8, 8), (4, 2));
        // More blocks than SMs: fewer teams each.
        assert_eq!(of("A100", "fp16", 200, 8), (2, 1));
        assert_eq!(of("A100", "fp16", 256, 8), (1, 1));
        assert_eq!(of("3090", "fp16", 256, 8), (1, 1));
        assert_eq!(of("4090", "q4", 512, 8), (1, 1));
        assert_eq!(of("A100", "q4", 512, 8), (1, 2));
    }

    #[test]
    fn every_call_fits_an_ampere_card() {
        for kind in KINDS {
            for (dim, rows) in [64, 128]
                .into_iter()
                .flat_map(|dim| (1..=super::super::ROWS).map(move |rows| (dim, rows)))
            {
                for (blocks, units) in [(1, 1), (8, 3), (256, 8), (4096, 8)] {
                    let caps = card("3060", RELEASE);
                    let found = shape(&caps, (kind, dim, rows), blocks, units);
                    assert!(found.is_some_and(|(teams, slots)| teams <= units
                        && shared(kind, dim, rows, teams, slots) <= caps.shared_per_block));
                }
            }
        }
    }

    #[test]
    fn a_window_limits_the_splits() {
        let caps = card("3090", RELEASE);
        let of = |window, keys| {
            let call = Call {
                window,
                ..call(kind("fp16"), 128, (32, 8), (1, 1), keys)
            };
            splits(&call, &Shares::of(caps.sms, &call, false))
        };
        assert_eq!((of(0, 512), of(0, 513), of(0, 16384)), (1, 2, 32));
        // A window's first key may be a split's last.
        assert_eq!((of(1, 16384), of(2, 16384), of(514, 16384)), (1, 2, 3));
        assert_eq!((of(4096, 1024), of(16384, 16384)), (2, 32));
    }
}
