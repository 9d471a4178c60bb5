//! Bit widths by shares of the rows: `0.1:5b_32g/0.9:4b_32g`.

use std::fmt;
use std::str::FromStr;

use super::WIDTHS;
use crate::error::Problem;

/// One width of a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Part {
    /// Share of the rows, 0..=1.
    pub fraction: f64,
    pub bits: u32,
    /// Rows of a group, a multiple of 32.
    pub group_size: usize,
}

/// Widths from wide to narrow, as the device code of EXL2 loaders requires.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub parts: Vec<Part>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, part) in self.parts.iter().enumerate() {
            let slash = if i == 0 { "" } else { "/" };
            write!(
                f,
                "{slash}{}:{}b_{}g",
                part.fraction, part.bits, part.group_size
            )?;
        }
        Ok(())
    }
}

impl FromStr for Plan {
    type Err = Problem;

    fn from_str(text: &str) -> Result<Self, Problem> {
        let bad = |why: &str| Problem::Plan {
            plan: text.to_owned(),
            why: why.to_owned(),
        };
        let parts = text
            .split('/')
            .map(|part| read_part(part).ok_or_else(|| bad("each part is <fraction>:<bits>b_<group size>g, as in 0.1:5b_32g/0.9:4b_32g")))
            .collect::<Result<Vec<_>, _>>()?;
        if parts.iter().any(|part| !WIDTHS.contains(&part.bits)) {
            return Err(bad("widths are 2, 3, 4, 5, 6 and 8 bits"));
        }
        if parts.iter().any(|part| {
            part.group_size == 0 || !part.group_size.is_multiple_of(32) || part.group_size > 1 << 20
        }) {
            return Err(bad(
                "group sizes are multiples of 32, such as 32, 64 and 128",
            ));
        }
        if parts.windows(2).any(|pair| pair[0].bits <= pair[1].bits) {
            return Err(bad("widths must fall from part to part, widest first"));
        }
        let sum: f64 = parts.iter().map(|part| part.fraction).sum();
        if parts
            .iter()
            .any(|part| part.fraction <= 0.0 || !part.fraction.is_finite())
            || (sum - 1.0).abs() > 1e-6
        {
            return Err(bad("fractions must be positive and add up to 1"));
        }
        Ok(Self { parts })
    }
}

fn read_part(text: &str) -> Option<Part> {
    let (fraction, rest) = text.split_once(':')?;
    let (bits, group_size) = rest.split_once("b_")?;
    Some(Part {
        fraction: fraction.trim().parse().ok()?,
        bits: bits.parse().ok()?,
        group_size: group_size.trim_end().strip_suffix('g')?.parse().ok()?,
    })
}

impl Plan {
    /// Width and rows of each group for `k` packed rows; the last group may be short.
    ///
    /// `k` must be a multiple of 32: EXL2 cannot hold other sizes.
    pub fn groups(&self, k: usize) -> Result<Vec<(u32, usize)>, Problem> {
        if k == 0 || !k.is_multiple_of(32) {
            return Err(Problem::Multiple {
                what: "in_features",
                value: k,
                multiple: 32,
                remedy: "leave this matrix in half precision",
            });
        }
        let mut groups = Vec::new();
        let mut remaining = k;
        for (i, part) in self.parts.iter().enumerate() {
            let wanted = if i + 1 == self.parts.len() {
                remaining as f64
            } else {
                (k as f64 * part.fraction).min(remaining as f64)
            };
            let count = (wanted / part.group_size as f64).ceil() as usize;
            for _ in 0..count {
                let rows = part.group_size.min(remaining);
                if rows > 0 {
                    groups.push((part.bits, rows));
                    remaining -= rows;
                }
            }
        }
        Ok(groups)
    }

    /// Bits of a matrix `[k, n]` in the file, including all five tensors.
    pub fn total_bits(&self, k: usize, n: usize) -> Result<u64, Problem> {
        let groups = self.groups(k)?;
        let n = n.next_multiple_of(32) as u64;
        let codes: u64 = groups
            .iter()
            .map(|&(bits, rows)| u64::from(bits) * rows as u64)
            .sum();
        Ok(codes * n + groups.len() as u64 * (16 + 32 + 4 * n) + 32 * k as u64)
    }
}
