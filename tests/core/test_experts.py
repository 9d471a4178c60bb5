"""Mixtures of experts on the CPU: one native call a layer, bitwise the experts one after the other, in any batch."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from joined_on_cpu import joined_on_cpu
from mixtures import FAMILIES, SIZES
from random_models import write_random_model
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Config
from exl_core.convert import quantize_model
from exl_core.execution import own_pass
from exl_core.execution.batch import Step
from exl_core.execution.experts_pass import ExpertsTogether
from exl_core.execution.fused import JoinedLaunches, joined_launches_of
from exl_core.execution.half import ModuleHalf
from exl_core.execution.halves import ExpertsHalf, half_of
from exl_core.execution.operators import APART
from exl_core.execution.own_pass import choose_own_pass
from exl_core.layers import Attention, MoE, RMSNorm
from exl_core.layers.sublayer import BY_OPERATOR
from exl_core.lora.pairs import LoraPair
from exl_kernels.moe import CpuExperts
from exl_kernels.selection import PACKED_ROWS

LENGTH = 40
CASES = [(family, "4.0", "int8") for family in FAMILIES] + [
    ("Qwen2MoeForCausalLM", "4.0", "exact"),
    ("MixtralForCausalLM", "gptq", "int8"),
    ("Qwen2MoeForCausalLM", "float", "exact"),
]

SHARED = [family for family, fields in FAMILIES.items() if "shared_expert_intermediate_size" in fields]

some = examples(10, 3, list(HealthCheck))


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ExLlamaV2:
    family, bits, compute = request.param
    folder: Path = tmp_path_factory.mktemp("experts")
    source = write_random_model(folder / "float", {**SIZES, "architectures": [family], **FAMILIES[family]})
    if bits != "float":
        options: dict[str, Any] = {"format": "gptq", "bits": 4, "group_size": 32} if bits == "gptq" else {"bits": 4.0}
        quantize_model(source, folder / "quantized", **options)
        source = folder / "quantized"
    config = ExLlamaV2Config(source)
    config.cpu_matmul = compute
    made = ExLlamaV2(config)
    made.load()
    return made


def mixtures(model: ExLlamaV2) -> list[MoE]:
    return [module for module in model.modules if isinstance(module, MoE)]


def ids_of(batch: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 96, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def one_after_the_other(model: ExLlamaV2, ids: Tensor, **options: Any) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        for mixture in mixtures(model):
            patch.setattr(mixture, "own_pass", BY_OPERATOR)
        logits: Tensor = model.forward(ids, **options)
        return logits


def in_one_call(model: ExLlamaV2, ids: Tensor, **options: Any) -> Tensor:
    """Logits; fails where experts run one after the other."""

    def fail(*_: Any) -> Tensor:
        raise AssertionError("experts ran one after the other")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoE, "run_expert", fail)
        logits: Tensor = model.forward(ids, **options)
        return logits


def test_few_rows_of_mixtures_are_batch_invariant(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: generators then limit the tokens of the prompts that share a pass."""
    monkeypatch.setattr(model, "device", torch.device("cuda", 0))
    assert model.invariant_tokens() == PACKED_ROWS


@pytest.mark.sampled(3)
@pytest.mark.parametrize("batch", [1, 3])
def test_in_one_call_and_one_after_the_other(model: ExLlamaV2, batch: int) -> None:
    assert mixtures(model)
    ids = ids_of(batch)
    assert torch.equal(in_one_call(model, ids), one_after_the_other(model, ids))


@pytest.mark.sampled(6)
@some
@given(data=st.data())
@pytest.mark.parametrize("cache_class", [ExLlamaV2Cache, ExLlamaV2Cache_Q4])
def test_batch_and_chunks_change_nothing(model: ExLlamaV2, cache_class: Any, data: st.DataObject) -> None:
    sequences = ids_of(4, seed=2)
    rows = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    cuts = data.draw(st.lists(st.integers(1, LENGTH - 1), max_size=4, unique=True).map(sorted))
    cache = cache_class(model, batch_size=len(rows), max_seq_len=LENGTH)
    parts = [model.forward(sequences[rows, a:b], cache) for a, b in pairwise([0, *cuts, LENGTH])]
    logits = torch.cat(parts, dim=1)
    for index, row in enumerate(rows):
        alone = model.forward(sequences[row : row + 1], cache_class(model, max_seq_len=LENGTH))
        assert torch.equal(logits[index], alone[0])


def adapter(linear: Any) -> Any:
    gen = torch.Generator().manual_seed(5)
    a, b = (torch.randn(shape, generator=gen) * 0.2 for shape in ((4, linear.in_features), (linear.out_features, 4)))
    pair = LoraPair(a, b, None, 1.0, torch.device("cpu"), linear.key)
    return SimpleNamespace(touched={linear.key}, pairs={linear.key: pair}, replacements={})


