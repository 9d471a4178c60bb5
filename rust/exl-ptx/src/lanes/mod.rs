//! Instructions without side effects as functions of 32 lanes, chosen by their PTX name.

#[macro_use]
mod macros;
mod comparison;
mod conversion;
mod floating;
mod integer;

use crate::float::{NAN32, Rounding};

pub use comparison::comparison;
pub use conversion::{conversion, eight_bit_conversion, pair_conversion};

pub type Words = [u32; 32];
pub type Doubles = [u64; 32];

/// A PTX type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    BF16,
    BF16x2,
    F32,
    F64,
    Pred,
}

impl Type {
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "b8" => Self::B8,
            "b16" => Self::B16,
            "b32" => Self::B32,
            "b64" => Self::B64,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::BF16,
            "bf16x2" => Self::BF16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "pred" => Self::Pred,
            _ => return None,
        })
    }

    pub fn bytes(self) -> usize {
        match self {
            Self::B8 | Self::U8 | Self::S8 | Self::Pred => 1,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::BF16 => 2,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 8,
            _ => 4,
        }
    }

    pub fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }
}

/// A function of lanes. The letters name the widths of result and operands: W for 32 bits and less, D for 64.
#[derive(Clone, Copy)]
pub enum Lanes {
    W1(fn(&Words) -> Words),
    W1d(fn(&Doubles) -> Words),
    D1w(fn(&Words) -> Doubles),
    D1(fn(&Doubles) -> Doubles),
    W2(fn(&Words, &Words) -> Words),
    D2(fn(&Doubles, &Doubles) -> Doubles),
    D2dw(fn(&Doubles, &Words) -> Doubles),
    D2ww(fn(&Words, &Words) -> Doubles),
    W3(fn(&Words, &Words, &Words) -> Words),
    D3(fn(&Doubles, &Doubles, &Doubles) -> Doubles),
    D3wwd(fn(&Words, &Words, &Doubles) -> Doubles),
    W4(fn(&Words, &Words, &Words, &Words) -> Words),
    D4(fn(&Doubles, &Doubles, &Words, &Words) -> Doubles),
    W3dww(fn(&Doubles, &Words, &Words) -> Words),
    D3dww(fn(&Doubles, &Words, &Words) -> Doubles),
    C2(fn(&Words, &Words) -> u32),
    C2d(fn(&Doubles, &Doubles) -> u32),
}

fn f(bits: u32) -> f32 {
    f32::from_bits(bits)
}

fn g(bits: u64) -> f64 {
    f64::from_bits(bits)
}

/// Bits of a single-precision result; every NaN is PTX's one.
fn r(value: f32) -> u32 {
    if value.is_nan() {
        NAN32
    } else {
        value.to_bits()
    }
}

fn flush(value: f32) -> f32 {
    if value.is_subnormal() {
        0.0_f32.copysign(value)
    } else {
        value
    }
}

fn saturate(value: f32) -> f32 {
    if value.is_nan() {
        0.0
    } else {
        value.clamp(0.0, 1.0)
    }
}

/// Suffixes of an instruction after its name.
#[derive(Clone, Copy)]
pub struct Suffixes<'a>(pub &'a [&'a str]);

impl Suffixes<'_> {
    pub fn has(&self, name: &str) -> bool {
        self.0.contains(&name)
    }

    pub fn rounding(&self) -> Rounding {
        if self.has("rz") {
            Rounding::Zero
        } else if self.has("rm") {
            Rounding::Down
        } else if self.has("rp") {
            Rounding::Up
        } else {
            Rounding::Nearest
        }
    }
}

/// The function of an arithmetic instruction. `ty` is its last type.
pub fn arithmetic(name: &str, suffixes: Suffixes, ty: Type) -> Option<Lanes> {
    if suffixes.has("cc") {
        return None;
    }
    match ty {
        Type::F32 => floating::singles(name, suffixes),
        Type::F64 => floating::doubles(name, suffixes),
        Type::F16 | Type::F16x2 | Type::BF16 | Type::BF16x2 => {
            crate::halves::halves(name, suffixes, ty)
        }
        _ => integer::integers(name, suffixes, ty),
    }
}
