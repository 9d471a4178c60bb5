//! Instructions without side effects as functions of 32 lanes, chosen by their PTX name.

use crate::float::{self, NAN32, Rounding};

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

macro_rules! w1 {
    ($a:ident => $e:expr) => {{
        fn apply(x: &Words) -> Words {
            let mut o = [0; 32];
            for i in 0..32 {
                let $a = x[i];
                o[i] = $e;
            }
            o
        }
        Lanes::W1(apply)
    }};
}
macro_rules! w1d {
    ($a:ident => $e:expr) => {{
        fn apply(x: &Doubles) -> Words {
            let mut o = [0; 32];
            for i in 0..32 {
                let $a = x[i];
                o[i] = $e;
            }
            o
        }
        Lanes::W1d(apply)
    }};
}
macro_rules! d1w {
    ($a:ident => $e:expr) => {{
        fn apply(x: &Words) -> Doubles {
            let mut o = [0; 32];
            for i in 0..32 {
                let $a = x[i];
                o[i] = $e;
            }
            o
        }
        Lanes::D1w(apply)
    }};
}
macro_rules! d1 {
    ($a:ident => $e:expr) => {{
        fn apply(x: &Doubles) -> Doubles {
            let mut o = [0; 32];
            for i in 0..32 {
                let $a = x[i];
                o[i] = $e;
            }
            o
        }
        Lanes::D1(apply)
    }};
}
macro_rules! two {
    ($v:ident, $x:ty, $y:ty, $o:ty, $a:ident, $b:ident => $e:expr) => {{
        fn apply(x: &$x, y: &$y) -> $o {
            let mut o = [0; 32];
            for i in 0..32 {
                let ($a, $b) = (x[i], y[i]);
                o[i] = $e;
            }
            o
        }
        Lanes::$v(apply)
    }};
}
macro_rules! w2 { ($a:ident, $b:ident => $e:expr) => { two!(W2, Words, Words, Words, $a, $b => $e) }; }
macro_rules! d2 { ($a:ident, $b:ident => $e:expr) => { two!(D2, Doubles, Doubles, Doubles, $a, $b => $e) }; }
macro_rules! d2dw { ($a:ident, $b:ident => $e:expr) => { two!(D2dw, Doubles, Words, Doubles, $a, $b => $e) }; }
macro_rules! d2ww { ($a:ident, $b:ident => $e:expr) => { two!(D2ww, Words, Words, Doubles, $a, $b => $e) }; }
macro_rules! three {
    ($v:ident, $x:ty, $y:ty, $z:ty, $o:ty, $a:ident, $b:ident, $c:ident => $e:expr) => {{
        fn apply(x: &$x, y: &$y, z: &$z) -> $o {
            let mut o = [0; 32];
            for i in 0..32 {
                let ($a, $b, $c) = (x[i], y[i], z[i]);
                o[i] = $e;
            }
            o
        }
        Lanes::$v(apply)
    }};
}
macro_rules! w3 { ($a:ident, $b:ident, $c:ident => $e:expr) => { three!(W3, Words, Words, Words, Words, $a, $b, $c => $e) }; }
macro_rules! d3 { ($a:ident, $b:ident, $c:ident => $e:expr) => { three!(D3, Doubles, Doubles, Doubles, Doubles, $a, $b, $c => $e) }; }
macro_rules! d3wwd { ($a:ident, $b:ident, $c:ident => $e:expr) => { three!(D3wwd, Words, Words, Doubles, Doubles, $a, $b, $c => $e) }; }
macro_rules! w4 {
    ($a:ident, $b:ident, $c:ident, $d:ident => $e:expr) => {{
        fn apply(x: &Words, y: &Words, z: &Words, w: &Words) -> Words {
            let mut o = [0; 32];
            for i in 0..32 {
                let ($a, $b, $c, $d) = (x[i], y[i], z[i], w[i]);
                o[i] = $e;
            }
            o
        }
        Lanes::W4(apply)
    }};
}
macro_rules! compare {
    ($v:ident, $x:ty, $a:ident, $b:ident => $e:expr) => {{
        fn apply(x: &$x, y: &$x) -> u32 {
            let mut o = 0;
            for i in 0..32 {
                let ($a, $b) = (x[i], y[i]);
                o |= u32::from($e) << i;
            }
            o
        }
        Lanes::$v(apply)
    }};
}

