"""The decode plan's order of launches on the CPU, with doubles for the two operators that only a GPU has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, PagedParams
from exl_core.decode import plan as plans
from exl_core.decode.plan import DecodePlan, joined_rows, plan_of
from exl_core.errors import InputError
from exl_core.modules import Attention
from exl_core.step import build_step
from exl_kernels.activation import gated_activation
from exl_kernels.attention import paged_attention
from exl_kernels.fused import rope_store
from exl_kernels.fused_linear import Prepared
from exl_kernels.linear import QuantMatrix
from exl_kernels.norm import rms_norm

FOLDER = Path(__file__).parent.parent / "golden" / "data" / "pylib-4m-exl2-4.5"
PAGE = 16


class FusedDouble:
    """`FusedLinear` as its documentation states it, out of CPU operators."""

    joined_rows = 64
    batch_rows = 64
    takes_prepared = True
    calls = 0

    def __init__(
        self, matrices: list[QuantMatrix], *, norm: Any = None, activation: Any = None, max_rows: int = 64
    ) -> None:
        self.matrices, self.norm, self.activation, self.max_rows = matrices, norm, activation, max_rows
        self.out_features = matrices[0].out_features if activation else sum(m.out_features for m in matrices)

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.shape[0] <= self.max_rows
        FusedDouble.calls += 1
        h = x if self.norm is None else rms_norm(x, self.norm.weight, self.norm.eps)
        parts = [matrix.matmul(h) for matrix in self.matrices]
        y = gated_activation(parts[0], parts[1], self.activation) if self.activation else torch.cat(parts, 1)
        return out.copy_(y if residual is None else residual + y)

    def input_of(self, m: int) -> None:
        return None

    def then(self, following: FusedDouble, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        between = torch.empty((x.shape[0], self.out_features), dtype=x.dtype)
        return following(self(x, between), out, residual)

    def goes_on_to(self, following: FusedDouble) -> bool:
        return self.activation is not None or len(self.matrices) == 1

    def room(self) -> list[Tensor]:
        """Where a prepared input is left: the plain one, here."""
        return []

    def in_a_row(
        self,
        x: Tensor | Prepared,
        out: Tensor | None = None,
        residual: Tensor | None = None,
        following: FusedDouble | None = None,
    ) -> Prepared | None:
        plain: Any = x.scratch[0] if isinstance(x, Prepared) else x
        y = self(plain, torch.empty(plain.shape[0], self.out_features) if out is None else out, residual)
        return None if following is None else Prepared([y.clone()], len(y))  # type: ignore[arg-type]


def own_double(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Any,
    block_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_positions: Tensor,
    *,
    interleaved: bool,
    early: bool,
    into: Any = None,
    **options: Any,
) -> Tensor:
    """`attend_own` as its documentation states it: one token a row of the block table."""
    assert early
    assert into is None
    assert len(set(rows.tolist())) == len(rows)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    rope_store(pages, q, k, v, cos, sin, rope_positions, slots, interleaved=interleaved)
    mixed = paged_attention(q, pages, block_table, rows, positions, **options)
    if into is not None:
        assert into.columns == 8
        into.scratch.append(mixed.flatten(1))
    return mixed


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2:
    monkeypatch.setattr(plans, "FusedLinear", FusedDouble)
    monkeypatch.setattr(plans, "attend_own", own_double)
    monkeypatch.setattr(plans, "_cuda", lambda linear: linear.quant)
    loaded = ExLlamaV2(ExLlamaV2Config(FOLDER))
    loaded.load()
    return loaded


@pytest.mark.parametrize("joined", ["0", "8", "64"])
@pytest.mark.parametrize(("batch", "q_len"), [(1, 1), (2, 1), (1, 3), (2, 4), (3, 5)])
def test_the_plan_is_the_modules_own_pass(
    model: ExLlamaV2, joined: str, batch: int, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXL_DECODE_JOINED_ROWS", joined)
    plan = plan_of(model)
    assert isinstance(plan, DecodePlan), plan
    generator = torch.Generator().manual_seed(batch)
    table = torch.arange(batch * 4, dtype=torch.int32).flip(0).view(batch, 4)
    ids = torch.randint(0, model.config.vocab_size, (batch, 20 + q_len), generator=generator)
    out = []
    for planned in (False, True):
        cache = ExLlamaV2Cache(model, max_seq_len=PAGE * 4 * batch)
        params = PagedParams(batch, table, torch.zeros(batch, dtype=torch.int32), 0, PAGE, 20)
        model.forward_chunk(ids[:, :20], cache, attn_params=params, preprocess_only=True)
        params = PagedParams(batch, table, torch.full((batch,), 20, dtype=torch.int32), 20, PAGE, q_len)
        if planned:
            step = build_step(model.config, model.rope, cache, params, batch, q_len, None, torch.device("cpu"))
            logits = torch.empty(batch * q_len, model.config.padded_vocab_size)
            FusedDouble.calls = 0
            plan.run(ids[:, 20:].reshape(-1), step, logits)
            layers = sum(isinstance(module, Attention) for module in model.modules)
            rows = batch * q_len
            joins = 4 if rows <= int(joined) else 2 if rows > plans.FEW_ROWS else 0
            head = plans.GEMV_ROWS < rows <= min(int(joined), plans.FEW_ROWS)
            assert FusedDouble.calls == joins * layers + head
        else:
            logits = model.forward_chunk(ids[:, 20:], cache, attn_params=params)["logits"].flatten(0, 1)
        out.append((logits, cache.all_tensors()))
    (want, want_cache), (got, got_cache) = out
    assert torch.equal(want, got)
    for a, b in zip(want_cache, got_cache, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("lengths", [[3], [40], [20, 1, 50], [60, 64, 30]])
def test_a_planned_prompt_is_the_modules_own_pass(model: ExLlamaV2, lengths: list[int]) -> None:
    """Prompts of one sequence or several: what is stored, and the logits."""
    plan = plan_of(model)
    assert isinstance(plan, DecodePlan), plan
    batch, total = len(lengths), sum(lengths)
    table = torch.arange(batch * 4, dtype=torch.int32).flip(0).view(batch, 4)
    ids = torch.randint(0, model.config.vocab_size, (1, total), generator=torch.Generator().manual_seed(total))
    caches = [ExLlamaV2Cache(model, max_seq_len=PAGE * 4 * batch) for _ in range(5)]
    none = torch.zeros(batch, dtype=torch.int32)
    params = PagedParams(batch, table, none, 0, PAGE, q_lens=torch.tensor(lengths, dtype=torch.int32))
    model.forward_chunk(ids, caches[0], attn_params=params, preprocess_only=True)
    want = model.forward_chunk(ids, caches[1], attn_params=params)["logits"].flatten(0, 1)
    for cache in caches[2:]:
        step = build_step(model.config, model.rope, cache, params, 1, total, None, torch.device("cpu"))
        if cache is caches[2]:
            plan.store(ids[0], step)
        elif cache is caches[3]:
            assert torch.equal(plan.head(plan.hidden(ids[0], step, 1), step), want[-1:])
        else:
            assert torch.equal(plan.head(plan.hidden(ids[0], step), step), want)
    for tensors in zip(*(cache.all_tensors() for cache in caches), strict=True):
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:])


def test_a_planned_prompt_that_fails_has_stored_nothing(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next try begins where this one did, and so do callers that ask the cache how far it is."""
    plan = plan_of(model)
    assert isinstance(plan, DecodePlan), plan
    monkeypatch.setattr(model.decode, "prompt_plan", lambda step: plan)
    ids = torch.randint(0, model.config.vocab_size, (1, 30), generator=torch.Generator().manual_seed(1))
    want = model.forward(ids, ExLlamaV2Cache(model, max_seq_len=64))
    cache = ExLlamaV2Cache(model, max_seq_len=64)
    model.forward(ids[:, :10], cache, preprocess_only=True)

    def full(*args: Any) -> None:
        raise MemoryError("no room")

    for name, how in (("store", {"preprocess_only": True}), ("hidden", {})):
        with monkeypatch.context() as patch:
            patch.setattr(DecodePlan, name, full)
            with pytest.raises(MemoryError):
                model.forward(ids[:, 10:], cache, **how)
        assert cache.current_seq_len == 10
    assert torch.equal(model.forward(ids[:, 10:], cache), want[:, 10:])
    assert cache.current_seq_len == 30
    for wrong in ("", "last", 2):
        with pytest.raises(InputError, match="return_last_state"):
            model.forward(ids, None, return_last_state=wrong)  # type: ignore[arg-type]


