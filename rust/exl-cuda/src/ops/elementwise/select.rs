//! The table that picks the kernel of a norm by what it computes, its types, width and alignment, and where its result goes.
//!
//! Kernels of one norm give bitwise identical results, and no choice depends on the card. Launches and reports use the same function,
//! [`select`].

use crate::abi::assert_constants;
use crate::launch::CudaError;
use crate::ops::Element;
use crate::rows::FEW_ROWS;

/// Most elements of a packed row: halves in the shared memory that every card has, without 1 KiB for the sums.
pub const MOST_PACKED_WIDTH: usize = 47 * 1024 / 2;

/// Longest row that the threads of a block of [`Kernel::AddPost`] hold in few registers.
const SHORT_WIDTH: usize = SHORT * 8 * 256;
const SHORT: usize = 2;

assert_constants!(residual, { SHORT == SHORT });

/// Kernels that norm rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// RMS norms, of these elements and weights.
    Rms(Element, Element),
    /// LayerNorms, of these elements and weights.
    Layer(Element, Element),
    /// LayerNorms, packed.
    LayerPacked(Packing),
    /// RMS norms of two parts of each row.
    RmsParts,
    /// x + y and its RMS norm.
    AddRms(Element),
    /// x + norm(y) and its norm. `short`: rows stay in registers.
    AddPost { element: Element, short: bool },
    /// The same, packed.
    AddPostPacked(Element, Packing),
}

/// The matmuls for which a kernel packs rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// `gemm_few` and `gemm_direct`.
    Few,
    /// `gemm_batch`.
    Batch,
}

impl Packing {
    const ALL: [Self; 2] = [Self::Few, Self::Batch];

    const fn of(columns: usize) -> Self {
        if columns == FEW_ROWS {
            Self::Few
        } else {
            Self::Batch
        }
    }

    const fn suffix(self) -> &'static str {
        match self {
            Self::Few => "_packed",
            Self::Batch => "_packed_for_batch",
        }
    }
}

impl Kernel {
    pub fn name(self) -> String {
        match self {
            Self::Rms(x, weight) => format!("rms_norm_{}_{}", x.suffix(), weight.suffix()),
            Self::Layer(x, weight) => format!("layer_norm_{}_{}", x.suffix(), weight.suffix()),
            Self::LayerPacked(packing) => format!("layer_norm{}", packing.suffix()),
            Self::RmsParts => "rms_norm_parts".to_owned(),
            Self::AddRms(x) => format!("add_rms_norm_{}", x.suffix()),
            Self::AddPost { element, short } => {
                let short = if short { "short_" } else { "" };
                format!("add_{short}post_norm_{}", element.suffix())
            }
            Self::AddPostPacked(element, packing) => {
                format!("add_post_norm{}_{}", packing.suffix(), element.suffix())
            }
        }
    }

    /// All kernels of `kernels/elementwise/norm.cu` or, if they add, of `residual.cu`.
    pub(in crate::ops) fn all(adds: bool) -> Vec<Self> {
        if adds {
            let post = [Element::F16, Element::F32]
                .into_iter()
                .flat_map(|element| {
                    let plain = [false, true].map(|short| Self::AddPost { element, short });
                    let packed = Packing::ALL.map(|packing| Self::AddPostPacked(element, packing));
                    plain.into_iter().chain(packed)
                });
            return Element::ALL
                .map(Self::AddRms)
                .into_iter()
                .chain(post)
                .collect();
        }
        let types = Element::ALL
            .into_iter()
            .flat_map(|x| Element::ALL.map(|weight| (x, weight)));
        types
            .flat_map(|(x, weight)| [Self::Rms(x, weight), Self::Layer(x, weight)])
            .chain(Packing::ALL.map(Self::LayerPacked))
            .chain([Self::RmsParts])
            .collect()
    }
}

/// The properties of a norm that decide its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// The RMS norms of rows.
    Rms { element: Element, weight: Element },
    /// The LayerNorms of rows.
    Layer { element: Element, weight: Element },
    /// The LayerNorms of halves, packed as the input of a matmul of so many columns.
    LayerPacked { columns: usize },
    /// The RMS norms of two parts of each row of halves.
    RmsParts,
    /// x + y and its RMS norm.
    AddRms { element: Element },
    /// x + norm(y) and its norm, which may be packed as the input of a matmul of so many columns.
    AddPost {
        element: Element,
        width: usize,
        columns: Option<usize>,
        /// All operands are aligned to 16 bytes.
        aligned: bool,
    },
}

