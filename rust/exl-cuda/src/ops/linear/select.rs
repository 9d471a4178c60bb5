//! The table that picks the kernel of a quantized matmul by rows, matrices, card, epilogue and alignment.
//!
//! All kernels give bitwise identical results up to [`MOST_PACKED_ROWS`] rows, so the choice only affects speed. Each kernel's module
//! reports what it cannot take as a [`Refusal`]; this module has the order in which kernels are tried. Launches and reports use the same
//! functions: [`plan`] for matrices over one input with an epilogue, [`plan_alone`] for one matrix.

use super::{Matrix, batch, few, ring};
use crate::capabilities::{Capabilities, Feature};
use crate::launch::CudaError;

/// Most rows of a call that run on packed weights; for more rows it is cheaper to dequantize once.
pub const MOST_PACKED_ROWS: usize = 64;

/// Largest number of rows for which [`Kernel::GemvRing`] is faster than [`Kernel::GemmFew`], by measurement.
pub const MOST_GEMV_ROWS: usize = 2;

/// Kernels of a quantized matmul, and dequantization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// A ring of weight stages in shared memory, with the activations beside it; one launch with norm, gate and residual.
    GemvRing,
    /// Activations packed once by an earlier launch or by the previous kernel; weights stream at the speed of one row.
    GemmFew,
    /// Warpgroup matrix instructions on packed activations.
    GemmBatch,
    /// `mma.sync` on packed activations, for every card; one matrix, no epilogue.
    GemmTile,
    /// Dequantize the matrix, then cuBLAS.
    GemmLarge,
}

impl Kernel {
    pub const ALL: [Self; 5] = [
        Self::GemvRing,
        Self::GemmFew,
        Self::GemmBatch,
        Self::GemmTile,
        Self::GemmLarge,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::GemvRing => "gemv_ring",
            Self::GemmFew => "gemm_few",
            Self::GemmBatch => "gemm_batch",
            Self::GemmTile => "gemm_tile",
            Self::GemmLarge => "gemm_large",
        }
    }

    /// Most rows of a launch.
    pub const fn most_rows(self) -> usize {
        match self {
            Self::GemvRing => ring::MOST_ROWS,
            Self::GemmFew => few::MOST_ROWS,
            Self::GemmBatch => batch::MOST_ROWS,
            Self::GemmTile => MOST_PACKED_ROWS,
            Self::GemmLarge => usize::MAX,
        }
    }

    /// The kernel of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kernel| kernel.name() == name)
    }

    /// Returns why the kernel cannot take this call; `Ok` if it can.
    fn takes(self, caps: &Capabilities, matrices: &[&Matrix], call: Call) -> Result<(), Refusal> {
        let Call { rows, epilogue, .. } = call;
        check_rows(rows, self.most_rows())?;
        match self {
            Self::GemvRing => ring::takes(caps, matrices, rows, epilogue)?,
            Self::GemmFew => few::takes(caps, matrices, epilogue.gate)?,
            Self::GemmBatch => batch::takes(caps, matrices, epilogue)?,
            Self::GemmTile | Self::GemmLarge if matrices.len() > 1 || epilogue.is_some() => {
                return Err(Refusal::Matrices(
                    "one matrix a launch, without an epilogue",
                ));
            }
            Self::GemmTile | Self::GemmLarge => {}
        }
        let (reads_lines, stores_pairs) = match self {
            Self::GemvRing | Self::GemmFew => (true, false),
            Self::GemmBatch => (epilogue.norm, epilogue.residual),
            Self::GemmTile | Self::GemmLarge => (false, false),
        };
        if reads_lines && !call.aligned_input {
            return Err(Refusal::Operands("inputs aligned to 16 bytes"));
        }
        if stores_pairs && !call.aligned_output {
            return Err(Refusal::Operands(
                "results aligned to 8 bytes and residuals to 4",
            ));
        }
        Ok(())
    }
}

/// The properties of a quantized matmul call that decide its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub rows: usize,
    pub epilogue: Epilogue,
    /// The input is aligned to 16 bytes.
    pub aligned_input: bool,
    /// Results are aligned to 8 bytes, and a residual to 4.
    pub aligned_output: bool,
}

impl Call {
    /// A call with aligned operands, as torch allocates them.
    pub const fn aligned(rows: usize, epilogue: Epilogue) -> Self {
        Self {
            rows,
            epilogue,
            aligned_input: true,
            aligned_output: true,
        }
    }
}

