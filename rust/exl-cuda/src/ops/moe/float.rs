//! Experts of float matrices in shared launches.

use super::plan::Form;
use super::{CallArgument, Launches};
use crate::abi::assert_layout;
use crate::capabilities::Capabilities;
use crate::device::BLOCK_RESERVED;
use crate::features::Feature;
use crate::launch::CudaError;
use crate::ops::index32;
use crate::ops::linear::float::{FloatMatrix, Kernel, THREADS, slice_of};
use crate::parameters::kernels;
use crate::rows::FEW_ROWS;

/// `struct FloatWeights` of `kernels/moe/experts_float.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Weights {
    weight: usize,
    bias: usize,
    scale: f32,
    prescale: f32,
}

assert_layout!(Weights, experts_float::FloatWeights, { weight, bias, scale, prescale });

impl Weights {
    const fn of(matrix: &FloatMatrix) -> Self {
        Self {
            weight: matrix.weight,
            bias: matrix.bias,
            scale: matrix.scale,
            prescale: matrix.prescale,
        }
    }
}

/// `struct FloatExpert` of `kernels/moe/experts_float.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Expert {
    gate: Weights,
    up: Weights,
    down: Weights,
}

assert_layout!(Expert, experts_float::FloatExpert, { gate, up, down });

/// `struct FloatExpertCall` of `kernels/moe/experts_float.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Argument {
    experts: usize,
    h: usize,
    item_counts: usize,
    items: usize,
    order: usize,
    inner: usize,
    parts: usize,
    chosen: i32,
    hidden: i32,
    width: i32,
    inner_stride: i32,
    activation: i32,
    slice: i32,
    whole: i32,
    padding: i32,
}

assert_layout!(Argument, experts_float::FloatExpertCall, { experts, h, item_counts, items, order, inner, parts, chosen, hidden, width, inner_stride, activation, slice, whole, padding });

/// The matrices of a layer's experts.
#[derive(Clone, Debug)]
pub(super) struct Float {
    pub entries: Vec<Expert>,
    hidden: usize,
    width: usize,
    /// Forms that the card has kernels and shared memory for.
    pub forms: Vec<Form>,
    /// Whether lanes may read 16 bytes of gate and up, and of down, at a time.
    whole: [bool; 2],
}

/// The matmul of gate and up, and that of down.
const PARTS: [&str; 2] = ["gate_up", "down"];

/// Whether the addresses are aligned to 16 bytes, as rows of a multiple of 8 halves are after them.
const fn is_whole(features: usize, addresses_together: usize) -> bool {
    features.is_multiple_of(8) && addresses_together.is_multiple_of(16)
}

/// The kernel of a float matrix that multiplies as those of a form.
const fn kernel_of(form: Form) -> Kernel {
    match form.rows() {
        rows @ (FEW_ROWS | 16) => Kernel::Rows { rows, tiles: 1 },
        rows => Kernel::Tile { rows },
    }
}

/// Threads of a block: kernels of few rows have a warp for each slice that has numbers.
const fn threads_of(form: Form, k: usize) -> u32 {
    match kernel_of(form) {
        Kernel::Rows { .. } => 32 * k.div_ceil(slice_of(k)) as u32,
        _ => THREADS as u32,
    }
}

fn name(part: &str, form: Form) -> String {
    format!("experts_float_{part}_{}", form.suffix())
}

impl Float {
    /// Experts of one card, each (gate, up, down), of equal sizes.
    pub fn new(experts: &[[&FloatMatrix; 3]], caps: &Capabilities) -> Result<Self, String> {
        let [gate, _, _] = experts[0];
        let (hidden, width) = (gate.in_features, gate.out_features);
        for (what, size) in [("hidden features", hidden), ("features", width)] {
            index32(what, size).map_err(|error| error.to_string())?;
        }
        let together = |parts: &[usize]| {
            experts
                .iter()
                .flat_map(|e| parts.iter().map(|&part| e[part].weight))
                .fold(0, |all, address| all | address)
        };
        let whole = [
            is_whole(hidden, together(&[0, 1])),
            is_whole(width, together(&[2])),
        ];
        let fitting = |form: &Form| match kernel_of(*form) {
            Kernel::Rows { .. } => true,
            kernel => {
                caps.has(Feature::LaneCopies)
                    && whole == [true; 2]
                    && kernel.shared_bytes() <= caps.shared_per_block
            }
        };
        Ok(Self {
            entries: experts
                .iter()
                .map(|parts| {
                    let [gate, up, down] = parts.map(Weights::of);
                    Expert { gate, up, down }
                })
                .collect(),
            hidden,
            width,
            forms: Form::FLOAT.into_iter().filter(fitting).collect(),
            whole,
        })
    }

    /// Numbers of K of a row of the input of down: rows are aligned to 16 bytes.
    pub const fn inner_stride(&self) -> usize {
        self.width.next_multiple_of(8)
    }

    pub fn names(form: Form) -> [String; 2] {
        PARTS.map(|part| name(part, form))
    }

    /// The form of a call with rows at `h`, instead of `form` for aligned rows.
    pub const fn form_at(form: Form, h: usize) -> Form {
        match kernel_of(form) {
            Kernel::Rows { .. } => form,
            _ if h.is_multiple_of(16) => form,
            _ => Form::By16,
        }
    }

