"""Loading and unloading adapters and models again and again gives a GPU's memory back, captured steps included."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from feature_cases import make_adapter

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Lora, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler

pytestmark = pytest.mark.cuda

FOLDER = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
CYCLES = 100
WARM_UP = 34
"""More cycles than torch has streams in its pool: the first use of a stream may take memory for good."""
SEGMENT = 2 << 20
"""Bytes of the smallest piece of memory that torch takes from the driver, which every pool of a graph has."""
TOKENS = 24
"""Enough for steps to be captured and replayed."""


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")


def held() -> tuple[int, int]:
    """Bytes of tensors on the GPU, and bytes that torch holds of it for tensors and graphs."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def assert_no_growth(cycle: Callable[[], None]) -> None:
    for _ in range(WARM_UP):
        cycle()
    tensors, reserved = held()
    for _ in range(CYCLES):
        cycle()
    tensors_after, reserved_after = held()
    assert tensors_after == tensors
    # Allocations of other sizes may end in other segments, but a graph that is not freed keeps one in every cycle.
    assert reserved_after - reserved < CYCLES // 10 * SEGMENT


def load() -> ExLlamaV2:
    model = ExLlamaV2(ExLlamaV2Config(FOLDER))
    model.load()
    return model


def complete(model: ExLlamaV2, generator: ExLlamaV2DynamicGenerator, loras: list[ExLlamaV2Lora]) -> str:
    """Generate by captured steps."""
    greedy = ExLlamaV2Sampler.Settings.greedy()
    text: str = generator.generate("def main(argv):\n", TOKENS, gen_settings=greedy, loras=loras)
    assert model.decode.count > 0, model.decode.reason
    return text


def new_generator(model: ExLlamaV2) -> ExLlamaV2DynamicGenerator:
    cache = ExLlamaV2Cache(model, max_seq_len=1024)
    return ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(model.config))


@pytest.mark.covers("core: lora")
def test_adapters(tmp_path: Path) -> None:
    model = load()
    folder = make_adapter(tmp_path / "adapter", model, 1)
    generator = new_generator(model)
    plain = complete(model, generator, [])

    def cycle() -> None:
        lora = ExLlamaV2Lora.from_directory(model, folder)
        complete(model, generator, [lora])
        lora.unload()

    assert_no_growth(cycle)
    assert complete(model, generator, []) == plain
    model.unload()


def test_models() -> None:
    def cycle() -> None:
        model = load()
        complete(model, new_generator(model), [])
        model.unload()

    assert_no_growth(cycle)
