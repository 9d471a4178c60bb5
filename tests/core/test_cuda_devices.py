"""Layers over a GPU and the CPU, and over two GPUs; planned bytes against torch's counters; needs a GPU."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from make_random_model import SHAPES, make_model
from random_models import loaded_over
from test_cuda_unlike_layers import changed
from test_sharded_launches import write_other

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Cache_TP, ExLlamaV2Config, PagedParams
from exl_core.device import GIB, devices
from exl_core.execution.sharded.launches import ResultRow
from exl_core.execution.sharded.matrix import SplitMatrix
from exl_core.execution.sharded.prompts import ShardedPrompts, Stores, StreamBarrier
from exl_core.layers import Linear
from exl_core.loading.plan import plan, plan_modules
from exl_core.transfer import is_direct
from exl_kernels.peer import ExchangeBuffers

pytestmark = [pytest.mark.cuda, pytest.mark.covers("core: loading")]

SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408, "head_dim": 64, "vocab_size": 2048}
KEPT = 128 << 10  # bytes that stay for the process on each GPU: attention's counters, one tensor a stream
TOLERANCE = 0.03  # of the largest logit, half against float32


def build(folder: Any) -> ExLlamaV2:
    return ExLlamaV2(ExLlamaV2Config(folder))


def halves(model: ExLlamaV2) -> list[float]:
    """GiB that put about half of the modules on each of two devices."""
    found = plan_modules(model.config, model.modules, devices()[:1], None, [64.0], None, True).devices[0]
    return [(found.weights * 0.62 + found.tables + found.scratch) / GIB, 8.0]


def allocated(device: int) -> int:
    """Bytes of tensors there. cuBLAS's workspace (32 MiB a stream on an H200) is torch's, for all of the process: not
    counted."""
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001
    return torch.cuda.memory_allocated(device)


def second_device(name: str) -> str:
    if name == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU here: the other half of this test runs on a machine with two")
    return name


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
@pytest.mark.parametrize("kind", ["exl2", "float"])
def test_a_split_model_gives_the_logits_of_one_device(
    lab: Any, monkeypatch: pytest.MonkeyPatch, kind: str, other: str
) -> None:
    folder = lab.write(kind=kind, num_hidden_layers=4, **SIZES)
    ids = lab.ids(2, 80, vocab=2048)
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    whole = build(folder)
    whole.load()
    expected = whole.forward(ids, ExLlamaV2Cache(whole, batch_size=2, max_seq_len=256)).cpu()
    monkeypatch.setenv("EXL_DEVICE", f"cuda:0,{second_device(other)}")
    model = build(folder)
    model.load(halves(model))
    assert set(model.cache_map.values()) == {"cuda:0", other}
    cache = ExLlamaV2Cache(model, batch_size=2, max_seq_len=256)
    logits = model.forward(ids, cache).cpu()
    if other == "cpu":  # other arithmetic on the second half
        assert float((logits - expected).abs().max()) < TOLERANCE * float(expected[..., :2048].abs().max())
    else:
        assert torch.equal(logits, expected)
        assert all(cache.footprint())
    paged, twin = ExLlamaV2Cache_Q4(model, max_seq_len=512), ExLlamaV2Cache_Q4(whole, max_seq_len=512)
    for token in range(3):
        params = PagedParams(
            2, torch.tensor([[1], [0]], dtype=torch.int32), torch.full((2,), token, dtype=torch.int32), token
        )
        step = ids[:, token : token + 1]
        ours = model.forward_chunk(step, paged, attn_params=params)["logits"].cpu()
        theirs = whole.forward_chunk(step, twin, attn_params=params)["logits"].cpu()
        assert torch.equal(ours, theirs) if other != "cpu" else torch.isfinite(ours).all()
    assert (model.decode.steps > 0) == (other != "cpu")


@pytest.mark.parametrize(
    "others",
    [[(4, "cuda:1")], [(5, "cuda:1")], [(-1, "cuda:1")], [(-2, "cuda:1")], [(3, "cuda:1"), (6, "cuda:0")]],
    ids=["between layers", "inside a layer", "head alone", "norm and head", "there and back"],
)
@pytest.mark.parametrize("kind", ["exl2", "gptq", "chained"])
def test_captured_steps_of_a_split_model_are_those_of_one_gpu(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, others: list[tuple[int, str]]
) -> None:
    """Wherever the border is; also the modules' own passes, and eager steps. Steps are queued without a wait.

    The matrices of a chained model pack the inputs of one another.
    """
    second_device("cuda:1")
    if kind == "chained":
        folder = tmp_path / "chained"
        make_model(folder, replace(SHAPES["tiny"], layers=4), 4.0)
    else:
        folder = lab.write(kind=kind, num_hidden_layers=4, **SIZES)
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    whole = build(folder)
    whole.load()
    borders = [(at % len(whole.modules), name) for at, name in others]
    model = loaded_over(build(folder), "cuda:0", *borders)
    for how in ("joined", "apart", "eager"):
        for m in (whole, model):
            m.decode.clear()
        with monkeypatch.context() as patch:
            if how == "eager":
                patch.setenv("EXL_CUDA_GRAPHS", "0")
            if how == "apart":
                patch.setattr("exl_core.execution.captured.joined_launches_of", lambda _: "asked for")
            before = model.decode.steps
            for batch, q_len in ((1, 1), (2, 1), (5, 1), (3, 4), (24, 1), (40, 2)):
                assert torch.equal(*(steps_of(m, lab.ids(batch, 8, vocab=1000), q_len) for m in (whole, model)))
            # 8 of one token, 2 of four, and those of 80 rows if matmuls run in blocks.
            taken = {0} if how == "eager" else {34, 38}
            assert model.decode.steps - before in taken, model.decode.reason
            assert not model.decode.failures


def steps_of(model: ExLlamaV2, ids: torch.Tensor, q_len: int, cache: Any = None) -> torch.Tensor:
    """Logits of all steps of `q_len` tokens, all queued before the first is read."""
    batch, found = ids.shape[0], []
    cache = ExLlamaV2Cache_Q4(model, max_seq_len=256 * batch) if cache is None else cache
    for begin in range(0, ids.shape[1], q_len):
        past = torch.full((batch,), begin, dtype=torch.int32)
        table = torch.arange(batch, dtype=torch.int32).flip(0)[:, None]
        params = PagedParams(batch, table, past, begin, q_len=q_len)
        found.append(model.forward_chunk(ids[:, begin : begin + q_len], cache, attn_params=params)["logits"].clone())
    return torch.cat(found, 1).cpu()


@pytest.mark.parametrize("batch", [1, 4, 8, 24])
def test_captured_steps_of_a_split_model_keep_what_they_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Other tensors take all memory that is free after the capture. Some launches read a norm's weights in an order of
    their own."""
    second_device("cuda:1")
    folder = tmp_path / "chained"
    make_model(folder, replace(SHAPES["tiny"], layers=4), 4.0)
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    model = build(folder)
    model = loaded_over(model, "cuda:0", (len(model.modules) // 2, "cuda:1"))
    cache = ExLlamaV2Cache(model, max_seq_len=256 * batch)
    ids = torch.arange(batch)[:, None] + 300
    table = torch.arange(batch, dtype=torch.int32)[:, None]
    params = PagedParams(batch, table, torch.zeros(batch, dtype=torch.int32), 0, q_len=1)

    def step() -> torch.Tensor:
        logits: torch.Tensor = model.forward_chunk(ids, cache, attn_params=params)["logits"].cpu()
        return logits

    first = step()
    assert model.decode.steps == 1, model.decode.reason
    taken = [
        torch.full((1 << size,), float("nan"), device=f"cuda:{device}")
        for device in (0, 1)
        for size in range(7, 20)
        for _ in range(32)
    ]
    assert torch.equal(step(), first)
    assert model.decode.steps == 2
    del taken


@pytest.mark.covers("core: tensor-parallel")
@pytest.mark.parametrize("kind", ["exl2", "gptq", "float"])
def test_matrices_cut_over_two_gpus(lab: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Quantized kernels sum each output in one order whatever the other columns; torch's float matmuls may not."""
    folder = lab.write(kind=kind, num_hidden_layers=4, **SIZES)
    monkeypatch.setenv("EXL_DEVICE", f"cuda:0,{second_device('cuda:1')}")
    gc.collect()
    start = allocated(1)
    model = build(folder)
    model.load_tp([6.0, 10.0])
    out = model.modules_dict["model.layers.0.self_attn.o_proj"]
    assert isinstance(out, Linear)
    assert isinstance(out.matrix, SplitMatrix)
    assert [part.device for part in out.matrix.parts] == [torch.device("cuda", i) for i in (0, 1)]
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    whole = build(folder)
    whole.load()
    cache, twin = (
        ExLlamaV2Cache_TP(model, ExLlamaV2Cache_Q4, max_seq_len=512),
        ExLlamaV2Cache_Q4(whole, max_seq_len=512),
    )
    assert len(cache.caches) == 2
    assert all(cache.footprint())
    ids = lab.ids(1, 40, vocab=2048)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    for begin, end in ((0, 37), (37, 38), (38, 40)):
        params = PagedParams(1, table, torch.tensor([begin], dtype=torch.int32), begin)
        found, expected = (
            m.forward_chunk(ids[:, begin:end], c, attn_params=params)["logits"].float().cpu()[..., :2048]
            for m, c in ((model, cache), (whole, twin))
        )
        error = float((found - expected).abs().max() / expected.abs().max())
        assert error == 0 if kind != "float" else error < TOLERANCE
    long = lab.ids(1, 200, vocab=2048)  # beyond the rows of the quantized kernels
    found, expected = (m.forward(long).float().cpu()[..., :2048] for m in (model, whole))
    assert float((found - expected).abs().max() / expected.abs().max()) < TOLERANCE
    before = allocated(1)
    del cache
    model.unload()
    assert allocated(1) < before
    assert allocated(1) - start < KEPT


@pytest.mark.covers("core: tensor-parallel")
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("shares", [[8.0, 8.0], [6.0, 10.0]], ids=["even", "uneven"])
def test_captured_steps_of_a_sharded_model_are_those_of_one_gpu(
    tmp_path: Path, lab: Any, monkeypatch: pytest.MonkeyPatch, shares: list[float], permuted: bool
) -> None:
    """Both GPUs run their graphs and meet at every exchange; all steps are queued before the first is read.

    The q, k and v of a layer that read their input in other orders share no launch.
    """
    folder = tmp_path / "model"
    make_model(folder, replace(SHAPES["tiny"], layers=4), 4.0)
    if permuted:
        changed(folder, "permuted", "model.layers.1.self_attn.k_proj")
    monkeypatch.setenv("EXL_DEVICE", f"cuda:0,{second_device('cuda:1')}")
    model = build(folder)
    model.load_tp(shares)
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    whole = build(folder)
    whole.load()
    for batch, q_len in ((1, 1), (2, 1), (5, 1), (3, 4), (24, 1), (64, 1)):
        before, ids = model.decode.steps, lab.ids(batch, 16, vocab=2048)
        expected = steps_of(whole, ids, q_len)
        found = steps_of(model, ids, q_len, ExLlamaV2Cache_TP(model, ExLlamaV2Cache_Q4, max_seq_len=256 * batch))
        assert torch.equal(found, expected), (batch, q_len)
        assert model.decode.steps - before == 16 // q_len, model.decode.reason
    assert not model.decode.failures


@pytest.mark.covers("core: tensor-parallel")
@pytest.mark.parametrize(
    "family", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "Glm4ForCausalLM", "Starcoder2ForCausalLM"]
)
def test_captured_steps_with_other_norms_are_those_of_one_gpu(
    tmp_path: Path, lab: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Norms of results, a hidden state of float32, LayerNorms and MLPs without gate, and prompts before the steps."""
    second = second_device("cuda:1")
    folder = write_other(tmp_path, family, **{**SIZES, "num_attention_heads": 8, "num_key_value_heads": 4})
    models = []
    for names, tp in (("cuda:0", False), (f"cuda:0,{second}", True)):
        monkeypatch.setenv("EXL_DEVICE", names)
        models.append(model := build(folder))
        if tp:
            model.load_tp([8.0, 8.0])
        else:
            model.load()
    whole, model = models
    for batch, q_len in ((1, 1), (5, 1), (3, 4), (24, 1)):
        before, ids = model.decode.steps, lab.ids(batch, 16, vocab=2048)
        cache = ExLlamaV2Cache_TP(model, ExLlamaV2Cache_Q4, max_seq_len=256 * batch)
        assert torch.equal(steps_of(model, ids, q_len, cache), steps_of(whole, ids, q_len)), (batch, q_len)
        assert model.decode.steps - before == 16 // q_len, model.decode.reason
    assert not model.decode.failures
    ids = lab.ids(1, 40, vocab=2048)
    found, expected = (m.forward(ids).float().cpu()[..., :2048] for m in (model, whole))
    assert torch.equal(found, expected)


@pytest.mark.covers("core: tensor-parallel")
def test_two_gpus_gather_columns_on_streams_that_wait_for_each_other() -> None:
    """Many times without a wait of the host: each GPU makes its next columns out of all."""
    devices = [torch.device("cuda:0"), torch.device(second_device("cuda:1"))]
    assert all(is_direct(one, other) for one, other in (devices, devices[::-1]))  # opens the access
    begins, stores = [0, 96, 256], Stores(StreamBarrier(devices), 300, ResultRow(512, 512))
    whole = torch.randn(300, 256).half()
    places = zip(devices, pairwise(begins), strict=True)
    own = [whole[:, begin:end].to(device) for device, (begin, end) in places]
    for _ in range(50):
        full = stores.gather(own, begins)
        own = [
            (found[:, begins[gpu] : begins[gpu + 1]] + found.roll(1, 0)[:, :1]) / 2 for gpu, found in enumerate(full)
        ]
        whole = (whole + whole.roll(1, 0)[:, :1]) / 2
    assert torch.equal(torch.cat([part.cpu() for part in own], 1), whole)


def sharded_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: list[float]) -> ExLlamaV2:
    """A model of four layers over two devices, which get these shares."""
    folder = tmp_path / "model"
    make_model(folder, replace(SHAPES["tiny"], layers=4), 4.0)
    monkeypatch.setenv("EXL_DEVICE", f"cuda:0,{second_device('cuda:1')}")
    model = build(folder)
    model.load_tp(shares)
    return model


@pytest.mark.covers("core: tensor-parallel")
@pytest.mark.parametrize("shares", [[8.0, 8.0], [6.0, 10.0]], ids=["even", "uneven"])
def test_prompts_of_a_sharded_model_are_those_of_its_modules(
    tmp_path: Path, lab: Any, monkeypatch: pytest.MonkeyPatch, shares: list[float]
) -> None:
    """Bitwise, but for the last token alone, which other kernels may compute. Chunks are queued without a wait."""
    model = sharded_tiny(tmp_path, monkeypatch, shares)
    taken: list[torch.Size] = []

    whole = ShardedPrompts.run

    def counted(prompts: ShardedPrompts, model: Any, asked: Any) -> Any:
        taken.append(asked.ids.shape)
        return whole(prompts, model, asked)

    monkeypatch.setattr(ShardedPrompts, "run", counted)
    ids, lengths = lab.ids(3, 300, vocab=2048), torch.tensor([90, 17, 120], dtype=torch.int32)
    table = torch.arange(6, dtype=torch.int32).flip(0).view(3, 2)

    chunks: list[tuple[int, int, dict[str, Any]]] = [
        (0, 120, {"preprocess_only": True}),
        (120, 200, {}),
        (200, 300, {"last_id_only": True}),
    ]

    def results() -> list[torch.Tensor]:
        cache, found = ExLlamaV2Cache_TP(model, ExLlamaV2Cache_Q4, max_seq_len=6 * 256), []
        for begin, end, how in chunks:
            past = torch.full((3,), begin, dtype=torch.int32)
            params = PagedParams(3, table, past, begin, q_len=end - begin)
            found.append(model.forward_chunk(ids[:, begin:end], cache, attn_params=params, **how).get("logits"))
        joined = PagedParams(3, table, torch.zeros(3, dtype=torch.int32), 0, q_lens=lengths)
        found.append(model.forward_chunk(ids[:1, : int(lengths.sum())], cache, attn_params=joined)["logits"])
        contiguous = ExLlamaV2Cache_TP(model, batch_size=3, max_seq_len=512)
        found.append(model.forward(ids, contiguous))
        return [logits.float().cpu()[..., :2048] for logits in found if logits is not None]

    found = results()
    assert len(taken) == 5
    monkeypatch.setenv("EXL_CUDA_GRAPHS", "0")
    model.decode.clear()
    expected = results()
    assert len(taken) == 5
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if index == 1:
            assert float((ours - theirs).abs().max()) < TOLERANCE * float(theirs.abs().max())
        else:
            assert torch.equal(ours, theirs), index


@pytest.mark.covers("core: tensor-parallel")
@pytest.mark.parametrize("shares", [[8.0, 8.0], [6.0, 10.0]], ids=["even", "uneven"])
def test_captured_prompts_of_a_sharded_model_are_those_that_are_not_captured(
    tmp_path: Path, lab: Any, monkeypatch: pytest.MonkeyPatch, shares: list[float]
) -> None:
    """Bitwise, keys and last logits, of rows that are packed and that are dequantized; queued without a wait."""
    model = sharded_tiny(tmp_path, monkeypatch, shares)
    ids = lab.ids(2, 700, vocab=2048)
    table = torch.arange(6, dtype=torch.int32).flip(0).view(2, 3)
    cache = ExLlamaV2Cache_TP(model, max_seq_len=6 * 256)
    chunks = [(0, 30), (30, 95), (95, 230), (230, 370), (370, 700)]
    asked: list[dict[str, Any]] = [{"preprocess_only": True}, {"last_id_only": True}]

    def results() -> list[torch.Tensor]:
        found = []
        for batch in (1, 2):
            for begin, end in chunks:
                for how in asked:
                    past = torch.full((batch,), begin, dtype=torch.int32)
                    params = PagedParams(batch, table[:batch], past, begin, q_len=end - begin)
                    part = ids[:batch, begin:end]
                    found.append(model.forward_chunk(part, cache, attn_params=params, **how).get("logits"))
        keys = [key.cpu() for shard in cache.shards() for key in shard.key_states if key is not None]
        return [*(logits.cpu() for logits in found if logits is not None), *keys]

    monkeypatch.setenv("EXL_CUDA_PROMPT_GRAPHS", "0")
    expected = results()
    assert model.decode.count == 0
    monkeypatch.setenv("EXL_CUDA_PROMPT_GRAPHS", "1")
    for _ in range(4):
        for shard in cache.shards():
            for key in (key for key in shard.key_states if key is not None):
                key.zero_()
        for index, (ours, theirs) in enumerate(zip(results(), expected, strict=True)):
            assert torch.equal(ours, theirs), index
    assert model.decode.count >= 2 * len(chunks), (model.decode.reason, model.decode.failures)
    model.check_peers()


@pytest.mark.covers("core: tensor-parallel")
def test_a_step_that_only_one_gpu_got_does_not_break_the_next(
    tmp_path: Path, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU that has it gives up waiting; later steps are recorded anew."""
    monkeypatch.setattr(
        "exl_core.execution.sharded.exchange_buffers.ExchangeBuffers", partial(ExchangeBuffers, limit=0.2)
    )
    folder = tmp_path / "model"
    make_model(folder, replace(SHAPES["tiny"], layers=2), 4.0)
    monkeypatch.setenv("EXL_DEVICE", f"cuda:0,{second_device('cuda:1')}")
    model = build(folder)
    model.load_tp([8.0, 8.0])
    cache, ids = ExLlamaV2Cache_TP(model, max_seq_len=512), lab.ids(2, 8, vocab=2048)
    expected = steps_of(model, ids, 1, cache)
    whole, launched = torch.cuda.CUDAGraph.replay, []

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        launched.append(graph)
        if len(launched) > 1:
            raise KeyboardInterrupt
        whole(graph)

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", replay)
        with pytest.raises(KeyboardInterrupt):
            steps_of(model, ids, 1, cache)
    assert torch.equal(steps_of(model, ids, 1, cache), expected)
    model.check_peers()
    model.unload()


@pytest.mark.covers("core: loading-memory")
@pytest.mark.parametrize("kind", ["exl2", "float"])
def test_planned_bytes_are_those_of_torch(lab: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    sizes = {**SIZES, "hidden_size": 1024, "intermediate_size": 2816, "max_position_embeddings": 4096}
    folder = lab.write(kind=kind, **sizes)
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    config = ExLlamaV2Config(folder)
    found = plan(config, cache="q4", cache_tokens=4096).devices[0]
    gc.collect()
    torch.cuda.empty_cache()  # a cached block that is a little larger counts whole
    before = allocated(0)
    model = ExLlamaV2(config)
    model.load()
    weights = torch.cuda.memory_allocated() - before
    assert weights <= found.weights * 1.035
    assert found.weights <= weights * 1.035
    cache = ExLlamaV2Cache_Q4(model, max_seq_len=4096)
    assert torch.cuda.memory_allocated() - before - weights == pytest.approx(found.cache, rel=0.01)
    torch.cuda.reset_peak_memory_stats()
    model.forward(lab.ids(1, 2048, vocab=2048), cache, last_id_only=True)
    assert torch.cuda.max_memory_allocated() - before <= found.used + (32 << 20)  # cuBLAS takes its workspace once
    model.unload()
    del cache
    assert allocated(0) - before < KEPT
