"""The way of a pass is decided once: `select` and the report of kernels give the same one, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from joined_on_cpu import joined_on_cpu
from make_random_model import Shape, make_model
from random_models import write_random_model
from test_decode_graphs import small_adapter
from test_kernel_uses import CONFIG, with_float, with_float_tensors

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, PagedParams
from exl_core.convert import quantize_model
from exl_core.execution import captured, halves
from exl_core.execution import select as selecting
from exl_core.execution.capturable import refusal_of_model
from exl_core.execution.environment import GRAPHS_VARIABLE, JOINED_ADAPTERS_VARIABLE, JOINED_ROWS_VARIABLE
from exl_core.execution.forward_pass import ForwardPass
from exl_core.execution.kernels import WAY, kernel_uses
from exl_core.execution.matrix_shapes import MatrixShapes
from exl_core.execution.select import select
from exl_core.execution.ways import REFUSAL_OF_ADAPTERS, PassFacts, Way, refusal_of_step, way_of
from exl_core.layers import MoE
from exl_kernels import _native
from exl_kernels.linear import QuantMatrix
from exl_kernels.moe import cuda
from exl_kernels.selection import Card

MOST_CHOSEN = _native.CudaExperts.most_chosen
PAGE = 16
ROWS = (1, 8, 64, 65, 128, 256, 257)
PROMPTS = (17, 300)


def plain(folder: Path) -> ExLlamaV2Config:
    make_model(folder, Shape(256, 768, 2, 4, 2, 96), 4.0)
    return ExLlamaV2Config(folder)


def experts(folder: Path, **changes: Any) -> ExLlamaV2Config:
    write_random_model(folder / "float", CONFIG | changes)
    quantize_model(folder / "float", folder / "quantized", bits=4.0)
    return ExLlamaV2Config(folder / "quantized")


def experts_of_gelu(folder: Path) -> ExLlamaV2Config:
    return experts(folder, hidden_act="gelu")


def float_experts(folder: Path) -> ExLlamaV2Config:
    return ExLlamaV2Config(write_random_model(folder, CONFIG))


def some_float_experts(folder: Path) -> ExLlamaV2Config:
    return with_float_tensors(folder, "layers.1.mlp.experts.2.")


def float_matrix(folder: Path) -> ExLlamaV2Config:
    return with_float(folder, "model.layers.0.self_attn.o_proj", 256, 256)


MODELS: dict[str, Callable[[Path], ExLlamaV2Config]] = {
    "plain": plain,
    "experts": experts,
    "experts of gelu": experts_of_gelu,
    "float experts": float_experts,
    "some float experts": some_float_experts,
    "a float matrix": float_matrix,
}
BY_HOST = ("experts of gelu", "some float experts")
"""Mixtures whose experts the host chooses."""
VARIABLES: dict[str, dict[str, str]] = {
    "as is": {},
    "no graphs": {GRAPHS_VARIABLE: "0"},
    "few joined rows": {JOINED_ROWS_VARIABLE: "32"},
    "adapters apart": {JOINED_ADAPTERS_VARIABLE: "0"},
}


def as_on_a_gpu(model: ExLlamaV2, patch: pytest.MonkeyPatch) -> None:
    """Let `select` see a model on the CPU as one on a GPU, whose experts share launches where they are alike."""
    joined_on_cpu(patch)
    patch.setattr(selecting, "may_fuse", lambda model: True)

    def refusal(model: Any) -> str | None:
        place = SimpleNamespace(names=["cuda:0"])
        there: Any = SimpleNamespace(
            device=torch.device("cuda"), tp_context=None, placement=place, modules=model.modules
        )
        return refusal_of_model(there)

    patch.setattr(captured, "refusal_of_model", refusal)
    patch.setattr(captured, "refusal_of_capture", lambda model, sets: None)  # a CPU has no kernels of adapters
    patch.setattr(cuda, "CudaQuantMatrix", Quantized)
    patch.setattr(cuda, "CudaFloatMatrix", Float)
    patch.setattr(cuda, "_native_experts", lambda experts, activation: None)  # takes matrices on a GPU
    patch.setattr(MoE, "capturable", property(lambda mixture: refusal_of_group(mixture) is None))


class OfFormats(type):
    """Type of a class whose instances are the matrices of its formats, on the CPU too."""

    formats: tuple[str, ...] = ()

    def __instancecheck__(cls, matrix: Any) -> bool:
        return isinstance(matrix, QuantMatrix) and matrix.format in cls.formats


class Quantized(metaclass=OfFormats):
    formats = ("exl2", "gptq")


class Float(metaclass=OfFormats):
    formats = ("float",)


def refusal_of_group(mixture: MoE) -> str | None:
    """Return why the loaded experts of a mixture share no launches."""
    whole = [(expert.gate.quant, expert.up.quant, expert.down.quant) for expert in mixture.experts]
    return cuda.why_apart(whole, mixture.activation, mixture.chosen)


def step(model: ExLlamaV2, batch: int, **changes: Any) -> ForwardPass:
    table = torch.arange(batch, dtype=torch.int32).view(batch, 1)
    params = PagedParams(batch, table, torch.full((batch,), 3, dtype=torch.int32), 3, PAGE, 1)
    cache = ExLlamaV2Cache(model, max_seq_len=batch * PAGE)
    return ForwardPass(torch.full((batch, 1), 7), cache, params, **changes)


@pytest.mark.parametrize("kind", MODELS)
def test_the_report_gives_the_way_and_the_reason_that_select_gives(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    config = MODELS[kind](tmp_path / "model")
    model = ExLlamaV2(config)
    model.load()
    adapter = small_adapter(model, tmp_path / "adapter")
    as_on_a_gpu(model, monkeypatch)
    seen = set()
    for variables, adapted in product(VARIABLES.values(), (False, True)):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            loras: dict[str, Any] = {"loras": [adapter]} if adapted else {}
            uses = kernel_uses(
                config, Card.named("H100"), rows=ROWS, prompts=PROMPTS, keys=512, adapter_rank=2 if adapted else None
            )
            reported = {(use.rows, use.tokens): use for use in uses if use.operation == WAY}
            for rows in ROWS:
                selected, use = select(model, step(model, rows, **loras)), reported[rows, 1]
                assert use.kernel == selected.way, (rows, variables, adapted, use.why, selected.reason)
                if selected.way != "captured":
                    assert same(selected.reason, use.why), (selected.reason, use.why)
                seen.add(selected.way)
            for tokens in PROMPTS:
                asked = ForwardPass(torch.full((1, tokens), 7), None, **loras)
                assert reported[tokens, tokens].kernel == select(model, asked).way, (tokens, variables, adapted)
    assert seen == ({"eager"} if kind in BY_HOST else {"captured", "joined", "eager"})


def same(reason: str | None, why: tuple[str, ...]) -> bool:
    """Whether a report gives the reason of `select`, or both say that the host chooses the experts."""
    return reason in why or ("decides on the host" in str(reason) and any("chosen by the host" in one for one in why))


@pytest.mark.parametrize(
    ("activation", "chosen", "taken"),
    [
        ("silu", 3, True),
        ("gelu_new", 3, True),
        ("gelu", 3, False),
        ("relu2", 3, False),
        ("silu", MOST_CHOSEN, True),
        ("silu", MOST_CHOSEN + 1, False),
    ],
)
def test_the_report_refuses_the_mixtures_that_a_loaded_model_refuses(
    activation: str, chosen: int, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the same reason. Layers have fewer experts than would exceed the limit, so their number is set."""
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    init = MoE.__init__
    monkeypatch.setattr(MoE, "__init__", lambda *given, **named: init(*given, **{**named, "chosen": chosen}))
    config = experts(tmp_path, hidden_act=activation)
    model = ExLlamaV2(config)
    model.load()
    as_on_a_gpu(model, monkeypatch)
    refusals = {refusal_of_group(module) for module in model.modules if isinstance(module, MoE)}
    (refusal,) = refusals
    assert (refusal is None) == taken
    uses = {use.operation: use for use in kernel_uses(config, Card.named("H200"), rows=(8,), prompts=())}
    assert uses[WAY].kernel == select(model, step(model, 8)).way == ("captured" if taken else "eager")
    assert ("experts" in uses) == taken
    if not taken:
        for operation in (WAY, "down_proj"):
            assert any(why.endswith(f"are chosen by the host: {refusal}") for why in uses[operation].why)


