//! Conversions between types (`cvt`).

use super::{Doubles, Lanes, Suffixes, Type, Words, f, flush, g, r, saturate};
use crate::float::{self, Rounding};

/// The function of `cvt` with these suffixes from `from` to `to`.
pub fn conversion(s: Suffixes, to: Type, from: Type) -> Option<Lanes> {
    use Type::{BF16, F16, F32, F64};
    let integral = ["rni", "rzi", "rmi", "rpi"]
        .into_iter()
        .find(|way| s.has(way));
    let is_float = |ty| matches!(ty, F16 | BF16 | F32 | F64);
    match (is_float(to), is_float(from)) {
        (false, false) => integer_conversion(s, to, from),
        (false, true) => to_integer(integral?, to, from, s),
        (true, false) => from_integer(to, from, s),
        (true, true) => between_floats(s, integral, to, from),
    }
}

fn integer_conversion(s: Suffixes, to: Type, from: Type) -> Option<Lanes> {
    use Type::{B8, B16, B32, B64, S8, S16, S32, S64, U8, U16, U32, U64};
    macro_rules! narrow { ($($from:pat => $value:expr),*) => { match (from, to) {
        $(
            ($from, U8 | B8) if s.has("sat") => w1!(a => { let v: i64 = $value(u64::from(a)); v.clamp(0, 255) as u32 }),
            ($from, S8) if s.has("sat") => w1!(a => { let v: i64 = $value(u64::from(a)); v.clamp(-128, 127) as i32 as u32 }),
            ($from, U16) if s.has("sat") => w1!(a => { let v: i64 = $value(u64::from(a)); v.clamp(0, 65535) as u32 }),
            ($from, S16) if s.has("sat") => w1!(a => { let v: i64 = $value(u64::from(a)); v.clamp(-32768, 32767) as u32 & 0xffff }),
            ($from, U32) if s.has("sat") => w1!(a => { let v: i64 = $value(u64::from(a)); v.clamp(0, i64::from(u32::MAX)) as u32 }),
            ($from, S32) if s.has("sat") => w1!(a => { let v: i64 = $value(u64::from(a)); v.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as u32 }),
            ($from, U8 | B8) => w1!(a => $value(u64::from(a)) as u8 as u32),
            ($from, S8) => w1!(a => $value(u64::from(a)) as i8 as i32 as u32),
            ($from, U16 | B16 | S16) => w1!(a => $value(u64::from(a)) as u32 & 0xffff),
            ($from, U32 | S32 | B32) => w1!(a => $value(u64::from(a)) as u32),
            ($from, U64 | S64 | B64) => d1w!(a => $value(u64::from(a)) as u64),
        )*
        (U64 | S64 | B64, U8 | B8) if !s.has("sat") => w1d!(a => a as u8 as u32),
        (U64 | S64 | B64, S8) if !s.has("sat") => w1d!(a => a as i8 as i32 as u32),
        (U64 | S64 | B64, U16 | B16 | S16) if !s.has("sat") => w1d!(a => a as u32 & 0xffff),
        (U64 | S64 | B64, U32 | S32 | B32) if !s.has("sat") => w1d!(a => a as u32),
        (U64 | S64 | B64, U64 | S64 | B64) if !s.has("sat") => d1!(a => a),
        _ => return None,
    } } }
    Some(narrow!(
        U8 | B8 => |a: u64| i64::from(a as u8),
        S8 => |a: u64| i64::from(a as i8),
        U16 | B16 => |a: u64| i64::from(a as u16),
        S16 => |a: u64| i64::from(a as i16),
        U32 | B32 => |a: u64| i64::from(a as u32),
        S32 => |a: u64| i64::from(a as i32)
    ))
}

fn to_integer(way: &str, to: Type, from: Type, s: Suffixes) -> Option<Lanes> {
    use Type::{BF16, F16, F32, F64, S8, S16, S32, S64, U8, U16, U32, U64};
    let ftz = s.has("ftz");
    macro_rules! by_way { ($m:ident, $conv:expr, $as:expr) => { match way {
        "rni" => $m!(a => $as($conv(a).round_ties_even())),
        "rzi" => $m!(a => $as($conv(a).trunc())),
        "rmi" => $m!(a => $as($conv(a).floor())),
        _ => $m!(a => $as($conv(a).ceil())),
    } } }
    // NaN becomes zero; values out of range saturate.
    fn u8_(v: f64) -> u32 {
        u32::from(v as u8)
    }
    fn s8_(v: f64) -> u32 {
        v as i8 as i32 as u32
    }
    fn u16_(v: f64) -> u32 {
        u32::from(v as u16)
    }
    fn s16_(v: f64) -> u32 {
        u32::from(v as i16 as u16)
    }
    fn u32_(v: f64) -> u32 {
        v as u32
    }
    fn s32_(v: f64) -> u32 {
        v as i32 as u32
    }
    fn u64_(v: f64) -> u64 {
        v as u64
    }
    fn s64_(v: f64) -> u64 {
        v as i64 as u64
    }
    fn single(a: u32) -> f64 {
        f64::from(f(a))
    }
    fn flushed(a: u32) -> f64 {
        f64::from(flush(f(a)))
    }
    macro_rules! by_type {
        ($w:ident, $d:ident, $conv:expr) => {
            match to {
                U8 => by_way!($w, $conv, u8_),
                S8 => by_way!($w, $conv, s8_),
                U16 => by_way!($w, $conv, u16_),
                S16 => by_way!($w, $conv, s16_),
                U32 => by_way!($w, $conv, u32_),
                S32 => by_way!($w, $conv, s32_),
                U64 => by_way!($d, $conv, u64_),
                S64 => by_way!($d, $conv, s64_),
                _ => return None,
            }
        };
    }
    Some(match from {
        F32 if ftz => by_type!(w1, d1w, flushed),
        F32 => by_type!(w1, d1w, single),
        F64 => by_type!(w1d, d1, g),
        F16 => by_type!(w1, d1w, float::half),
        BF16 => by_type!(w1, d1w, float::brain),
        _ => return None,
    })
}

