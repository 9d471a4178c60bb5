"""Third-party filters under `filter_prefer_eos`, as servers use it for structured output."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from exl_generate.bundled import default_model_dir
from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exllamav2.generator.filters import ExLlamaV2Filter, ExLlamaV2PrefixFilter

GREEDY = ExLlamaV2Sampler.Settings.greedy()
PROMPT = "The girl as JSON: "


@pytest.fixture(scope="module")
def loaded() -> tuple[ExLlamaV2, ExLlamaV2Tokenizer]:
    config = ExLlamaV2Config(str(default_model_dir()))
    model = ExLlamaV2(config)
    model.load()
    return model, ExLlamaV2Tokenizer(config)


def formatron_filter(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> Any:
    """JSON with a name and an age. formatron knows EOS by its spelling too, and allows it inside a string."""
    from formatron.formatter import FormatterBuilder
    from formatron.integrations.exllamav2 import create_formatter_filter
    from formatron.schemas.dict_inference import infer_mapping

    builder = FormatterBuilder()
    builder.append_line(f"{builder.json(infer_mapping({'name': 'x', 'age': 3}), capture_name='json')}")
    return create_formatter_filter(model, tokenizer, builder)


@pytest.mark.parametrize("prefer", [False, True])
@pytest.mark.parametrize("generator_class", [ExLlamaV2DynamicGenerator, ExLlamaV2BaseGenerator])
def test_prefer_eos_does_not_cut_formatron_short(loaded: Any, generator_class: Any, prefer: bool) -> None:
    model, tokenizer = loaded
    generator = generator_class(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)
    filters = [formatron_filter(model, tokenizer)]
    common = {"filters": filters, "filter_prefer_eos": prefer, "completion_only": True, "add_bos": True}
    if generator_class is ExLlamaV2DynamicGenerator:
        text = generator.generate(PROMPT, 60, gen_settings=GREEDY, stop_conditions=[tokenizer.eos_token_id], **common)
    else:
        text = generator.generate_simple(PROMPT, GREEDY, 60, **common)
    assert set(json.loads(text)) == {"name", "age"}


@pytest.mark.parametrize("prefer", [False, True])
def test_prefer_eos_does_not_cut_a_stream_short(loaded: Any, prefer: bool) -> None:
    model, tokenizer = loaded
    generator = ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)
    generator.set_stop_conditions([tokenizer.eos_token_id])
    ids = tokenizer.encode(PROMPT, add_bos=True)
    filters = [formatron_filter(model, tokenizer)]
    generator.begin_stream_ex(ids, GREEDY, filters=filters, filter_prefer_eos=prefer)
    text = ""
    for _ in range(60):
        result = generator.stream_ex()
        text += result["chunk"]
        if result["eos"]:
            break
    assert set(json.loads(text)) == {"name", "age"}


@pytest.mark.parametrize("prefer", [False, True])
def test_prefer_eos_does_not_force_the_end_on_a_sampler_with_formatron(loaded: Any, prefer: bool) -> None:
    model, tokenizer = loaded
    own = formatron_filter(model, tokenizer)
    own.begin("")
    for piece in '{"name":"':
        own.next()
        own.feed(tokenizer.single_id(piece))
    assert tokenizer.eos_token_id in own.next()[0], "this is not the place where EOS is allowed as text"
    logits = torch.zeros(1, 1, -(-model.config.vocab_size // 32) * 32)
    logits[..., tokenizer.single_id("a")] = 1.0
    ids = tokenizer.encode(PROMPT)
    token, *_, ended = ExLlamaV2Sampler.sample(
        logits, GREEDY, ids, 0.5, tokenizer, filters=[own], filter_prefer_eos=prefer
    )
    assert (int(token), ended) == (tokenizer.single_id("a"), False)


def test_prefer_eos_ends_lm_format_enforcer_after_the_object(loaded: Any) -> None:
    """The enforcer lists ids, EOS among white space once the object is whole: there the preference has its effect."""
    from lmformatenforcer import JsonSchemaParser
    from lmformatenforcer.integrations.exllamav2 import ExLlamaV2TokenEnforcerFilter

    model, tokenizer = loaded
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    generator = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)
    settings = ExLlamaV2Sampler.Settings.greedy()
    settings.token_bias = torch.zeros(-(-model.config.vocab_size // 32) * 32)
    settings.token_bias[tokenizer.eos_token_id] = -50.0
    text, last = generator.generate(
        PROMPT,
        60,
        gen_settings=settings,
        filters=[
            ExLlamaV2TokenEnforcerFilter(JsonSchemaParser(schema), tokenizer),
            ExLlamaV2PrefixFilter(model, tokenizer, ["{", "["]),
        ],
        filter_prefer_eos=True,
        completion_only=True,
        stop_conditions=[tokenizer.eos_token_id],
        return_last_results=True,
    )
    assert last["eos_reason"] == "stop_token"
    assert set(json.loads(text)) == {"age"}
    assert text == text.rstrip()


class Recorder(ExLlamaV2Filter):
    """Allows everything, and keeps the ids and the text of its tokens by means of torch and the tokenizer."""

    def begin(self, prefix_str: str | bytes | None = "") -> None:
        self.ids = torch.empty((1, 0), dtype=torch.long)
        self.text = ""

    def feed(self, token: torch.Tensor) -> None:
        self.ids = torch.cat([self.ids, token.cpu()], dim=-1)
        self.text += self.tokenizer.decode(token)[0]

    def next(self) -> tuple[None, set[int]]:
        return None, set()

    def clone(self, c: Any = None) -> Any:
        return self


def test_a_filter_is_fed_tensors_as_in_exllamav2(loaded: Any) -> None:
    model, tokenizer = loaded
    generator = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)
    recorder = Recorder(model, tokenizer)
    text = generator.generate(PROMPT, 6, gen_settings=GREEDY, filters=[recorder], completion_only=True, add_bos=True)
    assert recorder.text == text
    assert recorder.ids.shape == (1, 6)
    assert tokenizer.decode(recorder.ids) == [text]
