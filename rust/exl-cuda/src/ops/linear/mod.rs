//! Matmuls with matrices in the tile layout.

pub mod batch;
pub mod few;
pub mod float;
pub mod lora;
pub mod ring;
pub mod select;

use super::{Target, index32};
use crate::abi::{assert_constants, assert_layout};
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::layout::{COLUMN_TILE, Layout, Scales, UNIT_ROWS};
use crate::parameters::kernels;
use crate::rows::FEW_ROWS;

/// Element type of results, as the kernels number them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    F16 = 0,
    BF16 = 1,
    F32 = 2,
}

assert_constants!(tile_layout, { OUT_F16 == Half::F16, OUT_BF16 == Half::BF16, OUT_F32 == Half::F32 });

/// `struct Matrix` of `kernels/linear/tile_layout.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct MatrixArgument {
    pub image: usize,
    pub units: usize,
    pub maxima: usize,
    pub row_of_feature: usize,
    pub bias: usize,
    pub tiles: i32,
    pub unit_count: i32,
    pub rows: i32,
    pub in_features: i32,
    pub out_features: i32,
    pub tile_bytes: u32,
    pub prescale: f32,
}

assert_layout!(MatrixArgument, tile_layout::Matrix, { image, units, maxima, row_of_feature, bias, tiles, unit_count, rows, in_features, out_features, tile_bytes, prescale });

/// Device addresses of a matrix; all of them must stay valid as long as the [`Matrix`] is used.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// The image, aligned to 128 bytes.
    pub image: usize,
    /// [`Layout::units`] as pairs of u32.
    pub units: usize,
    /// [`Layout::maxima`].
    pub maxima: usize,
    /// [`Layout::features`] as i32.
    pub features: usize,
    /// [`Layout::row_of_feature`] as u16.
    pub row_of_feature: usize,
    /// `[out_features]` FP32, or 0.
    pub bias: usize,
}

/// A matrix on a GPU.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub(super) argument: MatrixArgument,
    pub(super) features: usize,
    pub(super) kind: &'static str,
    pub(super) entry_rows: usize,
    /// First byte of each unit within a tile, and the tile's size.
    pub(super) unit_offsets: Vec<u32>,
    /// The units' widths, as the kernels read them.
    pub(super) unit_widths: Vec<u32>,
    /// [`Layout::features`]: matrices with equal features can share a copy of the activations.
    pub(super) features_host: Vec<i32>,
}

/// Columns of the layouts in which a launch other than a matmul packs a matmul's input: [`FEW_ROWS`], the layout of
/// `kernels/linear/rows.cuh`, and those of the kernels for wgmma, the layout of `kernels/linear/prepared.cuh`.
pub fn input_columns() -> impl Iterator<Item = usize> {
    let of_batches = batch::VARIANTS.into_iter().map(|(columns, _)| columns);
    std::iter::once(FEW_ROWS).chain(of_batches)
}

/// How a launch packs rows as the input of a matrix, in a layout of one of [`input_columns`].
#[derive(Clone, Copy, Debug)]
pub struct PackedInput {
    /// `[rows]` i32: the feature in each row of the layout.
    pub features: usize,
    pub units: i32,
    pub rows: i32,
    pub columns: usize,
}

impl PackedInput {
    pub const fn bytes(self) -> usize {
        self.units as usize * 2 * self.columns * UNIT_ROWS
    }
}

impl Matrix {
    /// How its input of `columns` columns is packed; None if the layout pads K, or there is no such layout.
    pub fn packed_input(&self, columns: usize) -> Option<PackedInput> {
        let exists = input_columns().any(|of| of == columns);
        (exists && few::takes_packed(&[self])).then_some(PackedInput {
            features: self.features,
            units: self.argument.unit_count,
            rows: self.argument.rows,
            columns,
        })
    }

    /// A matrix with `layout`, placed at `at`; results are (x @ W + bias) * prescale.
    pub fn new(layout: &Layout, at: Addresses, prescale: f32) -> Self {
        Self {
            argument: MatrixArgument {
                image: at.image,
                units: at.units,
                maxima: if layout.maxima.is_empty() {
                    0
                } else {
                    at.maxima
                },
                row_of_feature: if layout.is_ordered() {
                    0
                } else {
                    at.row_of_feature
                },
                bias: at.bias,
                tiles: layout.tiles() as i32,
                unit_count: layout.units.len() as i32 - 1,
                rows: layout.rows() as i32,
                in_features: layout.in_features as i32,
                out_features: layout.out_features as i32,
                tile_bytes: layout.tile_bytes() as u32,
                prescale,
            },
            features: at.features,
            kind: match layout.scales {
                Scales::Exl2 => "exl2",
                Scales::Gptq => "gptq",
            },
            entry_rows: layout.entry_rows,
            unit_offsets: layout.units.iter().map(|unit| unit.offset).collect(),
            unit_widths: layout.units.iter().map(|unit| unit.widths).collect(),
            features_host: layout.features.clone(),
        }
    }

