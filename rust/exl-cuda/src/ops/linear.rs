//! Products with matrices in the tile layout.

use super::{Target, index32};
use crate::device::{Device, DeviceInfo};
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};
use crate::layout::{Layout, Scales, TILE};

/// Most rows of a call that the matrix kernels take; more are cheaper by dequantizing once.
pub const MAX_ROWS: usize = 64;
/// Most rows of the ring kernel.
const RING_ROWS: usize = 8;
const RING_THREADS: u32 = 320;
/// Bytes in flight per multiprocessor beyond which everything else waits behind weights (spec/kernels-measured.md 6.1).
const BYTES_IN_FLIGHT: usize = 33 * 1024;
/// Bytes a ring holds when they fit: enough to ride out a hand-over between kernels.
const RING_BYTES: usize = 130 * 1024;
/// More than half of a multiprocessor's shared memory, so that one block is placed on each (spec/kernels-measured.md 6.2).
const LEAST_SHARED: u32 = 116 * 1024;

/// Element type of results, as the kernels number them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    F16 = 0,
    BF16 = 1,
    F32 = 2,
}

/// `struct Matrix` of `kernels/tile.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct MatrixArgument {
    image: usize,
    units: usize,
    maxima: usize,
    row_of_feature: usize,
    bias: usize,
    tiles: i32,
    unit_count: i32,
    rows: i32,
    in_features: i32,
    out_features: i32,
    tile_bytes: u32,
    prescale: f32,
}

/// `struct Ring` of `kernels/ring.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RingArgument {
    slots: i32,
    window: i32,
    stage_stride: u32,
}

/// Device addresses of a matrix; all of them stay valid as long as the [`Matrix`] is used.
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
    argument: MatrixArgument,
    features: usize,
    kind: &'static str,
    entry_rows: usize,
    largest_stage: usize,
}

impl Matrix {
    /// `layout` placed at `at`; results are (x @ W + bias) * prescale.
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
            largest_stage: layout.largest_stage(),
        }
    }

    pub fn in_features(&self) -> usize {
        self.argument.in_features as usize
    }

    pub fn out_features(&self) -> usize {
        self.argument.out_features as usize
    }

    /// Rows of K in the layout, padding included.
    pub fn rows(&self) -> usize {
        self.argument.rows as usize
    }

    /// How many activation rows the ring kernel takes on this GPU; 0 when it cannot run there.
    pub fn ring_rows(&self, device: &DeviceInfo) -> usize {
        (1..=RING_ROWS)
            .rev()
            .find(|&m| self.ring(device, m).is_some())
            .unwrap_or(0)
    }

    /// Shared memory of the ring kernel apart from the slots; mirrors `RingMemory` of `kernels/ring.cuh`.
    fn ring_fixed_bytes(&self, m: usize, slots: usize) -> usize {
        let units = self.argument.unit_count as usize + 1;
        let activations = m * (self.rows() + 32) * 2;
        let results = 4 * 8 * TILE * 8 * 4 + 8 * 4;
        let barriers = (2 * slots + 2 * 4) * 8;
        let maxima = 2 * self.rows().div_ceil(self.entry_rows);
        activations + results + units * 8 + barriers + maxima + 64
    }

    /// Depth and shared memory of the ring for `m` rows, when it fits.
    fn ring(&self, device: &DeviceInfo, m: usize) -> Option<(RingArgument, u32)> {
        if device.compute_capability.0 < 9 || m > RING_ROWS {
            return None;
        }
        // 1 KB for the kernel's static arrays.
        let space = (device.shared_bytes_per_block as usize).checked_sub(1024)?;
        let stage = self.largest_stage.next_multiple_of(128);
        let mean_stage = 8 * self.argument.tile_bytes as usize / self.argument.unit_count as usize;
        let wanted = RING_BYTES.div_ceil(mean_stage.max(1)).clamp(4, 24);
        let fits = |slots: &usize| slots * stage + self.ring_fixed_bytes(m, *slots) <= space;
        let slots = (3..=wanted).rev().find(fits)?;
        let window = (BYTES_IN_FLIGHT + mean_stage / 2) / mean_stage.max(1);
        let shared = (slots * stage + self.ring_fixed_bytes(m, slots)) as u32;
        let ring = RingArgument {
            slots: slots as i32,
            window: window.clamp(1, slots) as i32,
            stage_stride: stage as u32,
        };
        Some((ring, shared.max(LEAST_SHARED.min(space as u32))))
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
        "ring" => kinds()
            .map(|(kind, entry)| format!("ring_{kind}_{entry}"))
            .collect(),
        "linear" => kinds()
            .map(|(kind, entry)| format!("dequantize_{kind}_{entry}"))
            .chain(["prepare_f16".to_owned(), "prepare_bf16".to_owned()])
            .collect(),
        _ => match file.strip_prefix("matmul_") {
            Some(rest) => [1, 2, 4]
                .map(|columns| format!("matmul_{rest}_{columns}"))
                .to_vec(),
            None => Vec::new(),
        },
    }
}

/// Depth and window of the ring, for benchmarks that try others than the planned ones.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    pub slots: i32,
    pub window: i32,
}

/// Activations and results of a product; device addresses, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// `[m, in_features]` of `x_type`, F16 or BF16.
    pub x: usize,
    pub x_type: Half,
    /// `[m, out_features]` of `y_type`.
    pub y: usize,
    pub y_type: Half,
    pub m: usize,
}