    /// Shared memory of an SM with as many blocks as its registers hold. The rest of its memory caches rows.
    pub const fn of_sm(form: Form) -> usize {
        let kernel = kernel_of(form);
        2 * (kernel.static_bytes() + kernel.shared_bytes() + BLOCK_RESERVED)
    }

    /// Launch the matmuls of at most `items` items.
    ///
    /// # Safety
    /// As for [`super::run`].
    pub unsafe fn multiply(
        &self,
        to: &Launches,
        argument: &CallArgument,
        items: usize,
        form: Form,
    ) -> Result<(), CudaError> {
        let kernel = kernel_of(form);
        for (down, part) in PARTS.into_iter().enumerate() {
            let [k, features, lines] = if down == 1 {
                [self.width, self.hidden, kernel.features()]
            } else {
                [self.hidden, self.width, kernel.features() / 2]
            };
            let slice = slice_of(k);
            let argument = Argument {
                experts: argument.experts,
                h: argument.h,
                item_counts: argument.item_counts,
                items: argument.items,
                order: argument.order,
                inner: argument.inner,
                parts: argument.parts,
                chosen: argument.chosen,
                hidden: argument.hidden,
                width: self.width as i32,
                inner_stride: argument.inner_stride,
                activation: argument.activation,
                slice: slice as i32,
                whole: i32::from(self.whole[down] && argument.h.is_multiple_of(16)),
                padding: 0,
            };
            let grid = [features.div_ceil(lines) as u32, items as u32, 1];
            let name = name(part, form);
            let mut launch = to.launch(&name, grid, threads_of(form, k), kernel.shared_bytes());
            launch.programmatic &= kernel.starts_early();
            let mut arguments = kernels::ExpertsFloat { call: argument };
            // SAFETY: the caller guarantees that the addresses are valid.
            unsafe {
                launch.run_with_shared(to.device, Some(Self::of_sm(form)), &mut arguments)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Call, Experts, most_scratch_bytes, rows_at_once, select};
    use super::*;
    use crate::capabilities::CARDS;

    const fn matrix(in_features: usize, out_features: usize, weight: usize) -> FloatMatrix {
        FloatMatrix {
            weight,
            bias: 0,
            in_features,
            out_features,
            scale: 1.0,
            prescale: 1.0,
        }
    }

    proptest! {
        /// The parts of the scratch memory are consecutive, do not overlap, and fit its size, which is within the bound of load plans.
        #[test]
        fn scratch_memory_has_room(count in 1usize..160, rows in 1usize..3000, chosen in 1usize..9, eights in 1usize..80, width in 1usize..700) {
            let (hidden, chosen) = (8 * eights, chosen.min(count));
            let (up, down) = (matrix(hidden, width, 0), matrix(width, hidden, 0));
            let all = vec![[&up, &up, &down]; count];
            for card in CARDS.map(|card| card.with_own_code()) {
                let experts = Experts::of_float(&all, &card).expect("small");
                let bytes = experts.scratch_bytes(rows, chosen);
                let shape = select::Call { rows, chosen, experts: count, hidden, width };
                prop_assert!(bytes <= most_scratch_bytes(shape));
                let rows = rows_at_once(rows, chosen);
                let call = Call {
                    table: 0, h: 0, ids: 0, weights: 0, scratch: 4096, shared: 0, shared_weights: 0, residual: 0, out: 0, rows, chosen,
                    activation: 0,
                };
                let (a, pairs) = (experts.argument(&call, experts.form(rows, chosen)), rows * chosen);
                prop_assert!(a.items >= 4096 + 8 && a.order >= a.items + 16 * pairs);
                prop_assert!(a.inner >= a.order + 4 * pairs && a.inner.is_multiple_of(16));
                prop_assert!(a.inner_stride as usize >= width && a.inner_stride % 8 == 0);
                prop_assert!(a.parts >= a.inner + 2 * pairs * a.inner_stride as usize && a.parts.is_multiple_of(16));
                prop_assert!(4096 + bytes >= a.parts + 2 * pairs * hidden);
            }
        }
    }

    #[test]
    fn wide_forms_need_aligned_rows_and_memory() {
        let forms = |card: &Capabilities, width, address| {
            let up = matrix(256, width, 16);
            let down = matrix(width, 256, address);
            Float::new(&[[&up, &up, &down]], card).expect("small").forms
        };
        let few = [Form::By8, Form::By16];
        for card in CARDS.map(|card| card.with_own_code()) {
            let all = forms(&card, 96, 32);
            if card.has(Feature::LaneCopies) {
                assert_eq!(all, Form::FLOAT);
                assert!(all.iter().all(|&form| {
                    kernel_of(form).shared_bytes() <= card.shared_per_block
                        && Float::form_at(form, 16) == form
                }));
            } else {
                assert_eq!(all, few);
            }
            assert_eq!(forms(&card, 97, 32), few);
            assert_eq!(forms(&card, 96, 40), few);
        }
        assert_eq!(Float::form_at(Form::By64, 8), Form::By16);
        assert_eq!(Float::form_at(Form::By8, 8), Form::By8);
    }
}