/// The kernel of a call on any card, and a faster one that does not take the call, with what it takes.
pub fn select(call: &Call) -> (Kernel, Option<(Kernel, &'static str)>) {
    let kernel = match *call {
        Call::Rms { element, weight } => Kernel::Rms(element, weight),
        Call::Layer { element, weight } => Kernel::Layer(element, weight),
        Call::LayerPacked { columns } => Kernel::LayerPacked(Packing::of(columns)),
        Call::RmsParts => Kernel::RmsParts,
        Call::AddRms { element } => Kernel::AddRms(element),
        Call::AddPost {
            element,
            columns: Some(columns),
            ..
        } => Kernel::AddPostPacked(element, Packing::of(columns)),
        Call::AddPost {
            element,
            width,
            columns: None,
            aligned,
        } => {
            let refused = [
                (width <= SHORT_WIDTH, "rows of up to 4096 elements"),
                (width.is_multiple_of(8), "rows of multiples of 8 elements"),
                (aligned, "operands aligned to 16 bytes"),
            ]
            .into_iter()
            .find(|(fits, _)| !fits);
            let of = |short| Kernel::AddPost { element, short };
            return match refused {
                Some((_, what)) => (of(false), Some((of(true), what))),
                None => (of(true), None),
            };
        }
    };
    (kernel, None)
}

const _: () = assert!(SHORT_WIDTH == 4096, "the reason in `select` names it");

/// Check that a launch can pack `rows` rows of `width` elements, at these addresses, as an input of `columns` columns.
pub(in crate::ops) fn check_packed(
    rows: usize,
    width: usize,
    columns: usize,
    addresses: &[usize],
) -> Result<(), CudaError> {
    let aligned = addresses.iter().all(|at| at.is_multiple_of(16));
    if rows <= columns && width <= MOST_PACKED_WIDTH && width.is_multiple_of(8) && aligned {
        return Ok(());
    }
    let operands = if aligned { "" } else { " that are not aligned" };
    Err(CudaError::Argument {
        what: format!("{rows} packed rows of {width} elements{operands}"),
        limit: format!(
            "{columns} rows of {MOST_PACKED_WIDTH}, a multiple of 8, at multiples of 16 bytes"
        ),
    })
}

/// Threads of a block that norms and packs a row, of which each has eight elements up to `MOST_THREADS`.
pub(in crate::ops) fn packing_threads(width: usize) -> u32 {
    let each = width.div_ceil(8).next_multiple_of(32);
    each.clamp(THREADS, MOST_THREADS) as u32
}

const THREADS: usize = 256;
const MOST_THREADS: usize = 1024;

assert_constants!(block_sum, { THREADS == THREADS });
assert_constants!(packed_rows, { MOST_THREADS == MOST_THREADS });

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::linear::input_columns;
    use crate::rows::PACKED_ROWS;
    use Element::{BF16, F16, F32};

    /// A norm of the sum of 4096 halves.
    const POST: Call = Call::AddPost {
        element: F16,
        width: 4096,
        columns: None,
        aligned: true,
    };

    fn name(call: Call) -> String {
        select(&call).0.name()
    }

    #[test]
    fn the_table_of_norms() {
        for (call, expected) in [
            (
                Call::Rms {
                    element: F16,
                    weight: F32,
                },
                "rms_norm_f16_f32",
            ),
            (
                Call::Layer {
                    element: F32,
                    weight: BF16,
                },
                "layer_norm_f32_bf16",
            ),
            (Call::RmsParts, "rms_norm_parts"),
            (Call::AddRms { element: BF16 }, "add_rms_norm_bf16"),
            (POST, "add_short_post_norm_f16"),
            (
                Call::AddPost {
                    element: F32,
                    width: 4096,
                    columns: Some(FEW_ROWS),
                    aligned: true,
                },
                "add_post_norm_packed_f32",
            ),
            (
                Call::AddPost {
                    element: F16,
                    width: 2048,
                    columns: Some(PACKED_ROWS),
                    aligned: true,
                },
                "add_post_norm_packed_for_batch_f16",
            ),
        ] {
            assert_eq!(name(call), expected);
            assert_eq!(select(&call).1, None, "{expected}");
        }
    }

    #[test]
    fn inputs_of_eight_columns_are_packed_for_few_rows() {
        for columns in input_columns() {
            let (kernel, _) = select(&Call::LayerPacked { columns });
            assert_eq!(
                kernel == Kernel::LayerPacked(Packing::Few),
                columns == 8,
                "{columns}"
            );
        }
    }

    #[test]
    fn rows_that_do_not_stay_in_registers_have_a_reason() {
        let of = |width, aligned| Call::AddPost {
            element: F16,
            width,
            columns: None,
            aligned,
        };
        for (call, what) in [
            (of(4104, true), "rows of up to 4096"),
            (of(4092, true), "multiples of 8"),
            (of(4096, false), "aligned to 16"),
        ] {
            assert_eq!(name(call), "add_post_norm_f16");
            let (faster, why) = select(&call).1.expect("a faster kernel");
            assert_eq!(faster.name(), "add_short_post_norm_f16");
            assert!(why.contains(what), "{why}");
        }
    }

    #[test]
    fn every_kernel_has_a_name_of_its_own() {
        let all = [Kernel::all(false), Kernel::all(true)].concat();
        let mut names: Vec<String> = all.iter().map(|kernel| kernel.name()).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all.len());
    }

    #[test]
    fn packed_rows_have_limits() {
        assert!(check_packed(8, MOST_PACKED_WIDTH, 8, &[0]).is_ok());
        let why = format!("{:?}", check_packed(9, 64, 8, &[]).unwrap_err());
        assert!(why.contains("9 packed rows of 64") && why.contains("8 rows of 24064"));
        assert!(check_packed(1, MOST_PACKED_WIDTH + 8, 128, &[]).is_err());
        assert!(check_packed(1, 60, 128, &[]).is_err());
        let why = format!("{:?}", check_packed(1, 64, 8, &[16, 8]).unwrap_err());
        assert!(why.contains("not aligned"));
        assert_eq!(
            [64, 2048, 2056, 4096, 24064].map(packing_threads),
            [256, 256, 288, 512, 1024]
        );
    }
}
