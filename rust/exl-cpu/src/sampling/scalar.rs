//! ln, e^x and powers of one f64 from additions and multiplications only, so that CPU and GPU give bitwise identical results.

const LN2_HIGH: f64 = 0.693_147_180_369_123_8;
const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// Natural logarithm of a positive normal number.
pub fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits(bits & 0x000f_ffff_ffff_ffff | 0x3ff0_0000_0000_0000);
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        exponent += 1;
    }
    // ln m = 2 atanh s with |s| <= 0.172: terms to s^23.
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut sum = 0.0;
    for k in (0..12).rev() {
        sum = sum * z + 1.0 / f64::from(2 * k + 1);
    }
    let e = exponent as f64;
    e * LN2_HIGH + (2.0 * s * sum + e * LN2_LOW)
}

/// e^x, 0 below -700; x up to 700.
pub fn exp(x: f64) -> f64 {
    if x < -700.0 {
        return 0.0;
    }
    let n = (x * std::f64::consts::LOG2_E + 0.5).floor();
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut sum = 1.0;
    for k in (1..=14).rev() {
        sum = sum * r / f64::from(k) + 1.0;
    }
    sum * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

/// x^y for x >= 0.
pub fn pow(x: f64, y: f64) -> f64 {
    if y == 0.0 {
        1.0
    } else if x < f64::MIN_POSITIVE {
        0.0
    } else {
        exp((y * ln(x)).min(700.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_close_to_those_of_std() {
        for i in 1..4000 {
            let x = f64::from(i) * 0.0137;
            assert!(
                (ln(x) - x.ln()).abs() <= 2e-15 * x.ln().abs().max(1.0),
                "{x}"
            );
            assert!((exp(-x) / (-x).exp() - 1.0).abs() < 1e-14, "{x}");
            assert!((pow(x, 0.7) / x.powf(0.7) - 1.0).abs() < 1e-14, "{x}");
        }
        assert_eq!(
            (exp(0.0), ln(1.0), pow(0.0, 2.0), pow(0.0, 0.0)),
            (1.0, 0.0, 0.0, 1.0)
        );
    }
}
