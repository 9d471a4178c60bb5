"""A decode step on the CPU crosses package borders six times, in the order of ARCHITECTURE.md.

The test counts transitions between packages, not calls. A border counts when a function of one package calls a function
of another, and once more on the return. Calls over the same border that follow one another count once: each layer
calls several operators, so the number of calls grows with the layers, and the number of transitions does not. It is the
number of ways that control takes: generator -> model -> operators, then generator -> sampling operators. A callback
into the package that called, or another way to the operators, adds one.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from types import FrameType

import pytest

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler

MODEL = str(Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5")
PACKAGES = {"exl_kernels", "exl_core", "exl_filters", "exl_generate"}
Border = tuple[str, str]


def package_of(frame: FrameType | None) -> str | None:
    """The nearest package of ours up the stack."""
    while frame is not None:
        found = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if found in PACKAGES:
            return found
        frame = frame.f_back
    return None


class Borders:
    """The borders that calls of this thread cross, in order."""

    def __init__(self) -> None:
        self.crossed: list[Border] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__", "")).partition(".")[0] in PACKAGES:
            here, there = package_of(frame.f_back), package_of(frame)
            if here is not None and there is not None and here != there:
                self.crossed.append((here, there))

    def __enter__(self) -> Borders:
        self._before = sys.getprofile()
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_decode_step_crosses_packages_six_times(jobs: int, temperature: float) -> None:
    """Transitions there and back, as the docstring of this file counts them."""
    config = ExLlamaV2Config(MODEL)
    model = ExLlamaV2(config)
    model.load()
    tokenizer = ExLlamaV2Tokenizer(config)
    generator = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=2048), tokenizer)
    for number in range(jobs):
        ids = tokenizer.encode(f"def function_{number}(value):\n")
        settings = ExLlamaV2Sampler.Settings(temperature=temperature)
        generator.enqueue(ExLlamaV2DynamicJob(input_ids=ids, max_new_tokens=60, gen_settings=settings))
    for _ in range(8):
        generator.iterate()
    with Borders() as borders:
        results = generator.iterate()
    assert len(results) == jobs
    assert all(result["stage"] == "streaming" for result in results)
    there = [border for border, _ in groupby(borders.crossed)]
    assert there == [("exl_generate", "exl_core"), ("exl_core", "exl_kernels"), ("exl_generate", "exl_kernels")]
    assert 2 * len(there) <= 6, "there and back"