/// The prologue and epilogue of a launch, as far as they decide which kernel fits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
// Independent properties of a call, not states of one thing.
#[allow(clippy::struct_excessive_bools)]
pub struct Epilogue {
    /// The activation of the first of two matrices gates the second.
    pub gate: bool,
    /// An RMS norm of the input.
    pub norm: bool,
    /// A residual is added.
    pub residual: bool,
    /// Activations are BF16, which are scaled by row.
    pub bf16: bool,
}

impl Epilogue {
    fn is_some(self) -> bool {
        self.gate || self.norm || self.residual
    }
}

/// Why a kernel does not take a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("{rows} rows, it takes 1 to {limit}")]
    Rows { rows: usize, limit: usize },
    #[error("it needs {}", .0.describe())]
    Needs(Feature),
    #[error("its buffers do not fit {0} bytes of shared memory a block")]
    SharedMemory(usize),
    #[error("it takes {0}")]
    Matrices(&'static str),
    #[error("it takes {0}")]
    Operands(&'static str),
}

impl Refusal {
    /// The error of a launch that requested `kernel` nevertheless.
    pub(crate) fn for_kernel(self, kernel: Kernel) -> CudaError {
        CudaError::Argument {
            what: format!("{} does not take this call", kernel.name()),
            limit: self.to_string(),
        }
    }
}

/// Check that `rows` are 1 to `limit`.
pub(crate) fn check_rows(rows: usize, limit: usize) -> Result<(), Refusal> {
    if (1..=limit).contains(&rows) {
        return Ok(());
    }
    Err(Refusal::Rows { rows, limit })
}

/// Check that matrices can share a launch: a kernel takes their number, form and input size.
pub(super) fn check_alike(matrices: &[&Matrix], gate: bool) -> Result<(), Refusal> {
    let same = |a: &&Matrix, b: &Matrix| {
        a.kind == b.kind && a.entry_rows == b.entry_rows && a.in_features() == b.in_features()
    };
    match matrices {
        [first, ..] if matrices.len() <= ring::MATRICES => {
            let paired = || matches!(matrices, [a, b] if a.out_features() == b.out_features());
            if !matrices.iter().all(|a| same(a, first)) {
                Err(Refusal::Matrices(
                    "matrices of one format, group size and input size",
                ))
            } else if gate && !paired() {
                Err(Refusal::Matrices(
                    "a gate of two matrices of one output size",
                ))
            } else if !first.in_features().is_multiple_of(8) {
                Err(Refusal::Matrices("input sizes that are multiples of 8"))
            } else {
                Ok(())
            }
        }
        _ => Err(Refusal::Matrices("one to three matrices")),
    }
}

/// Launch parameters of benchmarks and tests that override the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    pub ring: Option<ring::Tuning>,
    pub few: few::Tuning,
    pub batch: batch::Tuning,
}

/// A launch without addresses, kept so that calls need not plan it again.
#[derive(Clone, Debug)]
pub enum Planned {
    Ring(Box<ring::Plan>),
    Few(Box<few::Plan>),
    /// Kernels that plan each launch from its operands.
    Each,
}

/// A launch plan: the kernel of a call, the memory that it needs, and the chaining that it supports.
#[derive(Clone, Debug)]
// Independent properties of a launch, not states of one thing.
#[allow(clippy::struct_excessive_bools)]
pub struct Plan {
    pub call: Call,
    pub kernel: Kernel,
    /// One call of the kernel takes all matrices with the epilogue. Otherwise each matrix has a separate plan ([`plan_alone`]; `kernel` is
    /// that of the first), and norm, gate and residual are separate launches.
    pub joined: bool,
    /// Bytes of scratch memory of the call, aligned to 128; it begins with the packed input.
    pub scratch_bytes: usize,
    /// Place of the rows' multipliers (FP32) in the scratch memory of [`Kernel::GemmBatch`] and [`Kernel::GemmTile`].
    pub multipliers_at: usize,
    /// Bytes of the inter-block workspace, all ones before and after every launch; 0 for none.
    pub exchange_bytes: usize,
    /// The kernel stores the results of a gate's two matrices one after the other; the activation is a separate launch.
    pub separate_gate: bool,
    /// The previous matmul can write its results packed as the input of this one, in [`Kernel::GemmFew`]'s layout.
    pub takes_packed: bool,
    /// Columns of the kernel's layout in which a launch other than a matmul can write F16 rows packed as the input.
    pub input_columns: Option<usize>,
    /// Results can be written packed as the input of the next matmul.
    pub hands_on: bool,
    /// Why faster kernels do not take the call. Kernels for fewer rows are left out, unless there are too many rows for packed weights.
    pub refused: Vec<(Kernel, Refusal)>,
    pub tuning: Tuning,
    pub planned: Planned,
}

