//! Launches around matmuls of dequantized experts, which cuBLAS does: padding of their rows, dequantization, and the weighted sum of the
//! results.

use super::select::FREE_ROWS;
use super::{Call, Experts, Launches, Matrices, sum_parts};
use crate::abi::assert_layout;
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::ops::{Target, index32};
use crate::parameters::kernels;

/// The last launch of [`super::run`] alone: the weighted sum of rows of `parts` `[_, hidden]` F16; `places` `[rows, chosen]` i32 names the
/// row of each choice's result. Of `op`, `table`, `h`, `ids` and `scratch` are not used.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn combine(
    to: Target,
    experts: &Experts,
    op: &Call,
    (parts, places): (usize, usize),
) -> Result<(), CudaError> {
    if op.rows * op.chosen == 0 {
        return Ok(());
    }
    index32("pairs of rows and experts", op.rows * op.chosen)?;
    let mut argument = experts.argument(op, experts.form(op.rows, op.chosen));
    (argument.parts, argument.places) = (parts, places);
    let device = Device::get(to.device)?;
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { sum_parts(&Launches { device, to }, experts, argument, None) }
}

/// Memory for dequantized matrices, unless a single one is larger.
pub const DEQUANTIZED_BYTES: usize = 128 << 20;

/// Rows of an expert are padded to a multiple of this: cuBLAS chooses kernels anew for each number of rows.
const ROUND: usize = 32;

/// The experts that have rows in groups of at most `most`, each with the padded rows of its experts; expert e has rows `begins[e]` to
/// `begins[e + 1]`.
///
/// Experts with about as many rows go together: a group has at most twice as many padded rows as its experts have or, if that is more,
/// [`FREE_ROWS`] for each, before the rows of an expert are rounded up to a multiple of [`ROUND`].
pub fn groups(begins: &[i64], most: usize) -> Vec<(Vec<usize>, usize)> {
    let count = |expert: usize| (begins[expert + 1] - begins[expert]) as usize;
    let mut order: Vec<usize> = (0..begins.len() - 1).filter(|&e| count(e) > 0).collect();
    order.sort_by_key(|&expert| count(expert));
    let mut groups: Vec<(Vec<usize>, usize)> = Vec::new();
    let mut total = 0;
    for expert in order {
        let rows = count(expert);
        let joins = |held: usize| {
            let padded = (held + 1) * rows;
            held < most && (rows <= FREE_ROWS || padded <= 2 * (total + rows))
        };
        match groups.last_mut() {
            Some((held, padded)) if joins(held.len()) => {
                held.push(expert);
                *padded = rows.next_multiple_of(ROUND);
                total += rows;
            }
            _ => {
                groups.push((vec![expert], rows.next_multiple_of(ROUND)));
                total = rows;
            }
        }
    }
    groups
}

/// Most padded rows of all [`groups`] of `pairs` rows of `experts` experts.
pub const fn most_padded(pairs: usize, experts: usize) -> usize {
    // A group of at most FREE_ROWS rows an expert has at most as many padded rows for each; any other less than ROUND more for each than
    // twice its rows.
    2 * pairs + FREE_ROWS * experts
}

/// `struct PaddedExpert` of `kernels/moe/experts.cu`: an expert whose rows go to padded rows `first` and the following.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PaddedExpert {
    pub expert: i32,
    pub first: i32,
    pub rows: i32,
}

assert_layout!(PaddedExpert, experts::PaddedExpert, { expert, first, rows });

/// Operands of [`pad`]; device addresses.
#[derive(Clone, Copy, Debug)]
pub struct Padding {
    /// `[count]` of [`PaddedExpert`]
    pub experts: usize,
    pub count: usize,
    /// `[pairs]` i64: pairs sorted by expert
    pub order: usize,
    /// `[experts + 1]` i64: where each expert's begin
    pub begins: usize,
    pub chosen: usize,
    /// `[padded rows]` i32: the row of each; 0 for padding
    pub rows: usize,
    /// `[pairs]` i32: the padded row of each
    pub places: usize,
}

/// The rows of experts side by side, each expert's padded to its number of rows.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch; padded experts must be experts
/// of the layer, with no more pairs than rows, and their rows padded rows.
pub unsafe fn pad(to: Target, op: &Padding) -> Result<(), CudaError> {
    if op.count == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let launch = Launch {
        kernel: "experts_pad",
        grid: [index32("experts", op.count)? as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        // The kernel does not wait for its predecessor.
        programmatic: false,
    };
    let mut arguments = kernels::ExpertsPad {
        experts: op.experts,
        order: op.order,
        begins: op.begins,
        chosen: index32("experts of a row", op.chosen)?,
        rows: op.rows,
        places: op.places,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}

/// One of the three matrices of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Gate,
    Up,
    Down,
}

impl Part {
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];
}

/// Dequantize a matrix of each of `count` experts to F16 in file order, bitwise identical to the format: `out` `[count, in, out]`.
///
/// # Safety
/// `table` must be the bytes of [`Experts::table`], `numbers` the experts' `[count]` i64 numbers and `out` of the stated size, all device
/// memory that is valid until the stream has passed this launch.
pub unsafe fn dequantize(
    to: Target,
    experts: &Experts,
    table: usize,
    (numbers, count): (usize, usize),
    part: Part,
    out: usize,
) -> Result<(), CudaError> {
    if count == 0 {
        return Ok(());
    }
    if count > experts.count() {
        return Err(CudaError::Argument {
            what: format!("{count} experts"),
            limit: format!("the {} of the layer", experts.count()),
        });
    }
    let Matrices::Quantized(quantized) = &experts.matrices else {
        return Err(CudaError::Argument {
            what: "dequantize float experts".to_owned(),
            limit: "quantized ones only".to_owned(),
        });
    };
    let device = Device::get(to.device)?;
    let tiles = quantized.matmuls[usize::from(part == Part::Down)].tiles;
    let launch = Launch {
        kernel: &format!(
            "experts_dequantize_{}_{}",
            quantized.kind, quantized.entry_rows
        ),
        grid: [
            quantized.layout_rows[part as usize].div_ceil(64) as u32,
            tiles.div_ceil(8) as u32,
            count as u32,
        ],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        // The kernel does not wait for its predecessor.
        programmatic: false,
    };
    let mut arguments = kernels::ExpertsDequantize {
        experts: table,
        numbers,
        part: part as i32,
        out,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}
