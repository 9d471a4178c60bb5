"""Every public attribute that programs written for exllamav2 read exists, with its documented default."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import exllamav2
from exl_generate.bundled import default_model_dir
from exllamav2 import generator as generators


class Some:
    """Any value but None."""


ANY = object()  # whatever it says, None included
SOME = Some()

# Attribute -> default, or the kind of its value on the bundled model.
CONFIG_SET_BY_USERS: dict[str, Any] = {
    "model_dir": str,
    "max_seq_len": int,
    "max_batch_size": 1,
    "max_input_len": 2048,
    "max_attention_size": 2048**2,
    "max_output_len": None,
    "scale_pos_emb": 1.0,
    "scale_alpha_value": 1.0,
    "no_flash_attn": False,
    "no_xformers": False,
    "no_sdpa": False,
    "no_graphs": False,
    "load_in_q4": False,
    "max_dq_size": 512 * 1024**2,
    "num_experts_per_token": None,
    "fasttensors": ANY,
}
CONFIG_READ: dict[str, Any] = {
    **dict.fromkeys(("architecture",), str),
    **dict.fromkeys(("arch", "tensor_file_map", "tensor_files", "eos_token_id", "bos_token_id"), SOME),
    **dict.fromkeys(("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim"), int),
    **dict.fromkeys(("num_key_value_heads", "num_key_value_groups", "intermediate_size", "original_max_seq_len"), int),
    **dict.fromkeys(("norm_eps", "rotary_embedding_base"), float),
    "pad_token_id": ANY,
    "initializer_range": 0.02,
    "use_qk_norm": False,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "num_experts": None,
    "logit_scale": 1,
    "scale_emb": 1,
    "scale_depth": 1,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "norm_head": None,
    "rotary_embedding_base_alt": None,
    "scale_pos_emb_alt": None,
    "pos_id_index": 0,
    "sliding_window": 0,
    "sliding_window_pattern": 1,
    "partial_rotary_factor": 1.0,
    "checkpoint_offset_qzeros": False,
    "checkpoint_fused_mlp": False,
    "generation_config": ANY,
    "alt_rope_method": None,
    "scale_long_factor": None,
    "scale_short_factor": None,
    "l3_rope_factor": None,
    "l3_rope_low_freq_factor": None,
    "l3_rope_high_freq_factor": None,
    "l3_rope_original_max_position_embeddings": None,
    "yarn_rope_factor": None,
    "yarn_rope_original_max_position_embeddings": None,
    "mrope_section": None,
    "vision_model_type": None,
    **dict.fromkeys(("prepare", "set_low_mem", "arch_compat_overrides"), callable),
}
CACHE: dict[str, Any] = {
    **dict.fromkeys(("model", "key_states", "value_states", "key_scales", "value_scales", "dtype"), SOME),
    **dict.fromkeys(("num_key_value_heads", "num_hidden_layers", "head_dim", "q_block"), int),
    **dict.fromkeys(("weights_per_element_k", "weights_per_element_v"), int),
    "max_seq_len": 1024,
    "batch_size": 1,
    "current_seq_len": int,
    "has_scales": bool,
    "fixed_device": None,
    **dict.fromkeys(("create_state_tensors", "update_cache_tensors", "get_kv_state", "store_kv_state"), callable),
    **dict.fromkeys(("copy_states", "clone", "footprint", "reset", "all_tensors", "roll_left"), callable),
    "touch_device": callable,
}
STATIC: dict[str, Any] = {
    **dict.fromkeys(("model", "cache", "tokenizer"), SOME),
    "sequence_ids": None,
    "abort_event": None,
    **dict.fromkeys(("warmup", "full", "generate_simple"), callable),
}
SETTINGS: dict[str, Any] = {
    "token_repetition_penalty": 1.025,
    "token_repetition_range": -1,
    "token_repetition_decay": 0,
    "token_frequency_penalty": 0.0,
    "token_presence_penalty": 0.0,
    "temperature": 0.8,
    "smoothing_factor": 0.0,
    "min_temp": 0,
    "max_temp": 0.0,
    "temp_exponent": 1.0,
    "top_k": 50,
    "top_p": 0.8,
    "top_a": 0.0,
    "min_p": 0,
    "tfs": 0,
    "typical": 0,
    "skew": 0,
    "temperature_last": False,
    "mirostat": False,
    "mirostat_tau": 1.5,
    "mirostat_eta": 0.1,
    "mirostat_mu": None,
    "token_bias": None,
    "cfg_scale": None,
    "post_sampling_hooks": [],
    "dry_allowed_length": 2,
    "dry_base": 1.75,
    "dry_multiplier": 0.0,
    "dry_sequence_breakers": None,
    "dry_range": 0,
    "dry_max_ngram": 20,
    "ngram_trie": None,
    "ngram_index": 0,
    "ngram_history": deque(),
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "xtc_ignore_tokens": None,
}

TABLE: dict[str, dict[str, Any]] = {
    "config": {**CONFIG_SET_BY_USERS, **CONFIG_READ},
    "model": {
        **dict.fromkeys(("config", "modules", "modules_dict", "device_context", "cache_map"), SOME),
        **dict.fromkeys(("last_kv_layer_idx", "head_layer_idx"), int),
        "loaded": True,
        "tp_context": None,
        **dict.fromkeys(
            ("load", "load_gen", "load_autosplit", "load_autosplit_gen", "load_tp", "load_tp_gen"), callable
        ),
        **dict.fromkeys(("unload", "set_device_map", "set_cache_map", "get_cache_devices", "get_modules"), callable),
        **dict.fromkeys(("update_loras", "is_quant", "forward", "forward_chunk"), callable),
    },
    "cache": CACHE,
    "cache_8bit": CACHE,
    "cache_q4": {**CACHE, "wbits": 4, "temp_tensors": dict},
    "cache_q6": {**CACHE, "wbits": 6, "temp_tensors": dict},
    "cache_q8": {**CACHE, "wbits": 8, "temp_tensors": dict},
    "tokenizer": {
        **dict.fromkeys(("config", "tokenizer", "tokenizer_model", "tokenizer_config_dict"), SOME),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "newline_token_id", "space_token_id"), int),
        **dict.fromkeys(("unk_token", "bos_token", "eos_token"), str),
        "unk_token_id": ANY,
        "pad_token": "",
        "actual_vocab_size": int,
        **dict.fromkeys(("extended_piece_to_id", "extended_id_to_piece"), dict),
        **dict.fromkeys(("unspecial_piece_to_id", "unspecial_id_to_piece"), dict),
        **dict.fromkeys(
            ("encode", "decode", "padding_mask", "num_tokens", "encode_unspecial", "encode_special"), callable
        ),
        **dict.fromkeys(("cached_encode_str", "single_token", "single_id", "get_vocab_size"), callable),
        **dict.fromkeys(("get_id_to_piece_list", "get_id_to_ord_list", "get_piece_to_id_dict"), callable),
        **dict.fromkeys(("get_prefix_to_ids_dict", "get_prefix_id_to_ids_dict"), callable),
        **dict.fromkeys(("get_char_trie", "get_char_trie_ci"), callable),
    },
    "base": STATIC,
    "streaming": {
        **STATIC,
        "draft_model": None,
        "draft_cache": None,
        "num_speculative_tokens": 5,
        "stop_tokens": set,
        "stop_strings": set(),
        "speculative_prob_threshold": 0.25,
        "speculative_ngram": False,
        "speculative_ngram_min": 1,
        "speculative_ngram_max": 5,
        "speculative_ngram_max_inf": 3,
        "speculative_ngram_threshold": 1,
        "ngram_preloaded": None,
        "total_tokens": 0,
        "total_draft_tokens": 0,
        "accepted_draft_tokens": 0,
        "tail_decode_tokens": 2,
        "max_fallback_tokens": 4,
        **dict.fromkeys(("set_stop_conditions", "begin_stream", "begin_stream_ex", "stream_ex", "stream"), callable),
        **dict.fromkeys(("reset_sd_stats", "get_sd_stats", "ngram_preload"), callable),
    },
    "dynamic": {
        **dict.fromkeys(("model", "cache", "tokenizer"), SOME),
        "draft_model": None,
        "draft_cache": None,
        "num_draft_tokens": 0,  # not drafting
        "max_batch_size": 256,
        "max_seq_len": int,
        "max_chunk_size": int,
        "max_q_size": 8,
        "use_ngram_draft": False,
        "max_ngram": 4,
        "max_sampling_threads": 16,
        "min_sampling_threads": 3,
        "paged": True,
        "filter_background_eval": True,
        "pending_jobs": [],
        "active_jobs": [],
        "page_size": 256,
        "max_pages": 4,
        "max_total_tokens": 1024,
        "padded_vocab_size": int,
        "all_pages": list,
        "referenced_pages": {},
        "unreferenced_pages": dict,
        "access_serial": int,
        "job_serial": int,
        "current_loras": [],
        **dict.fromkeys(("warmup", "reset_page_table", "set_loras", "generate", "enqueue", "cancel"), callable),
        **dict.fromkeys(("clear_queue", "num_remaining_jobs", "num_pending_jobs", "num_active_jobs"), callable),
        **dict.fromkeys(("iterate", "defrag_cache", "print_page_list", "get_paged_params"), callable),
    },
    "job": {
        "serial_number": ANY,
        "sequences": list,
        "full_completion": "",
        "new_tokens": 0,
        "is_finished": False,
        "skips": 0,
        "max_skips": 4,
        "accepted_draft_tokens": 0,
        "rejected_draft_tokens": 0,
        "cached_pages": 0,
        "cached_tokens": 0,
        "total_pages": 0,
        "non_sequential_pages": 0,
        "max_new_tokens": 12,
        "min_new_tokens": 0,
        "gen_settings": SOME,
        "identifier": None,
        "filter_prefer_eos": False,
        "return_top_tokens": 0,
        "return_logits": False,
        "return_probs": False,
        **dict.fromkeys(("time_enqueue", "time_first_prefill", "time_first_token", "time_last_token"), None),
    },
    "settings": {
        **SETTINGS,
        **dict.fromkeys(("greedy", "clone", "greedy_clone", "disallow_tokens", "allow_tokens"), callable),
    },
    "sampler": {
        "Settings": type,
        **dict.fromkeys(("sample", "apply_dry", "get_dry_default_sequence_breaker_tokens"), callable),
        **dict.fromkeys(("get_default_xtc_mask_tokens", "get_xtc_mask_tensor"), callable),
    },
    "embedding": {
        "first_index": int,
        "length": 3,
        "text_alias": str,
        "metadata": {},
        **dict.fromkeys(("get_ids", "get_ids_tensor", "get_vision_token_range", "get_size_in_bytes"), callable),
    },
    "arch": {"lm": SOME, "requires_bos": False},
}
ROWS = [(kind, name) for kind, names in TABLE.items() for name in names]


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """One object of each kind, on the bundled model."""
    config = exllamav2.ExLlamaV2Config(str(default_model_dir()))
    model = exllamav2.ExLlamaV2(config)
    cache = exllamav2.ExLlamaV2Cache(model, max_seq_len=1024, lazy=True)
    model.load_autosplit(cache)
    tokenizer = exllamav2.ExLlamaV2Tokenizer(config)

    def cache_of(kind: Any) -> Any:
        return kind(model, max_seq_len=1024)

    return {
        "config": config,
        "arch": config.arch,
        "model": model,
        "cache": cache,
        "cache_8bit": cache_of(exllamav2.ExLlamaV2Cache_8bit),
        "cache_q4": cache_of(exllamav2.ExLlamaV2Cache_Q4),
        "cache_q6": cache_of(exllamav2.ExLlamaV2Cache_Q6),
        "cache_q8": cache_of(exllamav2.ExLlamaV2Cache_Q8),
        "tokenizer": tokenizer,
        "base": generators.ExLlamaV2BaseGenerator(model, cache_of(exllamav2.ExLlamaV2Cache), tokenizer),
        "streaming": generators.ExLlamaV2StreamingGenerator(model, cache_of(exllamav2.ExLlamaV2Cache), tokenizer),
        "dynamic": generators.ExLlamaV2DynamicGenerator(model, cache, tokenizer),
        "job": generators.ExLlamaV2DynamicJob(tokenizer.encode("Once upon a time,"), 12),
        "settings": generators.ExLlamaV2Sampler.Settings(),
        "sampler": generators.ExLlamaV2Sampler,
        "embedding": generators.ExLlamaV2MMEmbedding(model, torch.zeros(3, config.hidden_size)),
    }


@pytest.mark.parametrize(("kind", "name"), ROWS, ids=[".".join(row) for row in ROWS])
def test_the_attribute_exists_with_its_default(objects: dict[str, Any], kind: str, name: str) -> None:
    value, expected = getattr(objects[kind], name), TABLE[kind][name]
    if expected is callable:
        assert callable(value)
    elif expected is SOME:
        assert value is not None
    elif isinstance(expected, type):
        assert isinstance(value, expected)
    elif expected is not ANY:
        assert value == expected
        assert isinstance(value, bool) == isinstance(expected, bool)


def test_settings_have_no_other_fields_and_keep_their_order(objects: dict[str, Any]) -> None:
    """Positional construction is possible in exllamav2."""
    parameters = inspect.signature(generators.ExLlamaV2Sampler.Settings).parameters
    assert list(parameters)[: len(SETTINGS)] == list(SETTINGS)


def test_attributes_of_a_job_while_it_runs_and_after(objects: dict[str, Any]) -> None:
    generator, tokenizer = objects["dynamic"], objects["tokenizer"]
    ids = tokenizer.encode("Once upon a time,", add_bos=True)
    job = generators.ExLlamaV2DynamicJob(ids, 12, gen_settings=generators.ExLlamaV2Sampler.Settings.greedy())
    serial = generator.job_serial
    assert generator.enqueue(job) == job.serial_number == serial
    assert generator.pending_jobs == [job]
    before = generator.access_serial
    while job.new_tokens < 6:
        generator.iterate()
    sequence = job.sequences[0]
    assert torch.equal(sequence.input_ids, ids)
    assert len(sequence.sequence_ids) == ids.shape[1] + job.new_tokens
    assert torch.equal(sequence.sequence_ids.torch()[:, : ids.shape[1]], ids)
    assert sequence.kv_position >= ids.shape[1]
    assert generator.active_jobs == [job]
    held = generator.referenced_pages
    assert list(held.values()) == sequence.allocated_pages
    assert {*held} | {*generator.unreferenced_pages} == set(range(generator.max_pages))
    assert len(generator.all_pages) == generator.max_pages
    assert generator.access_serial > before
    assert (job.total_pages, job.non_sequential_pages) == (len(held), 0)
    while generator.num_remaining_jobs():
        generator.iterate()
    assert (generator.active_jobs, generator.referenced_pages) == ([], {})
    assert job.is_finished
    assert job.full_completion
    times = [job.time_enqueue, job.time_first_prefill, job.time_first_token, job.time_last_token]
    assert times == sorted(t for t in times if t is not None)


def test_pages_of_a_job_that_do_not_follow_each_other_are_counted(objects: dict[str, Any]) -> None:
    """Pages are given back last page first, so that the next job gets them in the opposite order."""
    generator = objects["dynamic"]
    generator.reset_page_table()
    seen = []
    for first in (100, 900):
        ids = torch.arange(first, first + 700)[None] % 1000 + 10
        job = generators.ExLlamaV2DynamicJob(ids, 2)
        generator.enqueue(job)
        results = generator.iterate()
        while not any(result["stage"] == "prefill" for result in results):
            results = generator.iterate()
        pages = [page.index for page in job.sequences[0].allocated_pages]
        assert job.total_pages == len(pages) == 3
        assert job.non_sequential_pages == sum(b != a + 1 for a, b in pairwise(pages))
        seen.append(job.non_sequential_pages)
        while generator.num_remaining_jobs():
            generator.iterate()
    assert max(seen) > 0


def test_parameters_of_pages(objects: dict[str, Any]) -> None:
    generator = objects["dynamic"]
    table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([300], dtype=torch.int32)
    params = generator.get_paged_params(1, table, lengths, 300, 1)
    assert (params.page_size, params.q_len, params.max_cache_seqlen) == (256, 1, 300)
    assert params.block_index is table


def test_attributes_of_async_objects(objects: dict[str, Any]) -> None:
    async def run() -> None:
        cache = exllamav2.ExLlamaV2Cache(objects["model"], max_seq_len=1024)
        generator = generators.ExLlamaV2DynamicGeneratorAsync(objects["model"], cache, objects["tokenizer"])
        assert isinstance(generator.generator, generators.ExLlamaV2DynamicGenerator)
        ids = objects["tokenizer"].encode("Once upon a time,")
        job = generators.ExLlamaV2DynamicJobAsync(generator, ids, max_new_tokens=4)
        assert job.cancelled is False
        assert isinstance(job.job, generators.ExLlamaV2DynamicJob)
        assert [r async for r in job][-1]["eos"]
        for name in ("enqueue", "cancel", "close"):
            assert callable(getattr(generator, name))
        await generator.close()

    asyncio.run(run())


TEXT_MODEL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlavaForConditionalGeneration", "pixtral"),
        ("Mistral3ForConditionalGeneration", "pixtral"),
        ("Qwen2VLForConditionalGeneration", "qwen2"),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2.5"),
        ("Gemma3ForConditionalGeneration", "siglip_vision_model"),
        ("LlamaForCausalLM", None),
    ],
)
def test_the_type_of_an_image_tower(architecture: str, expected: str | None, tmp_path: Path) -> None:
    text = {**TEXT_MODEL, "model_type": "mistral"} if expected == "pixtral" else TEXT_MODEL
    sections = {"vision_config": {"model_type": expected}, "text_config": text} if expected else {}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **TEXT_MODEL, **sections}))
    config = exllamav2.ExLlamaV2Config()
    assert config.vision_model_type is None
    config.model_dir = str(tmp_path)
    config.prepare(no_tensors=True)
    assert config.vision_model_type == expected
    config.model_dir = str(default_model_dir())  # prepared again for another model
    config.prepare(no_tensors=True)
    assert config.vision_model_type is None
