//! Keys and values in pages: storing them and attending to them.

use super::{Element, Target, index32};
use crate::device::Device;
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};

/// Keys of one part of an attention; cuts lie at its multiples. As `SPLIT` of `kernels/attention.cuh`.
pub const SPLIT: usize = 128;

/// What pages hold; spec/formats.md 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Fp16,
    Fp8,
    Q8,
    Q6,
    Q4,
}

impl Kind {
    pub const ALL: [Self; 5] = [Self::Fp16, Self::Fp8, Self::Q8, Self::Q6, Self::Q4];

    /// As the kernels' and the caches' names say it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp16 => "fp16",
            Self::Fp8 => "fp8",
            Self::Q8 => "q8",
            Self::Q6 => "q6",
            Self::Q4 => "q4",
        }
    }

    /// Numbers of `enum Storage` of `kernels/pages.cuh`: of keys and of values.
    fn storages(self) -> (i32, i32) {
        match self {
            Self::Fp16 => (0, 0),
            Self::Fp8 => (1, 1),
            Self::Q8 => (2, 2),
            Self::Q6 => (2, 3),
            Self::Q4 => (3, 3),
        }
    }

    fn rotates(self) -> bool {
        !matches!(self, Self::Fp16 | Self::Fp8)
    }

    /// Elements of a head as attention sees them: padded for the kinds that rotate blocks of 64.
    pub fn width(self, head_dim: usize) -> usize {
        if self.rotates() {
            head_dim.next_multiple_of(64)
        } else {
            head_dim
        }
    }

    /// Bytes of a head's keys, values and scales (each).
    pub fn stored_bytes(self, head_dim: usize) -> (usize, usize, usize) {
        let width = self.width(head_dim);
        match self {
            Self::Fp16 => (2 * width, 2 * width, 0),
            Self::Fp8 => (width, width, 0),
            Self::Q8 => (width, width, width / 16),
            Self::Q6 => (width, width / 2, width / 16),
            Self::Q4 => (width / 2, width / 2, width / 16),
        }
    }
}

/// `struct Pages` of `kernels/pages.cuh`; scales are 0 for kinds without.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct PagesArgument {
    key: usize,
    key_scales: usize,
    value: usize,
    value_scales: usize,
    pages: i32,
    page_size: i32,
    heads: i32,
    head_dim: i32,
}

/// Pages of one layer: device addresses of contiguous `[pages, page_size, heads, stored]`.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    pub kind: Kind,
    pub key: usize,
    pub key_scales: usize,
    pub value: usize,
    pub value_scales: usize,
    pub pages: usize,
    pub page_size: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl Pages {
    fn argument(&self) -> Result<PagesArgument, CudaError> {
        if self.head_dim == 0 || self.head_dim > 256 || !self.head_dim.is_multiple_of(8) {
            return Err(CudaError::Argument {
                what: format!("head_dim = {}", self.head_dim),
                limit: "a multiple of 8 up to 256".to_owned(),
            });
        }
        Ok(PagesArgument {
            key: self.key,
            key_scales: self.key_scales,
            value: self.value,
            value_scales: self.value_scales,
            pages: index32("pages", self.pages)?,
            page_size: index32("page size", self.page_size)?,
            heads: index32("heads", self.heads)?,
            head_dim: self.head_dim as i32,
        })
    }
}

/// Kernels in the image of `file`.
pub(super) fn kernels(file: &str) -> Vec<String> {
    match file {
        "kv" => Element::ALL
            .map(|e| format!("kv_store_{}", e.suffix()))
            .to_vec(),
        "attention_combine" => vec![file.to_owned()],
        _ => match file.strip_prefix("attention_") {
            Some(kind) => SHAPES
                .map(|(lanes, queries)| format!("attend_{kind}_{lanes}_{queries}"))
                .to_vec(),
            None => Vec::new(),
        },
    }
}

/// (lanes that share a key, query heads of a block) that there are kernels for.
const SHAPES: [(usize, usize); 8] = [
    (8, 1),
    (8, 4),
    (8, 8),
    (16, 1),
    (16, 4),
    (16, 8),
    (32, 1),
    (32, 4),
];

/// The kernel shape for a head of `width` elements and `group` query heads a key head.
fn shape_for(width: usize, group: usize) -> (usize, usize) {
    let lanes = (width / 8).next_power_of_two().max(8);
    let queries = match group {
        1 => 1,
        2..=4 => 4,
        _ if lanes == 32 => 4,
        _ => 8,
    };
    (lanes, queries)
}

/// Keys and values to store: device addresses.
#[derive(Clone, Copy, Debug)]
pub struct NewTokens {
    /// `[tokens, heads, head_dim]` of `element`, each
    pub k: usize,
    pub v: usize,
    pub element: Element,
    /// `[tokens]` int64; a slot outside the pages is skipped
    pub slots: usize,
    pub tokens: usize,
}

