//! How one row is sampled: the flags that its kernels read, the launches that it needs, and why not fewer.

use super::Kernel;
use crate::ops::sampling::{CAPACITY, MOST_TOP, flag};

/// The properties of a row that decide how it is sampled. Cuts are named as in `exl_cpu::sampling::Chain`; true: the cut is active.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
// Independent settings of a row, not states of one thing.
#[allow(clippy::struct_excessive_bools)]
pub struct Call {
    /// Logits that a token may be drawn from.
    pub size: usize,
    pub greedy: bool,
    /// Distances from the largest logit are squared.
    pub smooth: bool,
    /// 0 for all logits.
    pub top_k: usize,
    pub top_p: bool,
    pub top_a: bool,
    pub min_p: bool,
    pub tfs: bool,
    pub typical: bool,
    pub mirostat: bool,
    pub late: Late,
    pub xtc: bool,
    /// The draw is over falling probabilities.
    pub descending: bool,
    /// The logits are mixed from those of two prompts.
    pub mixed: bool,
    /// Candidates to report.
    pub top_n: usize,
}

/// Temperature after the cuts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Late {
    #[default]
    None,
    Fixed,
    /// It depends on the entropy of the candidates.
    Dynamic,
}

impl Call {
    /// Whether top-k keeps every logit.
    const fn keeps_all(&self) -> bool {
        self.top_k == 0 || self.top_k >= self.size
    }

    /// Whether the draw is over all logits unchanged, or at one late temperature, if top-k keeps every logit.
    fn is_plain(&self) -> bool {
        let cuts = self.top_p || self.top_a || self.min_p || self.tfs || self.typical;
        let uncut = !cuts && !self.mirostat && !self.xtc;
        uncut && self.late != Late::Dynamic && !self.descending
    }

    /// Why the candidates of a row, which is not greedy, can be too many for the table of the choosing block whatever its logits; None if
    /// a first cut limits them.
    fn exceeds_table(&self) -> Option<Refusal> {
        let first = self.top_p || self.top_a || self.min_p || (self.mirostat && !self.tfs);
        if self.typical {
            Some(Refusal::Typical)
        } else if !self.keeps_all() {
            (self.top_k > CAPACITY).then_some(Refusal::TopK)
        } else {
            (!first && !self.is_plain()).then_some(Refusal::Unlimited)
        }
    }
}

/// Ways to sample a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The choosing block takes the largest logit.
    Largest,
    /// The choosing block draws from all logits by the sums of their blocks.
    All,
    /// The choosing block cuts and draws in its table of candidates, and leaves a row with too many of them to passes.
    Table,
    /// Passes over all logits.
    Passes,
    /// The CPU samples the row.
    Host,
}

/// Why a faster way does not take a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("it takes rows with at least one logit")]
    Empty,
    #[error("it reports at most {MOST_TOP} candidates")]
    TopN,
    #[error("it takes rows without a typical cut")]
    Typical,
    #[error("it takes a top-k of at most {CAPACITY}")]
    TopK,
    #[error(
        "it takes rows with a top-k, top-p, top-a or min-p, or with mirostat and no tail-free cut"
    )]
    Unlimited,
    #[error(
        "its table holds {CAPACITY} candidates, which equal logits or flat probabilities can exceed"
    )]
    Overflow,
    #[error("a row without top-k needs the sum of all weights")]
    Sums,
    #[error("classifier-free guidance mixes the log-probabilities of two rows")]
    Mixed,
}

/// Launches that the rows of a batch need besides shaping and choosing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// A row has [`flag::SUMS`].
    pub sums: bool,
    /// A row's candidates may be too many for the choosing block's table.
    pub wide: bool,
    /// A row is mixed from two.
    pub mix: bool,
}

impl Needs {
    /// Needs of this or of another row.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        Self {
            sums: self.sums || other.sums,
            wide: self.wide || other.wide,
            mix: self.mix || other.mix,
        }
    }
}

/// How a row is sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub way: Way,
    /// Flags that the kernels read.
    pub flags: i32,
    /// The top-k that the kernels read; 0 where all logits are kept.
    pub top_k: usize,
    pub needs: Needs,
    /// Why the passes are needed, or the CPU.
    exceeds: Option<Refusal>,
}

impl Plan {
    /// Launches that a faster way would save, or its kernel, each with the reason why it does not take the row.
    pub fn refused(&self) -> Vec<(Kernel, Refusal)> {
        let mixed = self.needs.mix.then_some((Kernel::Shape, Refusal::Mixed));
        let sums = self.needs.sums.then_some((Kernel::Choose, Refusal::Sums));
        let exceeds = self.exceeds.map(|why| (Kernel::Choose, why));
        [mixed, sums, exceeds].into_iter().flatten().collect()
    }
}

/// Plan a row.
pub fn plan(call: &Call) -> Plan {
    if call.size == 0 || call.top_n > MOST_TOP {
        let why = if call.size == 0 {
            Refusal::Empty
        } else {
            Refusal::TopN
        };
        return Plan {
            way: Way::Host,
            flags: flag::SKIP,
            top_k: 0,
            needs: Needs::default(),
            exceeds: Some(why),
        };
    }
    let exceeds = if call.greedy {
        None
    } else {
        call.exceeds_table()
    };
    let all = call.keeps_all();
    let way = match exceeds {
        _ if call.greedy => Way::Largest,
        Some(_) => Way::Passes,
        None if all && call.is_plain() => Way::All,
        None => Way::Table,
    };
    // Equal logits can make the first `top_k`, or the reported candidates, too many for the table to tell apart.
    let overflow = way == Way::Table || (way == Way::All && call.top_n > 0);
    let exceeds = exceeds.or(overflow.then_some(Refusal::Overflow));
    let needs = Needs {
        sums: all && matches!(way, Way::All | Way::Table),
        wide: exceeds.is_some(),
        mix: call.mixed,
    };
    Plan {
        way,
        flags: flags(call, way, needs),
        top_k: if all { 0 } else { call.top_k },
        needs,
        exceeds,
    }
}

fn flags(call: &Call, way: Way, needs: Needs) -> i32 {
    [
        (call.greedy, flag::GREEDY),
        (call.smooth, flag::SMOOTH),
        (call.descending, flag::DESCENDING),
        (needs.sums, flag::SUMS),
        (call.late == Late::Fixed, flag::LATE_FIXED),
        (call.late == Late::Dynamic, flag::LATE_DYNAMIC),
        (call.keeps_all() && call.is_plain(), flag::PLAIN),
        (way == Way::Passes, flag::WIDE),
    ]
    .into_iter()
    .filter(|&(wanted, _)| wanted)
    .fold(0, |flags, (_, bit)| flags | bit)
}
