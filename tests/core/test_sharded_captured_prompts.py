"""Captured prompts of a sharded model without a GPU: a replayed graph is a thread; marks of stores are a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from captured_on_cpu import Graph, captured_on_cpu
from joined_on_cpu import joined_on_cpu
from test_sharded_launches import PAGE, sharded, write
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache_TP, PagedParams
from exl_core.execution import captured, step_recorder
from exl_core.execution.recorder import Body
from exl_core.execution.sharded import captured_prompts, exchange_buffers, prompts
from exl_core.execution.sharded.captured_prompts import MarkedStores, refusal_of_memory
from exl_core.execution.sharded.launches import shard_launches_of
from exl_core.execution.sharded.prompts import ShardedPrompts
from exl_core.execution.step_inputs import Bucket
from exl_kernels.device import set_row_invariant
from exl_kernels.peer import PeerResults

pytestmark = pytest.mark.covers("core: tensor-parallel")


class Results(PeerResults):
    """`PeerResults` of threads: a store that waits returns after the other threads' stores of its number."""

    made: ClassVar[list[Results]] = []

    def __init__(self, devices: Sequence[torch.device], even: int, odd: int) -> None:
        super().__init__(devices, even, odd)
        self.numbers: list[list[int]] = [[] for _ in devices]
        self._barrier = threading.Barrier(len(devices))
        Results.made.append(self)

    def store(
        self, gpu: int, own: Tensor, begins: Sequence[int], number: int, *, mark: bool = False, wait: bool = False
    ) -> Tensor:
        found = super().store(gpu, own, begins, number)
        if wait:
            self.numbers[gpu].append(number)
            self._barrier.wait()
        return found


class Replays:
    """The graphs of a pass that were replayed and wait for the others."""

    running: ClassVar[list[threading.Thread]] = []
    thread: ClassVar[threading.local] = threading.local()


def replayed(make: Callable[..., Body], *, waits: bool) -> Callable[..., Body]:
    """Let a graph run the body that `make` returns, and write its result where the recorded one is."""

    def made(*args: Any) -> Body:
        body = make(*args)

        def run(logits: Tensor | None) -> Tensor:
            found = body(logits)
            if Graph.recording is None:
                return found

            def replay() -> None:
                Replays.thread.live = True
                with torch.inference_mode():
                    result = body(logits)
                    if result is not found:
                        found.copy_(result)

            def begin() -> None:
                Replays.running.append(threading.Thread(target=replay))
                Replays.running[-1].start()
                last = not waits or args[-1] == 0  # the first device's graph is queued last
                while last and Replays.running:
                    Replays.running.pop().join()

            Graph.recording.body = begin
            return found

        return run

    return made


