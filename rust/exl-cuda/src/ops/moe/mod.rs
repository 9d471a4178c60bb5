//! A mixture of experts: routing, pairs of rows and experts sorted by expert, the matmuls of experts, and the weighted sum.
//!
//! Only the device knows which experts are chosen, so that a step with experts can be captured. Grids have a fixed size, and
//! blocks read their work from tables. A pair is a row with one of its choices.

pub mod dequantized;
mod float;
mod plan;
mod quantized;
pub mod route;
mod scratch;
pub mod select;

use super::Target;
use super::elementwise::Activation;
use super::linear::Matrix;
use super::linear::float::FloatMatrix;
use super::linear::select::is_invariant;
use crate::abi::{assert_constants, assert_layout};
use crate::capabilities::Capabilities;
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::parameters::kernels;
use float::Float;
use plan::Form;
use quantized::Quantized;
use scratch::{ITEM_BYTES, Scratch};
use select::Kernel;

pub use scratch::{most_scratch_bytes, rows_at_once};

/// Most experts of a layer, and most pairs of a call, that one block sorts; and the most pairs that it takes at a time, up to which a call packs its
/// inputs in the same launch.
pub const MOST_EXPERTS: usize = 1024;
pub const MOST_PAIRS: usize = 16_384;
const PAIRS_AT_A_TIME: usize = 1024;

assert_constants!(experts, { EXPERTS_MOST == MOST_EXPERTS, PAIRS_MOST == MOST_PAIRS, PAIRS_AT_A_TIME == PAIRS_AT_A_TIME });

/// Why no card runs `chosen` experts a row with this activation in shared launches, whatever their matrices; None where one may.
pub fn refusal(activation: &str, chosen: usize) -> Option<String> {
    if Activation::named(activation).is_none() {
        return Some(format!("no kernel of experts has activation {activation}"));
    }
    (chosen > MOST_EXPERTS).then(|| format!("{chosen} experts a row, more than {MOST_EXPERTS}"))
}

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
    item_of_pair: usize,
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
    packs: i32,
    padding: i32,
}

assert_layout!(CallArgument, experts::ExpertCall, { experts, ids, weights, h, item_counts, items, order, x, inner, parts, places, shared, shared_weights, residual, out, item_of_pair, rows, chosen, pairs, count, hidden, x_stride, inner_stride, inputs, activation, tiles, at_once, narrow, columns, unit_bytes, packs, padding });

/// The gated MLPs of a layer, some of which each row uses.
#[derive(Clone, Debug)]
pub struct Experts {
    hidden: usize,
    /// Features between gate, up and down.
    width: usize,
    matrices: Matrices,
}

#[derive(Clone, Debug)]
enum Matrices {
    Quantized(Quantized),
    Float(Float),
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

/// Hidden features, and features between gate, up and down. `sizes`: inputs and outputs of gate, up and down of each expert. The error says
/// why shared launches cannot take them.
fn sizes_of(sizes: &[[[usize; 2]; 3]]) -> Result<[usize; 2], String> {
    let Some(&[[hidden, width], _, _]) = sizes.first() else {
        return Err("no experts".to_owned());
    };
    if sizes.len() > MOST_EXPERTS {
        return Err(format!("{} experts, more than {MOST_EXPERTS}", sizes.len()));
    }
    let expected = [[hidden, width], [hidden, width], [width, hidden]];
    if let Some(number) = sizes.iter().position(|&found| found != expected) {
        return Err(format!("expert {number} has other sizes than expert 0"));
    }
    if !hidden.is_multiple_of(8) {
        return Err(format!("{hidden} hidden features, no multiple of 8"));
    }
    Ok([hidden, width])
}

impl Experts {
    /// Quantized experts of one card, each (gate, up, down). The error says why shared launches cannot take them.
    pub fn new(experts: &[[&Matrix; 3]], caps: &Capabilities) -> Result<Self, String> {
        let size = |m: &Matrix| [m.in_features(), m.out_features()];
        let sizes: Vec<_> = experts.iter().map(|parts| parts.map(size)).collect();
        let [hidden, width] = sizes_of(&sizes)?;
        Ok(Self {
            hidden,
            width,
            matrices: Matrices::Quantized(Quantized::new(experts, caps)?),
        })
    }

    /// Float experts of one card, as [`Experts::new`].
    pub fn of_float(experts: &[[&FloatMatrix; 3]], caps: &Capabilities) -> Result<Self, String> {
        let size = |m: &FloatMatrix| [m.in_features, m.out_features];
        let sizes: Vec<_> = experts.iter().map(|parts| parts.map(size)).collect();
        let [hidden, width] = sizes_of(&sizes)?;
        Ok(Self {
            hidden,
            width,
            matrices: Matrices::Float(Float::new(experts, caps)?),
        })
    }

    pub fn count(&self) -> usize {
        match &self.matrices {
            Matrices::Quantized(quantized) => quantized.entries.len(),
            Matrices::Float(float) => float.entries.len(),
        }
    }

