//! One table of kernels for each instruction set.

use super::activations::{self, Int8Block};
use super::exact::{self, Panel};
use super::int8;
use super::layout::BLOCK;
use super::matrix::{Codes, Floats, Section};
use super::simd::Scalar;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use crate::isa::Isa;

/// Packs rows of `x` `[.., k]`, each gathered through `source`, into `[blocks][rows]`; arguments `x, k, rows, source, out`.
pub type Pack<T> = unsafe fn(&[f32], usize, &[u32], &[u32], &mut [T]);

/// The kernels of one instruction set. Calling one is sound if the processor has that set; arguments as in the generic functions.
#[derive(Debug)]
pub struct Kernels {
    pub int8_tile:
        unsafe fn(&Codes, &[Section], usize, *const Int8Block, usize, *mut f32, *mut f32),
    pub exact_one_row: unsafe fn(&Codes, &[Section], usize, *const f32, *mut f32, *mut f32),
    pub exact_rows:
        unsafe fn(&Codes, &[Section], usize, *const f32, usize, *mut f32, *mut f32, &mut Panel),
    pub floats:
        unsafe fn(&Floats, &[Section], usize, *const f32, usize, *mut f32, *mut f32, &mut Panel),
    pub pack_int8: Pack<Int8Block>,
    pub pack_exact: Pack<[f32; BLOCK]>,
}

impl Kernels {
    /// The kernels of the current instruction set.
    pub fn current() -> &'static Self {
        match Isa::current() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &avx512::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::KERNELS,
            _ => &scalar::KERNELS,
        }
    }
}

macro_rules! kernels {
    ($module:ident, $simd:ty, $vectors:literal, $rows:literal, $(#[$features:meta])?) => {
        #[allow(clippy::too_many_arguments)] // those of the generic functions
        mod $module {
            use super::*;

            // SAFETY (all): the generic function's contract, and the features are those of the instruction set.
            $(#[$features])?
            unsafe fn int8_tile(m: &Codes, s: &[Section], t: usize, acts: *const Int8Block, rows: usize, c: *mut f32, partial: *mut f32) {
                unsafe { int8::tile::<$simd, $vectors>(m, s, t, acts, rows, c, partial) }
            }
            $(#[$features])?
            unsafe fn exact_one_row(m: &Codes, s: &[Section], t: usize, x: *const f32, c: *mut f32, partial: *mut f32) {
                unsafe { exact::tile_one_row::<$simd>(m, s, t, x, c, partial) }
            }
            $(#[$features])?
            unsafe fn exact_rows(m: &Codes, s: &[Section], t: usize, x: *const f32, rows: usize, c: *mut f32, partial: *mut f32, p: &mut Panel) {
                unsafe { exact::tile_rows::<$simd, $rows, $vectors>(m, s, t, x, rows, c, partial, p) }
            }
            $(#[$features])?
            unsafe fn floats(m: &Floats, s: &[Section], t: usize, x: *const f32, rows: usize, c: *mut f32, partial: *mut f32, p: &mut Panel) {
                unsafe { exact::tile_floats::<$simd, $rows, $vectors>(m, s, t, x, rows, c, partial, p) }
            }
            $(#[$features])?
            unsafe fn pack_int8(x: &[f32], k: usize, rows: &[u32], source: &[u32], out: &mut [Int8Block]) {
                unsafe { activations::pack_int8(x, k, rows, source, out) }
            }
            $(#[$features])?
            unsafe fn pack_exact(x: &[f32], k: usize, rows: &[u32], source: &[u32], out: &mut [[f32; BLOCK]]) {
                unsafe { activations::pack_exact(x, k, rows, source, out) }
            }

            pub static KERNELS: Kernels = Kernels {
                int8_tile,
                exact_one_row,
                exact_rows,
                floats,
                pack_int8,
                pack_exact,
            };
        }
    };
}

kernels!(scalar, Scalar, 1, 4,);
#[cfg(target_arch = "x86_64")]
kernels!(avx2, Avx2, 1, 4, #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
kernels!(avx512, Avx512, 2, 12, #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]);
