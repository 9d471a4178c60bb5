"""Prompts of a sharded model by one thread, on the CPU: logits and caches are those of the modules' own passes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from joined_on_cpu import FusedDouble, joined_on_cpu
from test_sharded_launches import OTHER_NORMS, PAGE, sharded, write, write_other
from torch import Tensor

from exl_core import AttentionParams, ExLlamaV2, ExLlamaV2Cache_Q4, ExLlamaV2Cache_TP, PagedParams
from exl_core.execution import captured, many_rows, select
from exl_core.execution.forward_pass import CheckedPass, ForwardPass, checked
from exl_core.execution.sharded import prompts
from exl_core.execution.sharded.launches import ResultRow, ShardLaunches, shard_launches_of
from exl_core.execution.sharded.prompts import ShardedPrompts, Stores, StreamBarrier, takes_prompt
from exl_core.lora.rows import RowAdapters
from exl_kernels.attention.prompt import PromptAttention
from exl_kernels.linear import QuantMatrix
from exl_kernels.selection import PACKED_ROWS, STEP_ROWS

pytestmark = pytest.mark.covers("core: tensor-parallel")


@pytest.fixture
def launches_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the launches of a model's devices, out of operators of the CPU."""

    def of(model: ExLlamaV2) -> list[ShardLaunches]:
        joined_on_cpu(monkeypatch)
        made = shard_launches_of(model)
        assert isinstance(made, list), made
        return made

    return of


def keys_of(cache: ExLlamaV2Cache_TP) -> list[Tensor]:
    return [key for part in cache.shards() for key in part.key_states if key is not None]


def paged(lengths: list[int], past: int, q_len: int) -> PagedParams:
    """Rows of these lengths, or of `q_len` tokens each where they are equal."""
    batch = len(lengths)
    table = torch.arange(8 * batch, dtype=torch.int32).flip(0).view(batch, 8)
    equal = len(set(lengths)) == 1
    begin = torch.full((batch,), past, dtype=torch.int32)
    own = None if equal else torch.tensor(lengths, dtype=torch.int32)
    return PagedParams(batch, table, begin, past, PAGE, q_len if equal else 0, q_lens=own)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shares", [[8.0, 8.0], [4.0, 14.0], [8.0] * 4], ids=["two", "uneven", "four"])
@pytest.mark.parametrize(
    ("kind", "family"),
    [("exl2", "LlamaForCausalLM"), ("gptq", "Qwen2ForCausalLM"), ("exl2", "Qwen3ForCausalLM")],
)
def test_prompts_are_those_of_the_modules(
    lab: Any, monkeypatch: pytest.MonkeyPatch, launches_of: Any, kind: str, family: str, shares: list[float]
) -> None:
    """Rows of one length and of several, a second chunk after the first, and passes of fewer results."""
    compare(lab, sharded(monkeypatch, write(lab, kind, family), shares), launches_of)


@pytest.mark.parametrize("family", OTHER_NORMS)
def test_prompts_with_other_norms_are_too(
    lab: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launches_of: Any, family: str
) -> None:
    compare(lab, sharded(monkeypatch, write_other(tmp_path, family), [4.0, 14.0]), launches_of)