def test_the_report_gives_the_way_of_a_mixture_with_attention_without_joined_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of attention with padding columns run as their modules; the router still norms in its launch."""
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    config = experts(tmp_path)
    model = ExLlamaV2(config)
    model.load()
    as_on_a_gpu(model, monkeypatch)
    monkeypatch.setattr(halves, "is_padded", lambda linear: "self_attn" in linear.key)
    monkeypatch.setattr(MatrixShapes, "is_padded", lambda shapes, linear: "self_attn" in linear.key)
    uses = kernel_uses(config, Card.named("H100"), rows=(8,), prompts=(17,))
    ways = {use.tokens: use for use in uses if use.operation == WAY}
    assert ways[1].kernel == select(model, step(model, 8)).way == "captured"
    assert not ways[1].why, "the launches are joined"
    asked = ForwardPass(torch.full((1, 17), 7), None)
    assert ways[17].kernel == select(model, asked).way == "joined"
    norms = sum(sum(use.calls) for use in uses if use.operation == "norm" and use.tokens == 1)
    assert norms == 1 + model.config.num_hidden_layers, "of attention, and the last one"


class Facts:
    """Facts about a model, one at a time."""

    def __init__(self, *, sharded: bool = False, **reasons: str) -> None:
        self.sharded = sharded
        self._reasons = reasons

    def refusal(self) -> str | None:
        return self._reasons.get("model")

    def refusal_of_launches(self) -> str | None:
        return self._reasons.get("launches")

    def unjoined(self, *, adapted: bool) -> str | None:
        return self._reasons.get("adapted" if adapted else "joined")

    def rows_of(self, batch: int, q_len: int) -> int:
        return batch * q_len

    def refusal_of_rows(self, rows: int) -> str | None:
        return self._reasons.get("rows")


WAYS: list[tuple[Facts, PassFacts, str | None, tuple[Way, str | None]]] = [
    (Facts(model="m"), PassFacts(adapted=True, is_prompt=False), None, ("captured", None)),
    (Facts(), PassFacts(adapted=False, is_prompt=True), "c", ("joined", "c")),
    (Facts(), PassFacts(adapted=True, is_prompt=True), "c", ("eager", REFUSAL_OF_ADAPTERS)),
    (Facts(), PassFacts(adapted=False, is_prompt=True, refusal="p"), "c", ("eager", "p")),
    (Facts(model="a part is on the CPU"), PassFacts(True, True), "c", ("eager", "a part is on the CPU")),
    (Facts(launches="l"), PassFacts(adapted=False, is_prompt=True), "c", ("eager", "l")),
    (Facts(sharded=True), PassFacts(adapted=False, is_prompt=True), "c", ("sharded prompt", "c")),
    (Facts(sharded=True), PassFacts(False, False), "c", ("sharded", "it has few tokens a row, or adapters")),
    (Facts(sharded=True, launches="l"), PassFacts(adapted=False, is_prompt=True), "c", ("sharded", "l")),
    (Facts(sharded=True, model="m"), PassFacts(adapted=False, is_prompt=True), "c", ("sharded", "m")),
    (Facts(sharded=True), PassFacts(adapted=False, is_prompt=False), None, ("captured", None)),
]


@pytest.mark.parametrize(("model", "asked", "captured", "way"), WAYS)
def test_facts_decide_the_way(
    model: Facts, asked: PassFacts, captured: str | None, way: tuple[Way, str | None]
) -> None:
    assert way_of(model, asked, captured) == way


def test_facts_decide_whether_a_step_is_captured() -> None:
    assert refusal_of_step(Facts(joined="j", rows="r"), 64, 1, adapted=False) is None
    assert refusal_of_step(Facts(model="m"), 1, 1, adapted=False) == "m"
    assert "at most 256" in (refusal_of_step(Facts(), 17, 16, adapted=False) or "")
    assert refusal_of_step(Facts(sharded=True, joined="j"), 65, 1, adapted=False) is None, "its launches decide"
    for adapted, reason in ((False, "j"), (True, "r")):
        assert (refusal_of_step(Facts(joined="j", rows="r"), 65, 1, adapted=adapted) or "").endswith(f": {reason}")
