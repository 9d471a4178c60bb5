//! Decoded instructions.

use crate::lanes::{Lanes, Type};

/// An operand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// Register of up to 32 bits.
    Word(u32),
    /// Register of 64 bits.
    Double(u32),
    /// Predicate, and whether it is negated.
    Pred(u32, bool),
    Bits(u64),
    Special(Special),
    /// A destination that is not written.
    Sink,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    Clusterid(u8),
    Nclusterid(u8),
    ClusterCtaid(u8),
    ClusterNctaid(u8),
    ClusterCtarank,
    ClusterNctarank,
    IsExplicitCluster,
    Lane,
    Warp,
    Nwarp,
    Sm,
    Nsm,
    Grid,
    /// Lane masks: equal, less, less or equal, greater, greater or equal.
    Mask(u8),
    Clock,
    Time,
    DynamicShared,
    TotalShared,
}

impl Special {
    pub fn named(name: &str) -> Option<Self> {
        let (base, axis) = match name.rsplit_once('.') {
            Some((base, "x")) => (base, 0),
            Some((base, "y")) => (base, 1),
            Some((base, "z")) => (base, 2),
            _ => (name, 0),
        };
        Some(match base {
            "%tid" => Self::Tid(axis),
            "%ntid" => Self::Ntid(axis),
            "%ctaid" => Self::Ctaid(axis),
            "%nctaid" => Self::Nctaid(axis),
            "%clusterid" => Self::Clusterid(axis),
            "%nclusterid" => Self::Nclusterid(axis),
            "%cluster_ctaid" => Self::ClusterCtaid(axis),
            "%cluster_nctaid" => Self::ClusterNctaid(axis),
            "%cluster_ctarank" => Self::ClusterCtarank,
            "%cluster_nctarank" => Self::ClusterNctarank,
            "%is_explicit_cluster" => Self::IsExplicitCluster,
            "%laneid" => Self::Lane,
            "%warpid" => Self::Warp,
            "%nwarpid" => Self::Nwarp,
            "%smid" => Self::Sm,
            "%nsmid" => Self::Nsm,
            "%gridid" => Self::Grid,
            "%lanemask_eq" => Self::Mask(0),
            "%lanemask_lt" => Self::Mask(1),
            "%lanemask_le" => Self::Mask(2),
            "%lanemask_gt" => Self::Mask(3),
            "%lanemask_ge" => Self::Mask(4),
            "%clock" | "%clock_hi" | "%clock64" => Self::Clock,
            "%globaltimer" | "%globaltimer_lo" => Self::Time,
            "%dynamic_smem_size" => Self::DynamicShared,
            "%total_smem_size" => Self::TotalShared,
            _ => return None,
        })
    }
}

/// State space of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Generic,
    Global,
    Shared,
    /// Shared memory of the blocks of a cluster.
    Cluster,
    Local,
    /// Parameters of the kernel.
    Param,
}

/// A load or store: registers are the destinations or the sources after the address.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub space: Space,
    pub ty: Type,
    pub count: u8,
    pub offset: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logic {
    And,
    Or,
    Xor,
    Not,
    Move,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    Compare,
    Increment,
    Decrement,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    None,
    Count,
    And,
    Or,
}

/// Element types of a matrix multiplication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F16,
    BF16,
    Tf32,
    F32,
    S8,
    U8,
    S32,
    E4m3,
    E5m2,
}

#[derive(Clone, Copy, Debug)]
pub struct Product {
    pub n: usize,
    pub k: usize,
    pub result: Element,
    pub a: Element,
    pub b: Element,
    pub saturate: bool,
}

/// `wgmma`: 64 rows of A, a warp's 16 of them from its registers or all from shared memory.
#[derive(Clone, Copy, Debug)]
pub struct WarpgroupProduct {
    pub shape: Product,
    pub a_in_registers: bool,
}

/// An addition or subtraction with the carry flag (`add.cc`, `addc`, `sub.cc`, `subc`).
#[derive(Clone, Copy, Debug)]
pub struct Carry {
    pub subtract: bool,
    /// Whether it reads the flag.
    pub takes: bool,
    /// Whether it writes the flag.
    pub sets: bool,
    /// Width of the operands, 32 or 64.
    pub bits: u32,
}

/// A load or store of 8 x 8 matrices in shared memory (`ldmatrix`, `stmatrix`).
#[derive(Clone, Copy, Debug)]
pub struct Matrices {
    pub count: u8,
    pub transposed: bool,
    pub offset: i64,
}

/// An asynchronous copy of 4, 8 or 16 bytes to shared memory (`cp.async`).
#[derive(Clone, Copy, Debug)]
pub struct SmallCopy {
    pub bytes: u8,
    /// Whether an operand says how many bytes are read; the rest is zero.
    pub sized: bool,
    pub to_offset: i64,
    pub from_offset: i64,
}

