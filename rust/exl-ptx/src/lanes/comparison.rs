//! Comparisons: a bit for each lane.

use std::cmp::Ordering;

use super::{Doubles, Lanes, Type, Words, f, g};
use crate::float;

/// Comparison `how` of two operands.
pub fn comparison(how: &str, ty: Type) -> Option<Lanes> {
    macro_rules! order { ($v:ident, $x:ty, $conv:expr) => {
        Some(match how {
            "eq" => compare!($v, $x, a, b => $conv(a) == $conv(b)),
            "ne" => compare!($v, $x, a, b => $conv(a) != $conv(b)),
            "lt" | "lo" => compare!($v, $x, a, b => $conv(a) < $conv(b)),
            "le" | "ls" => compare!($v, $x, a, b => $conv(a) <= $conv(b)),
            "gt" | "hi" => compare!($v, $x, a, b => $conv(a) > $conv(b)),
            "ge" | "hs" => compare!($v, $x, a, b => $conv(a) >= $conv(b)),
            _ => return None,
        })
    }; }
    // With a NaN, ordered comparisons are false and unordered ones, which end in `u`, are true.
    macro_rules! floats { ($v:ident, $x:ty, $conv:expr) => {
        Some(match how {
            "ne" => compare!($v, $x, a, b => $conv(a).partial_cmp(&$conv(b)).is_some_and(Ordering::is_ne)),
            "equ" => compare!($v, $x, a, b => $conv(a).partial_cmp(&$conv(b)).is_none_or(Ordering::is_eq)),
            "neu" => compare!($v, $x, a, b => $conv(a).partial_cmp(&$conv(b)).is_none_or(Ordering::is_ne)),
            "ltu" => compare!($v, $x, a, b => $conv(a).partial_cmp(&$conv(b)).is_none_or(Ordering::is_lt)),
            "leu" => compare!($v, $x, a, b => $conv(a).partial_cmp(&$conv(b)).is_none_or(Ordering::is_le)),
            "gtu" => compare!($v, $x, a, b => $conv(a).partial_cmp(&$conv(b)).is_none_or(Ordering::is_gt)),
            "geu" => compare!($v, $x, a, b => $conv(a).partial_cmp(&$conv(b)).is_none_or(Ordering::is_ge)),
            "num" => compare!($v, $x, a, b => !$conv(a).is_nan() && !$conv(b).is_nan()),
            "nan" => compare!($v, $x, a, b => $conv(a).is_nan() || $conv(b).is_nan()),
            _ => return order!($v, $x, $conv),
        })
    }; }
    fn s16(a: u32) -> i16 {
        a as i16
    }
    fn u16(a: u32) -> u16 {
        a as u16
    }
    fn s32(a: u32) -> i32 {
        a as i32
    }
    fn u32(a: u32) -> u32 {
        a
    }
    fn s64(a: u64) -> i64 {
        a as i64
    }
    fn u64(a: u64) -> u64 {
        a
    }
    fn h(a: u32) -> f64 {
        float::half(a)
    }
    fn b(a: u32) -> f64 {
        float::brain(a)
    }
    match ty {
        Type::U16 | Type::B16 => order!(C2, Words, u16),
        Type::S16 => order!(C2, Words, s16),
        Type::U32 | Type::B32 => order!(C2, Words, u32),
        Type::S32 => order!(C2, Words, s32),
        Type::U64 | Type::B64 => order!(C2d, Doubles, u64),
        Type::S64 => order!(C2d, Doubles, s64),
        Type::F32 => floats!(C2, Words, f),
        Type::F64 => floats!(C2d, Doubles, g),
        Type::F16 => floats!(C2, Words, h),
        Type::BF16 => floats!(C2, Words, b),
        _ => None,
    }
}
