//! The inputs of a captured decode step, checked and written into one buffer that one copy brings to the GPU.

use crate::device::Device;
use crate::fields::Field;
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

    /// The buffer: ids, slots and rotary positions (i64 a token), positions (i32 a token), the block table (i32) and the row of the block
    /// table of each token (i32).
    pub fn fields(&self) -> [Field; 6] {
        let (tokens, mut offset) = (self.tokens(), 0);
        [
            ("ids", tokens, 8),
            ("slots", tokens, 8),
            ("rope_positions", tokens, 8),
            ("positions", tokens, 4),
            ("block_table", self.batch * self.pages, 4),
            ("rows", tokens, 4),
        ]
        .map(|(name, count, element)| {
            let field = Field {
                name,
                offset,
                size: count * element,
                element,
            };
            offset = field.end();
            field
        })
    }

    /// Bytes of the buffer.
    pub fn bytes(&self) -> usize {
        self.fields()[5].end()
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
    let (q_len, page_size) = (sizes.q_len, sizes.page_size);
    let [ids, slots, rope_positions, positions, block_table, rows] =
        sizes.fields().map(|field| field.offset);
    let mut put = |start: usize, value: &[u8]| {
        out[start..start + value.len()].copy_from_slice(value);
    };
    for row in 0..sizes.batch {
        let past = step.past.get(row);
        for j in 0..q_len {
            let token = row * q_len + j;
            let (mut id, mut slot, mut position) = (0, -1, -1);
            if let Some(&past) = past {
                position = i64::from(past) + j as i64;
                let (page, inside) = (position as usize / page_size, position as usize % page_size);
                id = step.ids[token];
                slot = i64::from(step.table[row * step.width + page]) * page_size as i64
                    + inside as i64;
            }
            put(ids + 8 * token, &i64::to_ne_bytes(id));
            put(slots + 8 * token, &i64::to_ne_bytes(slot));
            let rope_position = position.max(0);
            put(rope_positions + 8 * token, &i64::to_ne_bytes(rope_position));
            put(positions + 4 * token, &i32::to_ne_bytes(position as i32));
            put(rows + 4 * token, &i32::to_ne_bytes(row as i32));
        }
    }
    let table = &mut out[block_table..rows];
    for (row, line) in table.chunks_exact_mut(4 * sizes.pages).enumerate() {
        for (page, entry) in line.chunks_exact_mut(4).enumerate() {
            let there = row < step.past.len() && page < step.width;
            let number = if there {
                step.table[row * step.width + page]
            } else {
                0
            };
            entry.copy_from_slice(&number.to_ne_bytes());
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
    fn fields_follow_one_another() {
        let fields = SIZES.fields();
        assert_eq!(fields[0].offset, 0);
        assert!(fields.windows(2).all(|two| two[0].end() == two[1].offset));
        assert!(fields.iter().all(|f| f.offset.is_multiple_of(f.element)));
        assert_eq!((fields[3].name, fields[3].offset), ("positions", 192));
        assert_eq!(SIZES.bytes(), 192 + 32 + 48 + 32);
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
