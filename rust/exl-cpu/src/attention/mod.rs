//! Attention over paged keys and values.
//!
//! The order of arithmetic depends only on a query's own position:
//! * Keys come in blocks of [`KEY_BLOCK`] from position 0, for any page size. Within a block, logits are dot products summed in
//!   order of the dimension, and values are summed in order of the key.
//! * The online softmax joins blocks in order, within splits of [`SPLIT`] keys. Splits are joined in order.
//!
//! So results are bitwise identical alone and in a batch, for any chunking, page placement and thread count. With splits, few queries over
//! a long context can still use all threads.
//!
//! Rows of the Hadamard codecs are used as stored. The transform H satisfies H H = 32 I, so q . k = (H q / 32) . (H k). The weighted sum of
//! transformed values is transformed back once a query.

mod math;
mod plan;
mod tile;

use crate::kv::Pages;

/// Keys of one block.
pub(crate) const KEY_BLOCK: usize = 64;
/// Keys of one split.
pub(crate) const SPLIT: usize = 512;

/// One call's queries and the places of their keys.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// [tokens, q_heads, head_dim]
    pub q: &'a [f32],
    pub q_heads: usize,
    pub pages: &'a Pages,
    /// [batch, max_pages]: page numbers in logical order; entries beyond a sequence's last visible key are not read.
    pub block_table: &'a [i32],
    pub max_pages: usize,
    /// [tokens]: the token's row of `block_table`.
    pub rows: &'a [i32],
    /// [tokens]: the token sees keys 0..=position; negative: none.
    pub positions: &'a [i32],
    pub scale: f32,
    /// Only the last `window` keys up to the position are visible; 0 = all.
    pub window: usize,
    /// s * tanh(logit / s) if above 0.
    pub softcap: f32,
    /// [batch, width], added to the logits; -inf hides a key.
    pub key_mask: Option<(&'a [f32], usize)>,
}

/// Errors of [`paged_attention`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttentionError {
    #[error("{what}: {got} elements, expected {expected}")]
    Length {
        what: &'static str,
        got: usize,
        expected: usize,
    },
    #[error("{q_heads} query heads are not a multiple of {heads} key/value heads")]
    Heads { q_heads: usize, heads: usize },
    #[error("row {row} of token {token} outside block_table's {batch} rows")]
    Row {
        token: usize,
        row: i32,
        batch: usize,
    },
    #[error("position {position} of token {token} outside the {limit} keys that {what} covers")]
    Position {
        token: usize,
        position: i32,
        limit: usize,
        what: &'static str,
    },
    #[error("block_table[{row}, {index}] is {page}, expected 0 to {last}")]
    Page {
        row: usize,
        index: usize,
        page: i32,
        last: usize,
    },
}

/// Write softmax(mask(softcap(scale q k^T))) v to `out` [tokens, q_heads, head_dim]; tokens that see no key get zeros.
///
/// Runs on the pool. It allocates memory in proportion to the context only if few queries are split over the threads.
pub fn paged_attention(args: &Attention<'_>, out: &mut [f32]) -> Result<(), AttentionError> {
    check(args, out.len())?;
    if out.is_empty() {
        return Ok(());
    }
    plan::run(args, out);
    Ok(())
}

fn check(args: &Attention<'_>, out: usize) -> Result<(), AttentionError> {
    let pages = args.pages;
    let tokens = args.rows.len();
    let width = args.q_heads * pages.head_dim;
    if args.q_heads == 0 || !args.q_heads.is_multiple_of(pages.heads) {
        return Err(AttentionError::Heads {
            q_heads: args.q_heads,
            heads: pages.heads,
        });
    }
    for (what, got, expected) in [
        ("q", args.q.len(), tokens * width),
        ("out", out, tokens * width),
        ("positions", args.positions.len(), tokens),
    ] {
        if got != expected {
            return Err(AttentionError::Length {
                what,
                got,
                expected,
            });
        }
    }
    let batch = args
        .block_table
        .len()
        .checked_div(args.max_pages)
        .unwrap_or(0);
    if let Some((mask, width)) = args.key_mask
        && mask.len() != batch * width
    {
        return Err(AttentionError::Length {
            what: "key_mask",
            got: mask.len(),
            expected: batch * width,
        });
    }
    let mut last_visible = vec![-1i32; batch];
    for (token, (&row, &position)) in args.rows.iter().zip(args.positions).enumerate() {
        if row < 0 || row as usize >= batch {
            return Err(AttentionError::Row { token, row, batch });
        }
        let covered = [("block_table", args.max_pages * pages.page_size)]
            .into_iter()
            .chain(args.key_mask.map(|(_, width)| ("key_mask", width)));
        for (what, limit) in covered {
            if position >= 0 && position as usize >= limit {
                return Err(AttentionError::Position {
                    token,
                    position,
                    limit,
                    what,
                });
            }
        }
        let last = &mut last_visible[row as usize];
        *last = (*last).max(position);
    }
    // Pages before the window of all queries of a row may have been freed, so only pages that a query reads are checked.
    check_pages(args, &last_visible)
}

fn check_pages(args: &Attention<'_>, last_visible: &[i32]) -> Result<(), AttentionError> {
    let pages = args.pages;
    let mut first_visible = vec![usize::MAX; last_visible.len()];
    for (&row, &position) in args.rows.iter().zip(args.positions) {
        if position >= 0 {
            let first = &mut first_visible[row as usize];
            *first = (*first).min(visible(position, args.window).0);
        }
    }
    for (row, (&last, &first)) in last_visible.iter().zip(&first_visible).enumerate() {
        if last < 0 {
            continue;
        }
        for index in first / pages.page_size..=last as usize / pages.page_size {
            let page = args.block_table[row * args.max_pages + index];
            if page < 0 || page as usize >= pages.num_pages {
                return Err(AttentionError::Page {
                    row,
                    index,
                    page,
                    last: pages.num_pages - 1,
                });
            }
        }
    }
    Ok(())
}

/// Visible keys of a query at `position`: from, to (exclusive).
#[inline(always)]
fn visible(position: i32, window: usize) -> (usize, usize) {
    let to = (i64::from(position) + 1).max(0) as usize;
    let from = if window > 0 {
        to.saturating_sub(window)
    } else {
        0
    };
    (from, to)
}