/// The product in one launch, for up to [`Matrix::ring_rows`] rows. Same bits as [`matmul`].
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn ring(
    to: Target,
    matrix: &Matrix,
    op: &Product,
    tuning: Option<Tuning>,
) -> Result<(), CudaError> {
    let device = Device::get(to.device)?;
    let Some((mut ring, mut shared)) = matrix.ring(&device.info, op.m).filter(|_| op.m > 0) else {
        return Err(CudaError::Argument {
            what: format!("{} rows for the ring kernel", op.m),
            limit: format!("1 to {}", matrix.ring_rows(&device.info)),
        });
    };
    if let Some(Tuning { slots, window }) =
        tuning.filter(|t| t.slots > 0 && (1..=t.slots).contains(&t.window))
    {
        (ring.slots, ring.window) = (slots, window);
        let needed = slots as usize * ring.stage_stride as usize
            + matrix.ring_fixed_bytes(op.m, slots as usize);
        shared = (needed as u32).max(LEAST_SHARED);
    }
    let kernel = format!("ring_{}_{}", matrix.kind, matrix.entry_rows);
    let launch = Launch {
        kernel: &kernel,
        grid: [
            (matrix.argument.tiles).min(device.info.multiprocessors) as u32,
            1,
            1,
        ],
        block: RING_THREADS,
        shared_bytes: shared,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let (m, x_type, y_type) = (op.m as i32, op.x_type as i32, op.y_type as i32);
    let mut arguments = kernel_arguments![matrix.argument, ring, op.x, x_type, op.y, m, y_type];
    // SAFETY: the order is that of `ring_matmul`; validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments) }
}

/// The product in two launches, for any GPU: `prepared` is `[m, rows]` F16 and `multipliers` `[m]` FP32 of scratch memory.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn matmul(
    to: Target,
    matrix: &Matrix,
    op: &Product,
    prepared: usize,
    multipliers: usize,
) -> Result<(), CudaError> {
    if op.m == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let m = index32("rows", op.m)?;
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
    let kernel = format!("prepare_{suffix}");
    let launch = Launch {
        kernel: &kernel,
        grid: [m as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernel_arguments![
        matrix.argument,
        matrix.features,
        op.x,
        prepared,
        multipliers
    ];
    // SAFETY: the order is that of `prepare`; validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments)? };
    // (column tiles of 8 rows, row tiles) of a block.
    let (columns, tiles) = match op.m {
        ..=8 => (1, 1),
        9..=16 => (2, 2),
        _ => (4, 2),
    };
    let kernel = format!("matmul_{}_{}_{columns}", matrix.kind, matrix.entry_rows);
    let launch = Launch {
        kernel: &kernel,
        grid: [
            (matrix.argument.tiles as u32).div_ceil(tiles),
            (op.m as u32).div_ceil(8 * columns),
            1,
        ],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        // Its loads of the prepared rows go through L1, which a launch that overlaps its predecessor does not clear.
        programmatic: false,
    };
    let y_type = op.y_type as i32;
    let mut arguments = kernel_arguments![matrix.argument, prepared, multipliers, op.y, m, y_type];
    // SAFETY: the order is that of `matmul` in `kernels/matmul.cuh`; validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments) }
}

/// W `[in_features, out_features]` F16 in file order, bit-exact to the format, into `out`.
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
    let mut arguments = kernel_arguments![matrix.argument, matrix.features, out];
    // SAFETY: the order is that of `dequantize` in `kernels/linear.cu`; validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Unit;

    fn hopper() -> DeviceInfo {
        DeviceInfo {
            index: 0,
            name: "test".to_owned(),
            compute_capability: (9, 0),
            multiprocessors: 132,
            shared_bytes_per_block: 232_448,
            memory_bytes: 0,
            unsupported: None,
        }
    }

    fn matrix(units: usize, unit_bytes: u32) -> Matrix {
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
            largest_stage: 8 * unit_bytes as usize,
        }
    }

    #[test]
    fn the_ring_of_four_bits_is_the_measured_one() {
        let (ring, shared) = matrix(16, 2064).ring(&hopper(), 1).expect("fits");
        assert_eq!((ring.slots, ring.window), (9, 2));
        assert!((LEAST_SHARED..232_448 - 1024).contains(&shared));
        assert_eq!(matrix(16, 2064).ring_rows(&hopper()), 8);
    }

    #[test]
    fn a_ring_never_asks_for_more_than_there_is() {
        for (units, bytes) in [(1, 1040), (16, 4112), (56, 2064), (56, 4112), (255, 4160)] {
            for m in 1..=8 {
                if let Some((ring, shared)) = matrix(units, bytes).ring(&hopper(), m) {
                    assert!(
                        shared <= 232_448 - 1024 && ring.window >= 1 && ring.window <= ring.slots
                    );
                }
            }
        }
        assert_eq!(
            matrix(255, 4160).ring_rows(&hopper()),
            0,
            "65,280 rows of activations leave no room"
        );
        let ampere = DeviceInfo {
            compute_capability: (8, 6),
            ..hopper()
        };
        assert_eq!(matrix(16, 2064).ring_rows(&ampere), 0);
    }

    #[test]
    fn a_unit_is_two_words() {
        assert_eq!(std::mem::size_of::<Unit>(), 8);
        assert_eq!(std::mem::size_of::<MatrixArgument>(), 5 * 8 + 7 * 4 + 4);
    }
}
