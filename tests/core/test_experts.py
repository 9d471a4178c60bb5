"""Mixtures of experts on the CPU: one native call a layer, bitwise the experts one after the other, in any batch."""

from __future__ import annotations

import sys
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
from exl_core.execution.batch import Step
from exl_core.execution.experts_half import ExpertsHalf
from exl_core.execution.fused import JoinedLaunches, joined_launches_of
from exl_core.execution.half import ModuleHalf
from exl_core.execution.halves import half_of
from exl_core.execution.operators import APART
from exl_core.layers import Attention, MoE, RMSNorm
from exl_core.lora.pairs import LoraPair
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
        patch.setattr(MoE, "_grouped_for", lambda *_: None)
        logits: Tensor = model.forward(ids, **options)
        return logits


def in_one_call(model: ExLlamaV2, ids: Tensor, **options: Any) -> Tensor:
    """Logits; fails where experts run one after the other."""

    def fail(*_: Any) -> Tensor:
        raise AssertionError("experts ran one after the other")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoE, "_outputs", fail)
        logits: Tensor = model.forward(ids, **options)
        return logits


def test_routers_do_not_keep_prompts_from_being_batch_invariant(
    model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU: generators then limit the tokens of the prompts that share a pass."""
    monkeypatch.setattr(model, "device", torch.device("cuda", 0))
    gates = ("router", "shared_gate")
    quantized = all(linear.is_quant() for linear in model.linears() if linear.spec.role not in gates)
    assert model.invariant_tokens() == (PACKED_ROWS if quantized else 0)


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


def test_an_adapted_expert_runs_by_itself(model: ExLlamaV2) -> None:
    """Its layer alone: adapters of other matrices leave the experts in one call."""
    mixture = mixtures(model)[1]
    h = torch.randn(20, 128, generator=torch.Generator().manual_seed(3))
    weights, numbers = mixture.route(h)
    lora = adapter(mixture.experts[int(numbers[0, 0])].up)
    adapted, plain = mixture.inner(h, [lora]), mixture.inner(h)
    changed = (numbers == int(numbers[0, 0])).any(-1)
    assert torch.equal(adapted[~changed], plain[~changed])
    assert not torch.isclose(adapted[changed], plain[changed]).all(-1).any()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoE, "run_expert", lambda *_, **__: pytest.fail("an expert ran by itself"))
        others = mixtures(model)[0]
        others.inner(h, [lora])
        with pytest.raises(pytest.fail.Exception):
            mixture.inner(h, [lora])
    assert weights.shape == numbers.shape


@pytest.mark.parametrize("model", [case for case in CASES if case[0] in SHARED], ids="-".join, indirect=True)
def test_an_adapted_shared_expert_joins_the_others(model: ExLlamaV2) -> None:
    mixture = mixtures(model)[1]
    assert mixture.shared is not None
    h = torch.randn(20, 128, generator=torch.Generator().manual_seed(3))
    lora = adapter(mixture.shared.down_proj)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoE, "run_expert", lambda *_, **__: pytest.fail("an expert ran by itself"))
        together = mixture.inner(h, [lora])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoE, "_grouped_for", lambda *_: None)
        apart = mixture.inner(h, [lora])
    assert torch.equal(together, apart)
    assert not torch.equal(together, mixture.inner(h))


def test_unloading_and_loading_again(model: ExLlamaV2) -> None:
    ids = ids_of(1)
    before = in_one_call(model, ids)
    matrices = [expert.up.loaded_matrix for mixture in mixtures(model) for expert in mixture.experts]
    model.unload()
    in_a_list_alone = [sys.getrefcount(one) for one in [object()]]  # by the version of Python
    assert [sys.getrefcount(matrix) for matrix in matrices] == in_a_list_alone * len(matrices)
    model.load()
    assert torch.equal(in_one_call(model, ids), before)


class Launches:
    """A router that norms its rows, and experts in shared launches, which note their calls."""

    dtype, joins_shared = torch.float16, True

    def __init__(self) -> None:
        self.normed_by_router = False
        self.weights: Tensor | None = None

    def plan(self, rows: int, norm: object) -> SimpleNamespace:
        return SimpleNamespace(norms=True)

    def norm_and_route(self, x: Tensor, norm: object) -> tuple[Tensor, Tensor, Tensor]:
        self.normed_by_router = True
        return x, torch.zeros(len(x), 2), torch.zeros(len(x), 2, dtype=torch.int64)

    def shares(self, rows: int, chosen: int, invariant: bool) -> bool:
        return True

    def __call__(self, h: Tensor, weights: Tensor, ids: Tensor, *, out: Tensor, **_: object) -> Tensor:
        self.weights = weights
        return out


ONE_MIXTURE = pytest.mark.parametrize("model", [("MixtralForCausalLM", "gptq", "int8")], ids="-".join, indirect=True)


@ONE_MIXTURE
def test_the_executor_lets_the_router_norm_and_the_module_does_not(
    model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that replaces a method runs: in the module's pass always, in joined launches where it is of one module."""
    mixture, step = mixtures(model)[0], cast(Step, SimpleNamespace(loras=(), invariant=False, batch_size=3))
    x = torch.zeros(3, mixture.router.in_features, dtype=torch.float16)
    mine = torch.full((3, 2), 0.25), torch.zeros(3, 2, dtype=torch.int64)
    monkeypatch.setattr(RMSNorm, "forward", lambda norm, x, *_, **__: x)
    launches = Launches()
    monkeypatch.setattr(mixture, "_router", launches)
    monkeypatch.setattr(mixture, "_grouped", launches)
    half = half_of(mixture)
    assert isinstance(half, ExpertsHalf)
    half.run(x, None, step, APART)
    assert launches.normed_by_router
    assert launches.weights is not None
    launches.normed_by_router = False
    with monkeypatch.context() as patch:
        patch.setattr(MoE, "route", lambda moe, h, loras=(), **_: mine)
        mixture.forward(x, step)
    assert not launches.normed_by_router
    assert launches.weights is mine[0]
    launches.weights = None
    monkeypatch.setattr(mixture, "route", lambda h, loras=(), **_: mine)
    half = half_of(mixture)
    assert isinstance(half, ModuleHalf)
    half.run(x, None, step, APART)
    assert not launches.normed_by_router
    assert launches.weights is mine[0]


@ONE_MIXTURE
def test_experts_that_do_not_share_launches_run_as_their_module(
    model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For so many rows: the half asks at each pass."""
    mixture, step = mixtures(model)[0], cast(Step, SimpleNamespace(loras=(), invariant=False, batch_size=3))
    x = torch.randn(3, mixture.router.in_features, generator=torch.Generator().manual_seed(3))
    half, ran = half_of(mixture), list[int]()
    assert isinstance(half, ExpertsHalf)
    forward = MoE.forward

    def noted(module: MoE, x: Tensor, step: Step) -> Tensor:
        ran.append(len(x))
        return forward(module, x, step)

    monkeypatch.setattr(MoE, "forward", noted)
    together, _ = half.run(x.clone(), None, step, APART)
    assert not ran
    monkeypatch.setattr(type(half.about.grouped), "shares", lambda *_: False)
    apart, _ = half.run(x.clone(), None, step, APART)
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
def test_mixtures_keep_their_launches_beside_attention_without_any(
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
