//! A mixture of experts: routing, pairs of rows and experts sorted by expert, the matmuls of experts, and the weighted sum.
//!
//! Only the device knows which experts are chosen, so that a step with experts can be captured. Grids have a fixed size, and
//! blocks read their work from tables. A pair is a row with one of its choices.

pub mod dequantized;
mod plan;
pub mod route;
mod scratch;
pub mod select;

use super::Target;
use super::elementwise::Activation;
use super::linear::{Matrix, MatrixArgument};
use crate::abi::{assert_constants, assert_layout};
use crate::capabilities::Capabilities;
use crate::device::Device;
use crate::features::Feature;
use crate::launch::{CudaError, Launch};
use crate::layout::UNIT_ROWS;
use crate::parameters::kernels;
use plan::{Form, Matmul};
use scratch::{ITEM_BYTES, Scratch};
use select::Kernel;

pub use scratch::{most_scratch_bytes, rows_at_once};

/// Most experts of a layer, and most pairs of a call, that one block can sort.
pub const MOST_EXPERTS: usize = 1024;
pub const MOST_PAIRS: usize = 1024;

assert_constants!(experts, { EXPERTS_MOST == MOST_EXPERTS, PAIRS_MOST == MOST_PAIRS });

/// Why no card runs `chosen` experts a row with this activation in shared launches, whatever their matrices; None where one may.
pub fn refusal(activation: &str, chosen: usize) -> Option<String> {
    if Activation::named(activation).is_none() {
        return Some(format!("no kernel of experts has activation {activation}"));
    }
    (chosen > MOST_PAIRS).then(|| format!("{chosen} experts a row, more than {MOST_PAIRS}"))
}

/// Most units of a matrix: a lane of a warp names one of a quarter of them, and its offset is a multiple of 16 in 16 bits.
const MOST_UNITS: usize = 128;
const _: () = assert!(MOST_UNITS / 4 <= 32 && MOST_UNITS * (128 * 32 + 512) <= 16 << 16);

/// `struct Expert` of `kernels/moe/experts.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ExpertArgument {
    gate: MatrixArgument,
    up: MatrixArgument,
    down: MatrixArgument,
    gate_features: usize,
    up_features: usize,
    down_features: usize,
}

assert_layout!(ExpertArgument, experts::Expert, { gate, up, down, gate_features, up_features, down_features });

/// `struct ExpertCall` of `kernels/moe/experts.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct CallArgument {
    experts: usize,
    ids: usize,
    weights: usize,
    h: usize,
    item_counts: usize,
    items: usize,
    order: usize,
    x: usize,
    inner: usize,
    parts: usize,
    places: usize,
    shared: usize,
    shared_weights: usize,
    residual: usize,
    out: usize,
    rows: i32,
    chosen: i32,
    pairs: i32,
    count: i32,
    hidden: i32,
    x_stride: i32,
    inner_stride: i32,
    inputs: i32,
    activation: i32,
    tiles: i32,
    at_once: i32,
    narrow: i32,
    columns: i32,
    unit_bytes: i32,
}

assert_layout!(CallArgument, experts::ExpertCall, { experts, ids, weights, h, item_counts, items, order, x, inner, parts, places, shared, shared_weights, residual, out, rows, chosen, pairs, count, hidden, x_stride, inner_stride, inputs, activation, tiles, at_once, narrow, columns, unit_bytes });

/// The gated MLPs of a layer, some of which each row uses.
#[derive(Clone, Debug)]
pub struct Experts {
    entries: Vec<ExpertArgument>,
    kind: &'static str,
    entry_rows: usize,
    hidden: usize,
    /// Weights of an expert.
    weights: usize,
    /// Packed copies of a row: gate and up share one if their rows of K have the same order.
    inputs: usize,
    /// Rows of K of the packed inputs, in whole units.
    x_stride: usize,
    inner_stride: usize,
    /// The matmul of gate and up, and that of down.
    matmuls: [Matmul; 2],
    /// Forms that the card has kernels and shared memory for.
    forms: Vec<Form>,
    /// SMs of the card, and bytes of shared memory of a block there.
    card: [usize; 2],
    /// No matrix has a bias or a factor, so that a dequantized matrix is all of it.
    plain: bool,
    /// Most rows of the layout of gate, up and down.
    layout_rows: [usize; 3],
}

