//! A call of attention, and why a kernel does not take it.

use super::super::tiles::MOST_PARTS;
use super::Kernel;
use crate::capabilities::Capabilities;
use crate::features::Feature;
use crate::ops::Element;
use crate::ops::kv::Kind;
use crate::rows::DECODE_TOKENS;

/// The properties of a call that decide its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Format of the pages.
    pub kind: Kind,
    pub head_dim: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    /// Type of the queries, and elements between tokens.
    pub element: Element,
    pub q_stride: usize,
    /// Sequences, and query tokens of all of them.
    pub batch: usize,
    pub tokens: usize,
    /// No token sees a key at or beyond this index.
    pub keys: usize,
    /// Keys of a page, and pages of a sequence in the block table.
    pub page_size: usize,
    pub max_pages: usize,
    /// Keys that a token sees; 0 for all before it.
    pub window: usize,
    /// Scores are limited.
    pub capped: bool,
    /// A mask hides keys.
    pub masked: bool,
    /// One token a sequence, whose key the launch rotates and stores.
    pub new_keys: Option<Rotated>,
    pub rows: Rows,
}

/// The meaning of the block table's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Sequences with any number of tokens.
    Sequences,
    /// Sequences with few tokens each, whose keys are in the pages: with a block for each token where this is faster.
    Apart,
    /// Windows of prompts, of few tokens as before. Neighbours may be of one sequence: as a prompt where this is faster.
    Windows,
}

impl Rows {
    /// The rows of a call of `tokens` tokens a row whose keys are in the pages. `windows`: rows of few tokens are windows of prompts.
    pub const fn of(tokens: usize, windows: bool) -> Self {
        match (tokens <= DECODE_TOKENS, windows) {
            (false, _) => Self::Sequences,
            (true, false) => Self::Apart,
            (true, true) => Self::Windows,
        }
    }

    /// Whether rows have few tokens, whose results can be packed as the input of a matmul.
    pub const fn are_few(self) -> bool {
        !matches!(self, Self::Sequences)
    }
}

/// Rotation of new keys and their queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotated {
    /// Rotated elements of a head, the first ones.
    pub elements: usize,
    pub interleaved: bool,
}

impl Call {
    /// Query heads a key head.
    pub(in super::super) const fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// Mean number of query tokens a sequence, which is all that the host knows.
    pub(in super::super) fn tokens_of_sequence(&self) -> usize {
        self.tokens.div_ceil(self.batch.max(1))
    }

    /// Tokens of a sequence that a tile of a prompt may hold, as far as the host knows.
    pub(in super::super) fn tokens_of_prompt(&self) -> usize {
        if self.rows == Rows::Windows {
            self.tokens
        } else {
            self.tokens_of_sequence()
        }
    }

    /// Keys that the block table has room for.
    pub(in super::super) const fn capacity(&self) -> usize {
        self.max_pages * self.page_size
    }
}

/// Why a kernel does not take a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("it needs {}", .0.describe())]
    Needs(Feature),
    #[error("its buffers do not fit {0} bytes of shared memory a block")]
    SharedMemory(usize),
    #[error(
        "its blocks keep {floats} floats of totals in the workspace, which has room for {MOST_PARTS}: pass fewer tokens at a time"
    )]
    Workspace { floats: usize },
    #[error("its blocks need {needed} bytes of shared memory, and the card's have {room}")]
    SmallBlocks { needed: usize, room: usize },
    #[error("it takes {0}")]
    Takes(&'static str),
    #[error("it takes the call, but another kernel is faster for these pages and lengths")]
    Slower,
    #[error("{rows} query rows a key head, it is faster from {least} on")]
    FewRows { rows: usize, least: usize },
    #[error("its {tiles} tiles do not fill {sms} SMs and hold too little work to share their keys")]
    FewTiles { tiles: usize, sms: usize },
}

/// Kernels that would be faster, each with the reason why it does not take the call.
pub type Refused = Vec<(Kernel, Refusal)>;

/// Check that a card has a feature.
pub(super) fn needs(caps: &Capabilities, feature: Feature) -> Result<(), Refusal> {
    takes(caps.has(feature), Refusal::Needs(feature))
}

/// Return `why` unless a condition holds.
pub(in super::super) fn takes(condition: bool, why: Refusal) -> Result<(), Refusal> {
    if condition { Ok(()) } else { Err(why) }
}
