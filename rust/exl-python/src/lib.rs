//! Bindings of the Rust crates: they check arguments, release the GIL and map errors. They do no arithmetic.

use pyo3::prelude::*;

mod by_name;
mod cpu;
mod cuda;
mod draft;
mod errors;
mod format;
mod matrix_parts;
mod operands;
mod tensor;

/// Native operators, private to `exl_kernels`. The package's modules check their arguments and are the public API.
#[pymodule]
mod _native {
    /// Version of the native module.
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use crate::cpu::activation::activate;
    #[pymodule_export]
    use crate::cpu::attention::paged_attention;
    #[pymodule_export]
    use crate::cpu::block::{AttentionBlock, BlockNorm, MlpBlock, Tokens};
    #[pymodule_export]
    use crate::cpu::kv::{Pages, kv_load, kv_store};
    #[pymodule_export]
    use crate::cpu::linear::Matrix;
    #[pymodule_export]
    use crate::cpu::moe::Experts;
    #[pymodule_export]
    use crate::cpu::norm::{layer_norm, rms_norm};
    #[pymodule_export]
    use crate::cpu::rope::apply_rope;
    #[pymodule_export]
    use crate::cpu::sampling::{
        Candidates, NoToken, Sampled, SamplingPlan, sample_rows, sampling_distribution,
        sampling_shaped,
    };
    #[pymodule_export]
    use crate::cpu::threads::{
        best_isa, isa, num_threads, pin_threads, read_bandwidth, run_empty, set_isa,
        set_num_threads,
    };
    #[pymodule_export]
    use crate::cuda::attention::{
        AttentionCall, CudaPages, HeadNorms, MatmulInput, NewKeys, cuda_kv_transfer,
    };
    #[pymodule_export]
    use crate::cuda::fields::{MemoryField, lora_entry_fields};
    #[pymodule_export]
    use crate::cuda::float::CudaFloat;
    #[pymodule_export]
    use crate::cuda::fused::{
        StepLimits, StepSizes, StepStage, cuda_add_post_norm, cuda_add_rms_norm, cuda_embed,
        cuda_layer_norm_packed, cuda_rms_norm_parts, cuda_rope_store,
    };
    #[pymodule_export]
    use crate::cuda::limits::{KernelLimits, kernel_limits};
    #[pymodule_export]
    use crate::cuda::linear::{
        CudaLinearGroup, MatmulCall, MatmulPlan, MatmulTuning, NextInput, NormPrologue,
    };
    #[pymodule_export]
    use crate::cuda::lora::{
        AdapterSizes, EpilogueAdapters, LoraRows, cuda_lora_add, cuda_lora_expand, cuda_lora_shrink,
    };
    #[pymodule_export]
    use crate::cuda::matrix::{CudaLayout, CudaMatrix};
    #[pymodule_export]
    use crate::cuda::moe::CudaExperts;
    #[pymodule_export]
    use crate::cuda::padded::{
        PaddedGroup, dequantized_bytes, most_padded_rows, plan_padded_experts,
    };
    #[pymodule_export]
    use crate::cuda::peer::{PeerColumns, PeerExchange, PeerParts};
    #[pymodule_export]
    use crate::cuda::router::{ExpertRouter, RouterPlan, RouterShape, cuda_plan_router};
    #[pymodule_export]
    use crate::cuda::sampling::{
        SamplingConstants, SamplingWorkspace, StagedRows, cuda_sample_answers, cuda_sample_fill,
        cuda_sample_launch,
    };
    #[pymodule_export]
    use crate::cuda::select::attention::{
        AttentionHeads, AttentionPlan, AttentionShape, cuda_attention_stores_keys,
        cuda_is_decode_step, cuda_refusal_of_pages, cuda_select_attention,
    };
    #[pymodule_export]
    use crate::cuda::select::{
        CudaCard, CudaShape, ExpertsPlan, KernelChoice, RefusedKernel, cuda_cards,
        cuda_has_fine_scales, cuda_pass_rows, cuda_plan_alone, cuda_plan_fused,
        cuda_refusal_of_adapted_rows, cuda_refusal_of_adapted_shapes, cuda_rows_invariant,
        cuda_runs_packed, cuda_select_adapters, cuda_select_experts, cuda_select_float,
        cuda_select_float_experts, cuda_select_norm, cuda_select_rope_store, cuda_select_sampling,
    };
    #[pymodule_export]
    use crate::cuda::{
        CudaBuild, CudaProbe, ProbedDevice, cuda_activation, cuda_build, cuda_launches,
        cuda_layer_norm, cuda_probe, cuda_probe_empty, cuda_probe_read, cuda_rms_norm, cuda_rope,
        cuda_softcap,
    };
    #[pymodule_export]
    use crate::draft::{DraftHistory, DraftRates, DraftText};
    #[pymodule_export]
    use crate::format::{
        Exl2Group, FileHeader, HeaderEntry, MatrixSize, exl2_check, exl2_dequantize, exl2_groups,
        exl2_pack, exl2_quantize, exl2_total_bits, gptq_check, gptq_dequantize, gptq_quantize,
        read_into, safetensors_header,
    };
    #[pymodule_export]
    use crate::operands::{AttentionOptions, AttentionTables, Launch, Rotation};
}