/// Addresses of one call; the device's memory, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// [`Experts::table`]'s bytes, aligned to 16.
    pub table: usize,
    /// `[rows, hidden]` F16
    pub h: usize,
    /// `[rows, chosen]` i64; the ids of a row differ
    pub ids: usize,
    /// `[rows, chosen]` FP32
    pub weights: usize,
    /// [`Experts::scratch_bytes`], aligned to 16
    pub scratch: usize,
    /// `[rows, hidden]` F16 or 0: the output of the shared expert
    pub shared: usize,
    /// `[rows]` FP32 or 0 for ones
    pub shared_weights: usize,
    /// `[rows, hidden]` F16 or 0
    pub residual: usize,
    /// `[rows, hidden]` F16; may be `residual`
    pub out: usize,
    pub rows: usize,
    pub chosen: usize,
    /// Number of the activation, as in `elementwise`.
    pub activation: i32,
}

impl Experts {
    /// Experts of one card, each (gate, up, down). The error says why shared launches cannot take them.
    pub fn new(experts: &[[&Matrix; 3]], caps: &Capabilities) -> Result<Self, String> {
        let Some([gate, _, down]) = experts.first() else {
            return Err("no experts".to_owned());
        };
        if experts.len() > MOST_EXPERTS {
            return Err(format!(
                "{} experts, more than {MOST_EXPERTS}",
                experts.len()
            ));
        }
        let (hidden, width) = (gate.in_features(), gate.out_features());
        for (number, [g, u, d]) in experts.iter().enumerate() {
            let sized = |m: &Matrix, k, n| m.in_features() == k && m.out_features() == n;
            if !(sized(g, hidden, width) && sized(u, hidden, width) && sized(d, width, hidden)) {
                return Err(format!("expert {number} has other sizes than expert 0"));
            }
            if [g, u, d]
                .iter()
                .any(|m| m.kind != gate.kind || m.entry_rows != gate.entry_rows)
            {
                return Err(format!(
                    "expert {number} is stored in another format, or with other groups, than expert 0"
                ));
            }
        }
        if !hidden.is_multiple_of(8) {
            return Err(format!("{hidden} hidden features, no multiple of 8"));
        }
        let all = |parts: &[usize]| -> Vec<&Matrix> {
            experts
                .iter()
                .flat_map(|e| parts.iter().map(|&part| e[part]))
                .collect()
        };
        let rows = |parts: &[usize]| all(parts).iter().map(|m| m.rows()).max().unwrap_or(0);
        let stride = |parts: &[usize]| rows(parts).next_multiple_of(UNIT_ROWS);
        let matmuls = [
            Matmul::new("gate_up", 2, &all(&[0, 1])),
            Matmul::new("down", 1, &all(&[2])),
        ];
        let card = [caps.sms, caps.shared_per_block];
        let fitting = |form: &Form| {
            let fits = |matmul: &Matmul| matmul.fits(*form, caps.shared_per_block);
            matmuls.iter().all(fits) && (form.tiles() == 1 || caps.has(Feature::BulkCopy))
        };
        let forms: Vec<Form> = Form::ALL.into_iter().filter(fitting).collect();
        if forms.is_empty() {
            return Err(format!(
                "their units and sums do not fit {} bytes of shared memory",
                caps.shared_per_block
            ));
        }
        let most = all(&[0, 1, 2]).iter().map(|m| m.argument.unit_count).max();
        if most > Some(MOST_UNITS as i32) {
            return Err(format!(
                "inputs of {} rows, more than {}",
                rows(&[0, 1, 2]),
                MOST_UNITS * UNIT_ROWS
            ));
        }
        let alike = experts
            .iter()
            .all(|[g, u, _]| g.features_host == u.features_host);
        let bare =
            |m: &&Matrix| m.argument.bias == 0 && m.argument.prescale.to_bits() == 1f32.to_bits();
        Ok(Self {
            entries: experts
                .iter()
                .map(|[g, u, d]| ExpertArgument {
                    gate: g.argument,
                    up: u.argument,
                    down: d.argument,
                    gate_features: g.features,
                    up_features: u.features,
                    down_features: d.features,
                })
                .collect(),
            kind: down.kind,
            entry_rows: down.entry_rows,
            hidden,
            weights: 3 * hidden * width,
            inputs: if alike { 1 } else { 2 },
            x_stride: stride(&[0, 1]),
            inner_stride: stride(&[2]),
            matmuls,
            forms,
            card,
            plain: all(&[0, 1, 2]).iter().all(bare),
            layout_rows: [rows(&[0]), rows(&[1]), rows(&[2])],
        })
    }

    pub fn count(&self) -> usize {
        self.entries.len()
    }