@pytest.fixture
def model(lab: Any, monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2:
    """A model over three devices, whose prompts are captured when they come for the second time."""
    folder = write(
        lab,
        "exl2",
        "LlamaForCausalLM",
        hidden_size=384,
        intermediate_size=288,
        num_attention_heads=12,
        num_key_value_heads=6,
        num_hidden_layers=2,
        vocab_size=288,
    )
    made = sharded(monkeypatch, folder, [8.0, 8.0, 8.0])
    joined_on_cpu(monkeypatch)
    captured_on_cpu(monkeypatch)
    Results.made.clear()
    monkeypatch.setenv("EXL_CUDA_PROMPT_GRAPHS", "1")
    monkeypatch.setattr(captured, "refusal_of_access", lambda context: None)
    monkeypatch.setattr(exchange_buffers, "PeerResults", Results)
    monkeypatch.setattr(exchange_buffers, "free_deleted", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(captured_prompts, "is_captured", lambda device: getattr(Replays.thread, "live", False))
    monkeypatch.setattr(captured_prompts, "embedding_body", replayed(captured_prompts.embedding_body, waits=False))
    monkeypatch.setattr(captured_prompts, "layers_body", replayed(captured_prompts.layers_body, waits=True))
    return made


def keys_in(cache: ExLlamaV2Cache_TP) -> list[Tensor]:
    return [key for part in cache.shards() for key in part.key_states if key is not None]


def cache_of(model: ExLlamaV2) -> ExLlamaV2Cache_TP:
    return ExLlamaV2Cache_TP(model, max_seq_len=48 * PAGE)


def run(model: ExLlamaV2, cache: ExLlamaV2Cache_TP, passes: list[tuple[Tensor, int, dict[str, Any]]]) -> list[Any]:
    """Logits and keys of passes in a cache, each over ids [B, q] after so many tokens."""
    found = []
    for ids, past, results in passes:
        batch = ids.shape[0]
        table = torch.arange(16 * batch, dtype=torch.int32).flip(0).view(batch, 16)
        params = PagedParams(batch, table, torch.full((batch,), past, dtype=torch.int32), past, PAGE, ids.shape[1])
        logits = model.forward_chunk(ids, cache, attn_params=params, **results).get("logits")
        found.append(
            (None if logits is None else logits.clone(), [key.clone() for key in keys_in(cache)], cache.current_seq_len)
        )
    return found


def same(ours: list[Any], theirs: list[Any]) -> bool:
    """Whether logits, keys and lengths are bitwise identical."""
    return all(
        (a[0] is b[0] is None or torch.equal(a[0], b[0])) and all(map(torch.equal, a[1], b[1])) and a[2] == b[2]
        for a, b in zip(ours, theirs, strict=True)
    )


def test_captured_prompts_are_those_of_the_modules(lab: Any, model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys only and with the last logits; one sequence and two; short ones in windows with padding; also again."""
    store, last = {"preprocess_only": True}, {"last_id_only": True}
    passes = [
        (lab.ids(1, 90, vocab=288), 0, store),
        (lab.ids(1, 70, vocab=288), 90, last),
        (lab.ids(2, 40, vocab=288), 0, store),
        (lab.ids(2, 35, vocab=288), 40, last),
        (lab.ids(1, 20, vocab=288), 0, last),
        (lab.ids(1, 25, vocab=288), 20, store),
        (lab.ids(3, 25, vocab=288), 0, last),
    ]
    with monkeypatch.context() as patch:
        patch.setattr("exl_core.execution.select.may_fuse", lambda model: False)
        expected = run(model, cache_of(model), passes)
    eager: list[Any] = []
    whole = ShardedPrompts.run

    def counted(made: ShardedPrompts, model: Any, asked: Any) -> Any:
        eager.append(asked)
        return whole(made, model, asked)

    monkeypatch.setattr(prompts.ShardedPrompts, "run", counted)
    cache = cache_of(model)
    assert same(run(model, cache, passes), expected)
    assert (model.decode.count, len(eager)) == (0, 7)
    for _ in range(3):
        for key in keys_in(cache):
            key.zero_()
        assert same(run(model, cache, passes), expected)
        assert model.decode.count == len(passes), model.decode.failures
    assert len(eager) == 7
    for made in Results.made:
        assert made.numbers[0] == made.numbers[1] == made.numbers[2]


def test_a_prompt_of_another_length_is_not_padded(lab: Any, model: ExLlamaV2) -> None:
    """cuBLAS may sum in another order for another number of rows."""
    cache = cache_of(model)
    for tokens in (90, 90, 91, 92):
        run(model, cache, [(lab.ids(1, tokens, vocab=288), 0, {"preprocess_only": True})])
    assert model.decode.count == 1


def test_a_captured_prompt_is_not_replayed_where_rows_must_be_invariant(
    lab: Any, model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The captured one multiplies by cuBLAS. Its step stays for later."""
    cache, asked = cache_of(model), [(lab.ids(1, 90, vocab=288), 0, {"preprocess_only": True})]
    for _ in range(2):
        run(model, cache, asked)
    eager: list[Any] = []
    whole = ShardedPrompts.run

    def counted(made: ShardedPrompts, model: Any, asked: Any) -> Any:
        eager.append(asked)
        return whole(made, model, asked)

    monkeypatch.setattr(prompts.ShardedPrompts, "run", counted)
    set_row_invariant(True)
    try:
        run(model, cache, asked)
    finally:
        set_row_invariant(False)
    assert len(eager) == 1
    run(model, cache, asked)
    assert len(eager) == 1


def test_marked_stores_that_are_not_live_leave_the_results_alone() -> None:
    results = PeerResults([torch.device("cpu")] * 2, 64, 64)
    results.result_of(0, 0, 2, 4, torch.float32).fill_(7)
    found = MarkedStores(results, 1, live=False).gather([torch.ones(2, 2)], [0, 2, 4])[0]
    assert found.shape == (2, 4)
    assert bool((results.result_of(0, 0, 2, 4, torch.float32) == 7).all())


def test_few_prompts_of_a_length_of_their_own_are_kept(
    lab: Any, model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lengths used last are kept; one that was dropped runs eagerly first, as any rare length."""
    monkeypatch.setattr(captured, "MAX_PROMPTS", 2)
    cache, store = cache_of(model), {"preprocess_only": True}
    for tokens in (70, 71, 70, 72):
        for _ in range(2):
            run(model, cache, [(lab.ids(1, tokens, vocab=288), 0, store)])
    recorded: list[Any] = []
    record = step_recorder.record_prompt

    def counted(*given: Any) -> Any:
        recorded.append(given[3])
        return record(*given)

    monkeypatch.setattr(step_recorder, "record_prompt", counted)
    for tokens in (72, 70, 71):
        run(model, cache, [(lab.ids(1, tokens, vocab=288), 0, store)])
    assert not recorded
    run(model, cache, [(lab.ids(1, 71, vocab=288), 0, store)])
    assert [bucket.q_len for bucket in recorded] == [71]
    assert model.decode.count == 2


def test_a_prompt_is_not_captured_where_memory_is_short(
    lab: Any, model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt runs eagerly, and `failures` says why."""
    ids, store = lab.ids(1, 90, vocab=288), {"preprocess_only": True}
    expected = run(model, cache_of(model), [(ids, 0, store)])
    monkeypatch.setattr(step_recorder, "refusal_of_memory", lambda shards, devices, bucket: "cuda:1 has 3 MiB free")
    cache = cache_of(model)
    for _ in range(2):
        assert same(run(model, cache, [(ids, 0, store)]), expected)
    assert model.decode.count == 0
    assert ["cuda:1 has 3 MiB free" in str(failure) for failure in model.decode.failures] == [True]


def test_the_memory_that_a_captured_prompt_takes_must_be_free_twice(
    model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, bucket = shard_launches_of(model), Bucket(1, 2048, 8, 256, stores=True)
    assert isinstance(shards, list)
    devices, free = [torch.device("cuda", at) for at in range(3)], [1 << 40] * 3
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index], 1 << 40))
    assert refusal_of_memory(shards, devices, bucket) is None
    # Twice the hidden state of 384 features, and attention's 384 columns, of halves.
    free[1] = 2 * (2048 * 2 * 2 * 3 * 384)
    assert refusal_of_memory(shards, devices, bucket) is None
    free[1] -= 1
    why = refusal_of_memory(shards, devices, bucket)
    assert why is not None
    assert why.startswith("cuda:1 has 17 MiB free; a captured prompt of 2048 tokens takes 9")