fn from_integer(to: Type, from: Type, s: Suffixes) -> Option<Lanes> {
    use Type::{BF16, F16, F32, F64, S8, S16, S32, S64, U8, U16, U32, U64};
    if s.rounding() != Rounding::Nearest {
        return match (to, from, s.rounding()) {
            (F32, S32, Rounding::Zero) => {
                Some(w1!(a => r(float::single(f64::from(a as i32), 0.0, Rounding::Zero))))
            }
            (F32, U32, Rounding::Zero) => {
                Some(w1!(a => r(float::single(f64::from(a), 0.0, Rounding::Zero))))
            }
            (F32, U32, Rounding::Up) => {
                Some(w1!(a => r(float::single(f64::from(a), 0.0, Rounding::Up))))
            }
            (F32, U32, Rounding::Down) => {
                Some(w1!(a => r(float::single(f64::from(a), 0.0, Rounding::Down))))
            }
            _ => None,
        };
    }
    macro_rules! to_float { ($($from:pat => $v:expr),*; $($wide:pat => $w:expr),*) => { match (from, to) {
        $(($from, F32) => w1!(a => ($v(a) as f32).to_bits()),
          ($from, F64) => d1w!(a => ($v(a) as f64).to_bits()),
          ($from, F16) => w1!(a => u32::from(float::half_of($v(a) as f64))),
          ($from, BF16) => w1!(a => u32::from(float::brain_of($v(a) as f64))),)*
        $(($wide, F32) => w1d!(a => ($w(a) as f32).to_bits()),
          ($wide, F64) => d1!(a => ($w(a) as f64).to_bits()),)*
        _ => return None,
    } } }
    Some(to_float!(
        U8 => |a: u32| a as u8,
        S8 => |a: u32| a as i8,
        U16 => |a: u32| a as u16,
        S16 => |a: u32| a as i16,
        U32 => |a: u32| a,
        S32 => |a: u32| a as i32;
        U64 => |a: u64| a,
        S64 => |a: u64| a as i64
    ))
}

