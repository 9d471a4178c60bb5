"""A sample of config_mutations.py: what a key of config.json does to the logits it does here too, or is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("transformers")

from config_mutations import Judge, base_config, changes_of, foreign_keys
from effort import trials
from test_against_transformers import CASES

pytestmark = [
    pytest.mark.covers("core: config-keys", "core: config", "core: architectures"),
    pytest.mark.sampled(5),
]

FAMILIES = {CASES[name].model: name for name in reversed(CASES)}  # the first case of each
A_FAMILY = trials(9, 2)  # changes of each that are tried here; all of them: `python tests/core/config_mutations.py`

# Where transformers 5 does what no file can mean, and we what the file says: none of it is in a published model.
DELIBERATE = {
    # It drops the oldest spelling `type` where each layer type has a rotation of its own.
    **dict.fromkeys(("gemma3", "gemma3-text"), ('"type": "linear"', '"type": "yarn"', '"type": "llama3"')),
    # The same, and `rope_theta` at the top is for layers that see everything only.
    "olmo3": ('"type": "linear"', '"type": "yarn"', '"type": "llama3"', '{"rope_theta": 123.0'),
    # It reads `attn_config.rope_theta` no more, which is where the published model has it.
    "dbrx": ("rope gone",),
}


def sample(case: str) -> list[tuple[str, dict[str, Any]]]:
    """Different ones for each family, the same ones each time."""
    base = base_config(case)
    known = [pair for pair in changes_of(base) if not any(text in pair[0] for text in DELIBERATE.get(case, ()))]
    drawn = random.Random(case)
    return [*drawn.sample(known, A_FAMILY), *drawn.sample(list(foreign_keys(base)), trials(3, 2))]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("case", sorted(FAMILIES.values()))
def test_one_key_at_a_time(case: str) -> None:
    judge = Judge(case)
    assert judge(base_config(case))[0] == "same"
    for what, config in sample(case):
        verdict, why = judge(config)
        assert verdict not in ("other", "crash"), f"{what}: {verdict}, {why}"


WRONG = [  # (case, change) that were ignored or misread once
    ("cohere", "rope gone"),
    ("ernie4.5", "rope gone"),
    ("smollm3", "rope gone"),
    ("bigcode", "multi_query=false"),
    ("dbrx", "num_key_value_heads=4"),
    ("dbrx", "attn_config.kv_n_heads=4"),
    (
        "exaone4",
        'layer_types=["full_attention", "full_attention", "full_attention", "full_attention", "full_attention"]',
    ),
    ("qwen2-moe", "qkv_bias=false"),
    ("llava-pixtral", "tie_word_embeddings=true"),
]
REFUSED = [
    (
        "llama",
        'old {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_scaling": null}',
        "partial_rotary_factor",
    ),
    ("gemma", 'hidden_act="silu"', "hidden_act"),
    ("gemma", 'hidden_activation="relu2"', "hidden_activation"),
    ("gemma3-text", "attn_logit_softcapping=0.7", "attn_logit_softcapping"),
    ("gemma3", "final_logit_softcapping=0.7", "final_logit_softcapping"),
    ("gemma3-text", 'rope_parameters={"rope_theta": 123.0, "rope_type": "default"}', "two rotations"),
    ("llama", "foreign embedding_multiplier=0.7", "embedding_multiplier"),
    ("qwen3", "foreign logits_scaling=0.7", "logits_scaling"),
    ("llama", "foreign residual_multiplier=0.7", "residual_multiplier"),
    ("granite", "foreign logit_scale=0.7", "logit_scale"),
]


def changed(case: str, what: str) -> dict[str, Any]:
    base = base_config(case)
    return dict([*changes_of(base), *foreign_keys(base)])[what]


@pytest.mark.parametrize(("case", "what"), WRONG)
def test_files_that_were_misread_once(case: str, what: str) -> None:
    judge = Judge(case)
    judge(base_config(case))
    assert judge(changed(case, what))[0] == "same"


@pytest.mark.parametrize(("case", "what", "key"), REFUSED)
def test_an_unsupported_value_is_rejected_with_its_key(case: str, what: str, key: str) -> None:
    verdict, why = Judge(case)(changed(case, what))
    assert verdict == "refused"
    assert why.startswith(("Config", "Unsupported"))
    assert key in why


OUTSIDE = [  # of a multimodal model, outside text_config: transformers does not read them there
    ("gemma3", {"sliding_window": 4, "rms_norm_eps": 0.1, "query_pre_attn_scalar": 10}),
    ("qwen2.5-vl", {"rms_norm_eps": 0.1, "hidden_act": "gelu", "rope_theta": 123.0}),
    ("mistral3", {"rms_norm_eps": 0.1, "hidden_act": "gelu", "num_hidden_layers": 1}),
]


@pytest.mark.parametrize(("case", "keys"), OUTSIDE)
def test_keys_outside_text_config_change_nothing(case: str, keys: dict[str, Any]) -> None:
    judge, base = Judge(case), base_config(case)
    judge(base)
    assert judge({**base, **keys})[0] == "same"


@pytest.mark.parametrize("case", ["gpt2", "bigcode", "dbrx"])
@pytest.mark.parametrize("heads", [1, 2, 3, 8])
def test_families_that_do_not_read_num_key_value_heads_ignore_it(case: str, heads: int) -> None:
    judge, base = Judge(case), base_config(case)
    judge(base)
    assert judge({**base, "num_key_value_heads": heads})[0] == "same"