def step_of(*loras: Any) -> Step:
    """A step of one sequence, as far as mixtures read it."""
    return cast(Step, SimpleNamespace(loras=loras, invariant=None, batch_size=1))


def hidden_of(mixture: MoE, rows: int = 20) -> Tensor:
    return torch.randn(rows, mixture.router.in_features, generator=torch.Generator().manual_seed(3))


def test_an_adapted_expert_runs_by_itself(model: ExLlamaV2) -> None:
    """Its layer alone: adapters of other matrices leave the experts in one call."""
    others, mixture = mixtures(model)[:2]
    x = hidden_of(mixture)
    _, numbers = mixture.route(mixture.normed(x))
    lora = adapter(mixture.experts[int(numbers[0, 0])].up)
    adapted, plain = mixture.forward(x.clone(), step_of(lora)), mixture.forward(x.clone(), step_of())
    changed = (numbers == int(numbers[0, 0])).any(-1)
    assert torch.equal(adapted[~changed], plain[~changed])
    assert not torch.isclose(adapted[changed], plain[changed]).all(-1).any()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoE, "run_expert", lambda *_, **__: pytest.fail("an expert ran by itself"))
        others.forward(x.clone(), step_of(lora))
        with pytest.raises(pytest.fail.Exception):
            mixture.forward(x.clone(), step_of(lora))


@pytest.mark.parametrize("part", ["router", "shared"])
@pytest.mark.parametrize("model", [case for case in CASES if case[0] in SHARED], ids="-".join, indirect=True)
def test_an_adapted_router_or_shared_expert_leaves_the_experts_in_one_call(model: ExLlamaV2, part: str) -> None:
    mixture = mixtures(model)[1]
    assert mixture.shared is not None
    x = hidden_of(mixture)
    step = step_of(adapter(mixture.router if part == "router" else mixture.shared.down_proj))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoE, "run_expert", lambda *_, **__: pytest.fail("an expert ran by itself"))
        together = mixture.forward(x.clone(), step)
    assert torch.equal(together, mixture.forward_by_operator(x.clone(), step))
    assert not torch.equal(together, mixture.forward(x.clone(), step_of()))


