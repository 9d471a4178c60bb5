//! Dequantization of W `[K, N]` to half, bitwise as the format defines it.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::Exl2View;
use crate::bits;

/// Columns processed together, so that the scratch rows stay in the first-level cache.
const BLOCK: usize = 2048;

impl Exl2View<'_> {
    /// Write W `[K, N]`, row = input feature in file order: h16((code - zero) * scale).
    ///
    /// # Panics
    /// If `out` does not hold K * N elements.
    pub fn dequantize_into(&self, out: &mut [f16]) {
        let n = self.out_features();
        assert_eq!(
            out.len(),
            self.in_features() * n,
            "output must hold K * N elements"
        );
        let perm = self.perm();
        let mut scales = vec![0.0f32; n];
        let mut codes = vec![0u8; n];
        let mut values = [0.0f32; BLOCK];
        for (g, group) in self.groups().iter().enumerate() {
            self.scale_row(g, &mut scales);
            let words = self.group_words(g);
            let zero = group.zero() as i32;
            for k in group.rows.clone() {
                bits::unpack_row(words, k - group.rows.start, group.bits, &mut codes);
                let row = &mut out[perm[k] as usize * n..][..n];
                for ((row, codes), scales) in row
                    .chunks_mut(BLOCK)
                    .zip(codes.chunks(BLOCK))
                    .zip(scales.chunks(BLOCK))
                {
                    let values = &mut values[..row.len()];
                    for ((value, &code), &scale) in values.iter_mut().zip(codes).zip(scales) {
                        // Exact in float32: at most 8 bits times 11.
                        *value = (code as i32 - zero) as f32 * scale;
                    }
                    row.convert_from_f32_slice(values);
                }
            }
        }
    }
}
