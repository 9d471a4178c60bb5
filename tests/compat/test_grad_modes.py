"""Objects made in one of torch's modes (plain, no_grad, inference_mode) work in every other one, in any thread."""

from __future__ import annotations

import gc
import itertools
import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_generate.bundled import draft_model_dir
from exl_kernels.safetensors_file import write_safetensors
from exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
    ExLlamaV2Lora,
    ExLlamaV2Tokenizer,
    SeqTensor,
)
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

pytestmark = pytest.mark.sampled(7)

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
PAIRS = [pair for pair in itertools.product(MODES, MODES) if pair[0] != pair[1]]
PAGED = [ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8, ExLlamaV2Cache_TP]
# Two prompts of one page that share most of it: the second one takes its head from the first one's page.
SHARED = "Once upon a time, a small fox lived in a forest with an old bear and a young girl. "
PROMPTS = (SHARED + "One day, the fox", SHARED + "One night, the bear")


def in_thread(run: Callable[[], Any]) -> Any:
    """The result of `run` in a thread of its own, which starts in plain mode."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    assert results, "the thread failed"
    return results[0]


def lazy_load(config: ExLlamaV2Config, cache_class: Any, load: str, make: str) -> tuple[ExLlamaV2, Any]:
    """A model loaded in one mode with a cache made in another, through load_autosplit_gen with a callback."""
    model = ExLlamaV2(config)
    if cache_class is ExLlamaV2Cache_TP:
        with MODES[load]():
            model.load_tp()
        with MODES[make]():
            return model, ExLlamaV2Cache_TP(model, base=ExLlamaV2Cache_Q4, max_seq_len=768)
    with MODES[make]():
        cache = cache_class(model, max_seq_len=768, lazy=True)
    seen: list[tuple[int, int]] = []
    with MODES[load]():
        for _ in model.load_autosplit_gen(cache, callback=lambda done, total: seen.append((done, total))):
            pass
    assert seen[-1] == (len(model.modules), len(model.modules))
    return model, cache


def answers(generator: Any) -> tuple[list[str], int]:
    """Both completions, and how many tokens of the second prompt were copied from the first one's page."""
    generator.reset_page_table()
    greedy = ExLlamaV2Sampler.Settings.greedy()
    texts, cached = [], 0
    for prompt in PROMPTS:
        text, last = generator.generate(prompt, 5, gen_settings=greedy, add_bos=True, return_last_results=True)
        texts.append(text)
        cached = last["cached_tokens"]
    return texts, cached


@pytest.fixture(scope="module")
def config() -> ExLlamaV2Config:
    return ExLlamaV2Config(str(draft_model_dir()))


@pytest.fixture(scope="module")
def tokenizer(config: ExLlamaV2Config) -> ExLlamaV2Tokenizer:
    return ExLlamaV2Tokenizer(config)


@pytest.mark.parametrize("cache_class", PAGED, ids=lambda c: c.__name__)
@pytest.mark.parametrize("load", MODES)
@pytest.mark.parametrize("make", MODES)
def test_shared_prefixes_are_copied_in_every_mode(
    config: ExLlamaV2Config, tokenizer: ExLlamaV2Tokenizer, cache_class: Any, load: str, make: str
) -> None:
    """Model, cache and generator of each mode serve callers of each mode and of another thread with the same tokens."""
    model, cache = lazy_load(config, cache_class, load, make)
    draft, draft_cache = lazy_load(config, cache_class, load, make)
    with MODES[make]():
        generator = ExLlamaV2DynamicGenerator(
            model, cache, tokenizer, draft_model=draft, draft_cache=draft_cache, num_draft_tokens=2
        )
    found = []
    for mode in MODES.values():
        with mode():
            found.append(answers(generator))
            found.append(in_thread(lambda: answers(generator)))
    assert found == [found[0]] * 6
    assert found[0][1] >= 16


@pytest.mark.parametrize(("make", "use"), PAIRS)
@pytest.mark.parametrize("cache_class", [ExLlamaV2Cache_8bit, *PAGED[:-1]], ids=lambda c: c.__name__)
def test_caches_are_written_in_every_mode(config: ExLlamaV2Config, cache_class: Any, make: str, use: str) -> None:
    """Every method of a cache that writes in place, on caches, clones and decoded pairs of another mode."""
    with MODES[make]():
        model, cache = lazy_load(config, cache_class, make, make)
        model.forward(torch.tensor([[1, 20, 30, 40]]), cache)
        copies = [cache.clone(), cache_class(model, max_seq_len=768)]
        cache.get_kv_state(0, 1, 0, 4)
    stored = [tensor[:, :4].clone() for tensor in cache.all_tensors()]
    with MODES[use]():
        for copy in copies:
            cache.copy_states(copy, 0, 4, 8, 4, 0, 1, 0, 1)
        cache.get_kv_state(0, 1, 0, 4)
        cache.store_kv_state(0, 1, 0, 4)
        model.forward(torch.tensor([[50]]), cache)
        copies[0].roll_left()
    for want, rolled, copied in zip(stored, copies[0].all_tensors(), copies[1].all_tensors(), strict=True):
        assert torch.equal(want, rolled[:, 7:11])
        assert torch.equal(want, copied[:, 8:12])


