//! Integer and bit instructions.

use super::{Doubles, Lanes, Suffixes, Type, Words};

/// The function of an integer instruction. `ty` is its last type.
pub(super) fn integers(name: &str, suffixes: Suffixes, ty: Type) -> Option<Lanes> {
    match name {
        "add" if suffixes.has("sat") => integers2!(ty, T, a, b => T::saturating_add(a, b)),
        "sub" if suffixes.has("sat") => integers2!(ty, T, a, b => T::saturating_sub(a, b)),
        "add" => integers2!(ty, T, a, b => T::wrapping_add(a, b)),
        "sub" => integers2!(ty, T, a, b => T::wrapping_sub(a, b)),
        "mul" if suffixes.has("wide") => wide(ty),
        "mul" if suffixes.has("hi") => high(ty),
        "mul" => integers2!(ty, T, a, b => T::wrapping_mul(a, b)),
        "mul24" => Some(if ty == Type::U32 {
            w2!(a, b => (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff))
        } else {
            w2!(a, b => (((a << 8) as i32 >> 8).wrapping_mul((b << 8) as i32 >> 8)) as u32)
        }),
        "mad" if suffixes.has("wide") => Some(match ty {
            Type::U32 => d3wwd!(a, b, c => u64::from(a).wrapping_mul(u64::from(b)).wrapping_add(c)),
            Type::S32 => {
                d3wwd!(a, b, c => (i64::from(a as i32).wrapping_mul(i64::from(b as i32)) as u64).wrapping_add(c))
            }
            Type::U16 => w3!(a, b, c => (a & 0xffff).wrapping_mul(b & 0xffff).wrapping_add(c)),
            Type::S16 => {
                w3!(a, b, c => (i32::from(a as i16) * i32::from(b as i16)).wrapping_add(c as i32) as u32)
            }
            _ => return None,
        }),
        "mad" if suffixes.has("hi") => Some(match ty {
            Type::U32 => {
                w3!(a, b, c => (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c))
            }
            Type::S32 => {
                w3!(a, b, c => (((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32).wrapping_add(c))
            }
            _ => return None,
        }),
        "mad" => Some(match ty {
            Type::U16 | Type::S16 => w3!(a, b, c => a.wrapping_mul(b).wrapping_add(c) & 0xffff),
            Type::U32 | Type::S32 => w3!(a, b, c => a.wrapping_mul(b).wrapping_add(c)),
            Type::U64 | Type::S64 => d3!(a, b, c => a.wrapping_mul(b).wrapping_add(c)),
            _ => return None,
        }),
        // A division by zero gives all ones on the cards; the value is unspecified.
        "div" => integers2!(ty, T, a, b => if b == 0 { !0 } else { T::wrapping_div(a, b) }),
        "rem" => integers2!(ty, T, a, b => if b == 0 { a } else { T::wrapping_rem(a, b) }),
        "min" => integers2!(ty, T, a, b => T::min(a, b)),
        "max" => integers2!(ty, T, a, b => T::max(a, b)),
        "abs" => integers1!(ty, T, a => T::wrapping_abs(a)),
        "neg" => integers1!(ty, T, a => T::wrapping_neg(a)),
        "sad" => Some(match ty {
            Type::U32 => w3!(a, b, c => a.abs_diff(b).wrapping_add(c)),
            Type::S32 => w3!(a, b, c => (a as i32).abs_diff(b as i32).wrapping_add(c)),
            _ => return None,
        }),
        _ => bits(name, suffixes, ty),
    }
}

fn wide(ty: Type) -> Option<Lanes> {
    Some(match ty {
        Type::U16 => w2!(a, b => (a & 0xffff).wrapping_mul(b & 0xffff)),
        Type::S16 => w2!(a, b => (i32::from(a as i16) * i32::from(b as i16)) as u32),
        Type::U32 => d2ww!(a, b => u64::from(a) * u64::from(b)),
        Type::S32 => d2ww!(a, b => (i64::from(a as i32) * i64::from(b as i32)) as u64),
        _ => return None,
    })
}

fn high(ty: Type) -> Option<Lanes> {
    Some(match ty {
        Type::U16 => w2!(a, b => ((a & 0xffff) * (b & 0xffff)) >> 16),
        Type::S16 => {
            w2!(a, b => (((i32::from(a as i16) * i32::from(b as i16)) >> 16) as u32) & 0xffff)
        }
        Type::U32 => w2!(a, b => ((u64::from(a) * u64::from(b)) >> 32) as u32),
        Type::S32 => w2!(a, b => ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32),
        Type::U64 => d2!(a, b => ((u128::from(a) * u128::from(b)) >> 64) as u64),
        Type::S64 => d2!(a, b => ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64),
        _ => return None,
    })
}

fn bits(name: &str, suffixes: Suffixes, ty: Type) -> Option<Lanes> {
    match name {
        "and" => integers2!(ty, T, a, b => a & b),
        "or" => integers2!(ty, T, a, b => a | b),
        "xor" => integers2!(ty, T, a, b => a ^ b),
        "not" => integers1!(ty, T, a => !a),
        "cnot" => integers1!(ty, T, a => T::from(a == 0)),
        "shl" => Some(match ty {
            Type::B16 => w2!(a, b => if b < 16 { (a << b) & 0xffff } else { 0 }),
            Type::B32 => w2!(a, b => if b < 32 { a << b } else { 0 }),
            Type::B64 => d2dw!(a, b => if b < 64 { a << b } else { 0 }),
            _ => return None,
        }),
        "shr" => Some(match ty {
            Type::B16 | Type::U16 => w2!(a, b => if b < 16 { (a & 0xffff) >> b } else { 0 }),
            Type::S16 => w2!(a, b => (i32::from(a as i16) >> b.min(15)) as u32 & 0xffff),
            Type::B32 | Type::U32 => w2!(a, b => if b < 32 { a >> b } else { 0 }),
            Type::S32 => w2!(a, b => ((a as i32) >> b.min(31)) as u32),
            Type::B64 | Type::U64 => d2dw!(a, b => if b < 64 { a >> b } else { 0 }),
            Type::S64 => d2dw!(a, b => ((a as i64) >> b.min(63)) as u64),
            _ => return None,
        }),
        "shf" => Some(match (suffixes.has("l"), suffixes.has("wrap")) {
            (true, true) => w3!(a, b, c => funnel(a, b, 32 - (c & 31))),
            (true, false) => w3!(a, b, c => funnel(a, b, 32 - c.min(32))),
            (false, true) => w3!(a, b, c => funnel(a, b, c & 31)),
            (false, false) => w3!(a, b, c => funnel(a, b, c.min(32))),
        }),
        "lop3" => Some(w4!(a, b, c, table => lop3(a, b, c, table))),
        "prmt" => Some(if suffixes.0.len() > 1 {
            return permute_mode(suffixes);
        } else {
            w3!(a, b, c => permute(a, b, c))
        }),
        "bfe" => Some(match ty {
            Type::U32 => w3!(a, b, c => extract(u64::from(a), b, c, 32, false) as u32),
            Type::S32 => w3!(a, b, c => extract(a as i32 as i64 as u64, b, c, 32, true) as u32),
            Type::U64 => {
                three!(D3dww, Doubles, Words, Words, Doubles, a, b, c => extract(a, b, c, 64, false))
            }
            Type::S64 => {
                three!(D3dww, Doubles, Words, Words, Doubles, a, b, c => extract(a, b, c, 64, true))
            }
            _ => return None,
        }),
        "bfi" => Some(match ty {
            Type::B32 => w4!(a, b, at, n => insert(u64::from(a), u64::from(b), at, n, 32) as u32),
            Type::B64 => {
                fn apply(x: &Doubles, y: &Doubles, z: &Words, w: &Words) -> Doubles {
                    std::array::from_fn(|i| insert(x[i], y[i], z[i], w[i], 64))
                }
                Lanes::D4(apply)
            }
            _ => return None,
        }),
        "bfind" => Some(match (ty, suffixes.has("shiftamt")) {
            (Type::U32, false) => w1!(a => if a == 0 { !0 } else { a.ilog2() }),
            (Type::U32, true) => w1!(a => if a == 0 { !0 } else { a.leading_zeros() }),
            (Type::S32, false) => {
                w1!(a => { let a = if (a as i32) < 0 { !a } else { a }; if a == 0 { !0 } else { a.ilog2() } })
            }
            (Type::S32, true) => {
                w1!(a => { let a = if (a as i32) < 0 { !a } else { a }; if a == 0 { !0 } else { a.leading_zeros() } })
            }
            (Type::U64, false) => w1d!(a => if a == 0 { !0 } else { a.ilog2() }),
            (Type::U64, true) => w1d!(a => if a == 0 { !0 } else { a.leading_zeros() }),
            _ => return None,
        }),
        "clz" => Some(if ty == Type::B64 {
            w1d!(a => a.leading_zeros())
        } else {
            w1!(a => a.leading_zeros())
        }),
        "popc" => Some(if ty == Type::B64 {
            w1d!(a => a.count_ones())
        } else {
            w1!(a => a.count_ones())
        }),
        "brev" => Some(if ty == Type::B64 {
            d1!(a => a.reverse_bits())
        } else {
            w1!(a => a.reverse_bits())
        }),
        "bmsk" => Some(w2!(at, n => (extract(!0, 0, n, 64, false) << at.min(63)) as u32)),
        "fns" => None,
        "dp4a" => Some(
            match (suffixes.0.first().copied(), suffixes.0.get(1).copied()) {
                (Some("u32"), Some("u32")) => w3!(a, b, c => dot4(a, b, c, false, false)),
                (Some("s32"), Some("u32")) => w3!(a, b, c => dot4(a, b, c, true, false)),
                (Some("u32"), Some("s32")) => w3!(a, b, c => dot4(a, b, c, false, true)),
                _ => w3!(a, b, c => dot4(a, b, c, true, true)),
            },
        ),
        _ => None,
    }
}

fn funnel(low: u32, high: u32, shift: u32) -> u32 {
    (((u64::from(high) << 32) | u64::from(low)) >> shift) as u32
}

fn lop3(a: u32, b: u32, c: u32, table: u32) -> u32 {
    let mut out = 0;
    for case in 0..8 {
        let pick = |value: u32, bit: u32| if case & bit != 0 { value } else { !value };
        let term = pick(a, 4) & pick(b, 2) & pick(c, 1);
        out |= term & 0u32.wrapping_sub((table >> case) & 1);
    }
    out
}

fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = (u64::from(b) << 32) | u64::from(a);
    let mut out = 0;
    for i in 0..4 {
        let pick = selector >> (4 * i);
        let byte = (bytes >> (8 * (pick & 7))) as u8;
        let byte = if pick & 8 != 0 {
            ((byte as i8) >> 7) as u8
        } else {
            byte
        };
        out |= u32::from(byte) << (8 * i);
    }
    out
}

fn permute_mode(suffixes: Suffixes) -> Option<Lanes> {
    Some(if suffixes.has("f4e") {
        w3!(a, b, c => permute(a, b, [0x3210, 0x4321, 0x5432, 0x6543][(c & 3) as usize]))
    } else if suffixes.has("b4e") {
        w3!(a, b, c => permute(a, b, [0x5670, 0x6701, 0x7012, 0x0123][(c & 3) as usize]))
    } else if suffixes.has("rc8") {
        w3!(a, b, c => permute(a, b, [0x0000, 0x1111, 0x2222, 0x3333][(c & 3) as usize]))
    } else if suffixes.has("ecl") {
        w3!(a, b, c => permute(a, b, [0x3210, 0x3211, 0x3222, 0x3333][(c & 3) as usize]))
    } else if suffixes.has("ecr") {
        w3!(a, b, c => permute(a, b, [0x0000, 0x1110, 0x2210, 0x3210][(c & 3) as usize]))
    } else if suffixes.has("rc16") {
        w3!(a, b, c => permute(a, b, [0x1010, 0x3232, 0x1010, 0x3232][(c & 3) as usize]))
    } else {
        return None;
    })
}

fn extract(value: u64, at: u32, count: u32, width: u32, signed: bool) -> u64 {
    let (at, count) = (at & 0xff, count & 0xff);
    if count == 0 {
        return 0;
    }
    let top = (at + count - 1).min(width - 1);
    let sign = if signed && (value >> top) & 1 == 1 {
        !0u64
    } else {
        0
    };
    let mut out = if at < width { value >> at } else { 0 };
    let kept = if at < width {
        (width - at).min(count)
    } else {
        0
    };
    let mask = if kept >= 64 { !0 } else { (1u64 << kept) - 1 };
    out &= mask;
    out | (sign & !mask)
}

fn insert(value: u64, into: u64, at: u32, count: u32, width: u32) -> u64 {
    let (at, count) = (at & 0xff, count & 0xff);
    if at >= width || count == 0 {
        return into;
    }
    let count = count.min(width - at);
    let mask = (if count >= 64 { !0 } else { (1u64 << count) - 1 }) << at;
    (into & !mask) | ((value << at) & mask)
}

fn dot4(a: u32, b: u32, c: u32, a_signed: bool, b_signed: bool) -> u32 {
    let mut sum = c as i32;
    for i in 0..4 {
        let part = |value: u32, signed| {
            let byte = (value >> (8 * i)) as u8;
            if signed {
                i32::from(byte as i8)
            } else {
                i32::from(byte)
            }
        };
        sum = sum.wrapping_add(part(a, a_signed) * part(b, b_signed));
    }
    sum as u32
}