impl Plan {
    fn new(
        caps: &Capabilities,
        matrices: &[&Matrix],
        call: Call,
        (kernel, joined): (Kernel, bool),
        refused: Vec<(Kernel, Refusal)>,
        tuning: Tuning,
    ) -> Self {
        let mut plan = Self {
            call,
            kernel,
            joined,
            scratch_bytes: 0,
            multipliers_at: 0,
            exchange_bytes: 0,
            separate_gate: false,
            takes_packed: false,
            input_columns: None,
            hands_on: false,
            refused,
            tuning,
            planned: Planned::Each,
        };
        if joined {
            plan.add_launch(caps, matrices);
            plan.add_memory(caps, matrices);
            plan.add_chaining(caps, matrices);
        }
        plan
    }

    fn add_launch(&mut self, caps: &Capabilities, matrices: &[&Matrix]) {
        let (Call { rows, epilogue, .. }, tuning) = (self.call, self.tuning);
        match self.kernel {
            Kernel::GemvRing => {
                let plan = ring::planned(caps, matrices, rows, epilogue, tuning.ring);
                self.planned = plan.map_or(Planned::Each, |plan| Planned::Ring(Box::new(plan)));
            }
            Kernel::GemmFew => {
                let plan = few::planned(caps, matrices, rows, epilogue.gate, tuning.few);
                self.planned = plan.map_or(Planned::Each, |plan| Planned::Few(Box::new(plan)));
            }
            Kernel::GemmBatch | Kernel::GemmTile | Kernel::GemmLarge => {}
        }
    }

    fn add_memory(&mut self, caps: &Capabilities, matrices: &[&Matrix]) {
        let (rows, gate) = (self.call.rows, self.call.epilogue.gate);
        match self.kernel {
            Kernel::GemvRing | Kernel::GemmLarge => {}
            Kernel::GemmFew => {
                self.scratch_bytes = few::scratch_bytes(caps, matrices, gate, self.tuning.few);
            }
            Kernel::GemmBatch => {
                let gates = gate && batch::gates(matrices);
                self.separate_gate = gate && !gates;
                self.exchange_bytes =
                    batch::exchange_bytes(caps, matrices, rows, gates, self.tuning.batch);
                self.add_multipliers(batch::scratch_bytes(matrices, rows));
            }
            Kernel::GemmTile => self.add_multipliers(matrices[0].prepared_bytes(rows)),
        }
    }

    fn add_multipliers(&mut self, packed_bytes: usize) {
        self.multipliers_at = packed_bytes;
        self.scratch_bytes = packed_bytes + 4 * self.call.rows;
    }

    fn add_chaining(&mut self, caps: &Capabilities, matrices: &[&Matrix]) {
        let Call { rows, epilogue, .. } = self.call;
        let Epilogue {
            gate, norm, bf16, ..
        } = epilogue;
        if bf16 || !self.call.aligned_input {
            return;
        }
        match self.kernel {
            Kernel::GemmFew if rows > MOST_GEMV_ROWS => {
                self.takes_packed = few::takes_prepared(caps, matrices, gate);
                self.hands_on = gate || matrices.len() == 1;
                let bare = self.takes_packed && matrices.len() == 1 && !norm;
                self.input_columns = bare.then_some(few::MOST_ROWS);
            }
            Kernel::GemmBatch if batch::stores_pairs(matrices) => {
                self.hands_on = gate && !self.separate_gate;
                if matrices.len() == 1 && !norm {
                    self.input_columns = batch::input(matrices, rows);
                }
            }
            _ => {}
        }
    }

    /// Whether this matmul can write its results packed as the input of `next`, whose input has as many features.
    pub fn chains_to(&self, next: &Self) -> bool {
        let takes = match self.kernel {
            Kernel::GemmFew => next.takes_packed,
            Kernel::GemmBatch => next.input_columns.is_some(),
            _ => false,
        };
        self.hands_on && self.kernel == next.kernel && self.call.rows == next.call.rows && takes
    }
}