/// Encodes tokens into their slots.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn store(to: Target, pages: &Pages, op: &NewTokens) -> Result<(), CudaError> {
    if op.tokens == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let argument = pages.argument()?;
    let tokens = index32("tokens", op.tokens)?;
    let warps = index32("token heads", op.tokens * pages.heads)? as u32;
    let (key_kind, value_kind) = pages.kind.storages();
    let kernel = format!("kv_store_{}", op.element.suffix());
    let launch = Launch {
        kernel: &kernel,
        grid: [warps.div_ceil(8), 2, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments =
        kernel_arguments![argument, op.k, op.v, op.slots, tokens, key_kind, value_kind];
    // SAFETY: the order is that of `store` in `kernels/kv.cu`; validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments) }
}

/// `struct Query` of `kernels/attention.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct QueryArgument {
    q: usize,
    block_table: usize,
    rows: usize,
    positions: usize,
    mask: usize,
    parts: usize,
    out: usize,
    element: i32,
    tokens: i32,
    query_heads: i32,
    sequences: i32,
    table_width: i32,
    mask_width: i32,
    window: i32,
    splits: i32,
    scale: f32,
    softcap: f32,
}

/// Query tokens: device addresses.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    /// `[tokens, query_heads, head_dim]` of `element`, as is `out`
    pub q: usize,
    pub out: usize,
    pub element: Element,
    pub tokens: usize,
    pub query_heads: usize,
    /// int32 `[sequences, table_width]`
    pub block_table: usize,
    pub sequences: usize,
    pub table_width: usize,
    /// int32 `[tokens]`, each
    pub rows: usize,
    pub positions: usize,
    /// FP32 `[sequences, mask_width]`, or 0
    pub mask: usize,
    pub mask_width: usize,
    pub scale: f32,
    /// 0: none
    pub window: usize,
    pub softcap: f32,
    /// FP32 scratch, [`scratch_floats`] long
    pub parts: usize,
}

/// Parts into which a sequence of `table_width` pages may fall.
pub fn splits(pages: &Pages, table_width: usize) -> usize {
    (table_width * pages.page_size).div_ceil(SPLIT).max(1)
}

/// Scratch of [`attend`], in floats.
pub fn scratch_floats(
    pages: &Pages,
    tokens: usize,
    query_heads: usize,
    table_width: usize,
) -> usize {
    tokens * query_heads * splits(pages, table_width) * (pages.kind.width(pages.head_dim) + 2)
}

/// softmax(mask(softcap(scale q k^T))) v of every query token over its sequence's pages.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed these launches.
pub unsafe fn attend(to: Target, pages: &Pages, op: &Query) -> Result<(), CudaError> {
    if op.tokens == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let argument = pages.argument()?;
    let width = pages.kind.width(pages.head_dim);
    let group = op.query_heads / pages.heads;
    let splits = splits(pages, op.table_width);
    let query = QueryArgument {
        q: op.q,
        block_table: op.block_table,
        rows: op.rows,
        positions: op.positions,
        mask: op.mask,
        parts: op.parts,
        out: op.out,
        element: match op.element {
            Element::F16 => 0,
            Element::BF16 => 1,
            Element::F32 => 2,
        },
        tokens: index32("tokens", op.tokens)?,
        query_heads: index32("query heads", op.query_heads)?,
        sequences: index32("sequences", op.sequences)?,
        table_width: index32("pages of a sequence", op.table_width)?,
        mask_width: index32("mask width", op.mask_width)?,
        window: index32("window", op.window)?,
        splits: index32("parts", splits)?,
        scale: op.scale,
        softcap: op.softcap,
    };
    let (lanes, queries) = shape_for(width, group);
    let kernel = format!("attend_{}_{lanes}_{queries}", pages.kind.name());
    let launch = Launch {
        kernel: &kernel,
        grid: [
            op.tokens as u32,
            (pages.heads * group.div_ceil(queries)) as u32,
            splits as u32,
        ],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernel_arguments![argument, query];
    // SAFETY: the order is that of `attend` in `kernels/attention.cuh`; validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments)? };
    let heads = index32("token heads", op.tokens * op.query_heads)? as u32;
    let launch = Launch {
        kernel: "attention_combine",
        grid: [heads, 1, 1],
        block: 128,
        ..launch
    };
    let (head_dim, width, rotate) = (
        pages.head_dim as i32,
        width as i32,
        i32::from(pages.kind.rotates()),
    );
    let mut arguments = kernel_arguments![query, head_dim, width, rotate];
    // SAFETY: the order is that of `attention_combine`; validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_has_its_kernel() {
        for kind in Kind::ALL {
            for head_dim in (8..=256).step_by(8) {
                for group in 1..=20 {
                    let (lanes, queries) = shape_for(kind.width(head_dim), group);
                    assert!(SHAPES.contains(&(lanes, queries)), "{head_dim} {group}");
                    assert!(lanes * 8 >= kind.width(head_dim));
                }
            }
        }
    }

    #[test]
    fn arguments_have_the_size_of_the_device_structs() {
        assert_eq!(std::mem::size_of::<PagesArgument>(), 4 * 8 + 4 * 4);
        assert_eq!(std::mem::size_of::<QueryArgument>(), 7 * 8 + 10 * 4);
    }
}