/// One definition for every integer type; `$t` names it in the expression.
macro_rules! integers2 { ($ty:expr, $t:ident, $a:ident, $b:ident => $e:expr) => {{
    use Type::*;
    Some(match $ty {
        U16 | B16 => w2!(x, y => { type $t = u16; let ($a, $b) = (x as $t, y as $t); let r: $t = $e; u32::from(r) }),
        S16 => w2!(x, y => { type $t = i16; let ($a, $b) = (x as $t, y as $t); let r: $t = $e; u32::from(r as u16) }),
        U32 | B32 => w2!(x, y => { type $t = u32; let ($a, $b) = (x, y); let r: $t = $e; r }),
        S32 => w2!(x, y => { type $t = i32; let ($a, $b) = (x as $t, y as $t); let r: $t = $e; r as u32 }),
        U64 | B64 => d2!(x, y => { type $t = u64; let ($a, $b) = (x, y); let r: $t = $e; r }),
        S64 => d2!(x, y => { type $t = i64; let ($a, $b) = (x as $t, y as $t); let r: $t = $e; r as u64 }),
        _ => return None,
    })
}}; }

macro_rules! integers1 { ($ty:expr, $t:ident, $a:ident => $e:expr) => {{
    use Type::*;
    Some(match $ty {
        S16 | B16 | U16 => w1!(x => { type $t = i16; let $a = x as $t; let r: $t = $e; u32::from(r as u16) }),
        S32 | B32 | U32 => w1!(x => { type $t = i32; let $a = x as $t; let r: $t = $e; r as u32 }),
        S64 | B64 | U64 => d1!(x => { type $t = i64; let $a = x as $t; let r: $t = $e; r as u64 }),
        _ => return None,
    })
}}; }

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

/// Suffixes of an instruction behind its name.
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
        Type::F32 => return singles(name, suffixes),
        Type::F64 => return doubles(name, suffixes),
        Type::F16 | Type::F16x2 | Type::BF16 | Type::BF16x2 => {
            return crate::halves::halves(name, suffixes, ty);
        }
        _ => {}
    }
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

/// Four variants of a function by `.ftz` and `.sat`.
macro_rules! finished {
    ($m:ident, $suffixes:expr, $($a:ident),+ => $e:expr) => {
        match ($suffixes.has("ftz"), $suffixes.has("sat")) {
            (false, false) => $m!($($a),+ => { $(let $a = f($a);)+ r($e) }),
            (true, false) => $m!($($a),+ => { $(let $a = flush(f($a));)+ r(flush($e)) }),
            (false, true) => $m!($($a),+ => { $(let $a = f($a);)+ r(saturate($e)) }),
            (true, true) => $m!($($a),+ => { $(let $a = flush(f($a));)+ r(saturate(flush($e))) }),
        }
    };
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

fn singles(name: &str, s: Suffixes) -> Option<Lanes> {
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

fn doubles(name: &str, s: Suffixes) -> Option<Lanes> {
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
    #[allow(clippy::nonminimal_bool)] // The unordered comparisons are negations of ordered ones: a NaN decides.
    mod negated {
        pub fn not_equal<T: PartialOrd + Copy>(a: T, b: T) -> bool {
            a != b
        }
    }
    macro_rules! floats { ($v:ident, $x:ty, $conv:expr) => {
        Some(match how {
            "ne" => compare!($v, $x, a, b => negated::not_equal($conv(a), $conv(b))),
            "equ" => compare!($v, $x, a, b => !negated::not_equal($conv(a), $conv(b))),
            "neu" => compare!($v, $x, a, b => $conv(a) != $conv(b)),
            "ltu" => compare!($v, $x, a, b => { let less = $conv(a) >= $conv(b); !less }),
            "leu" => compare!($v, $x, a, b => { let more = $conv(a) > $conv(b); !more }),
            "gtu" => compare!($v, $x, a, b => { let less = $conv(a) <= $conv(b); !less }),
            "geu" => compare!($v, $x, a, b => { let less = $conv(a) < $conv(b); !less }),
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

/// The function of `cvt` with these suffixes, from `from` to `to`. `wide` says whether the destination register has 64 bits.
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
