//! Division of queries among threads: tiles of neighbouring tokens x key/value heads, and splits of the context if these are few.

use std::cell::RefCell;

use super::tile::{Scratch, State, Tile};
use super::{Attention, SPLIT, visible};
use crate::isa::Isa;
use crate::pool;
use crate::simd::dispatch;

/// Query rows (tokens x grouped heads) that share one decoding of the keys.
const TILE_ROWS: usize = 64;
/// Floats that partial results of one call may take.
const PARTIAL_FLOATS: usize = 1 << 22;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

pub(super) fn run(args: &Attention<'_>, out: &mut [f32]) {
    let tiles = tiles(args);
    let heads = args.pages.heads;
    let isa = Isa::current();
    let out = Out(out.as_mut_ptr());
    let splits = tiles.iter().map(Tile::splits).max().unwrap_or(0);
    let rows = tiles.iter().map(Tile::rows).max().unwrap_or(0);
    let units = tiles.len() * heads;
    let state = State::floats(rows, args);
    let few = units < 4 * pool::threads();
    if few && splits > 1 && pool::threads() > 1 && units * splits * state <= PARTIAL_FLOATS {
        run_split(args, &tiles, isa, &out, splits, state);
    } else {
        pool::run(units, &|i| {
            // Heaviest tiles first: later tokens see more keys.
            let i = units - 1 - i;
            SCRATCH.with_borrow_mut(|scratch| {
                let work = tiles[i / heads].work(args, i % heads);
                scratch.reserve(&work);
                dispatch(isa, work.whole(scratch, out.get()));
            });
        });
    }
}

/// Run splits as separate tasks, then join them: the same steps in the same order as on one thread.
fn run_split(
    args: &Attention<'_>,
    tiles: &[Tile],
    isa: Isa,
    out: &Out,
    splits: usize,
    state: usize,
) {
    let heads = args.pages.heads;
    let units = tiles.len() * heads;
    let mut partial = vec![0.0f32; units * splits * state];
    let base = Out(partial.as_mut_ptr());
    let at = |unit: usize, split: usize| {
        let offset = (unit * splits + split) * state;
        // SAFETY: the offset lies within `partial`.
        unsafe { base.get().add(offset) }
    };
    pool::run(units * splits, &|i| {
        let (split, unit) = (i / units, i % units);
        let tile = &tiles[unit / heads];
        if !tile.split_range().contains(&split) {
            return;
        }
        SCRATCH.with_borrow_mut(|scratch| {
            let work = tile.work(args, unit % heads);
            scratch.reserve(&work);
            dispatch(isa, work.split(scratch, split, at(unit, split)));
        });
    });
    pool::run(units, &|unit| {
        let tile = &tiles[unit / heads];
        let work = tile.work(args, unit % heads);
        let parts: Vec<*mut f32> = tile.split_range().map(|split| at(unit, split)).collect();
        dispatch(isa, work.join(&parts, out.get()));
    });
}

#[derive(Clone, Copy)]
struct Out(*mut f32);

impl Out {
    fn get(self) -> *mut f32 {
        self.0
    }
}

// SAFETY: tasks write to disjoint places.
unsafe impl Sync for Out {}

/// Tiles of neighbouring tokens of one sequence, each of up to [`TILE_ROWS`] rows.
fn tiles(args: &Attention<'_>) -> Vec<Tile> {
    let groups = args.q_heads / args.pages.heads;
    let limit = (TILE_ROWS / groups).max(1);
    let mut tiles: Vec<Tile> = Vec::new();
    for (token, (&row, &position)) in args.rows.iter().zip(args.positions).enumerate() {
        let (from, to) = visible(position, args.window);
        match tiles.last_mut() {
            Some(tile) if tile.row == row as usize && tile.tokens < limit => {
                tile.tokens += 1;
                if to > from {
                    tile.from = if tile.to > tile.from {
                        tile.from.min(from)
                    } else {
                        from
                    };
                    tile.to = tile.to.max(to);
                }
            }
            _ => tiles.push(Tile {
                first: token,
                tokens: 1,
                groups,
                row: row as usize,
                from,
                to,
            }),
        }
    }
    tiles
}

impl Tile {
    /// Splits of the context that hold visible keys.
    pub(super) fn split_range(&self) -> std::ops::Range<usize> {
        self.from / SPLIT..self.to.div_ceil(SPLIT)
    }

    fn splits(&self) -> usize {
        self.to.div_ceil(SPLIT)
    }
}