def test_the_oracle_of_a_mixture_runs_one_expert_after_the_other(
    model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = mixtures(model)[0]
    x, ran = hidden_of(mixture), list[object]()
    run_expert = MoE.run_expert

    def noted(mixture: MoE, expert: Any, *given: Any, **more: Any) -> Tensor:
        ran.append(expert)
        return run_expert(mixture, expert, *given, **more)

    monkeypatch.setattr(MoE, "run_expert", noted)
    _, numbers = mixture.route(mixture.normed(x))
    together = mixture.forward(x.clone(), step_of())
    assert not ran
    assert torch.equal(mixture.forward_by_operator(x.clone(), step_of()), together)
    assert ran == [mixture.experts[number] for number in numbers.unique().tolist()]


def test_unloading_and_loading_again(model: ExLlamaV2) -> None:
    ids = ids_of(1)
    before = in_one_call(model, ids)
    matrices = [expert.up.loaded_matrix for mixture in mixtures(model) for expert in mixture.experts]
    model.unload()
    in_a_list_alone = [sys.getrefcount(one) for one in [object()]]  # by the version of Python
    assert [sys.getrefcount(matrix) for matrix in matrices] == in_a_list_alone * len(matrices)
    model.load()
    assert torch.equal(in_one_call(model, ids), before)


def test_a_mixture_whose_experts_cannot_be_grouped_is_not_loaded(
    model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = next(at for at, module in enumerate(model.modules) if isinstance(module, MoE))

    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(own_pass, "group_experts", full)
        with pytest.raises(MemoryError):
            model.load_module(at)
    assert not model.modules[at].loaded
    model.load_module(at)
    assert isinstance(mixtures(model)[0].own_pass, ExpertsTogether)


class Launches:
    """A router that norms its rows, and experts in shared launches, which note their calls."""

    dtype, device, joins_shared = torch.float16, torch.device("cuda"), True

    def __init__(self, *, norms: bool = True) -> None:
        self.norms, self.normed_by_router, self.routed = norms, False, False
        self.weights: Tensor | None = None

    def plan(self, rows: int, norm: object) -> SimpleNamespace:
        return SimpleNamespace(norms=self.norms)

    def norm_and_route(self, x: Tensor, norm: object) -> tuple[Tensor, Tensor, Tensor]:
        self.normed_by_router = True
        return x, torch.zeros(len(x), 2), torch.zeros(len(x), 2, dtype=torch.int64)

    def shares(self, rows: int, chosen: int, invariant: bool) -> bool:
        return True

    def __call__(self, h: Tensor, weights: Tensor, ids: Tensor, *, out: Tensor, **_: object) -> Tensor:
        self.weights = weights
        return out


ONE_MIXTURE = pytest.mark.parametrize("model", [("MixtralForCausalLM", "gptq", "int8")], ids="-".join, indirect=True)


@pytest.fixture
def launches(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Return the launches of the first mixture, whose own pass is chosen anew."""
    mixture, made, describe = mixtures(model)[0], Launches(), MoE.describe
    monkeypatch.setattr(RMSNorm, "forward", lambda norm, x, *_, **__: x)
    monkeypatch.setattr(MoE, "describe", lambda moe: replace(describe(moe), routing=cast(Any, made)))
    monkeypatch.setattr(own_pass, "group_experts", lambda *_: made)
    monkeypatch.setattr(mixture, "own_pass", BY_OPERATOR)
    choose_own_pass(mixture)
    assert isinstance(mixture.own_pass, ExpertsTogether)
    return made


MINE = torch.full((3, 2), 0.25), torch.zeros(3, 2, dtype=torch.int64)


@ONE_MIXTURE
def test_the_router_norms_where_its_plan_and_adapters_let_it(
    model: ExLlamaV2, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = mixtures(model)[0]
    x = torch.zeros(3, mixture.router.in_features, dtype=torch.float16)
    half_of(mixture).run(x, None, step_of(), APART)
    assert launches.normed_by_router
    monkeypatch.setattr(MoE, "route", lambda moe, h, loras=(), **_: MINE)
    for norms, step in ((False, step_of()), (True, step_of(adapter(mixture.router)))):
        launches.norms, launches.normed_by_router = norms, False
        mixture.forward(x, step)
        assert not launches.normed_by_router
        assert launches.weights is MINE[0]


@ONE_MIXTURE
def test_a_mixture_with_other_code_runs_it(
    model: ExLlamaV2, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operator by operator, which no captured step holds."""
    mixture = mixtures(model)[0]
    assert mixture.capturable
    monkeypatch.setattr(mixture, "route", lambda h, loras=(), **_: MINE)
    choose_own_pass(mixture)
    assert mixture.own_pass is BY_OPERATOR
    assert not mixture.capturable
    half = half_of(mixture)
    assert isinstance(half, ModuleHalf)
    assert not isinstance(half, ExpertsHalf)


def test_experts_that_do_not_share_a_call_run_by_operator(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """For so many rows: the pass asks each time."""
    mixture, ran = mixtures(model)[0], list[int]()
    x = hidden_of(mixture, 3)
    by_operator = MoE.forward_by_operator

    def noted(module: MoE, x: Tensor, step: Step) -> Tensor:
        ran.append(len(x))
        return by_operator(module, x, step)

    monkeypatch.setattr(MoE, "forward_by_operator", noted)
    together = mixture.forward(x.clone(), step_of())
    assert not ran
    monkeypatch.setattr(CpuExperts, "shares", lambda *_: False)
    apart = mixture.forward(x.clone(), step_of())
    assert ran == [3]
    assert torch.equal(together, apart)


def test_adapters_of_a_mixture_are_left_to_its_module(model: ExLlamaV2) -> None:
    one, other = mixtures(model)[:2]
    half = half_of(one)
    assert isinstance(half, ExpertsHalf)
    for linear in (one.router, one.experts[1].down):
        assert not half.takes_adapters(cast(Step, SimpleNamespace(loras=[adapter(linear)])))
    assert half.takes_adapters(cast(Step, SimpleNamespace(loras=[adapter(other.experts[1].down)])))


@pytest.mark.parametrize("model", [case for case in CASES if case[0] in SHARED], ids="-".join, indirect=True)
def test_a_shared_expert_with_code_of_its_own_keeps_it(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = mixtures(model)[0]
    assert mixture.shared is not None
    assert isinstance(half_of(mixture), ExpertsHalf)
    monkeypatch.setattr(mixture.shared, "inner", lambda h, loras=(), **_: h)
    assert isinstance(half_of(mixture), ModuleHalf)


@ONE_MIXTURE
def test_mixtures_keep_their_launches_with_attention_without_any(
    model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router's launch norms the hidden state in a model whose other halves run as their modules, too."""
    for module in model.modules:
        if isinstance(module, Attention):
            monkeypatch.setattr(module, "forward", module.forward)
    joined_on_cpu(monkeypatch)
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches), plan
    assert [type(half) for half in plan.halves] == [ModuleHalf, ExpertsHalf] * (len(plan.halves) // 2)
    for mixture in mixtures(model):
        monkeypatch.setattr(mixture, "forward", mixture.forward)
    assert "has code that its description does not know" in str(joined_launches_of(model))
