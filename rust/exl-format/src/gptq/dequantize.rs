//! Dequantization of W `[K, N]` to half, bitwise as the format defines it.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::GptqView;

/// Columns processed together, so that the scratch rows stay in the first-level cache.
const BLOCK: usize = 2048;

impl GptqView<'_> {
    /// Write W `[K, N]`, row = input feature: h16((code - zero) * scale).
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
        // Act-order uses groups in any order, so the zeros of all groups are unpacked once.
        let zeros: Vec<i16> = (0..self.num_groups() * n)
            .map(|i| self.zero(i / n, i % n) as i16)
            .collect();
        let mut codes = vec![0u8; n];
        let mut scales = [0.0f32; BLOCK];
        let mut values = [0.0f32; BLOCK];
        for (k, row) in out.chunks_exact_mut(n).enumerate() {
            let g = self.group_of()[k] as usize;
            self.unpack_row(k, &mut codes);
            for (((row, codes), zeros), halves) in row
                .chunks_mut(BLOCK)
                .zip(codes.chunks(BLOCK))
                .zip(zeros[g * n..][..n].chunks(BLOCK))
                .zip(self.scale_row(g).chunks(BLOCK))
            {
                let (scales, values) = (&mut scales[..row.len()], &mut values[..row.len()]);
                halves.convert_to_f32_slice(scales);
                for (((value, &code), &zero), &scale) in
                    values.iter_mut().zip(codes).zip(zeros).zip(&*scales)
                {
                    // Exact in float32: at most 9 bits times 11.
                    *value = (code as i16 - zero) as f32 * scale;
                }
                row.convert_from_f32_slice(values);
            }
        }
    }
}