/// Plan a call of `matrices` over one input, on a card of these capabilities.
pub fn plan(caps: &Capabilities, matrices: &[&Matrix], call: Call) -> Plan {
    let (kernel, refused) = first_of(&joined_order(call.rows), caps, matrices, call);
    if let Some(kernel) = kernel {
        return Plan::new(
            caps,
            matrices,
            call,
            (kernel, true),
            refused,
            Tuning::default(),
        );
    }
    let alone = plan_alone(caps, matrices[0], call.rows, call.epilogue.bf16);
    Plan::new(
        caps,
        matrices,
        call,
        (alone.kernel, false),
        refused,
        Tuning::default(),
    )
}

/// Plan one matrix without an epilogue and without scratch memory that outlives the call. [`Kernel::GemmFew`] is not tried, because usually
/// another kernel packs its input. Inputs that are not aligned are copied.
pub fn plan_alone(caps: &Capabilities, matrix: &Matrix, rows: usize, bf16: bool) -> Plan {
    let order = [Kernel::GemvRing, Kernel::GemmBatch, Kernel::GemmTile];
    let call = Call::aligned(
        rows,
        Epilogue {
            bf16,
            ..Epilogue::default()
        },
    );
    let (kernel, refused) = first_of(&order, caps, &[matrix], call);
    let kernel = kernel.unwrap_or(Kernel::GemmLarge);
    Plan::new(
        caps,
        &[matrix],
        call,
        (kernel, true),
        refused,
        Tuning::default(),
    )
}

/// Plan a call by `kernel`, for benchmarks and tests that compare kernels; an error if it does not take the call.
pub fn plan_with(
    kernel: Kernel,
    caps: &Capabilities,
    matrices: &[&Matrix],
    call: Call,
    tuning: Tuning,
) -> Result<Plan, CudaError> {
    kernel
        .takes(caps, matrices, call)
        .map_err(|why| why.for_kernel(kernel))?;
    Ok(Plan::new(
        caps,
        matrices,
        call,
        (kernel, true),
        Vec::new(),
        tuning,
    ))
}

/// The kernel of a call, and why faster ones do not take it, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    pub kernel: Kernel,
    /// As in [`Plan`], and true for one matrix without an epilogue.
    pub joined: bool,
    pub refused: Vec<(Kernel, Refusal)>,
}

/// The kernel that [`plan`] launches for aligned operands.
pub fn select(
    caps: &Capabilities,
    matrices: &[&Matrix],
    rows: usize,
    epilogue: Epilogue,
) -> Selection {
    let Plan {
        kernel,
        joined,
        mut refused,
        ..
    } = plan(caps, matrices, Call::aligned(rows, epilogue));
    let bare = matrices.len() == 1 && !epilogue.is_some();
    if bare && !joined {
        for (kernel, why) in plan_alone(caps, matrices[0], rows, epilogue.bf16).refused {
            if refused.iter().all(|(known, _)| *known != kernel) {
                refused.push((kernel, why));
            }
        }
    }
    Selection {
        kernel,
        joined: joined || bare,
        refused,
    }
}

/// The kernel that [`plan_alone`] launches.
pub fn select_alone(caps: &Capabilities, matrix: &Matrix, rows: usize, bf16: bool) -> Selection {
    let Plan {
        kernel, refused, ..
    } = plan_alone(caps, matrix, rows, bf16);
    Selection {
        kernel,
        joined: true,
        refused,
    }
}

/// The first kernel of `order` that takes the call, and why the earlier ones do not.
fn first_of(
    order: &[Kernel],
    caps: &Capabilities,
    matrices: &[&Matrix],
    call: Call,
) -> (Option<Kernel>, Vec<(Kernel, Refusal)>) {
    let mut refused = Vec::new();
    for &kernel in order {
        match kernel.takes(caps, matrices, call) {
            Ok(()) => return (Some(kernel), refused),
            Err(Refusal::Rows { rows, limit }) if rows > limit && limit < MOST_PACKED_ROWS => {}
            Err(why) => refused.push((kernel, why)),
        }
    }
    (None, refused)
}