def compare(lab: Any, model: ExLlamaV2, launches_of: Any) -> None:
    """Compare prompts with the modules' own passes."""
    caches = [ExLlamaV2Cache_TP(model, ExLlamaV2Cache_Q4, max_seq_len=24 * PAGE) for _ in range(2)]
    asked: list[tuple[list[int], int, dict[str, Any]]] = [
        ([40, 40, 40], 0, {}),
        ([30, 30, 30], 40, {"last_id_only": True}),
        ([30, 41, 17], 70, {}),
        ([35, 35], 0, {"preprocess_only": True}),
    ]
    passes = []
    for lengths, past, results in asked:
        equal = len(set(lengths)) == 1
        ids = lab.ids(len(lengths), lengths[0], vocab=160) if equal else lab.ids(1, sum(lengths), vocab=160)
        passes.append((ids, paged(lengths, past, lengths[0]), results))
    want = []
    for ids, params, results in passes:
        found = model.forward_chunk(ids, caches[0], attn_params=params, **results)
        want.append((found, [key.clone() for key in keys_of(caches[0])], caches[0].current_seq_len))
    assert model.tp_context is not None
    runner = ShardedPrompts(model.tp_context, launches_of(model))
    for (ids, params, results), (expected, keys, length) in zip(passes, want, strict=True):
        one = checked(model, ForwardPass(ids, caches[1], params, **results))
        assert takes_prompt(one)
        with torch.inference_mode():
            got = runner.run(model, one)
        assert got.keys() == expected.keys()
        assert "logits" not in got or torch.equal(got["logits"], expected["logits"])
        assert all(torch.equal(a, b) for a, b in zip(keys_of(caches[1]), keys, strict=True))
        assert caches[1].current_seq_len == length


def test_attention_is_prepared_once_for_each_device(
    lab: Any, monkeypatch: pytest.MonkeyPatch, launches_of: Any
) -> None:
    """Not once for each of the layers, whose operands are the same but for the pages."""
    model = sharded(monkeypatch, write(lab, "exl2", "LlamaForCausalLM"), [8.0, 8.0])
    made: list[PromptAttention] = []

    class Counted(PromptAttention):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(many_rows, "PromptAttention", Counted)
    assert model.tp_context is not None
    runner = ShardedPrompts(model.tp_context, launches_of(model))
    with torch.inference_mode():
        runner.run(model, checked(model, ForwardPass(lab.ids(1, 80, vocab=160), None)))
    assert len(made) == 2


def test_a_prompt_without_a_cache(lab: Any, monkeypatch: pytest.MonkeyPatch, launches_of: Any) -> None:
    model = sharded(monkeypatch, write(lab, "exl2", "LlamaForCausalLM"), [8.0, 8.0])
    ids = lab.ids(2, 50, vocab=160)
    want = model.forward(ids)
    assert model.tp_context is not None
    runner = ShardedPrompts(model.tp_context, launches_of(model))
    with torch.inference_mode():
        found = runner.run(model, checked(model, ForwardPass(ids, None)))
    assert torch.equal(found["logits"], want)


def test_passes_that_count_as_prompts() -> None:
    """Decode steps of many rows need batch-invariant matmuls, adapters are for the modules."""

    def asked(*shape: int, **changes: Any) -> CheckedPass:
        return CheckedPass(ids=torch.zeros(shape, dtype=torch.int64), cache=None, params=AttentionParams(), **changes)

    assert takes_prompt(asked(1, 17))
    assert not takes_prompt(asked(16, 16))
    assert not takes_prompt(asked(1, 65, adapters=(RowAdapters([], torch.full((65,), -1), 65),)))


@pytest.mark.parametrize("begins", [[0, 8, 24], [0, 6, 10, 26], [0, 1, 3]], ids=["wide", "narrow", "odd"])
def test_each_device_gets_the_columns_of_all(begins: list[int]) -> None:
    """A result is valid until the second gather after it."""
    stores = Stores(
        StreamBarrier([torch.device("cpu")] * (len(begins) - 1)), 3, ResultRow(2 * begins[-1], 2 * begins[-1])
    )
    before: tuple[list[Tensor], Tensor] | None = None
    for _ in range(4):
        made = [torch.randn(3, end - begin).half() for begin, end in pairwise(begins)]
        whole = torch.cat(made, 1)
        found = stores.gather(made, begins)
        for results, expected in ((found, whole), *(() if before is None else (before,))):
            assert all(torch.equal(result, expected) for result in results)
        before = found, whole


