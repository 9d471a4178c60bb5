"""The guide for TabbyAPI's users names every option, route and field of TabbyAPI, and says true things about them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exl_serve.api import chat, completions
from exl_serve.api.app import ROUTES

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "tabbyapi.md").read_text(encoding="utf-8")
#: The keys of TabbyAPI's sample configuration, by section.
OPTIONS = {
    "network": "host port disable_auth disable_fetch_requests send_tracebacks api_servers",
    "logging": "log_prompt log_generation_params log_requests log_chat_completion_requests",
    "model": (
        "model_dir inline_model_loading use_dummy_models dummy_model_names model_name use_as_default backend "
        "max_seq_len cache_size cache_mode tensor_parallel tensor_parallel_backend gpu_split_auto autosplit_reserve "
        "gpu_split rope_scale rope_alpha chunk_size output_chunking max_batch_size prompt_template vision "
        "force_enable_thinking reasoning reasoning_start_token reasoning_end_token reasoning_suppress_header "
        "tool_format"
    ),
    "draft_model": (
        "draft_mode draft_model_dir draft_model_name draft_rope_scale draft_rope_alpha draft_cache_mode "
        "draft_gpu_split draft_num_tokens ngram_match_min"
    ),
    "sampling": "override_preset",
    "lora": "lora_dir loras",
    "embeddings": "embedding_model_dir embeddings_device embedding_model_name",
    "memory": "sysmem_recurrent_cache cuda_malloc_async",
    "developer": (
        "unsafe_launch disable_request_streaming realtime_process_priority seqlog seqlog_server_url seqlog_api_key"
    ),
}
FIELDS = (
    "max_tokens max_length min_tokens min_length generate_window stop stop_sequence banned_strings banned_tokens "
    "custom_token_bans allowed_tokens allowed_token_ids token_healing temperature temperature_last smoothing_factor "
    "top_k top_p top_a min_p tfs typical typical_p skew frequency_penalty presence_penalty repetition_penalty rep_pen "
    "penalty_range repetition_range repetition_penalty_range rep_pen_range repetition_decay dry_multiplier dry_base "
    "dry_allowed_length dry_range dry_penalty_last_n dry_sequence_breakers mirostat mirostat_mode mirostat_tau "
    "mirostat_eta add_bos_token ban_eos_token ignore_eos skip_special_tokens logit_bias negative_prompt json_schema "
    "regex_pattern grammar_string speculative_ngram cfg_scale guidance_scale max_temp dynatemp_high min_temp "
    "dynatemp_low temp_exponent dynatemp_exponent model stream stream_options logprobs response_format n prompt "
    "messages prompt_template add_generation_prompt template_vars response_prefix tools functions"
)
KNOWN = {*chat.FIELDS, *completions.FIELDS, "messages", "prompt", "functions"}
#: The route reads them otherwise, or not at all: the second table says how.
OTHERWISE = {"generate_window", "speculative_ngram", "response_prefix", "prompt_template"}


@pytest.mark.parametrize("section", OPTIONS)
def test_every_option_is_named(section: str) -> None:
    assert [key for key in OPTIONS[section].split() if f"`{section}.{key}`" not in GUIDE] == []


def test_every_field_is_named_and_known() -> None:
    fields = FIELDS.split()
    assert [name for name in fields if f"`{name}`" not in GUIDE] == []
    assert [name for name in fields if name not in KNOWN | OTHERWISE] == []


def test_routes_that_are_the_same_exist() -> None:
    served = {route.path for route in ROUTES}
    rows = re.findall(r"^\| (`/.*?) \| (.*) \|$", GUIDE, re.MULTILINE)
    assert len(rows) > 12
    same = [path for names, answer in rows if answer.startswith("the same") for path in re.findall(r"`(/\S+)`", names)]
    assert len(same) >= 14
    assert [path for path in same if path not in served] == []
    others = [path for names, answer in rows if "not offered" in answer for path in re.findall(r"`(/\S+)`", names)]
    assert [path for path in others if path in served] == []