    fn forms(&self) -> &[Form] {
        match &self.matrices {
            Matrices::Quantized(quantized) => &quantized.forms,
            Matrices::Float(float) => &float.forms,
        }
    }

    /// The kernel for a call of `rows` rows with `chosen` experts each, whose results do not depend on one another if `invariant`.
    pub fn kernel(&self, rows: usize, chosen: usize, invariant: bool) -> Kernel {
        let (call, form) = (self.shape(rows, chosen), self.form(rows, chosen));
        let mixes = !is_invariant(rows, invariant);
        match &self.matrices {
            Matrices::Quantized(quantized) => select::select(call, form, mixes && quantized.plain),
            Matrices::Float(_) => select::select_float(call, form, mixes),
        }
    }

    fn shape(&self, rows: usize, chosen: usize) -> select::Call {
        select::Call {
            rows,
            chosen,
            experts: self.count(),
            hidden: self.hidden,
            width: self.width,
        }
    }

    /// The kernels of the launches of [`run`], in their order; none where [`Experts::kernel`] is not one of shared launches.
    pub fn launches(&self, rows: usize, chosen: usize, invariant: bool) -> Vec<String> {
        let Kernel::Shared(form) = self.kernel(rows, chosen, invariant) else {
            return Vec::new();
        };
        let [gate_up, down] = match &self.matrices {
            Matrices::Quantized(quantized) => quantized.names(form),
            Matrices::Float(_) => Float::names(form),
        };
        let pairs = rows_at_once(rows, chosen) * chosen;
        let packing = u32::from(matches!(&self.matrices, Matrices::Quantized(_)));
        let arranging = arrangement(pairs, packing).map(|_| ARRANGE.to_owned());
        arranging
            .chain([gate_up, down, COMBINE.to_owned()])
            .collect()
    }

    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Features between gate, up and down.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The table of all experts that the launches read, to be copied to the GPU.
    pub fn table(&self) -> &[u8] {
        match &self.matrices {
            Matrices::Quantized(quantized) => bytes_of(&quantized.entries),
            Matrices::Float(float) => bytes_of(&float.entries),
        }
    }

    /// How the shared launches of a call multiply.
    fn form(&self, rows: usize, chosen: usize) -> Form {
        let call = self.shape(rows, chosen);
        match &self.matrices {
            Matrices::Quantized(_) => select::form(call, self.forms()),
            Matrices::Float(_) => select::float_form(call, self.forms()),
        }
    }

    /// Columns of packed inputs of `pairs` pairs, rows of K of each for gate and up together, and of the input of down.
    fn packed(&self, pairs: usize, form: Form) -> [usize; 3] {
        match &self.matrices {
            Matrices::Quantized(q) => [
                q.columns(pairs, form),
                q.inputs * q.x_stride,
                q.inner_stride,
            ],
            Matrices::Float(float) => [pairs, 0, float.inner_stride()],
        }
    }

    fn scratch(&self, rows: usize, chosen: usize) -> Scratch {
        let pairs = rows * chosen;
        let [columns, x, inner] = self.packed(pairs, self.form(rows, chosen));
        Scratch::of(pairs, columns, x, inner, self.hidden)
    }

    /// Bytes of scratch memory of a call, or of the calls into which larger ones are split.
    pub fn scratch_bytes(&self, rows: usize, chosen: usize) -> usize {
        self.scratch(rows_at_once(rows, chosen), chosen).bytes()
    }

    /// The operands of a call whose launches multiply as `form`.
    fn argument(&self, op: &Call, form: Form) -> CallArgument {
        let pairs = op.rows * op.chosen;
        let [columns, _, inner_stride] = self.packed(pairs, form);
        let (x_stride, inputs, narrow) = match &self.matrices {
            Matrices::Quantized(q) => (q.x_stride, q.inputs, form.narrow()),
            Matrices::Float(_) => (0, 0, form.rows()),
        };
        let sizes = self.scratch(op.rows, op.chosen);
        let items = op.scratch + 16;
        let x = op.scratch + sizes.tables + sizes.item_of_pair;
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
            item_of_pair: if sizes.item_of_pair == 0 {
                0
            } else {
                op.scratch + sizes.tables
            },
            rows: op.rows as i32,
            chosen: op.chosen as i32,
            pairs: pairs as i32,
            count: self.count() as i32,
            hidden: self.hidden as i32,
            x_stride: x_stride as i32,
            inner_stride: inner_stride as i32,
            inputs: inputs as i32,
            activation: op.activation,
            tiles: 0,
            at_once: form.rows() as i32,
            narrow: narrow as i32,
            columns: columns as i32,
            unit_bytes: 0,
            packs: 0,
            padding: 0,
        }
    }
}

/// The bytes of a table's entries.
fn bytes_of<T: Copy>(entries: &[T]) -> &[u8] {
    // SAFETY: entries are plain numbers without padding (their size is that of all fields); the lifetime is that of `entries`.
    unsafe { std::slice::from_raw_parts(entries.as_ptr().cast(), size_of_val(entries)) }
}

