//! Rounding of floating-point results: exact conversions between widths, directed rounding, fused operations.

use half::{bf16, f16};

/// The NaN that PTX instructions of single precision return.
pub const NAN32: u32 = 0x7fff_ffff;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

/// A finite sum as a rounded value and its exact error.
pub fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let from_b = sum - a;
    let error = (a - (sum - from_b)) + (b - from_b);
    (sum, if sum.is_finite() { error } else { 0.0 })
}

/// `sum + error` rounded to odd: a second rounding to at most 51 bits is then correct.
pub fn to_odd(sum: f64, error: f64) -> f64 {
    if error == 0.0 || !sum.is_finite() || sum.to_bits() & 1 == 1 {
        return sum;
    }
    // The neighbour towards the exact value has an odd last bit.
    let away = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if away {
        sum.to_bits() + 1
    } else {
        sum.to_bits() - 1
    })
}

/// A double as single precision, rounded to odd.
fn single_to_odd(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) == value || !value.is_finite() || near.to_bits() & 1 == 1 {
        return near;
    }
    if near.is_infinite() {
        return f32::from_bits(near.to_bits() - 1);
    }
    let away = f64::from(near).abs() < value.abs();
    f32::from_bits(if away {
        near.to_bits() + 1
    } else {
        near.to_bits() - 1
    })
}

/// The exact `value + error` in single precision.
pub fn single(value: f64, error: f64, rounding: Rounding) -> f32 {
    let near = to_odd(value, error) as f32;
    if rounding == Rounding::Nearest || near.is_nan() || value.is_infinite() {
        return near;
    }
    let difference = f64::from(near) - value;
    let above = difference > 0.0 || (difference == 0.0 && error < 0.0);
    let below = difference < 0.0 || (difference == 0.0 && error > 0.0);
    match rounding {
        Rounding::Down if above => near.next_down(),
        Rounding::Up if below => near.next_up(),
        Rounding::Zero if value > 0.0 && above => near.next_down(),
        Rounding::Zero if value < 0.0 && below => near.next_up(),
        _ => near,
    }
}

/// A double in half precision, rounded to nearest even once.
pub fn half_of(value: f64) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    f16::from_f32(single_to_odd(value)).to_bits()
}

/// A double as bfloat16, rounded to nearest even once.
pub fn brain_of(value: f64) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    bf16::from_f32(single_to_odd(value)).to_bits()
}

pub fn half(bits: u32) -> f64 {
    f64::from(f16::from_bits(bits as u16).to_f32())
}

pub fn brain(bits: u32) -> f64 {
    f64::from(f32::from_bits(bits << 16))
}

/// `a * b + c` of halves or bfloat16, as a double that one more rounding makes exact.
pub fn fused(a: f64, b: f64, c: f64) -> f64 {
    // `a * b` of such numbers is exact in a double.
    let product = a * b;
    let (sum, error) = two_sum(product, c);
    to_odd(sum, error)
}

/// A single in half or bfloat16 precision by another rounding than to nearest.
pub fn narrow(value: f32, brain: bool, rounding: Rounding) -> u16 {
    let (near, back) = if brain {
        let near = bf16::from_f32(value);
        (near.to_bits(), near.to_f32())
    } else {
        let near = f16::from_f32(value);
        (near.to_bits(), near.to_f32())
    };
    if value.is_nan() {
        return 0x7fff;
    }
    if rounding == Rounding::Nearest || value.is_infinite() {
        return near;
    }
    let larger = back.abs() > value.abs();
    let smaller = back.abs() < value.abs();
    let towards_zero = match rounding {
        Rounding::Down => value > 0.0,
        Rounding::Up => value < 0.0,
        _ => true,
    };
    match (towards_zero, larger, smaller) {
        (true, true, _) => near - 1,
        (false, _, true) => near + 1,
        _ => near,
    }
}

/// An `e4m3` or `e5m2` number of eight bits, saturated to the largest finite one.
pub fn eight(value: f32, mantissa: u32) -> u8 {
    let (bias, largest, nan) = if mantissa == 3 {
        (7, 0x7e_u8, 0x7f_u8)
    } else {
        (15, 0x7b, 0x7f)
    };
    if value.is_nan() {
        return nan;
    }
    let sign = ((value.to_bits() >> 24) & 0x80) as u8;
    let size = f64::from(value.abs());
    if size == 0.0 {
        return sign;
    }
    let exponent = (size.log2().floor() as i32).max(1 - bias);
    let unit = f64::from(exponent - mantissa as i32).exp2();
    let steps = (size / unit).round_ties_even();
    let bits = steps as i64 + (i64::from(exponent + bias - 1) << mantissa);
    sign | bits.clamp(0, i64::from(largest)) as u8
}

/// The value of an `e4m3` or `e5m2` number.
pub fn of_eight(bits: u8, mantissa: u32) -> f32 {
    let bias = if mantissa == 3 { 7 } else { 15 };
    let sign = if bits & 0x80 != 0 { -1.0 } else { 1.0 };
    let exponent = i32::from((bits & 0x7f) >> mantissa);
    let fraction = f32::from(bits & ((1 << mantissa) - 1));
    if mantissa == 3 && bits & 0x7f == 0x7f {
        return f32::NAN;
    }
    if mantissa == 2 && exponent == 31 {
        return if fraction == 0.0 {
            sign * f32::INFINITY
        } else {
            f32::NAN
        };
    }
    let scale = (exponent.max(1) - bias - mantissa as i32) as f32;
    let hidden = if exponent > 0 {
        (1 << mantissa) as f32
    } else {
        0.0
    };
    sign * (hidden + fraction) * scale.exp2()
}
