//! The inputs of a captured decode step, checked and written into one buffer that one copy brings to the GPU.

use crate::device::Device;
use crate::launch::{CudaError, copy_to_device};
use crate::ops::Target;

/// Fixed sizes of a captured step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub batch: usize,
    /// Tokens of a row.
    pub q_len: usize,
    /// Pages of a row.
    pub pages: usize,
    pub page_size: usize,
}

/// Exclusive upper limits of ids, lengths and page numbers.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub vocab: i64,
    pub positions: i64,
    pub num_pages: i64,
}

/// One step: `ids` `[rows, q_len]`, tokens already stored `past` `[rows]`, page numbers `table` `[rows, width]`.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub ids: &'a [i64],
    pub past: &'a [i32],
    pub table: &'a [i32],
    pub width: usize,
}

impl Sizes {
    pub fn tokens(&self) -> usize {
        self.batch * self.q_len
    }

    /// Bytes of the buffer: ids, slots and rotary positions (i64 a token each), positions (i32 a token), the block table (i32), the row of
    /// the block table of each token (i32).
    pub fn bytes(&self) -> usize {
        32 * self.tokens() + 4 * self.batch * self.pages
    }
}

/// Whether a step is valid and fits `sizes`. Padding rows are added if it has fewer than `sizes.batch` rows.
pub fn fits(sizes: &Sizes, limits: &Limits, step: &Request<'_>) -> bool {
    let rows = step.past.len();
    let shaped = (1..=sizes.batch).contains(&rows)
        && step.ids.len() == rows * sizes.q_len
        && step.table.len() == rows * step.width
        && sizes.q_len > 0
        && sizes.page_size > 0;
    shaped
        && step.ids.iter().all(|&id| (-1..limits.vocab).contains(&id))
        && step.past.iter().enumerate().all(|(row, &past)| {
            let end = i64::from(past) + sizes.q_len as i64;
            let used = (end.max(0) as usize).div_ceil(sizes.page_size);
            past >= 0
                && end <= limits.positions
                && used <= sizes.pages.min(step.width)
                && step.table[row * step.width..][..used]
                    .iter()
                    .all(|&page| (0..limits.num_pages).contains(&i64::from(page)))
        })
}

/// Queue the copy of a written buffer of `bytes` bytes at `from` (pinned) to the GPU's at `to`.
///
/// # Safety
/// Both addresses must be valid for `bytes` bytes until the stream has passed the copy; the host memory must not change before.
pub unsafe fn send(target: Target, to: usize, from: usize, bytes: usize) -> Result<(), CudaError> {
    let device = Device::get(target.device)?;
    // SAFETY: this function's contract.
    unsafe { copy_to_device(device, to, from, bytes, target.stream) }
}

/// Write a step that [`fits`] into `out` of [`Sizes::bytes`] bytes. Padding rows have token 0 at position -1, which sees no keys, in slot
/// -1, which is not stored.
pub fn write(sizes: &Sizes, step: &Request<'_>, out: &mut [u8]) {
    let (tokens, q_len) = (sizes.tokens(), sizes.q_len);
    let (longs, ints) = out.split_at_mut(24 * tokens);
    let mut long =
        |at: usize, value: i64| longs[8 * at..8 * at + 8].copy_from_slice(&value.to_ne_bytes());
    let mut int =
        |at: usize, value: i32| ints[4 * at..4 * at + 4].copy_from_slice(&value.to_ne_bytes());
    for token in 0..tokens {
        let (row, j) = (token / q_len, token % q_len);
        let (mut id, mut slot, mut position) = (0, -1, -1);
        if let Some(&past) = step.past.get(row) {
            position = i64::from(past) + j as i64;
            let (page, inside) = (
                position as usize / sizes.page_size,
                position as usize % sizes.page_size,
            );
            id = step.ids[token];
            slot = i64::from(step.table[row * step.width + page]) * sizes.page_size as i64
                + inside as i64;
        }
        long(token, id);
        long(tokens + token, slot);
        long(2 * tokens + token, position.max(0));
        int(token, position as i32);
        int(tokens + sizes.batch * sizes.pages + token, row as i32);
    }
    for row in 0..sizes.batch {
        for page in 0..sizes.pages {
            let there = row < step.past.len() && page < step.width;
            let number = if there {
                step.table[row * step.width + page]
            } else {
                0
            };
            int(tokens + row * sizes.pages + page, number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes {
        batch: 4,
        q_len: 2,
        pages: 3,
        page_size: 4,
    };
    const LIMITS: Limits = Limits {
        vocab: 100,
        positions: 12,
        num_pages: 9,
    };

    fn step<'a>(ids: &'a [i64], past: &'a [i32], table: &'a [i32]) -> Request<'a> {
        Request {
            ids,
            past,
            table,
            width: 3,
        }
    }

    #[test]
    fn a_step_is_written_with_padding() {
        let request = step(&[5, 6, 7, -1], &[3, 0], &[8, 2, -7, 4, 99, 99]);
        assert!(fits(&SIZES, &LIMITS, &request));
        let mut out = vec![0xaa; SIZES.bytes()];
        write(&SIZES, &request, &mut out);
        let longs: Vec<i64> = out[..192]
            .chunks(8)
            .map(|b| i64::from_ne_bytes(b.try_into().expect("eight bytes")))
            .collect();
        let ints: Vec<i32> = out[192..]
            .chunks(4)
            .map(|b| i32::from_ne_bytes(b.try_into().expect("four bytes")))
            .collect();
        assert_eq!(longs[..8], [5, 6, 7, -1, 0, 0, 0, 0]);
        assert_eq!(longs[8..16], [35, 8, 16, 17, -1, -1, -1, -1]);
        assert_eq!(longs[16..], [3, 4, 0, 1, 0, 0, 0, 0]);
        assert_eq!(ints[..8], [3, 4, 0, 1, -1, -1, -1, -1]);
        assert_eq!(
            ints[8..],
            [
                8, 2, -7, 4, 99, 99, 0, 0, 0, 0, 0, 0, // pages
                0, 0, 1, 1, 2, 2, 3, 3, // rows of them
            ]
        );
    }

    #[test]
    fn invalid_steps_do_not_fit() {
        let table = [0; 3];
        assert!(fits(&SIZES, &LIMITS, &step(&[1, 2], &[10], &table)));
        for (ids, past) in [
            (vec![1, 100], 0),
            (vec![-2, 1], 0),
            (vec![1, 2], -1),
            (vec![1, 2], 11),
            (vec![1], 0),
            (vec![1, 2], i32::MAX),
        ] {
            assert!(
                !fits(&SIZES, &LIMITS, &step(&ids, &[past], &table)),
                "{ids:?} {past}"
            );
        }
        for table in [[0, 9, 0], [0, -1, 0]] {
            assert!(!fits(&SIZES, &LIMITS, &step(&[1, 2], &[3], &table)));
            assert!(fits(&SIZES, &LIMITS, &step(&[1, 2], &[2], &table)));
        }
        assert!(!fits(&SIZES, &LIMITS, &step(&[1; 10], &[0; 5], &[0; 15])));
        assert!(!fits(&SIZES, &LIMITS, &step(&[], &[], &[])));
    }
}