    pub fn in_features(&self) -> usize {
        self.argument.in_features as usize
    }

    pub fn out_features(&self) -> usize {
        self.argument.out_features as usize
    }

    /// Rows of K in the layout, including padding.
    pub fn rows(&self) -> usize {
        self.argument.rows as usize
    }

    /// Bytes of the packed weights.
    pub fn image_bytes(&self) -> usize {
        self.argument.tiles as usize * self.argument.tile_bytes as usize
    }

    /// Bytes of scratch memory that [`matmul`] needs for `m` rows.
    pub fn packed_bytes(&self, m: usize) -> usize {
        self.argument.unit_count as usize * m.div_ceil(COLUMN_TILE) * 16 * UNIT_ROWS
    }
}

/// Kernels in the image of `file`.
pub(super) fn kernels(file: &str) -> Vec<String> {
    let kinds = || {
        ["exl2", "gptq"]
            .into_iter()
            .flat_map(|kind| [128, 32].map(|entry| (kind, entry)))
    };
    match file {
        "ring" => ring::kernels("exl2"),
        "ring_gptq" => ring::kernels("gptq"),
        "direct_exl2" => [named("gemm_direct_exl2"), vec!["norm_packed".to_owned()]].concat(),
        "direct_gptq" => named("gemm_direct_gptq"),
        "few" => few::kernels("exl2"),
        "few_gptq" => few::kernels("gptq"),
        "rows" => ["prepare_rows_f16", "prepare_rows_bf16"]
            .map(str::to_owned)
            .to_vec(),
        "lora" => lora::kernels(),
        "float" | "float_tile" => float::kernels(file),
        "linear" => kinds()
            .map(|(kind, entry)| format!("dequantize_{kind}_{entry}"))
            .chain(
                [
                    "prepare_f16",
                    "prepare_bf16",
                    "pack_rows_f16",
                    "pack_rows_bf16",
                    "pack_activated_rows_f16",
                    "row_multipliers",
                ]
                .map(str::to_owned),
            )
            .collect(),
        _ => {
            if let Some(form) = file.strip_prefix("batch_mma_") {
                batch::mma_kernels(form)
            } else if let Some(form) = file.strip_prefix("batch_") {
                batch::kernels(form)
            } else if let Some(form) = file.strip_prefix("tile_") {
                [1, 2, 4]
                    .map(|columns| format!("gemm_tile_{form}_{columns}"))
                    .to_vec()
            } else {
                Vec::new()
            }
        }
    }
}

/// A kernel for each distance of scale entries.
fn named(kernel: &str) -> Vec<String> {
    [128, 32].map(|entry| format!("{kernel}_{entry}")).to_vec()
}

/// Activations and results of a matmul; device addresses, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    /// `[m, in_features]` of `x_type`, F16 or BF16.
    pub x: usize,
    pub x_type: Half,
    /// `[m, out_features]` of `y_type`.
    pub y: usize,
    pub y_type: Half,
    pub m: usize,
}

