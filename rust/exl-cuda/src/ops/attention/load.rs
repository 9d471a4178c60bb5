//! Decisions between `attention_few` and `attention_long` that measurements alone justify (docs/design/attention.md).

use super::single::Few;
use super::{ROWS, SPLIT_UNITS};

/// The work of a call of one token a sequence, and the SMs that share it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// Whether pages hold halves.
    pub half: bool,
    /// Elements of a head, and query heads of a key head.
    pub dim: usize,
    pub group: usize,
    /// Key heads of all sequences.
    pub heads: usize,
    /// Units of keys of the longest sequence, at least one.
    pub units: usize,
    pub sms: usize,
}

/// Most splits of a sequence of half pages up to which `attention_long` runs wherever clusters cannot.
const SHORT_SPLITS: usize = 4;
/// Most splits with heads of 128 elements: in general, and with at most [`FEW_QUERIES`] query heads a key head. Beyond, joining the splits of a
/// head bounds the kernel.
const MOST_SPLITS: [usize; 2] = [16, 64];
/// Query heads of a key head up to which joining costs little compared with reading keys.
const FEW_QUERIES: usize = 4;

impl Load {
    pub fn splits(&self) -> usize {
        self.units.div_ceil(SPLIT_UNITS)
    }

    /// Splits of all heads: blocks of `attention_long`, clusters of `attention_few`.
    fn blocks(&self) -> usize {
        self.heads * self.splits()
    }

    fn has_few_queries(&self) -> bool {
        self.group <= FEW_QUERIES
    }

    /// Whether clusters of four, which are all resident, beat clusters of two. Of a row of one split they do for packed pages and for many
    /// query heads; of more splits for half pages of heads of 128 elements, as long as an SM gets at most four of their blocks, or three with
    /// many query heads.
    pub fn takes_fours(&self) -> bool {
        if self.splits() == 1 {
            return !self.half || self.group > ROWS / 2;
        }
        let most = if self.has_few_queries() { 4 } else { 3 };
        self.half && self.dim == 128 && 4 * self.blocks() <= most * self.sms
    }

    /// Whether blocks of whole splits beat clusters (`few`, where they can run). They do not if clusters of more than two blocks are
    /// resident. Otherwise they do for packed pages, and for half pages of short sequences, if there are blocks for most SMs, or of long
    /// ones, if there are many.
    pub fn long_is_faster(&self, few: Option<Few>) -> bool {
        match few {
            Some(few) if few.size > 2 => false,
            _ if !self.half => true,
            Some(few) if few.clusters == 1 => self.crowds(),
            None if self.splits() <= SHORT_SPLITS => true,
            _ => self.long_halves_are_faster(few.is_none()),
        }
    }

    /// `long_is_faster` for half pages of many splits. `alone`: clusters cannot run.
    fn long_halves_are_faster(&self, alone: bool) -> bool {
        let blocks = self.blocks();
        match self.dim {
            128 if self.has_few_queries() => {
                4 * blocks >= 9 * self.sms && self.splits() <= MOST_SPLITS[1]
            }
            128 if alone => self.group <= ROWS / 2 && self.splits() <= MOST_SPLITS[0],
            128 => 8 * blocks >= 15 * self.sms && blocks <= 2 * self.sms,
            256 => alone && self.has_few_queries() && self.splits() <= MOST_SPLITS[1],
            _ => false,
        }
    }

    /// Whether the key heads of all sequences are enough for most SMs, or have so few keys that more blocks would not help.
    fn crowds(&self) -> bool {
        4 * self.heads >= 3 * self.sms || self.units <= 2
    }

    /// Blocks of `attention_long` that share an SM, for half pages: as many as read all keys in the fewest waves, where a wave takes as long
    /// as an SM has blocks. A block needs room for two units, so large heads get an SM for each.
    pub fn blocks_of_sm(&self) -> usize {
        let waves = |share: usize| share * self.blocks().div_ceil(share * self.sms);
        match self.dim {
            256 if self.splits() > SHORT_SPLITS => 1,
            128 if self.splits() > 1
                && self.has_few_queries()
                && 20 * waves(3) <= 23 * waves(2) =>
            {
                3
            }
            _ => 2,
        }
    }
}

/// The work of calls of `heads` key heads with `keys` keys each.
#[cfg(test)]
pub(super) fn load(half: bool, dim: usize, group: usize, heads: usize, keys: usize) -> Load {
    Load {
        half,
        dim,
        group,
        heads,
        units: keys.div_ceil(super::UNIT),
        sms: 132,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIRS: Few = Few {
        size: 2,
        clusters: 2,
        shared: 0,
    };

    /// The kernel is the one that was fastest on an H200 (docs/design/attention.md). None: attention_decode or attention_few.
    #[test]
    fn long_halves_take_the_kernel_that_was_fastest() {
        for (dim, group, heads, keys, few, share) in [
            (128, 4, 8, 16_384, true, None),
            (128, 4, 8, 20_000, true, Some(3)),
            (128, 4, 8, 22_528, false, Some(3)),
            (128, 4, 8, 32_768, false, Some(2)),
            (128, 4, 8, 65_536, false, None),
            (128, 4, 4 * 8, 6144, false, Some(3)),
            (128, 4, 32 * 8, 2048, false, Some(3)),
            (128, 8, 4, 16_384, true, None),
            (128, 8, 4, 24_576, true, None),
            (128, 8, 4, 32_768, true, Some(2)),
            (128, 8, 4 * 4, 8192, true, Some(2)),
            (128, 8, 8, 16_384, true, Some(2)),
            (128, 8, 8, 24_576, false, None),
            (128, 8, 8 * 8, 8192, false, Some(2)),
            (256, 2, 8, 8192, true, None),
            (256, 2, 8, 16_384, false, Some(1)),
            (256, 2, 8, 32_768, false, Some(1)),
            // Not measured: as before.
            (256, 2, 8, 65_536, false, None),
            (256, 16, 8, 16_384, false, None),
            (256, 2, 32 * 8, 1024, false, Some(2)),
            (128, 16, 8 * 8, 4096, false, None),
            (64, 4, 4 * 8, 6144, false, None),
        ] {
            let call = load(true, dim, group, heads, keys);
            let found = call.long_is_faster(few.then_some(PAIRS));
            let name = format!("{dim} {group} {heads} {keys}");
            assert_eq!(found, share.is_some(), "{name}");
            assert!(
                share.is_none_or(|share| share == call.blocks_of_sm()),
                "{name}"
            );
        }
    }

    #[test]
    fn fours_run_where_they_were_faster_than_pairs() {
        for (dim, group, heads, keys, fours) in [
            (128, 4, 8, 8192, true),
            (128, 4, 8 * 8, 1024, true),
            (128, 4, 8, 12_288, false),
            (128, 8, 4, 12_288, true),
            (128, 8, 4, 16_384, false),
            (128, 8, 8, 8192, false),
            (128, 16, 2, 16_384, true),
            (256, 2, 8, 4096, false),
            (64, 4, 8, 8192, false),
        ] {
            let call = load(true, dim, group, heads, keys);
            assert_eq!(call.takes_fours(), fours, "{dim} {group} {heads} {keys}");
        }
        // One split a row.
        assert!(
            load(false, 128, 4, 8, 512).takes_fours() && load(true, 128, 16, 8, 512).takes_fours()
        );
        assert!(!load(true, 128, 4, 8, 512).takes_fours());
        assert!(
            !load(false, 128, 4, 8, 8192).takes_fours(),
            "packed pages take attention_long"
        );
    }
}