/// Kernels that take an epilogue, fastest first.
fn joined_order(rows: usize) -> [Kernel; 3] {
    if rows <= MOST_GEMV_ROWS {
        [Kernel::GemvRing, Kernel::GemmFew, Kernel::GemmBatch]
    } else {
        [Kernel::GemmFew, Kernel::GemvRing, Kernel::GemmBatch]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::capabilities::CARDS;
    use crate::capabilities::tests::{RELEASE, card};
    use crate::ops::linear::tests::{matrix, sized};

    const PLAIN: Epilogue = Epilogue {
        gate: false,
        norm: false,
        residual: false,
        bf16: false,
    };
    const NORM: Epilogue = Epilogue {
        norm: true,
        ..PLAIN
    };
    const GATE: Epilogue = Epilogue { gate: true, ..NORM };
    const RESIDUAL: Epilogue = Epilogue {
        residual: true,
        ..PLAIN
    };

    /// The matmuls of a layer of an 8B Llama at 4 bits, and its head.
    fn layer() -> [(&'static str, Vec<Matrix>, Epilogue); 5] {
        let of = |units, n| sized(units, 2064, n);
        [
            ("qkv", vec![of(16, 4096), of(16, 1024), of(16, 1024)], NORM),
            ("o", vec![of(16, 4096)], RESIDUAL),
            ("gate_up", vec![of(16, 14336), of(16, 14336)], GATE),
            ("down", vec![of(56, 4096)], RESIDUAL),
            ("head", vec![of(16, 128_256)], NORM),
        ]
    }

    /// One word for each matmul of the layer: the kernel, with `+` if one launch includes the epilogue.
    fn selected(caps: &Capabilities, rows: usize) -> String {
        let words = layer().map(|(_, matrices, epilogue)| {
            let all: Vec<&Matrix> = matrices.iter().collect();
            let found = select(caps, &all, rows, epilogue);
            let word = found.kernel.name().trim_start_matches("gem");
            format!("{word}{}", if found.joined { "+" } else { "" })
        });
        words.join(" ")
    }

    fn all(word: &str) -> String {
        [word; 5].join(" ")
    }

    #[test]
    fn the_table_of_a_layer_on_every_card() {
        for name in CARDS.map(|card| card.name) {
            let found = [1, 8, 32, 64, 512].map(|rows| selected(&card(name, RELEASE), rows));
            let expected = match name {
                "H100" | "H200" => {
                    ["v_ring+", "m_few+", "m_batch+", "m_batch+", "m_large"].map(all)
                }
                "B200" => ["v_ring+", "m_few+", "m_tile", "m_tile", "m_large"].map(all),
                // `down` has more activations than the ring leaves room for in 99 KB.
                "5090" => [
                    "v_ring+ v_ring+ v_ring+ m_tile v_ring+".to_owned(),
                    all("m_tile"),
                    all("m_tile"),
                    all("m_tile"),
                    all("m_large"),
                ],
                _ => ["m_tile", "m_tile", "m_tile", "m_tile", "m_large"].map(all),
            };
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn a_module_of_older_code_keeps_newer_kernels_off_the_card() {
        let (proxy, native) = (card("H100", &["80+ptx"]), card("H100", &["80+ptx", "90a"]));
        for rows in [1, 2, 3, 8, 9, 64] {
            assert_eq!(selected(&proxy, rows), all("m_tile"), "{rows}");
            assert!(!selected(&native, rows).contains("tile"), "{rows}");
        }
        assert!(selected(&card("H100", &["90"]), 64).contains("tile"));
    }

    #[test]
    fn rows_decide_the_kernel_at_each_limit() {
        let hopper = card("H100", &["90a"]);
        let made = matrix(16, 2064);
        let kernel = |rows, epilogue| select(&hopper, &[&made], rows, epilogue).kernel;
        let limits = [
            (1, Kernel::GemvRing),
            (MOST_GEMV_ROWS, Kernel::GemvRing),
            (MOST_GEMV_ROWS + 1, Kernel::GemmFew),
            (few::MOST_ROWS, Kernel::GemmFew),
            (few::MOST_ROWS + 1, Kernel::GemmBatch),
            (MOST_PACKED_ROWS, Kernel::GemmBatch),
            (MOST_PACKED_ROWS + 1, Kernel::GemmLarge),
        ];
        for (rows, expected) in limits {
            for epilogue in [PLAIN, NORM, RESIDUAL, Epilogue { bf16: true, ..NORM }] {
                assert_eq!(kernel(rows, epilogue), expected, "{rows} {epilogue:?}");
            }
            let alone = select_alone(&hopper, &made, rows, false).kernel;
            let few = expected == Kernel::GemmFew;
            assert_eq!(alone, if few { Kernel::GemvRing } else { expected });
        }
    }

    #[test]
    fn a_refusal_says_why_the_faster_kernel_is_not_used() {
        let made = matrix(16, 2064);
        let found = select(&card("4090", RELEASE), &[&made], 1, PLAIN);
        assert_eq!(found.kernel, Kernel::GemmTile);
        let why: Vec<String> = found
            .refused
            .iter()
            .map(|(kernel, why)| format!("{}: {why}", kernel.name()))
            .collect();
        assert_eq!(
            why,
            [
                "gemv_ring: it needs bulk copies (code for sm_90 or newer)",
                "gemm_few: it needs bulk copies (code for sm_90 or newer)",
                "gemm_batch: it needs wgmma (code for sm_90a on an sm_90 card)",
            ]
        );
        // Two matrices with different permutations share no packed input.
        let mut other = matrix(16, 2064);
        other.features_host.reverse();
        let hopper = card("H100", &["90a"]);
        let apart = select(&hopper, &[&made, &other], 32, NORM);
        assert_eq!((apart.kernel, apart.joined), (Kernel::GemmBatch, false));
        let last = apart.refused.last().map(|(kernel, _)| *kernel);
        assert_eq!(last, Some(Kernel::GemmBatch));
        assert!(select(&hopper, &[&made, &other], 8, NORM).joined);
    }

    /// The plan of the matmul of this name in [`layer`].
    fn planned(caps: &Capabilities, name: &str, rows: usize) -> Plan {
        let found = layer().into_iter().find(|(known, ..)| *known == name);
        let (_, matrices, epilogue) = found.expect("a matmul of the layer");
        let all: Vec<&Matrix> = matrices.iter().collect();
        plan(caps, &all, Call::aligned(rows, epilogue))
    }

    #[test]
    fn matmuls_chain_if_one_kernel_packs_the_input_of_the_other() {
        for name in CARDS.map(|card| card.name) {
            let caps = card(name, RELEASE);
            for rows in [1, 2, 3, 8, 9, 32, 64, 65, 512] {
                let of = |matmul| planned(&caps, matmul, rows);
                let (qkv, o, gate_up, down) = (of("qkv"), of("o"), of("gate_up"), of("down"));
                let both = |a: &Plan, b: &Plan, kernel| {
                    [a, b]
                        .iter()
                        .all(|plan| plan.joined && plan.kernel == kernel)
                };
                let few = rows > MOST_GEMV_ROWS;
                let expected = few && both(&o, &gate_up, Kernel::GemmFew);
                assert_eq!(o.chains_to(&gate_up), expected, "{name} {rows}");
                let expected = (few && both(&gate_up, &down, Kernel::GemmFew))
                    || both(&gate_up, &down, Kernel::GemmBatch);
                assert_eq!(gate_up.chains_to(&down), expected, "{name} {rows}");
                assert!(!qkv.chains_to(&o), "several matrices without a gate");
                let columns = o.input_columns;
                let packs = match o.kernel {
                    Kernel::GemmFew => few,
                    kernel => kernel == Kernel::GemmBatch,
                };
                assert_eq!(columns.is_some(), o.joined && packs, "{name} {rows}");
                assert!(columns.is_none_or(|columns| (rows..=MOST_PACKED_ROWS).contains(&columns)));
            }
        }
    }

    #[test]
    fn bf16_rows_and_unaligned_inputs_do_not_chain() {
        let (hopper, made) = (card("H100", &["90a"]), sized(16, 2064, 4096));
        for rows in [4, 32] {
            let aligned = Call::aligned(rows, PLAIN);
            let bf16 = Epilogue {
                bf16: true,
                ..PLAIN
            };
            for call in [
                Call {
                    aligned_input: false,
                    ..aligned
                },
                Call::aligned(rows, bf16),
            ] {
                let plan = plan(&hopper, &[&made], call);
                assert!(!plan.takes_packed && !plan.hands_on && plan.input_columns.is_none());
            }
            assert!(plan(&hopper, &[&made], aligned).input_columns.is_some());
        }
    }

    #[test]
    fn unaligned_operands_use_kernels_that_take_them() {
        let (hopper, made) = (card("H100", &["90a"]), matrix(16, 2064));
        let kernel = |call| {
            let plan = plan(&hopper, &[&made], call);
            plan.joined.then_some(plan.kernel)
        };
        for rows in [1, 4, 32] {
            let of = |epilogue| Call {
                aligned_input: false,
                ..Call::aligned(rows, epilogue)
            };
            assert_eq!(kernel(of(PLAIN)), Some(Kernel::GemmBatch));
            assert_eq!(kernel(of(NORM)), None);
        }
        let of = |rows| Call {
            aligned_output: false,
            ..Call::aligned(rows, RESIDUAL)
        };
        let kernels = [1, 4, 32].map(|rows| kernel(of(rows)));
        assert_eq!(
            kernels,
            [Some(Kernel::GemvRing), Some(Kernel::GemmFew), None]
        );
        let plain = |rows| Call {
            aligned_output: false,
            ..Call::aligned(rows, PLAIN)
        };
        assert_eq!(kernel(plain(32)), Some(Kernel::GemmBatch));
    }

    #[test]
    fn a_plan_has_memory_for_its_kernel() {
        let (hopper, made) = (card("H100", &["90a"]), matrix(16, 2064));
        for (kernel, rows) in [
            (Kernel::GemmBatch, 9),
            (Kernel::GemmTile, 9),
            (Kernel::GemmBatch, 64),
        ] {
            let call = Call::aligned(rows, PLAIN);
            let plan =
                plan_with(kernel, &hopper, &[&made], call, Tuning::default()).expect("taken");
            assert_eq!(plan.scratch_bytes, plan.multipliers_at + 4 * rows);
            assert!(
                plan.multipliers_at >= 2 * rows * made.in_features()
                    && plan.multipliers_at.is_multiple_of(128)
            );
        }
        let few = plan(&hopper, &[&made], Call::aligned(8, PLAIN));
        assert!(few.scratch_bytes >= 16 * made.in_features() && few.exchange_bytes == 0);
        assert_eq!(
            plan(&hopper, &[&made], Call::aligned(1, PLAIN)).scratch_bytes,
            0
        );
        let pair = [&made, &made];
        let gated = plan(&hopper, &pair, Call::aligned(32, GATE));
        assert!(
            gated.separate_gate && gated.exchange_bytes > 0,
            "small matrices share K"
        );
        assert!(
            plan_with(
                Kernel::GemmTile,
                &hopper,
                &pair,
                Call::aligned(1, GATE),
                Tuning::default()
            )
            .is_err()
        );
    }

    proptest! {
        /// A selected kernel has a plan within the card's shared memory, and `select` never takes a kernel that rejects the call.
        #[test]
        fn a_selected_launch_fits_its_card(
            known in proptest::sample::select(CARDS.to_vec()),
            units in 1usize..80,
            bytes in proptest::sample::select(vec![1040u32, 1552, 2064, 2576, 3088, 4112]),
            outs in proptest::collection::vec(1usize..400, 1..4),
            rows in 1usize..100,
            flags in any::<[bool; 4]>(),
        ) {
            let caps = known.with(RELEASE);
            let made: Vec<Matrix> = outs.iter().map(|n| sized(units, bytes, 16 * n)).collect();
            let all: Vec<&Matrix> = made.iter().collect();
            let [gate, norm, residual, bf16] = flags;
            let gate = gate && all.len() == 2;
            let epilogue = Epilogue { gate, norm, residual: residual && !gate, bf16 };
            let found = select(&caps, &all, rows, epilogue);
            prop_assert!(rows <= found.kernel.most_rows());
            let taken = if found.joined { &all[..] } else { &all[..1] };
            let asked = if found.joined { epilogue } else { Epilogue { bf16, ..PLAIN } };
            prop_assert_eq!(found.kernel.takes(&caps, taken, Call::aligned(rows, asked)), Ok(()));
            let shared = match found.kernel {
                Kernel::GemvRing => ring::shared_bytes(&caps, taken, rows, asked),
                Kernel::GemmFew => few::shared_bytes(&caps, taken, asked.gate),
                Kernel::GemmBatch => batch::shared_bytes(&caps, taken, rows, asked.gate),
                Kernel::GemmTile | Kernel::GemmLarge => Some(0),
            };
            prop_assert!(shared.is_some_and(|bytes| bytes <= caps.shared_per_block));
        }
    }
}
