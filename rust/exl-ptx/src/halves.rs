//! Arithmetic of f16, bf16 and pairs of them.

use crate::float::{self, brain, brain_of, fused, half, half_of};
use crate::lanes::{Lanes, Suffixes, Type, Words};

macro_rules! each_half {
    ($ty:expr, $($x:ident / $a:ident),+ => $e:expr) => {{
        fn once(read: fn(u32) -> f64, write: fn(f64) -> u16, $($a: u32),+) -> u32 {
            $(let $a = read($a & 0xffff);)+
            u32::from(write($e))
        }
        fn twice(read: fn(u32) -> f64, write: fn(f64) -> u16, $($a: u32),+) -> u32 {
            once(read, write, $($a),+) | (once(read, write, $($a >> 16),+) << 16)
        }
        match $ty {
            Type::F16 => each_half!(@ $($x),+ => |i| once(half, half_of, $($x[i]),+)),
            Type::F16x2 => each_half!(@ $($x),+ => |i| twice(half, half_of, $($x[i]),+)),
            Type::BF16 => each_half!(@ $($x),+ => |i| once(brain, brain_of, $($x[i]),+)),
            _ => each_half!(@ $($x),+ => |i| twice(brain, brain_of, $($x[i]),+)),
        }
    }};
    (@ $x:ident => |$i:ident| $e:expr) => {{ fn apply($x: &Words) -> Words { std::array::from_fn(|$i| $e) } Lanes::W1(apply) }};
    (@ $x:ident, $y:ident => |$i:ident| $e:expr) => {{
        fn apply($x: &Words, $y: &Words) -> Words { std::array::from_fn(|$i| $e) }
        Lanes::W2(apply)
    }};
    (@ $x:ident, $y:ident, $z:ident => |$i:ident| $e:expr) => {{
        fn apply($x: &Words, $y: &Words, $z: &Words) -> Words { std::array::from_fn(|$i| $e) }
        Lanes::W3(apply)
    }};
}

fn smaller(a: f64, b: f64) -> f64 {
    if a.is_nan() || b < a || (a == b && b.is_sign_negative()) {
        b
    } else {
        a
    }
}

fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b > a || (a == b && b.is_sign_positive()) {
        b
    } else {
        a
    }
}

fn saturate(value: f64) -> f64 {
    if value.is_nan() {
        0.0
    } else {
        value.clamp(0.0, 1.0)
    }
}

/// `a + b`, `a - b` or `a * b` of pairs of halves by the processor's conversions: the rounding through single precision is exact.
#[cfg(target_arch = "x86_64")]
mod fast {
    use std::arch::x86_64::{
        _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_blendv_epi8, _mm_loadu_si128, _mm_packs_epi32,
        _mm_set1_epi16, _mm_storeu_si128, _mm256_add_ps, _mm256_castps_si256,
        _mm256_castsi256_si128, _mm256_cmp_ps, _mm256_cvtph_ps, _mm256_cvtps_ph,
        _mm256_extracti128_si256, _mm256_mul_ps, _mm256_sub_ps,
    };

    use super::Words;

    macro_rules! pairs {
        ($name:ident, $inner:ident, $op:ident) => {
            pub fn $name(x: &Words, y: &Words) -> Words {
                // SAFETY: chosen only where the processor has the instructions.
                unsafe { $inner(x, y) }
            }

            #[target_feature(enable = "avx2,f16c")]
            fn $inner(x: &Words, y: &Words) -> Words {
                let mut out = [0u32; 32];
                for i in (0..32).step_by(4) {
                    // SAFETY: four words from `i` on are inside of the arrays.
                    unsafe {
                        let a = _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().add(i).cast()));
                        let b = _mm256_cvtph_ps(_mm_loadu_si128(y.as_ptr().add(i).cast()));
                        let sum = $op(a, b);
                        let unordered =
                            _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(sum, sum));
                        let half = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(sum);
                        let nan = _mm_packs_epi32(
                            _mm256_castsi256_si128(unordered),
                            _mm256_extracti128_si256::<1>(unordered),
                        );
                        let half = _mm_blendv_epi8(half, _mm_set1_epi16(0x7fff), nan);
                        _mm_storeu_si128(out.as_mut_ptr().add(i).cast(), half);
                    }
                }
                out
            }
        };
    }
    pairs!(add, add_inner, _mm256_add_ps);
    pairs!(sub, sub_inner, _mm256_sub_ps);
    pairs!(mul, mul_inner, _mm256_mul_ps);

    pub fn usable() -> bool {
        is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx2")
    }
}

