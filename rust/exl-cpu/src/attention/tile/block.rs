//! Reads one block of keys from the pages for a tile: locates the rows, and decodes keys, values and mask for the arithmetic.

use super::Work;
use crate::attention::KEY_BLOCK;
use crate::kv::{CodeRow, Codec, E5M2Row, HalfRow, RowFormat, decode_row};
use crate::simd::{Lanes, MAX_LANES};

/// Places of the keys `from..to` of a block: row numbers of the planes.
pub(super) struct BlockRows {
    pub first_key: usize,
    /// Keys of the block that exist for this tile: `from..to`, relative to `first_key`.
    pub from: usize,
    pub to: usize,
    rows: [usize; KEY_BLOCK],
}

impl Work<'_> {
    /// Find the rows of a block's keys through the block table.
    #[inline(always)]
    pub(super) fn locate(&self, block: usize) -> BlockRows {
        let pages = self.args.pages;
        let first_key = block * KEY_BLOCK;
        let from = self.tile.from.max(first_key) - first_key;
        let to = self.tile.to.min(first_key + KEY_BLOCK) - first_key;
        let table =
            &self.args.block_table[self.tile.row * self.args.max_pages..][..self.args.max_pages];
        let mut rows = [0; KEY_BLOCK];
        let mut key = from;
        while key < to {
            let (page, offset) = (
                (first_key + key) / pages.page_size,
                (first_key + key) % pages.page_size,
            );
            let run = (pages.page_size - offset).min(to - key);
            let slot = table[page] as usize * pages.page_size + offset;
            for i in 0..run {
                rows[key + i] = (slot + i) * pages.heads + self.head;
            }
            key += run;
        }
        BlockRows {
            first_key,
            from,
            to,
            rows,
        }
    }

    /// Decode the block's keys to `keys` [key_dim, KEY_BLOCK]. Columns outside the tile's keys are undefined: their logits are discarded.
    #[inline(always)]
    pub(super) unsafe fn load_keys<V: Lanes>(
        &self,
        here: &BlockRows,
        next: &BlockRows,
        keys: &mut [f32],
    ) {
        let keys = keys.as_mut_ptr();
        // SAFETY: the format is the plane's.
        unsafe {
            match self.args.pages.key.codec() {
                Codec::F16 => self.load_keys_as::<V, HalfRow>(here, next, keys),
                Codec::E5M2 => self.load_keys_as::<V, E5M2Row>(here, next, keys),
                Codec::Hadamard8 => self.load_keys_as::<V, CodeRow<8>>(here, next, keys),
                Codec::Hadamard4 => self.load_keys_as::<V, CodeRow<4>>(here, next, keys),
            }
        }
    }

    #[inline(always)]
    unsafe fn load_keys_as<V: Lanes, F: RowFormat>(
        &self,
        here: &BlockRows,
        next: &BlockRows,
        keys: *mut f32,
    ) {
        let plane = &self.args.pages.key;
        let n = self.args.pages.head_dim;
        let whole = F::whole::<V>(n);
        let mut first = here.from - here.from % V::LANES;
        while first < here.to {
            let mut rows = [(std::ptr::null(), std::ptr::null()); MAX_LANES];
            for (i, row) in rows.iter_mut().enumerate().take(V::LANES) {
                *row = plane.row(here.rows[(first + i).clamp(here.from, here.to - 1)]);
                plane.prefetch(next.rows[first + i]);
            }
            let mut columns = [V::splat(0.0); MAX_LANES];
            let mut e = 0;
            // SAFETY: rows were located within checked pages; `keys` has key_dim * KEY_BLOCK floats.
            unsafe {
                while e < whole {
                    for i in 0..V::LANES {
                        columns[i] = F::load::<V>(rows[i].0, rows[i].1, e);
                    }
                    V::store_columns(&columns, keys.add(e * KEY_BLOCK + first), KEY_BLOCK);
                    e += V::LANES;
                }
                if e < n {
                    for i in 0..V::LANES {
                        columns[i] = F::load_tail::<V>(rows[i].0, e, n);
                    }
                    V::store_columns(&columns, keys.add(e * KEY_BLOCK + first), KEY_BLOCK);
                }
            }
            first += V::LANES;
        }
    }

    /// Decode the values of the tile's keys in the block to `values` [KEY_BLOCK, value_dim]; other rows are not changed.
    #[inline(always)]
    pub(super) unsafe fn load_values<V: Lanes>(
        &self,
        here: &BlockRows,
        next: &BlockRows,
        values: &mut [f32],
    ) {
        let values = values.as_mut_ptr();
        // SAFETY: the format is the plane's.
        unsafe {
            match self.args.pages.value.codec() {
                Codec::F16 => self.load_values_as::<V, HalfRow>(here, next, values),
                Codec::E5M2 => self.load_values_as::<V, E5M2Row>(here, next, values),
                Codec::Hadamard8 => self.load_values_as::<V, CodeRow<8>>(here, next, values),
                Codec::Hadamard4 => self.load_values_as::<V, CodeRow<4>>(here, next, values),
            }
        }
    }

    #[inline(always)]
    unsafe fn load_values_as<V: Lanes, F: RowFormat>(
        &self,
        here: &BlockRows,
        next: &BlockRows,
        values: *mut f32,
    ) {
        let plane = &self.args.pages.value;
        for key in here.from..here.to {
            let (data, scales) = plane.row(here.rows[key]);
            plane.prefetch(next.rows[key]);
            // SAFETY: as above; `values` has KEY_BLOCK * value_dim floats.
            unsafe {
                decode_row::<V, F>(
                    data,
                    scales,
                    self.args.pages.head_dim,
                    values.add(key * self.value_dim),
                );
            }
        }
    }

    #[inline(always)]
    pub(super) fn load_mask(&self, here: &BlockRows, mask: &mut [f32]) {
        if let Some((values, width)) = self.args.key_mask {
            let row = &values[self.tile.row * width..][..width];
            mask[here.from..here.to]
                .copy_from_slice(&row[here.first_key + here.from..here.first_key + here.to]);
        }
    }
}