@pytest.mark.parametrize(("begin", "go_on"), PAIRS)
def test_a_stream_goes_on_in_another_mode(
    config: ExLlamaV2Config, tokenizer: ExLlamaV2Tokenizer, begin: str, go_on: str
) -> None:
    with MODES[begin]():
        model, cache = lazy_load(config, ExLlamaV2Cache, begin, begin)
        generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
        settings = ExLlamaV2Sampler.Settings.greedy()
        settings.disallow_tokens(tokenizer, [5])
        generator.begin_stream_ex(tokenizer.encode(PROMPTS[0], add_bos=True), settings)
        text = generator.stream_ex()["chunk"]
    with MODES[go_on]():
        settings.disallow_tokens(tokenizer, [6])
        text += "".join(generator.stream_ex()["chunk"] for _ in range(5))
        generator.begin_stream_ex(tokenizer.encode(PROMPTS[0], add_bos=True), settings)
        assert "".join(generator.stream_ex()["chunk"] for _ in range(6)) == text


@pytest.mark.parametrize(("make", "use"), PAIRS)
def test_a_growing_tensor_grows_in_another_mode(make: str, use: str) -> None:
    with MODES[make]():
        grown = SeqTensor((1, 0), torch.int64, 1)
        grown.append(torch.arange(100)[None])
    with MODES[use]():
        grown.append(torch.arange(100, 200)[None])
        grown.append(torch.arange(200, 400)[None])
    assert grown.torch().tolist() == [list(range(400))]


def inference_tensors() -> list[torch.Tensor]:
    """All of the process that are alive and were made in inference mode."""
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is torch.Tensor and found.is_inference()]


def write_adapter(config: ExLlamaV2Config, folder: Path) -> None:
    tensors = {}
    for layer in range(config.num_hidden_layers):
        key = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{key}.lora_A.weight"] = torch.full((2, config.hidden_size), 0.01)
        tensors[f"{key}.lora_B.weight"] = torch.full((config.hidden_size, 2), 0.01)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))


@torch.inference_mode()
def test_nothing_that_lasts_belongs_to_inference_mode(config: ExLlamaV2Config, tmp_path: Path) -> None:
    """After a host's work in inference mode, no tensor of model, caches, adapter or generator refuses other modes."""
    before = {id(tensor) for tensor in inference_tensors()}
    model, cache = lazy_load(config, ExLlamaV2Cache_Q4, "inference", "inference")
    model.load_module(1)
    draft, draft_cache = lazy_load(config, ExLlamaV2Cache_Q8, "inference", "inference")
    write_adapter(config, tmp_path)
    lora = ExLlamaV2Lora.from_directory(model, str(tmp_path))
    own = ExLlamaV2Tokenizer(config)
    own.cached_encode_str("Once")
    generator = ExLlamaV2DynamicGenerator(model, cache, own, draft_model=draft, draft_cache=draft_cache)
    generator.set_loras(lora)
    answers(generator)
    left = [tuple(tensor.shape) for tensor in inference_tensors() if id(tensor) not in before]
    assert not left, left
    del generator, lora, draft, draft_cache, model, cache, own


@torch.inference_mode()
def test_an_image_is_no_inference_tensor(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from vision_models import QWEN_TEXT, picture, write_model, write_tokenizer

    from exllamav2 import ExLlamaV2VisionTower

    sizes = {"vocab_size": 288, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 260}
    with torch.inference_mode(False):
        write_model("Qwen2VL", tmp_path, text_config={**QWEN_TEXT, **sizes})
        write_tokenizer(tmp_path)
    own = ExLlamaV2Config(str(tmp_path))
    before = {id(tensor) for tensor in inference_tensors()}
    tower = ExLlamaV2VisionTower(own)
    tower.load()
    model, cache = lazy_load(own, ExLlamaV2Cache, "inference", "inference")
    reader = ExLlamaV2Tokenizer(own)
    image = tower.get_image_embeddings(model, reader, picture(60, 24))
    held = [value for value in vars(image).values() if isinstance(value, torch.Tensor)]
    assert held
    assert not any(tensor.is_inference() for tensor in held)
    left = [tuple(tensor.shape) for tensor in inference_tensors() if id(tensor) not in before]
    assert not left, left
    generator = ExLlamaV2DynamicGenerator(model, cache, reader)
    with torch.inference_mode(False):
        texts = [
            generator.generate(f"{image.text_alias} What?", 4, embeddings=[image], completion_only=True, seed=1)
            for _ in range(2)
        ]
    assert texts[0] == texts[1]