#[cfg(target_arch = "x86_64")]
fn quick(name: &str) -> Option<Lanes> {
    if !fast::usable() {
        return None;
    }
    match name {
        "add" => Some(Lanes::W2(fast::add)),
        "sub" => Some(Lanes::W2(fast::sub)),
        "mul" => Some(Lanes::W2(fast::mul)),
        _ => None,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn quick(_: &str) -> Option<Lanes> {
    None
}

/// The function of an arithmetic instruction on halves.
pub fn halves(name: &str, s: Suffixes, ty: Type) -> Option<Lanes> {
    if s.rounding() != float::Rounding::Nearest || s.has("ftz") {
        return None;
    }
    if ty == Type::F16x2
        && !s.has("sat")
        && let Some(found) = quick(name)
    {
        return Some(found);
    }
    Some(match (name, s.has("sat"), s.has("relu"), s.has("NaN")) {
        ("add", false, false, _) => each_half!(ty, x / a, y / b => fused(1.0, a, b)),
        ("sub", false, false, _) => each_half!(ty, x / a, y / b => fused(-1.0, b, a)),
        ("mul", false, false, _) => each_half!(ty, x / a, y / b => a * b),
        ("add", true, false, _) => each_half!(ty, x / a, y / b => saturate(fused(1.0, a, b))),
        ("mul", true, false, _) => each_half!(ty, x / a, y / b => saturate(a * b)),
        ("fma", false, false, _) => each_half!(ty, x / a, y / b, z / c => fused(a, b, c)),
        ("fma", true, false, _) => each_half!(ty, x / a, y / b, z / c => saturate(fused(a, b, c))),
        ("fma", false, true, _) => {
            each_half!(ty, x / a, y / b, z / c => { let v = fused(a, b, c); if v < 0.0 { 0.0 } else { v } })
        }
        ("min", _, _, false) => each_half!(ty, x / a, y / b => smaller(a, b)),
        ("max", _, _, false) => each_half!(ty, x / a, y / b => larger(a, b)),
        ("min", _, _, true) => {
            each_half!(ty, x / a, y / b => if a.is_nan() || b.is_nan() { f64::NAN } else { smaller(a, b) })
        }
        ("max", _, _, true) => {
            each_half!(ty, x / a, y / b => if a.is_nan() || b.is_nan() { f64::NAN } else { larger(a, b) })
        }
        ("neg", ..) => sign(ty, true),
        ("abs", ..) => sign(ty, false),
        ("ex2", ..) => each_half!(ty, x / a => a.exp2()),
        ("tanh", ..) => each_half!(ty, x / a => a.tanh()),
        _ => return None,
    })
}

fn sign(ty: Type, flip: bool) -> Lanes {
    fn neg(x: &Words) -> Words {
        x.map(|a| (a ^ 0x8000) & 0xffff)
    }
    fn neg2(x: &Words) -> Words {
        x.map(|a| a ^ 0x8000_8000)
    }
    fn abs(x: &Words) -> Words {
        x.map(|a| a & 0x7fff)
    }
    fn abs2(x: &Words) -> Words {
        x.map(|a| a & 0x7fff_7fff)
    }
    Lanes::W1(match (matches!(ty, Type::F16 | Type::BF16), flip) {
        (true, true) => neg,
        (true, false) => abs,
        (false, true) => neg2,
        (false, false) => abs2,
    })
}
