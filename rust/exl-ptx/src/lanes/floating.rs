//! Single and double precision arithmetic.

use super::{Doubles, Lanes, Suffixes, Words, f, flush, g, r, saturate};
use crate::float::{self, NAN32, Rounding};

fn smaller(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        b
    } else if b.is_nan() || a < b || (a == b && a.is_sign_negative()) {
        a
    } else {
        b
    }
}

fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        b
    } else if b.is_nan() || a > b || (a == b && a.is_sign_positive()) {
        a
    } else {
        b
    }
}

/// The exact result of an addition as a double and its error, rounded.
fn directed_sum(a: f32, b: f32, rounding: Rounding) -> f32 {
    let (sum, error) = float::two_sum(f64::from(a), f64::from(b));
    float::single(sum, error, rounding)
}

fn directed_fused(a: f32, b: f32, c: f32, rounding: Rounding) -> f32 {
    let (sum, error) = float::two_sum(f64::from(a) * f64::from(b), f64::from(c));
    float::single(sum, error, rounding)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fused_fast(x: &Words, y: &Words, z: &Words) -> Words {
    let mut o = [0; 32];
    for i in 0..32 {
        let value = f32::mul_add(f(x[i]), f(y[i]), f(z[i]));
        o[i] = if value.is_nan() {
            NAN32
        } else {
            value.to_bits()
        };
    }
    o
}

#[cfg(target_arch = "x86_64")]
fn fused_lanes() -> Lanes {
    fn fast(x: &Words, y: &Words, z: &Words) -> Words {
        // SAFETY: chosen only where the processor has the instructions.
        unsafe { fused_fast(x, y, z) }
    }
    if is_x86_feature_detected!("fma") && is_x86_feature_detected!("avx2") {
        Lanes::W3(fast)
    } else {
        w3!(a, b, c => r(f32::mul_add(f(a), f(b), f(c))))
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn fused_lanes() -> Lanes {
    w3!(a, b, c => r(f32::mul_add(f(a), f(b), f(c))))
}

pub(super) fn singles(name: &str, s: Suffixes) -> Option<Lanes> {
    let rounding = s.rounding();
    let directed = rounding != Rounding::Nearest;
    Some(match name {
        "add" if directed => match rounding {
            Rounding::Down => w2!(a, b => r(directed_sum(f(a), f(b), Rounding::Down))),
            Rounding::Up => w2!(a, b => r(directed_sum(f(a), f(b), Rounding::Up))),
            _ => w2!(a, b => r(directed_sum(f(a), f(b), Rounding::Zero))),
        },
        "sub" if directed => match rounding {
            Rounding::Down => w2!(a, b => r(directed_sum(f(a), -f(b), Rounding::Down))),
            Rounding::Up => w2!(a, b => r(directed_sum(f(a), -f(b), Rounding::Up))),
            _ => w2!(a, b => r(directed_sum(f(a), -f(b), Rounding::Zero))),
        },
        "mul" if directed => match rounding {
            Rounding::Down => {
                w2!(a, b => r(float::single(f64::from(f(a)) * f64::from(f(b)), 0.0, Rounding::Down)))
            }
            Rounding::Up => {
                w2!(a, b => r(float::single(f64::from(f(a)) * f64::from(f(b)), 0.0, Rounding::Up)))
            }
            _ => {
                w2!(a, b => r(float::single(f64::from(f(a)) * f64::from(f(b)), 0.0, Rounding::Zero)))
            }
        },
        "fma" | "mad" if directed => match rounding {
            Rounding::Down => w3!(a, b, c => r(directed_fused(f(a), f(b), f(c), Rounding::Down))),
            Rounding::Up => w3!(a, b, c => r(directed_fused(f(a), f(b), f(c), Rounding::Up))),
            _ => w3!(a, b, c => r(directed_fused(f(a), f(b), f(c), Rounding::Zero))),
        },
        "add" => finished!(w2, s, a, b => a + b),
        "sub" => finished!(w2, s, a, b => a - b),
        "mul" => finished!(w2, s, a, b => a * b),
        "fma" | "mad" if !s.has("ftz") && !s.has("sat") => fused_lanes(),
        "fma" | "mad" => finished!(w3, s, a, b, c => f32::mul_add(a, b, c)),
        "div" if directed => return None,
        "div" => finished!(w2, s, a, b => a / b),
        "min" if s.has("NaN") => {
            finished!(w2, s, a, b => if a.is_nan() || b.is_nan() { f32::NAN } else { smaller(a, b) })
        }
        "max" if s.has("NaN") => {
            finished!(w2, s, a, b => if a.is_nan() || b.is_nan() { f32::NAN } else { larger(a, b) })
        }
        "min" => finished!(w2, s, a, b => smaller(a, b)),
        "max" => finished!(w2, s, a, b => larger(a, b)),
        "abs" if s.has("ftz") => w1!(a => flush(f(a)).to_bits() & 0x7fff_ffff),
        "abs" => w1!(a => a & 0x7fff_ffff),
        "neg" if s.has("ftz") => w1!(a => flush(f(a)).to_bits() ^ (1 << 31)),
        "neg" => w1!(a => a ^ (1 << 31)),
        "copysign" => w2!(a, b => (a & (1 << 31)) | (b & 0x7fff_ffff)),
        "rcp" | "sqrt" if directed => return None,
        "rcp" => finished!(w1, s, a => 1.0 / a),
        "sqrt" => finished!(w1, s, a => a.sqrt()),
        "rsqrt" => finished!(w1, s, a => (1.0 / f64::from(a).sqrt()) as f32),
        "ex2" => finished!(w1, s, a => f64::from(a).exp2() as f32),
        "lg2" => finished!(w1, s, a => f64::from(a).log2() as f32),
        "sin" => finished!(w1, s, a => f64::from(a).sin() as f32),
        "cos" => finished!(w1, s, a => f64::from(a).cos() as f32),
        "tanh" => finished!(w1, s, a => f64::from(a).tanh() as f32),
        _ => return None,
    })
}

pub(super) fn doubles(name: &str, s: Suffixes) -> Option<Lanes> {
    if s.rounding() != Rounding::Nearest {
        return None;
    }
    Some(match name {
        "add" => d2!(a, b => (g(a) + g(b)).to_bits()),
        "sub" => d2!(a, b => (g(a) - g(b)).to_bits()),
        "mul" => d2!(a, b => (g(a) * g(b)).to_bits()),
        "div" => d2!(a, b => (g(a) / g(b)).to_bits()),
        "fma" | "mad" => d3!(a, b, c => f64::mul_add(g(a), g(b), g(c)).to_bits()),
        "min" => {
            d2!(a, b => { let (a, b) = (g(a), g(b)); (if a.is_nan() || b < a || (a == b && b.is_sign_negative()) { b } else { a }).to_bits() })
        }
        "max" => {
            d2!(a, b => { let (a, b) = (g(a), g(b)); (if a.is_nan() || b > a || (a == b && b.is_sign_positive()) { b } else { a }).to_bits() })
        }
        "abs" => d1!(a => a & !(1 << 63)),
        "neg" => d1!(a => a ^ (1 << 63)),
        "copysign" => d2!(a, b => (a & (1 << 63)) | (b & !(1 << 63))),
        "rcp" => d1!(a => (1.0 / g(a)).to_bits()),
        "sqrt" => d1!(a => g(a).sqrt().to_bits()),
        "rsqrt" => d1!(a => (1.0 / g(a).sqrt()).to_bits()),
        _ => return None,
    })
}