/// Operations on a barrier object in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mbarrier {
    Init,
    Invalidate,
    /// Arrive; with the number of bytes that are to come, if `expects`.
    Arrive {
        expects: bool,
        drops: bool,
    },
    ExpectBytes,
    Complete,
    /// Test a phase by its token, or by its parity.
    Test {
        parity: bool,
    },
    /// `cp.async.mbarrier.arrive`
    ArriveCopies {
        counted: bool,
    },
}

/// Asynchronous copies in bulk and operations on their groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bulk {
    /// Global to shared memory, completing on a barrier; `multicast` copies to several blocks.
    Load {
        multicast: bool,
    },
    /// Shared memory to that of another block of the cluster.
    ToCluster,
    /// Shared to global memory, in a bulk group.
    Store,
    /// Added to global memory.
    ReduceAdd(Type),
    Commit,
    Wait {
        reads: bool,
    },
}

#[derive(Clone, Copy)]
pub enum Op {
    Lanes(Lanes),
    /// Sum or difference with the carry flag.
    Carry(Carry),
    Compare(Lanes, Option<Logic>),
    Logic(Logic),
    Select,
    Move,
    /// Registers joined into a wider one.
    Pack(u8),
    Unpack(u8),
    Load(Access),
    Store(Access),
    /// Update of memory; the old value goes to the destination, if there is one.
    Atomic(Access, Update),
    Branch(u32),
    /// Branch by an index into a table of targets.
    BranchTable(u32),
    Exit,
    Trap,
    Shuffle(Shuffle),
    Vote(Vote),
    Match {
        all: bool,
        double: bool,
    },
    Redux(Update, Type),
    ActiveMask,
    Elect,
    WarpBarrier,
    /// Barrier of a block: `waits` is false for an arrival.
    Barrier {
        waits: bool,
        reduce: Reduce,
        counted: bool,
    },
    ClusterArrive,
    ClusterWait,
    LoadMatrix(Matrices),
    StoreMatrix(Matrices),
    MoveMatrix,
    Product(Product),
    /// Copy of a few bytes to shared memory.
    Copy(SmallCopy),
    CommitCopies,
    WaitCopies,
    WaitAllCopies,
    Mbarrier(Mbarrier, i64),
    Bulk(Bulk, i64, i64),
    /// `st.async` to shared memory of the cluster.
    StoreAsync(Type, u8, i64),
    /// Address in the shared memory of another block.
    MapShared {
        generic: bool,
    },
    Rank {
        generic: bool,
    },
    ToGeneric(Space),
    FromGeneric(Space),
    IsSpace(Space),
    WarpgroupProduct(WarpgroupProduct),
    WarpgroupCommit,
    WarpgroupWait,
    /// Makes ordinary stores to shared memory visible to matrix instructions and bulk copies.
    ProxyFence,
    /// Let others run.
    Yield,
    /// Wait for the previous kernel.
    GridWait,
    Nothing,
}

/// The lanes that execute an instruction together: it waits for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Participants {
    None,
    /// Every lane of the warp that has not exited.
    Warp,
    /// The lanes of the mask in this source operand.
    Mask(u8),
}

pub struct Instruction {
    pub op: Op,
    pub guard: Option<(u32, bool)>,
    pub participants: Participants,
    pub line: u32,
    pub to: Box<[Value]>,
    pub from: Box<[Value]>,
}

/// A kernel, ready to run.
pub struct Kernel {
    pub name: String,
    pub code: Vec<Instruction>,
    pub tables: Vec<Vec<u32>>,
    pub words: usize,
    pub doubles: usize,
    pub preds: usize,
    /// Offset and size of each parameter.
    pub params: Vec<(usize, usize)>,
    pub param_bytes: usize,
    /// Bytes of static shared memory, from [`crate::memory::SHARED_START`] on.
    pub static_shared: usize,
    /// Address of dynamic shared memory.
    pub dynamic_at: usize,
    pub local_bytes: usize,
    pub min_blocks: usize,
    /// Whether it has `wgmma`.
    pub has_wgmma: bool,
    /// The text of every instruction's line, for messages.
    pub lines: std::sync::Arc<Vec<String>>,
}

impl Kernel {
    /// An instruction's line and text.
    pub fn describe(&self, pc: u32) -> String {
        let Some(instruction) = self.code.get(pc as usize) else {
            return "the end".to_owned();
        };
        let line = instruction.line as usize;
        let text = self
            .lines
            .get(line.wrapping_sub(1))
            .map_or("", |l| l.trim());
        format!("line {line}: {text}")
    }
}
