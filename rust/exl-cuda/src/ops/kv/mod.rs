//! Keys and values stored to pages and loaded from pages.

pub mod rope_store;
pub mod select;

use super::{Element, Target, index32};
use crate::abi::{assert_constants, assert_layout};
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::parameters::kernels;

/// Storage format of one plane, as the kernels number it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    F16 = 0,
    E5M2 = 1,
    Hadamard8 = 2,
    Hadamard4 = 3,
}

assert_constants!(hadamard, {
    F16 == Codec::F16,
    E5M2 == Codec::E5M2,
    HADAMARD8 == Codec::Hadamard8,
    HADAMARD4 == Codec::Hadamard4,
});

impl Codec {
    pub fn is_hadamard(self) -> bool {
        matches!(self, Self::Hadamard8 | Self::Hadamard4)
    }

    /// Bytes of one head of one token, without scales.
    pub fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F16 => 2 * head_dim,
            Self::E5M2 => head_dim,
            Self::Hadamard8 => head_dim.next_multiple_of(64),
            Self::Hadamard4 => head_dim.next_multiple_of(64) / 2,
        }
    }
}

/// A kind of cache: codecs of keys and values, and its suffix in kernel names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    pub name: &'static str,
    pub key: Codec,
    pub value: Codec,
}

/// Every kind of cache.
pub const KINDS: [Kind; 5] = [
    kind("fp16", Codec::F16, Codec::F16),
    kind("fp8", Codec::E5M2, Codec::E5M2),
    kind("q8", Codec::Hadamard8, Codec::Hadamard8),
    kind("q6", Codec::Hadamard8, Codec::Hadamard4),
    kind("q4", Codec::Hadamard4, Codec::Hadamard4),
];

const fn kind(name: &'static str, key: Codec, value: Codec) -> Kind {
    Kind { name, key, value }
}

/// One layer's pages: device addresses of `[pages, page_size, heads, row]`, and of the scales if the kind has them (else 0).
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    pub kind: Kind,
    pub data: [usize; 2],
    pub scales: [usize; 2],
    pub num_pages: usize,
    pub page_size: usize,
    pub heads: usize,
    pub head_dim: usize,
}

/// `struct Pages` of `kernels/kv/kv_encode.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct PagesArgument {
    data: [usize; 2],
    scales: [usize; 2],
    codec: [i32; 2],
    heads: i32,
    dim: i32,
    blocks: i32,
    slots: i64,
}

assert_layout!(PagesArgument, kv_encode::Pages, { data, scales, codec, heads, dim, blocks, slots });

impl Pages {
    pub(super) fn argument(&self) -> Result<PagesArgument, CudaError> {
        Ok(PagesArgument {
            data: self.data,
            scales: self.scales,
            codec: [self.kind.key as i32, self.kind.value as i32],
            heads: index32("heads", self.heads)?,
            dim: index32("head_dim", self.head_dim)?,
            blocks: index32("head_dim", self.head_dim.div_ceil(64))?,
            slots: (self.num_pages * self.page_size) as i64,
        })
    }
}

fn store_name(element: Element) -> String {
    format!("kv_store_{}", element.suffix())
}

pub(super) fn kernels() -> Vec<String> {
    let mut all = Element::ALL.map(store_name).to_vec();
    all.push("kv_load".to_owned());
    all
}

/// Direction of [`transfer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Encode k and v of this type.
    Store(Element),
    /// Decode into FP32.
    Load,
}

/// Store k and v `[tokens, heads, head_dim]` in `slots` (`[tokens]` int64), or load them. Slots outside the pages are skipped, or load
/// zeros.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn transfer(
    to: Target,
    direction: Direction,
    pages: &Pages,
    k: usize,
    v: usize,
    slots: usize,
    tokens: usize,
) -> Result<(), CudaError> {
    if tokens == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let kernel = match direction {
        Direction::Store(element) => store_name(element),
        Direction::Load => "kv_load".to_owned(),
    };
    let items = 2 * pages.heads * pages.head_dim.div_ceil(64);
    let launch = Launch {
        kernel: &kernel,
        grid: [index32("tokens", tokens)? as u32, 1, 1],
        block: 32 * items.min(8) as u32,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let p = pages.argument()?;
    let mut arguments = kernels::Kv { p, k, v, slots };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}
