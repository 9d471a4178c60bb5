"""Steps queued before the host is done with the last one, as on a GPU: nobody can tell, whatever ends or changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_core import PagedParams
from exl_filters import ExLlamaV2Filter
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.testing import (
    ScriptedCache,
    ScriptedConfig,
    ScriptedLora,
    ScriptedModel,
    ScriptedTokenizer,
    check_pages,
    streamed_tokens,
)

TOKENIZER = ScriptedTokenizer(["a", "b", "c", "ab", "bc", " ", "A", "cab", ".", "é"])
VOCAB, EOS = TOKENIZER.get_vocab_size(), TOKENIZER.eos_token_id
Settings = ExLlamaV2Sampler.Settings
ADAPTER = ScriptedLora(3)


class Even(ExLlamaV2Filter):
    """Even ids; raises at step `fault`."""

    def __init__(self, fault: int) -> None:
        super().__init__(None, None)
        self.fault, self.at = fault, 0

    def clone(self, c: Any = None) -> Even:
        return Even(self.fault)

    def begin(self, prefix_str: Any = "") -> None:
        self.at = 0

    def feed(self, token: Any) -> None:
        self.at += 1

    def next(self) -> tuple[set[int], set[int]]:
        if self.at == self.fault:
            raise ZeroDivisionError("broken plugin")
        return set(range(4, VOCAB, 2)), set()


def one_less(result: Any) -> None:
    result.sampled_token = torch.tensor([[max(3, int(result.sampled_token) - 1)]])


class Overwriting(ScriptedModel):
    """Its logits lie in memory that its next pass with logits overwrites, as those of captured steps."""

    def __init__(self, config: ScriptedConfig) -> None:
        super().__init__(config)
        self.given: list[torch.Tensor] = []

    def forward_chunk(self, *args: Any, **kw: Any) -> dict[str, torch.Tensor]:
        found = super().forward_chunk(*args, **kw)
        if "logits" in found:
            for logits in self.given:
                logits.fill_(float("nan"))
            self.given = [found["logits"]]
        return found


class OneBuffer(ScriptedModel):
    """Its logits lie in one buffer for all passes of a size, whoever asked for them, as those of captured steps."""

    def __init__(self, config: ScriptedConfig) -> None:
        super().__init__(config)
        self.steps = 0
        self.buffers: dict[int, torch.Tensor] = {}

    def forward_chunk(self, *args: Any, **kw: Any) -> dict[str, torch.Tensor]:
        found = super().forward_chunk(*args, **kw)
        self.steps += 1
        if "logits" in found:
            fresh = found["logits"]
            rows = fresh.shape[0] * fresh.shape[1]
            buffer = self.buffers.setdefault(rows, torch.empty(rows, fresh.shape[2]))
            found["logits"] = buffer.copy_(fresh.view(rows, -1)).view(fresh.shape)
        return found


class Prepared:
    """A step of `Preparing` that waits for its ids."""

    def __init__(self, model: Preparing, cache: Any, params: PagedParams) -> None:
        self.model, self.cache, self.params, self.number = model, cache, params, -1

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            logits = self.model.forward_chunk(ids, cache=self.cache, attn_params=self.params)["logits"]
        self.number = self.model.steps
        return logits

    @property
    def stands(self) -> bool:
        return self.number == self.model.steps


class Preparing(OneBuffer):
    """A model with steps whose inputs are made beforehand."""

    def prepare_step(self, q_len: int, cache: Any, params: PagedParams) -> Prepared:
        return Prepared(self, cache, params)


@dataclass(frozen=True)
class Ask:
    """A request as data."""

    prompt: tuple[int, ...]
    new: int
    seed: int
    kind: str
    stops: tuple[str | int, ...]
    arrives: int
    cancelled_at: int

    def job(self) -> ExLlamaV2DynamicJob:
        style = Settings.greedy() if self.kind == "greedy" else Settings(temperature=1.0, top_k=0, top_p=0)
        style.post_sampling_hooks = [one_less] if self.kind == "hook" else []
        return ExLlamaV2DynamicJob(
            torch.tensor([self.prompt]),
            self.new,
            gen_settings=style,
            seed=self.seed,
            stop_conditions=list(self.stops),
            banned_strings=["ab", "cc"] if self.kind == "bans" else [],
            filters=[Even(self.seed + 3)] if self.kind == "filter" else None,
            loras=[ADAPTER] if self.kind == "lora" else [],
            max_rq_tokens=3 if self.kind == "share" else None,
            return_logits=self.kind != "greedy",
            return_hidden_state=self.kind == "state",
        )


ASKS = st.builds(
    Ask,
    prompt=st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=20).map(tuple),
    new=st.integers(0, 20),
    seed=st.integers(0, 3),
    kind=st.sampled_from(["plain", "greedy", "greedy", "hook", "bans", "filter", "lora", "share", "state"]),
    stops=st.sampled_from([(), (EOS,), ("bc",), (5, "a ")]),
    arrives=st.integers(0, 10),
    cancelled_at=st.sampled_from([-1, -1, -1, 4, 9]),
)


def comparable(value: Any) -> Any:
    """A result without clocks and objects, its tensors as bytes."""
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return {k: comparable(v) for k, v in value.items() if not k.startswith("time_") and k != "job"}
    return repr(value)


def play(asks: list[Ask], ahead: bool) -> tuple[list[list[Any]], ScriptedModel]:
    """What every job said, round by round, and the model that was asked."""
    model = Overwriting(ScriptedConfig(vocab_size=VOCAB, max_seq_len=96, max_input_len=32))
    cache = ScriptedCache(model, max_seq_len=160)
    generator = ExLlamaV2DynamicGenerator(model, cache, TOKENIZER, page_size=8, max_chunk_size=16, max_batch_size=4)
    generator._engine._runner.asynchronous = ahead
    jobs = [ask.job() for ask in asks]
    said: list[list[Any]] = [[] for _ in jobs]
    for at in range(400):
        for job, ask in zip(jobs, asks, strict=True):
            if ask.arrives == at:
                generator.enqueue(job)
            if ask.cancelled_at == at:
                generator.cancel(job)
        for result in generator.iterate():
            said[jobs.index(result["job"])].append(comparable(result))
        check_pages(generator)
        if at > 10 and not generator.num_remaining_jobs():
            return said, model
    raise AssertionError("the jobs do not end")


@settings(max_examples=150, deadline=None)
@given(st.lists(ASKS, min_size=1, max_size=6))
def test_nobody_can_tell(asks: list[Ask]) -> None:
    assert play(asks, ahead=True)[0] == play(asks, ahead=False)[0]


def test_steps_are_foreseen_and_computed_once() -> None:
    """Two plain jobs: not one pass more than without, and the last step is not followed by another."""
    asks = [Ask((3, 4, 5), 12, 0, "plain", (), 0, -1), Ask((6, 7), 12, 1, "plain", (), 0, -1)]
    (said, ahead), (expected, plain) = play(asks, ahead=True), play(asks, ahead=False)
    assert said == expected
    assert ahead.calls == plain.calls


@pytest.mark.parametrize("kind", [OneBuffer, Preparing])
def test_generators_that_share_a_model_keep_their_logits(kind: type[OneBuffer]) -> None:
    """In turns, each with a cache of its own; and a caller's own passes in between."""

    def play_all(company: bool) -> list[list[int]]:
        model = kind(ScriptedConfig(vocab_size=VOCAB, max_seq_len=96, max_input_len=32))
        generators = []
        for prompt in ([3, 4, 5], [6, 7]):
            cache = ScriptedCache(model, max_seq_len=160)
            generator = ExLlamaV2DynamicGenerator(model, cache, TOKENIZER, page_size=8)
            generator._engine._runner.asynchronous = True
            generator.enqueue(ExLlamaV2DynamicJob(torch.tensor([prompt]), 16, gen_settings=Settings.greedy()))
            generators.append(generator)
        own = ScriptedCache(model, max_seq_len=64)
        said: list[list[Any]] = [[], []]
        table = torch.arange(8, dtype=torch.int32)[None]
        for round_ in range(400):
            for generator, results in zip(generators, said, strict=True):
                if generator.num_remaining_jobs() and (company or generator is generators[0] or round_ >= 200):
                    results += generator.iterate()
                if company and round_ < 8:
                    params = PagedParams(1, table, torch.tensor([round_], dtype=torch.int32), round_, 8, 1)
                    with torch.inference_mode():
                        model.forward_chunk(torch.tensor([[7]]), cache=own, attn_params=params)
        assert not any(generator.num_remaining_jobs() for generator in generators)
        return [streamed_tokens(results) for results in said]

    assert play_all(company=True) == play_all(company=False)


def test_a_step_that_cannot_be_queued_is_computed_in_its_round() -> None:
    model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=96, max_input_len=32), lambda context: 6)
    generator = ExLlamaV2DynamicGenerator(model, ScriptedCache(model, max_seq_len=64), TOKENIZER, page_size=8)
    generator._engine._runner.asynchronous = True
    job = ExLlamaV2DynamicJob(torch.tensor([[3, 4, 5]]), 8, gen_settings=Settings.greedy())
    generator.enqueue(job)
    generator.iterate()
    model.faults[6] = RuntimeError("the GPU is full")  # met by the pass ahead, then by the job's own
    results = [result for _ in range(3) for result in generator.iterate()]
    assert results[-1]["eos_reason"] == "error"
    with pytest.raises(RuntimeError, match="the GPU is full"):
        raise results[-1]["exception"]
    check_pages(generator)
