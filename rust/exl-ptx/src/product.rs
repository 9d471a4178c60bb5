//! Matrix multiplications of a warp: exact products, sums in double precision, one rounding.

use crate::code::{Element, Product};
use crate::float;
use crate::lanes::{Lanes, Words};

pub fn bytes_of(element: Element) -> usize {
    match element {
        Element::F16 | Element::BF16 => 2,
        Element::Tf32 | Element::F32 | Element::S32 => 4,
        _ => 1,
    }
}

/// The value of an element in the low bits of a word.
pub fn value_of(bits: u32, element: Element) -> f64 {
    match element {
        Element::F16 => float::half(bits & 0xffff),
        Element::BF16 => float::brain(bits & 0xffff),
        // The tensor cores read the upper 19 bits.
        Element::Tf32 => f64::from(f32::from_bits(bits & 0xffff_e000)),
        Element::F32 => f64::from(f32::from_bits(bits)),
        Element::S8 => f64::from(bits as u8 as i8),
        Element::U8 => f64::from(bits as u8),
        Element::S32 => f64::from(bits as i32),
        Element::E4m3 => f64::from(float::of_eight(bits as u8, 3)),
        Element::E5m2 => f64::from(float::of_eight(bits as u8, 2)),
    }
}

/// `cvt.rna.tf32.f32`: nearest, ties away from zero.
pub fn to_tf32() -> Lanes {
    fn f(x: &Words) -> Words {
        x.map(|a| {
            if a & 0x7f80_0000 == 0x7f80_0000 {
                a
            } else {
                a.wrapping_add(0x1000) & 0xffff_e000
            }
        })
    }
    Lanes::W1(f)
}

/// Multiply fragments of `m16nNkK`: `a` and `b` are registers of 32 lanes in PTX's order, `c` the sums before.
pub fn multiply(shape: &Product, a: &[Words], b: &[Words], c: &[Words]) -> Vec<Words> {
    let each = 4 / bytes_of(shape.a);
    let bits = 8 * bytes_of(shape.a) as u32;
    let k = shape.k;
    let mut left = vec![0f64; 16 * k];
    let mut right = vec![0f64; k * 8];
    for lane in 0..32 {
        let (group, in_group) = (lane >> 2, lane & 3);
        for (number, register) in a.iter().enumerate() {
            let row = group + 8 * (number & 1);
            for e in 0..each {
                let column = each * in_group + e + (number >> 1) * 4 * each;
                left[row * k + column] = value_of(register[lane] >> (bits * e as u32), shape.a);
            }
        }
        for (number, register) in b.iter().enumerate() {
            for e in 0..each {
                let row = each * in_group + e + number * 4 * each;
                right[row * 8 + group] = value_of(register[lane] >> (bits * e as u32), shape.b);
            }
        }
    }
    let mut sums = [[0f64; 8]; 16];
    for (row, sums) in sums.iter_mut().enumerate() {
        for at in 0..k {
            let factor = left[row * k + at];
            for n in 0..8 {
                sums[n] += factor * right[at * 8 + n];
            }
        }
    }
    let mut out = vec![[0u32; 32]; c.len()];
    for lane in 0..32 {
        let (group, in_group) = (lane >> 2, lane & 3);
        for (number, register) in c.iter().enumerate() {
            let sum =
                |row: usize, column: usize, before: u32| add(sums[row][column], before, shape);
            out[number][lane] = if shape.result == Element::F16 {
                let (row, column) = (group + 8 * number, 2 * in_group);
                sum(row, column, register[lane] & 0xffff)
                    | (sum(row, column + 1, register[lane] >> 16) << 16)
            } else {
                sum(
                    group + 8 * (number >> 1),
                    2 * in_group + (number & 1),
                    register[lane],
                )
            };
        }
    }
    out
}

/// The sum and what was there before, rounded to the result's type.
pub fn add(sum: f64, before: u32, shape: &Product) -> u32 {
    match shape.result {
        Element::S32 => {
            let total = sum as i64 + i64::from(before as i32);
            if shape.saturate {
                total.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as u32
            } else {
                total as u32
            }
        }
        Element::F16 => u32::from(float::half_of(sum + float::half(before))),
        _ => {
            let total = (sum + f64::from(f32::from_bits(before))) as f32;
            if total.is_nan() {
                float::NAN32
            } else {
                total.to_bits()
            }
        }
    }
}