/// Pack activations in the order of `kernels/linear/prepared.cuh`: for wgmma with `columns` columns, or for mma.sync if `columns` is 0.
///
/// # Safety
/// As for [`matmul`].
pub(super) unsafe fn prepare(
    to: Target,
    matrix: &Matrix,
    op: &Matmul,
    prepared: usize,
    multipliers: usize,
    columns: usize,
) -> Result<(), CudaError> {
    let device = Device::get(to.device)?;
    let m = index32("rows", op.m)?;
    let mut arguments = kernels::Prepare {
        a: matrix.argument,
        features: matrix.features,
        x: op.x,
        out: prepared,
        multipliers,
        m,
        columns: columns as i32,
    };
    let suffix = match op.x_type {
        Half::F16 => "f16",
        Half::BF16 => "bf16",
        Half::F32 => {
            return Err(CudaError::Argument {
                what: "activations in FP32".to_owned(),
                limit: "F16 or BF16".to_owned(),
            });
        }
    };
    let base = Launch {
        kernel: "row_multipliers",
        grid: [m as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    if op.x_type == Half::BF16 {
        let mut arguments = kernels::RowMultipliers {
            x: op.x,
            multipliers,
            k: matrix.argument.in_features,
        };
        // SAFETY: the caller guarantees that the addresses are valid.
        unsafe { base.run(device, &mut arguments)? };
    }
    let kernel = format!("prepare_{suffix}");
    let launch = Launch {
        kernel: &kernel,
        grid: [
            matrix.argument.unit_count as u32,
            (op.m.max(columns) as u32).div_ceil(COLUMN_TILE as u32),
            1,
        ],
        // The previous launch writes the multipliers; this kernel reads them with ordinary loads.
        programmatic: to.programmatic && op.x_type == Half::F16,
        ..base
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}

/// The function of `gemm_tile` for a number of rows: tiles of a block, in columns and in rows of W.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    columns: u32,
    rows: u32,
}

impl Tile {
    /// The fewest column tiles that hold `rows` rows, of one, two or four.
    pub const fn of(rows: usize) -> Self {
        let (columns, rows) = match rows.div_ceil(COLUMN_TILE) {
            0 | 1 => (1, 1),
            2 => (2, 2),
            _ => (4, 2),
        };
        Self { columns, rows }
    }
}

/// The matmul in separate launches, for any GPU: `prepared` is [`Matrix::packed_bytes`] and `multipliers` `[m]` FP32 of scratch memory.
/// Bitwise identical to `ring`.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn matmul(
    to: Target,
    matrix: &Matrix,
    op: &Matmul,
    (prepared, multipliers): (usize, usize),
    tile: Tile,
) -> Result<(), CudaError> {
    if op.m == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let m = index32("rows", op.m)?;
    // SAFETY: this function's contract.
    unsafe { prepare(to, matrix, op, prepared, multipliers, 0)? };
    let Tile { columns, rows } = tile;
    let kernel = format!("gemm_tile_{}_{}_{columns}", matrix.kind, matrix.entry_rows);
    let launch = Launch {
        kernel: &kernel,
        grid: [
            (matrix.argument.tiles as u32).div_ceil(rows),
            (op.m as u32).div_ceil(COLUMN_TILE as u32 * columns),
            1,
        ],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        // The kernel is compiled for any architecture and does not wait for its predecessor.
        programmatic: false,
    };
    let mut arguments = kernels::GemmTile {
        a: matrix.argument,
        x: prepared,
        multipliers,
        y: op.y,
        m,
        y_kind: op.y_type as i32,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}

/// Dequantize W `[in_features, out_features]` to F16 in file order, bitwise identical to the format, into `out`.
///
/// # Safety
/// `out` must be device memory of that size, valid until the stream has passed this launch.
pub unsafe fn dequantize(to: Target, matrix: &Matrix, out: usize) -> Result<(), CudaError> {
    let device = Device::get(to.device)?;
    let kernel = format!("dequantize_{}_{}", matrix.kind, matrix.entry_rows);
    let launch = Launch {
        kernel: &kernel,
        grid: [
            (matrix.argument.rows / 64) as u32,
            (matrix.argument.tiles as u32).div_ceil(8),
            1,
        ],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: false,
    };
    let mut arguments = kernels::Dequantize {
        a: matrix.argument,
        features: matrix.features,
        out,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::layout::Unit;

    pub fn matrix(units: usize, unit_bytes: u32) -> Matrix {
        Matrix {
            argument: MatrixArgument {
                image: 0,
                units: 0,
                maxima: 0,
                row_of_feature: 0,
                bias: 0,
                tiles: 256,
                unit_count: units as i32,
                rows: 256 * units as i32,
                in_features: 256 * units as i32,
                out_features: 4096,
                tile_bytes: units as u32 * unit_bytes,
                prescale: 1.0,
            },
            features: 0,
            kind: "exl2",
            entry_rows: 128,
            unit_offsets: (0..=units as u32).map(|u| u * unit_bytes).collect(),
            unit_widths: vec![0x4444; units + 1],
            features_host: (0..256 * units as i32).collect(),
        }
    }

    /// [`matrix`] of `out_features` output features.
    pub fn sized(units: usize, unit_bytes: u32, out_features: usize) -> Matrix {
        let mut made = matrix(units, unit_bytes);
        made.argument.out_features = out_features as i32;
        made.argument.tiles = out_features.div_ceil(16) as i32;
        made
    }

    #[test]
    fn kernels_begin_with_their_name_in_the_table() {
        let forms = ["exl2_128", "exl2_32", "gptq_128", "gptq_32"];
        let named = |file: &str| forms.map(|form| format!("{file}_{form}"));
        let texts = |files: &[&str]| files.iter().map(ToString::to_string).collect();
        let files: [(_, Vec<String>); 5] = [
            (select::Kernel::GemvRing, texts(&["ring", "ring_gptq"])),
            (select::Kernel::GemmFew, texts(&["few", "few_gptq"])),
            (select::Kernel::GemmDirect, texts(&["direct_gptq"])),
            (
                select::Kernel::GemmBatch,
                [named("batch"), named("batch_mma")].concat(),
            ),
            (select::Kernel::GemmTile, named("tile").to_vec()),
        ];
        for (kernel, files) in files {
            for file in files {
                let names = kernels(&file);
                let all = names.iter().all(|name| {
                    let rest = name.strip_prefix(kernel.name());
                    rest.is_some_and(|rest| rest.starts_with('_'))
                });
                assert!(all && !names.is_empty(), "{file}: {names:?}");
            }
        }
    }

    #[test]
    fn a_unit_is_two_words() {
        assert_eq!(std::mem::size_of::<Unit>(), 8);
    }

    #[test]
    fn scratch_memory_counts_whole_blocks() {
        assert_eq!(matrix(16, 2064).packed_bytes(9), 16 * 2 * 4096);
    }
}