    /// The kernel for a call of `rows` rows with `chosen` experts each, whose results do not depend on one another if `invariant`.
    pub fn kernel(&self, rows: usize, chosen: usize, invariant: bool) -> Kernel {
        let invariant = invariant || !self.plain;
        let call = self.shape(rows, chosen);
        select::select(call, self.weights, &self.forms, invariant)
    }

    fn shape(&self, rows: usize, chosen: usize) -> select::Call {
        select::Call {
            rows,
            chosen,
            experts: self.count(),
            hidden: self.hidden,
        }
    }

    /// The kernels of the launches of [`run`], in their order; none where [`Experts::kernel`] is not one of shared launches.
    pub fn launches(&self, rows: usize, chosen: usize, invariant: bool) -> Vec<String> {
        let Kernel::Shared(form) = self.kernel(rows, chosen, invariant) else {
            return Vec::new();
        };
        let matmuls = self.matmuls.each_ref();
        let [gate_up, down] = matmuls.map(|matmul| self.matmul_name(matmul, form));
        vec![ARRANGE.to_owned(), gate_up, down, COMBINE.to_owned()]
    }

    fn matmul_name(&self, matmul: &Matmul, form: Form) -> String {
        let (name, kind, entry_rows) = (matmul.name, self.kind, self.entry_rows);
        format!("experts_{name}_{kind}_{entry_rows}_{}", form.suffix())
    }

    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Features between gate, up and down.
    pub fn width(&self) -> usize {
        self.weights / (3 * self.hidden)
    }

    /// The table of all experts that the launches read, to be copied to the GPU.
    pub fn table(&self) -> &[u8] {
        // SAFETY: plain numbers without padding (the size is that of all fields); the lifetime is that of `self`.
        unsafe {
            std::slice::from_raw_parts(
                self.entries.as_ptr().cast(),
                size_of_val(self.entries.as_slice()),
            )
        }
    }

    /// How the shared launches of a call multiply.
    fn form(&self, rows: usize, chosen: usize) -> Form {
        select::form(self.shape(rows, chosen), &self.forms)
    }

    /// Columns of packed inputs: room for the last item of each expert.
    fn columns(&self, rows: usize, chosen: usize) -> usize {
        let at_once = self.form(rows, chosen).rows();
        rows * chosen + (at_once - 1) * self.count()
    }

    fn scratch(&self, rows: usize, chosen: usize) -> Scratch {
        Scratch::of(
            rows * chosen,
            self.columns(rows, chosen),
            self.inputs * self.x_stride,
            self.inner_stride,
            self.hidden,
        )
    }

    /// Bytes of scratch memory of a call, or of the launches of [`MOST_PAIRS`] pairs into which larger calls are split.
    pub fn scratch_bytes(&self, rows: usize, chosen: usize) -> usize {
        self.scratch(rows_at_once(rows, chosen), chosen).bytes()
    }

    fn argument(&self, op: &Call) -> CallArgument {
        let pairs = op.rows * op.chosen;
        let sizes = self.scratch(op.rows, op.chosen);
        let items = op.scratch + 16;
        let form = self.form(op.rows, op.chosen);
        let x = op.scratch + sizes.tables;
        let inner = x + sizes.x;
        CallArgument {
            experts: op.table,
            ids: op.ids,
            weights: op.weights,
            h: op.h,
            item_counts: op.scratch,
            items,
            order: items + ITEM_BYTES * pairs,
            x,
            inner,
            parts: inner + sizes.inner,
            places: 0,
            shared: op.shared,
            shared_weights: op.shared_weights,
            residual: op.residual,
            out: op.out,
            rows: op.rows as i32,
            chosen: op.chosen as i32,
            pairs: pairs as i32,
            count: self.entries.len() as i32,
            hidden: self.hidden as i32,
            x_stride: self.x_stride as i32,
            inner_stride: self.inner_stride as i32,
            inputs: self.inputs as i32,
            activation: op.activation,
            tiles: 0,
            at_once: form.rows() as i32,
            narrow: form.narrow() as i32,
            columns: self.columns(op.rows, op.chosen) as i32,
            unit_bytes: 0,
        }
    }
}

const ARRANGE: &str = "experts_arrange";
const COMBINE: &str = "experts_combine";

/// Kernels in the image of `file`.
pub(super) fn kernels(file: &str) -> Vec<String> {
    let Some(rest) = file.strip_prefix("experts_") else {
        let mut names = [ARRANGE, COMBINE, "experts_pad"]
            .map(str::to_owned)
            .to_vec();
        names.extend(select::route::kernels());
        return names;
    };
    if rest == "dequantize" {
        return ["exl2_128", "exl2_32", "gptq_128", "gptq_32"]
            .map(|form| format!("experts_dequantize_{form}"))
            .to_vec();
    }
    let (tiles, rest) = match rest.strip_prefix("pairs_") {
        Some(rest) => (2, rest),
        None => (1, rest),
    };
    let forms = Form::ALL.into_iter().filter(|form| form.tiles() == tiles);
    forms
        .flat_map(|form| {
            ["gate_up", "down"].map(|part| format!("experts_{part}_{rest}_{}", form.suffix()))
        })
        .collect()
}