fn between_floats(s: Suffixes, integral: Option<&str>, to: Type, from: Type) -> Option<Lanes> {
    use Type::{BF16, F16, F32, F64};
    Some(match (from, to, integral) {
        (F32, F32, None) => finished!(w1, s, a => a),
        (F32, F32, Some("rni")) => finished!(w1, s, a => a.round_ties_even()),
        (F32, F32, Some("rzi")) => finished!(w1, s, a => a.trunc()),
        (F32, F32, Some("rmi")) => finished!(w1, s, a => a.floor()),
        (F32, F32, Some(_)) => finished!(w1, s, a => a.ceil()),
        (F64, F64, None) if s.has("sat") => {
            d1!(a => (if g(a).is_nan() { 0.0 } else { g(a).clamp(0.0, 1.0) }).to_bits())
        }
        (F64, F64, None) => d1!(a => a),
        (F64, F64, Some("rni")) => d1!(a => g(a).round_ties_even().to_bits()),
        (F64, F64, Some("rzi")) => d1!(a => g(a).trunc().to_bits()),
        (F64, F64, Some("rmi")) => d1!(a => g(a).floor().to_bits()),
        (F64, F64, Some(_)) => d1!(a => g(a).ceil().to_bits()),
        (F32, F64, None) => d1w!(a => f64::from(f(a)).to_bits()),
        (F64, F32, None) => match s.rounding() {
            Rounding::Nearest => w1d!(a => r(g(a) as f32)),
            Rounding::Zero => w1d!(a => r(float::single(g(a), 0.0, Rounding::Zero))),
            Rounding::Down => w1d!(a => r(float::single(g(a), 0.0, Rounding::Down))),
            Rounding::Up => w1d!(a => r(float::single(g(a), 0.0, Rounding::Up))),
        },
        (F16, F32, None) => w1!(a => r(float::half(a) as f32)),
        (BF16, F32, None) => w1!(a => r(float::brain(a) as f32)),
        (F16, F64, None) => d1w!(a => float::half(a).to_bits()),
        (F64, F16, None) => w1d!(a => u32::from(float::half_of(g(a)))),
        (F32, F16, None) if s.has("sat") => {
            w1!(a => u32::from(float::narrow(saturate(f(a)), false, Rounding::Nearest)))
        }
        (F32, F16 | BF16, None) if !s.has("sat") && !s.has("relu") => {
            match (to == BF16, s.rounding()) {
                (false, Rounding::Nearest) => {
                    w1!(a => u32::from(float::narrow(f(a), false, Rounding::Nearest)))
                }
                (false, Rounding::Zero) => {
                    w1!(a => u32::from(float::narrow(f(a), false, Rounding::Zero)))
                }
                (false, Rounding::Down) => {
                    w1!(a => u32::from(float::narrow(f(a), false, Rounding::Down)))
                }
                (false, Rounding::Up) => {
                    w1!(a => u32::from(float::narrow(f(a), false, Rounding::Up)))
                }
                (true, Rounding::Nearest) => {
                    w1!(a => u32::from(float::narrow(f(a), true, Rounding::Nearest)))
                }
                (true, Rounding::Zero) => {
                    w1!(a => u32::from(float::narrow(f(a), true, Rounding::Zero)))
                }
                (true, Rounding::Down) => {
                    w1!(a => u32::from(float::narrow(f(a), true, Rounding::Down)))
                }
                (true, Rounding::Up) => {
                    w1!(a => u32::from(float::narrow(f(a), true, Rounding::Up)))
                }
            }
        }
        (F16, F16, None) => w1!(a => a),
        (F16, F16, Some("rni")) => {
            w1!(a => u32::from(float::half_of(float::half(a).round_ties_even())))
        }
        (F16, F16, Some("rzi")) => w1!(a => u32::from(float::half_of(float::half(a).trunc()))),
        (F16, F16, Some("rmi")) => w1!(a => u32::from(float::half_of(float::half(a).floor()))),
        (F16, F16, Some(_)) => w1!(a => u32::from(float::half_of(float::half(a).ceil()))),
        _ => return None,
    })
}

/// `cvt` of a pair: the first operand becomes the upper half.
pub fn pair_conversion(s: Suffixes, to: &str) -> Option<Lanes> {
    macro_rules! packed { ($e:expr) => { w2!(high, low => (u32::from($e(f(high))) << 16) | u32::from($e(f(low)))) } }
    fn relu(value: f32) -> f32 {
        if value > 0.0 || value.is_nan() {
            value
        } else {
            0.0
        }
    }
    Some(match (to, s.has("rz"), s.has("relu")) {
        ("f16x2", false, false) => packed!(|v| float::narrow(v, false, Rounding::Nearest)),
        ("f16x2", true, false) => packed!(|v| float::narrow(v, false, Rounding::Zero)),
        ("f16x2", false, true) => packed!(|v| float::narrow(relu(v), false, Rounding::Nearest)),
        ("bf16x2", false, false) => packed!(|v| float::narrow(v, true, Rounding::Nearest)),
        ("bf16x2", true, false) => packed!(|v| float::narrow(v, true, Rounding::Zero)),
        ("bf16x2", false, true) => packed!(|v| float::narrow(relu(v), true, Rounding::Nearest)),
        ("e4m3x2", false, false) => {
            w2!(high, low => (u32::from(float::eight(f(high), 3)) << 8) | u32::from(float::eight(f(low), 3)))
        }
        ("e5m2x2", false, false) => {
            w2!(high, low => (u32::from(float::eight(f(high), 2)) << 8) | u32::from(float::eight(f(low), 2)))
        }
        _ => return None,
    })
}

/// `cvt` of a packed pair of eight-bit numbers to halves, or back.
pub fn eight_bit_conversion(to: &str, from: &str) -> Option<Lanes> {
    fn halves(a: u32, mantissa: u32) -> u32 {
        let one = |byte: u32| {
            u32::from(float::narrow(
                float::of_eight(byte as u8, mantissa),
                false,
                Rounding::Nearest,
            ))
        };
        one(a & 0xff) | (one((a >> 8) & 0xff) << 16)
    }
    fn eights(a: u32, mantissa: u32) -> u32 {
        let one = |bits: u32| u32::from(float::eight(float::half(bits & 0xffff) as f32, mantissa));
        one(a) | (one(a >> 16) << 8)
    }
    Some(match (to, from) {
        ("f16x2", "e4m3x2") => w1!(a => halves(a, 3)),
        ("f16x2", "e5m2x2") => w1!(a => halves(a, 2)),
        ("e4m3x2", "f16x2") => w1!(a => eights(a, 3)),
        ("e5m2x2", "f16x2") => w1!(a => eights(a, 2)),
        _ => return None,
    })
}
