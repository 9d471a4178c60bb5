//! The border between Python and the Rust crates: checks arguments, releases the GIL, maps errors. No arithmetic lives here.

use pyo3::prelude::*;

mod activation;
mod attention;
mod block;
mod cuda;
mod cuda_attention;
mod cuda_experts;
mod cuda_fused;
mod cuda_matrix;
mod cuda_operands;
mod cuda_ring;
mod cuda_sampling;
mod cuda_select;
mod errors;
mod format;
mod kv;
mod linear;
mod matrix_parts;
mod norm;
mod operands;
mod rope;
mod sampling;
mod tensor;
mod threads;

/// Native operators, private to `exl_kernels`: the package's modules check what they pass and are the public API.
#[pymodule]
mod _native {
    /// Version of the native module.
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use crate::activation::activate;
    #[pymodule_export]
    use crate::attention::paged_attention;
    #[pymodule_export]
    use crate::block::{AttentionBlock, BlockNorm, MlpBlock, Tokens};
    #[pymodule_export]
    use crate::cuda::{
        cuda_activation, cuda_build, cuda_launches, cuda_layer_norm, cuda_probe, cuda_probe_empty,
        cuda_probe_read, cuda_rms_norm, cuda_rope,
    };
    #[pymodule_export]
    use crate::cuda_attention::{
        AttentionWorkspace, CudaPages, MatmulInput, NewKeys, cuda_attention_plan, cuda_kv_transfer,
        cuda_paged_attention,
    };
    #[pymodule_export]
    use crate::cuda_experts::{CudaExperts, ExpertRouter};
    #[pymodule_export]
    use crate::cuda_fused::{StepStage, cuda_add_rms_norm, cuda_embed, cuda_rope_store};
    #[pymodule_export]
    use crate::cuda_matrix::{CudaLayout, CudaMatrix};
    #[pymodule_export]
    use crate::cuda_ring::{BatchWorkspace, CudaRing, NextInput, NormPrologue};
    #[pymodule_export]
    use crate::cuda_sampling::{
        SamplingWorkspace, cuda_sample_answers, cuda_sample_fill, cuda_sample_launch,
    };
    #[pymodule_export]
    use crate::cuda_select::{
        CudaCard, CudaShape, cuda_cards, cuda_row_limits, cuda_select_alone, cuda_select_attention,
        cuda_select_fused,
    };
    #[pymodule_export]
    use crate::format::{
        exl2_check, exl2_dequantize, exl2_groups, exl2_pack, exl2_quantize, exl2_total_bits,
        gptq_check, gptq_dequantize, gptq_quantize, read_into, safetensors_header,
    };
    #[pymodule_export]
    use crate::kv::{Pages, kv_load, kv_store};
    #[pymodule_export]
    use crate::linear::Matrix;
    #[pymodule_export]
    use crate::norm::{layer_norm, rms_norm};
    #[pymodule_export]
    use crate::operands::{AttentionOptions, AttentionTables, Launch, Rotation};
    #[pymodule_export]
    use crate::rope::apply_rope;
    #[pymodule_export]
    use crate::sampling::{SamplingPlan, sample_rows, sampling_distribution, sampling_shaped};
    #[pymodule_export]
    use crate::threads::{
        best_isa, isa, num_threads, pin_threads, read_bandwidth, run_empty, set_isa,
        set_num_threads,
    };
}