/// out = residual + sum over a row's choices of weight * down(act(gate(h)) * up(h)), + shared * its weight. Every part is rounded to half.
/// The sum is FP32, in the order of choices, and rounded once.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed these launches; ids must be valid expert
/// indices.
pub unsafe fn run(to: Target, experts: &Experts, op: &Call) -> Result<(), CudaError> {
    let pairs = op.rows * op.chosen;
    if pairs == 0 {
        return Ok(());
    }
    if pairs > MOST_PAIRS {
        return Err(CudaError::Argument {
            what: format!("{} rows with {} experts each", op.rows, op.chosen),
            limit: format!("at most {MOST_PAIRS} of both together"),
        });
    }
    let device = Device::get(to.device)?;
    let mut argument = experts.argument(op);
    let launch = |kernel: &str, blocks, threads, shared, of_sm, argument: CallArgument| {
        let launch = Launch {
            kernel,
            grid: [blocks, 1, 1],
            block: threads,
            shared_bytes: shared,
            stream: to.stream,
            programmatic: to.programmatic,
        };
        let mut arguments = kernels::Experts { call: argument };
        // SAFETY: the caller guarantees that the addresses are valid.
        unsafe { launch.run_with_shared(device, Some(of_sm), &mut arguments) }
    };
    let form = experts.form(op.rows, op.chosen);
    let items = pairs.min(experts.count() + pairs / form.rows());
    let plan = |matmul: &Matmul| matmul.launch(items, form, experts.card);
    let blocks = (pairs * experts.inputs + 1) as u32;
    // As in the next launch, so that SMs need not change over.
    let of_sm = plan(&experts.matmuls[0]).of_sm;
    launch(ARRANGE, blocks, 256, 0, of_sm, argument)?;
    // No launch may come between the two: see `expert_product`.
    for matmul in &experts.matmuls {
        let kernel = experts.matmul_name(matmul, form);
        let plan = plan(matmul);
        argument.tiles = matmul.tiles as i32;
        argument.unit_bytes = matmul.unit_bytes as i32;
        launch(
            &kernel,
            plan.blocks,
            plan.threads,
            plan.shared as u32,
            plan.of_sm,
            argument,
        )?;
    }
    // SAFETY: `parts` lies in the scratch memory; the caller guarantees the rest.
    unsafe { sum_parts(to, device, experts, argument, Some(0)) }
}