def test_passes_share_the_events(lab: Any, monkeypatch: pytest.MonkeyPatch, launches_of: Any) -> None:
    """They are made with the first prompt, and again after the launches were dropped."""
    model = sharded(monkeypatch, write(lab, "exl2", "LlamaForCausalLM"), [8.0, 8.0])
    ids, made = lab.ids(2, 50, vocab=160), []
    want = model.forward(ids)
    launches_of(model)
    monkeypatch.setattr(captured, "refusal_of_access", lambda context: None)
    monkeypatch.setattr(captured, "refusal_of_model", lambda model: None)
    monkeypatch.setattr(select, "may_fuse", lambda model: True)

    class Counted(StreamBarrier):
        def __init__(self, devices: Any) -> None:
            made.append(devices)
            super().__init__(devices)

    monkeypatch.setattr("exl_core.execution.sharded.prompts.StreamBarrier", Counted)
    for count in (1, 1, 2):
        if count == 2:
            model.decode.clear()
        assert torch.equal(model.forward(ids), want)
        assert len(made) == count


class Event:
    """The place in the log where it was recorded last."""

    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.at: tuple[str, int] | None = None

    def record(self, stream: Stream) -> None:
        self.at = (stream.name, stream.queued)


class Stream:
    """Knows up to where it waits for each other stream."""

    current: ClassVar[dict[torch.device, Stream]] = {}

    def __init__(self, device: torch.device) -> None:
        self.name, self.queued = str(device), 0
        self.waited: dict[str, int] = {}

    def wait_event(self, event: Event) -> None:
        assert event.at is not None
        self.waited[event.at[0]] = max(event.at[1], self.waited.get(event.at[0], 0))


def test_streams_wait_for_all_stores_of_an_interrupted_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the results is used again after the work of these streams. Gathers make no further events."""
    devices = [torch.device("cuda", at) for at in range(3)]
    monkeypatch.setattr(Event, "made", 0)
    monkeypatch.setattr(Stream, "current", {device: Stream(device) for device in devices})
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current[device])
    stored, limit = 0, 2

    class Results:
        def __init__(self, devices: Any, even: int, odd: int) -> None: ...

        def store(self, gpu: int, own: Tensor, begins: list[int], number: int) -> Tensor:
            nonlocal stored
            stored += 1
            if stored == limit:
                raise KeyboardInterrupt
            Stream.current[devices[gpu]].queued += 1
            return own

    monkeypatch.setattr(prompts, "PeerResults", Results)
    stores = Stores(StreamBarrier(devices), 3, ResultRow(48, 48))
    made, begins = [torch.zeros(3, 4)] * 3, [0, 4, 8, 12]
    for interrupted in (True, False, False):
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                stores.gather(made, begins)
        else:
            stores.gather(made, begins)
        for one in Stream.current.values():
            for other in Stream.current.values():
                assert one is other or one.waited[other.name] == other.queued
    assert Event.made == len(devices)


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "no blocks"])
def test_prompts_of_packed_rows_run_by_joined_launches(
    lab: Any, monkeypatch: pytest.MonkeyPatch, launches_of: Any, blocks: bool
) -> None:
    """Up to 256 rows where one launch takes 128 rows of each part of a matrix, as on one GPU."""
    model = sharded(monkeypatch, write(lab, "exl2", "LlamaForCausalLM"), [8.0, 8.0])
    monkeypatch.setattr(QuantMatrix, "takes_blocks", blocks)
    ids = lab.ids(2, 50, vocab=160)
    want = model.forward(ids)
    assert model.packed_rows == (STEP_ROWS if blocks else PACKED_ROWS)
    assert model.tp_context is not None
    runner = ShardedPrompts(model.tp_context, launches_of(model))
    monkeypatch.setattr(FusedDouble, "calls", 0)
    with torch.inference_mode():
        found = runner.run(model, checked(model, ForwardPass(ids, None)))
    assert torch.equal(found["logits"], want)
    assert (FusedDouble.calls > 0) == blocks