/// The launches that sort `pairs` pairs and pack inputs by `packing` blocks: whether each only packs, and its blocks.
fn arrangement(pairs: usize, packing: u32) -> impl Iterator<Item = (i32, u32)> {
    let apart = sorts_first(pairs) && packing > 0;
    let first = (0, if apart { 1 } else { 1 + packing });
    std::iter::once(first).chain(apart.then_some((1, packing)))
}

/// Whether inputs are packed after the pairs are sorted.
const fn sorts_first(pairs: usize) -> bool {
    pairs > PAIRS_AT_A_TIME
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
    if let Some(rest) = rest.strip_prefix("float") {
        let rows: &[Form] = if rest.is_empty() {
            &[Form::By8, Form::By16]
        } else {
            &[Form::By32, Form::By64]
        };
        return rows.iter().flat_map(|&form| Float::names(form)).collect();
    }
    if rest == "dequantize" {
        return ["exl2_128", "exl2_32", "gptq_128", "gptq_32"]
            .map(|form| format!("experts_dequantize_{form}"))
            .to_vec();
    }
    let (tiles, rest) = match rest.strip_prefix("pairs_") {
        Some(rest) => (2, rest),
        None => (1, rest),
    };
    let forms = Form::QUANTIZED
        .into_iter()
        .filter(|form| form.tiles() == tiles);
    forms
        .flat_map(|form| {
            ["gate_up", "down"].map(|part| format!("experts_{part}_{rest}_{}", form.suffix()))
        })
        .collect()
}

/// Where a call launches.
struct Launches {
    device: &'static Device,
    to: Target,
}

impl Launches {
    fn launch<'a>(&self, kernel: &'a str, grid: [u32; 3], block: u32, shared: usize) -> Launch<'a> {
        Launch {
            kernel,
            grid,
            block,
            shared_bytes: shared as u32,
            stream: self.to.stream,
            programmatic: self.to.programmatic,
        }
    }
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
    let form = experts.form(op.rows, op.chosen);
    let (form, (packing, of_sm)) = match &experts.matrices {
        Matrices::Quantized(quantized) => (form, quantized.packing(pairs, form)),
        Matrices::Float(_) => {
            let form = Float::form_at(form, op.h);
            (form, (0, Float::of_sm(form)))
        }
    };
    let argument = experts.argument(op, form);
    let launches = Launches { device, to };
    let items = pairs.min(experts.count() + pairs / form.rows());
    // SAFETY: the caller guarantees that the addresses are valid; `parts` lies in the scratch memory.
    unsafe {
        for (packs, blocks) in arrangement(pairs, packing) {
            let mut arguments = kernels::Experts {
                call: CallArgument { packs, ..argument },
            };
            let arrange = launches.launch(ARRANGE, [blocks, 1, 1], 256, 0);
            arrange.run_with_shared(device, Some(of_sm), &mut arguments)?;
        }
        match &experts.matrices {
            Matrices::Quantized(quantized) => {
                quantized.multiply(&launches, argument, items, form)?;
            }
            Matrices::Float(float) => float.multiply(&launches, &argument, items, form)?,
        }
        sum_parts(&launches, experts, argument, Some(0))
    }
}

/// Launch the weighted sum of `argument.parts`, with `of_sm` bytes of shared memory on each SM.
///
/// # Safety
/// As for [`combine`].
unsafe fn sum_parts(
    to: &Launches,
    experts: &Experts,
    argument: CallArgument,
    of_sm: Option<usize>,
) -> Result<(), CudaError> {
    let grid = [experts.hidden.div_ceil(512) as u32, argument.rows as u32, 1];
    let mut arguments = kernels::Experts { call: argument };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe {
        to.launch(COMBINE, grid, 256, 0)
            .run_with_shared(to.device, of_sm, &mut arguments)
    }
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

    /// The quantized matrices of experts.
    fn quantized(experts: &[[Matrix; 3]], card: &Capabilities) -> Quantized {
        match Experts::new(&all(experts), card).expect("fits").matrices {
            Matrices::Quantized(quantized) => quantized,
            Matrices::Float(_) => unreachable!("the matrices are quantized"),
        }
    }

    #[test]
    fn rows_are_packed_once_if_gate_and_up_agree() {
        let (mut experts, card) = (made(2, 512, 256), card("H100", RELEASE));
        assert_eq!(quantized(&experts, &card).inputs, 1);
        experts[1][1].features_host.reverse();
        assert_eq!(quantized(&experts, &card).inputs, 2);
    }

    #[test]
    fn blocks_fit_every_card() {
        for card in CARDS.map(|card| card.with_own_code()) {
            let experts = made(9, 4096, 14336);
            let made = quantized(&experts, &card);
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
            let a = experts.argument(&call, experts.form(rows, chosen));
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
            let call = select::Call { rows, chosen, experts: count, hidden, width: 256 };
            let most = most_scratch_bytes(call);
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