/// Launch the weighted sum of `argument.parts`, with `of_sm` bytes of shared memory on each SM.
///
/// # Safety
/// As for [`combine`].
unsafe fn sum_parts(
    to: Target,
    device: &Device,
    experts: &Experts,
    argument: CallArgument,
    of_sm: Option<usize>,
) -> Result<(), CudaError> {
    let launch = Launch {
        kernel: COMBINE,
        grid: [experts.hidden.div_ceil(512) as u32, argument.rows as u32, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernels::Experts { call: argument };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run_with_shared(device, of_sm, &mut arguments) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::linear::tests::sized;
    use super::plan::BLOCKS;
    use super::*;
    use crate::capabilities::CARDS;
    use crate::capabilities::tests::{RELEASE, card};

    /// Matrices of `count` experts, 16 rows a tile.
    fn made(count: usize, hidden: usize, width: usize) -> Vec<[Matrix; 3]> {
        let of = |k: usize, n| {
            let mut matrix = sized(k / 256, 2064, n);
            matrix.argument.in_features = k as i32;
            matrix
        };
        (0..count)
            .map(|_| [of(hidden, width), of(hidden, width), of(width, hidden)])
            .collect()
    }

    fn all(experts: &[[Matrix; 3]]) -> Vec<[&Matrix; 3]> {
        experts.iter().map(|e| [&e[0], &e[1], &e[2]]).collect()
    }

    #[test]
    fn differing_experts_are_rejected_with_their_index() {
        let mut experts = made(3, 512, 256);
        assert!(Experts::new(&all(&experts), &card("H100", RELEASE)).is_ok());
        experts[2][1].entry_rows = 32;
        let why = Experts::new(&all(&experts), &card("H100", RELEASE)).unwrap_err();
        assert!(why.starts_with("expert 2 is stored"), "{why}");
        experts[1][2].argument.in_features = 512;
        let why = Experts::new(&all(&experts), &card("H100", RELEASE)).unwrap_err();
        assert_eq!(why, "expert 1 has other sizes than expert 0");
        assert!(Experts::new(&[], &card("H100", RELEASE)).is_err());
    }

    #[test]
    fn rows_are_packed_once_if_gate_and_up_agree() {
        let mut experts = made(2, 512, 256);
        assert_eq!(
            Experts::new(&all(&experts), &card("H100", RELEASE))
                .unwrap()
                .inputs,
            1
        );
        experts[1][1].features_host.reverse();
        assert_eq!(
            Experts::new(&all(&experts), &card("H100", RELEASE))
                .unwrap()
                .inputs,
            2
        );
    }

    #[test]
    fn blocks_fit_every_card() {
        for card in CARDS.map(|card| card.with_own_code()) {
            let experts = made(9, 4096, 14336);
            let made = Experts::new(&all(&experts), &card).expect("fits");
            for (matmul, form) in made
                .matmuls
                .iter()
                .flat_map(|m| made.forms.iter().map(move |&form| (m, form)))
            {
                let plan = matmul.launch(2, form, made.card);
                assert!(plan.shared <= card.shared_per_block);
                assert!((1..=BLOCKS * card.sms).contains(&(plan.blocks as usize)));
                let few = matmul.launch(1, form, [10_000, 200_000]);
                assert_eq!(few.blocks as usize, matmul.tiles);
            }
        }
    }

    proptest! {
        /// The parts of the scratch memory are consecutive, do not overlap, and fit its size.
        #[test]
        fn scratch_memory_has_room(count in 1usize..160, rows in 1usize..65, chosen in 1usize..9) {
            let experts = made(count, 512, 256);
            let experts = Experts::new(&all(&experts), &card("H100", RELEASE)).unwrap();
            let chosen = chosen.min(count);
            let pairs = rows * chosen;
            let call = Call {
                table: 0, h: 0, ids: 0, weights: 0, scratch: 4096, shared: 0, shared_weights: 0, residual: 0, out: 0, rows, chosen,
                activation: 0,
            };
            let a = experts.argument(&call);
            prop_assert!(a.item_counts == 4096 && a.items.is_multiple_of(16) && a.items >= 4096 + 4);
            prop_assert!(a.order >= a.items + 16 * pairs);
            prop_assert!(a.x >= a.order + 4 * pairs && a.x.is_multiple_of(16));
            let columns = a.columns as usize;
            prop_assert!(columns >= pairs && a.columns == (pairs + count * (a.at_once as usize - 1)) as i32);
            prop_assert!(a.inner >= a.x + 2 * columns * 512 && a.inner.is_multiple_of(16));
            prop_assert!(a.parts >= a.inner + 2 * columns * 256 && a.parts.is_multiple_of(16));
            prop_assert!(4096 + experts.scratch_bytes(rows, chosen) >= a.parts + 2 * pairs * 512);
        }

        /// No card needs more, even where gate and up have orders of their own.
        #[test]
        fn scratch_memory_is_within_the_bound_of_all_cards(count in 1usize..40, rows in 1usize..3000, chosen in 1usize..9, paired in any::<bool>()) {
            let hidden = if paired { 2560 } else { 512 };
            let mut experts = made(count, hidden, 256);
            experts[0][1].features_host.reverse();
            let chosen = chosen.min(count);
            let call = select::Call { rows, chosen, experts: count, hidden };
            let most = most_scratch_bytes(call, 256);
            let of_card = |card: crate::Card| Experts::new(&all(&experts), &card.with_own_code()).unwrap().scratch_bytes(rows, chosen);
            let found = CARDS.map(of_card).into_iter().max().unwrap();
            prop_assert!(found <= most && most <= 2 * found, "{} of {}", found, most);
        }

        /// One allocation serves all launches of a split call: the last one, which has fewer rows, needs no more memory.
        #[test]
        fn fewer_rows_need_no_more_scratch_memory(count in 1usize..40, rows in 2usize..3000, chosen in 1usize..9, paired in any::<bool>()) {
            let experts = made(count, if paired { 2560 } else { 512 }, 256);
            let chosen = chosen.min(count);
            for known in CARDS.map(|card| card.with_own_code()) {
                let experts = Experts::new(&all(&experts), &known).unwrap();
                prop_assert!(experts.scratch_bytes(rows - 1, chosen) <= experts.scratch_bytes(rows, chosen));
            }
        }
    }
}
