//! Checked launches, one folder a subject. Entry points take addresses and sizes and never read device memory.

pub mod attention;
pub mod elementwise;
pub mod kv;
pub mod linear;
pub mod moe;
pub mod probe;
pub mod sampling;

use crate::launch::CudaError;

/// Element type of activations, as the kernels of attention number it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F16 = 0,
    BF16 = 1,
    F32 = 2,
}

impl Element {
    pub const ALL: [Self; 3] = [Self::F16, Self::BF16, Self::F32];

    /// The suffix of kernel names.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

/// Target of a launch: GPU index, stream, and whether to request programmatic dependent launch.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub device: u32,
    pub stream: usize,
    pub programmatic: bool,
}

/// Names of the kernels to resolve in the image of `file`.
pub(crate) fn kernels_of(file: &str) -> Vec<String> {
    match file {
        "probe" => probe::kernels(),
        "norm" => elementwise::norm::kernels(),
        "residual" => elementwise::residual::kernels(),
        "rope" => elementwise::rope::kernels(),
        "rope_store" => kv::rope_store::kernels(),
        "embedding" => elementwise::embedding::kernels(),
        "exchange" => elementwise::exchange::kernels(),
        "elementwise" => elementwise::kernels(),
        "kv" => kv::kernels(),
        "sampling" | "sampling_wide" => sampling::kernels(file),
        _ if file.starts_with("attention_") => attention::kernels(file),
        _ if file.starts_with("experts") => moe::kernels(file),
        _ => linear::kernels(file),
    }
}

pub(crate) fn index32(what: &str, value: usize) -> Result<i32, CudaError> {
    i32::try_from(value).map_err(|_| CudaError::Argument {
        what: format!("{what} = {value}"),
        limit: format!("at most {}", i32::MAX),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::tests::{RELEASE, card};
    use crate::features::feature_of;

    #[test]
    fn a_card_loads_the_kernels_that_its_code_can_run() {
        let loads =
            |archs, file| feature_of(file).is_none_or(|feature| card("H100", archs).has(feature));
        let newer = [
            "ring_gptq",
            "few",
            "attention_few_q4",
            "attention_long_fp16",
        ];
        let newest = ["batch_exl2_128", "attention_wide"];
        let any = [
            "linear",
            "rows",
            "tile_gptq_32",
            "direct_exl2",
            "direct_gptq",
            "attention_decode_q6",
            "attention_prefill_fp16",
            "experts",
            "experts_gptq_32",
            "norm",
            "residual",
            "rope_store",
            "lora",
            "sampling",
        ];
        for (archs, expected) in [
            (&["80+ptx"][..], (false, false)),
            (&["90"], (true, false)),
            (RELEASE, (true, true)),
        ] {
            assert!(newer.iter().all(|file| loads(archs, file) == expected.0));
            assert!(newest.iter().all(|file| loads(archs, file) == expected.1));
            assert!(
                any.iter()
                    .all(|file| loads(archs, file) && !kernels_of(file).is_empty())
            );
            let teams = "attention_teams_q4";
            assert_eq!(loads(archs, teams), archs == ["80+ptx"]);
            assert!(!kernels_of(teams).is_empty());
            assert_eq!(loads(archs, "batch_mma_gptq_32"), !expected.1);
            assert_eq!(kernels_of("batch_mma_gptq_32").len(), 3);
        }
    }
}