def test_what_a_plan_does_not_know_is_named(model: ExLlamaV2) -> None:
    for name, value in (("clip", 8.0), ("post", torch.ones(1)), ("rope", "none")):
        module = model.modules[1]
        before = getattr(module, name)
        setattr(module, name, value)
        reason = plan_of(model)
        assert isinstance(reason, str)
        assert module.key in reason
        setattr(module, name, before)
    assert isinstance(plan_of(model), DecodePlan)


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXL_DECODE_JOINED_ROWS", raising=False)
    assert joined_rows() == plans.JOINED_ROWS
    for text, rows in (("0", 0), ("5", 5), ("99", 64)):
        monkeypatch.setenv("EXL_DECODE_JOINED_ROWS", text)
        assert joined_rows() == rows
    monkeypatch.setenv("EXL_DECODE_JOINED_ROWS", "few")
    with pytest.raises(InputError, match="EXL_DECODE_JOINED_ROWS"):
        joined_rows()


def test_a_step_is_prepared_on_a_gpu_only() -> None:
    """On the CPU, where nothing is queued, there is nothing to prepare; nor for a model that is unloaded again."""
    model = ExLlamaV2(ExLlamaV2Config(FOLDER))
    params = PagedParams(1, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0, PAGE, 1)
    model.load()
    cache = ExLlamaV2Cache(model, max_seq_len=PAGE)
    assert model.prepare_step(1, cache, params) is None
    model.unload()
    assert model.prepare_step(1, cache, params) is None
