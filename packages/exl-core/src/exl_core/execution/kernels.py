"""The kernels that the steps and prompts of a model run on a card, determined from the headers of the model's files.

Plans of shapes (`exl_kernels.linear.planned`) answer the questions that executors ask plans of loaded matrices, by the
same functions (`half_matmuls.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from exl_kernels.device import row_invariant, rows_are_invariant
from exl_kernels.linear.fused import Activation
from exl_kernels.linear.planned import ShapedMatmul, blocks_of
from exl_kernels.selection import (
    BLOCK_ROWS,
    FEW_ROWS,
    PACKED_ROWS,
    STEP_ROWS,
    AdapterSizes,
    Card,
    RouterPlan,
    Selection,
    adapter_kernels,
    attention_stores_keys,
    refusal_of_experts,
    rope_store_kernel,
    runs_packed,
)

from ..config import ExLlamaV2Config
from ..config.rope_config import main_rope
from ..errors import ModelStateError
from ..layers import Head, Linear, Module, Norm, build_modules
from ..layers.description import AttentionDescription, ExpertsDescription, HalfDescription, MatmulDescription
from ..layers.norm import LayerNorm, rms_of
from .capturable import refusal_of_settings
from .environment import refusal_of_joined_adapters, refusal_of_joined_rows
from .experts_pass import router_norm
from .fused import uncovered
from .half import description_of, is_mixture, refusal_of_code, why_own_pass
from .half_matmuls import (
    HalfPlan,
    head_with_norm,
    joins_rows,
    packed_rows_of,
    refusal_of_blocks,
)
from .kernel_norms import HalfRun, NormLaunches
from .matrix_shapes import MatrixShapes
from .prologues import next_prologues
from .ways import PassFacts, Way, refusal_of_step, way_of

__all__ = ["KEYS", "PROMPTS", "ROWS", "WAY", "KernelUse", "kernel_uses"]

ROWS = (1, FEW_ROWS, 32, PACKED_ROWS)
"""Default numbers of sequences of a step."""

PROMPTS = (128, 512)
"""Default numbers of tokens of a prompt."""

KEYS = 256
"""Default number of keys that attention reads."""

WAY = "way"
"""The operation of a `KernelUse` that names how `select` runs the pass."""

_CHOSEN = "are chosen by the host"
_UNCAPTURED = "a prompt is captured only where many of its size store keys and values alone"


@dataclass(frozen=True)
class KernelUse:
    """One operation of a pass of a number of rows, over all layers."""

    operation: str
    """"way", "q+k+v", "o", "gate+up", "down", "rope+store", "attention", "router", "experts", "head", "norm" (launches
    that only norm rows), "adapters", the last part of a matrix's key, or an operation that the caller adds."""
    rows: int
    tokens: int
    """Query tokens of each sequence: one in a decode step, all rows in a prompt."""
    kernel: str
    """A name of `exl_kernels.selection`, "cuBLAS" for float matrices; "captured", "joined" or "eager" for "way".

    Several names with commas where layers, or blocks of rows, differ."""
    why: tuple[str, ...]
    """The reasons why no faster kernel runs, one sentence each; empty where no faster kernel exists."""
    calls: tuple[int, ...] = ()
    """Calls of each kernel in a pass: of all layers and blocks of rows together."""


def kernel_uses(
    config: ExLlamaV2Config,
    card: Card,
    *,
    rows: Sequence[int] = ROWS,
    prompts: Sequence[int] = PROMPTS,
    cache: str = "fp16",
    keys: int = KEYS,
    adapter_rank: int | None = None,
) -> list[KernelUse]:
    """Return the kernels of every operation of a model on one GPU, and how `select` runs the pass.

    Reads the scales of every matrix, not its weights. A captured step is padded to more rows where its bucket has more
    (`capturable.padded_rows`); the report is of the rows as given, and of all logits.

    Args:
        config: a prepared config.
        card: the GPU.
        rows: numbers of sequences of a step, of one token each.
        prompts: numbers of tokens of a prompt, which is one sequence.
        cache: storage format of the cache.
        keys: keys that attention reads, at least as many as the prompt has tokens.
        adapter_rank: rank of adapters of all matrices that every row has; None: passes without adapters. Where the pass
            is not captured, the launches of adapters themselves are not listed. A matmul that adds them has none.

    Raises:
        ModelStateError: the config was prepared without tensors.
        FormatError, MissingTensorError: the weight files are broken or incomplete.
    """
    if config.checkpoint is None:
        raise ModelStateError("the config was prepared with no_tensors=True: call config.prepare() first")
    model = _Model(config, card, MatrixShapes(config.checkpoint))
    rotated = main_rope(config).rotary_dim
    found: list[KernelUse] = []
    for count, is_prompt in (*((n, False) for n in rows), *((n, True) for n in prompts)):
        way = model.way(count, is_prompt, adapted=adapter_rank is not None)
        uses = _Uses(model, way, count, is_prompt, adapter_rank)
        uses.attention(cache, keys, rotated)
        uses.halves()
        uses.head()
        uses.norms()
        uses.adapters()
        found += uses.rows()
    return found


@dataclass(frozen=True)
class _Half:
    """A half of a layer and the plan of its joined launches; `why` there is none."""

    module: Module
    about: HalfDescription | None
    plan: HalfPlan[ShapedMatmul] | None
    why: str | None


class _Way(NamedTuple):
    """How a pass runs."""

    way: Way
    why: tuple[str, ...]
    """Why `select` takes no way before it in its table; for a captured step, why it has no joined launches."""
    refusal: str | None
    """Why no half of so many rows joins its launches."""
    invariant: bool
    """The pass asks for batch-invariant rows."""


class _Model:
    """The halves of a model with their plans, and the ways of its passes on one GPU."""

    def __init__(self, config: ExLlamaV2Config, card: Card, shapes: MatrixShapes) -> None:
        self.card, self.shapes, self.modules = card, shapes, build_modules(config)
        self.hidden = config.hidden_size
        self._eager = refusal_of_settings(config) or self._decided_by_host()
        why_not = self._eager or uncovered(self.modules)
        self.halves = [self._half(module, why_not) for module in self.modules[1:-2]]
        covered = any(half.why is None or is_mixture(half.about) for half in self.halves)
        self._apart = why_not or (None if covered else next((half.why for half in self.halves), None))
        linears = (linear for module in self.modules for linear in module.submodules())
        refusals = (self._refusal_of_experts(description_of(module), STEP_ROWS) for module in self.modules)
        self._packed_rows = packed_rows_of(map(self._takes_blocks, linears), refusals)

    def _takes_blocks(self, linear: Linear) -> bool:
        """Return whether one launch takes BLOCK_ROWS rows, as `QuantMatrix.takes_blocks`."""
        shape, card = self.shapes.of(linear), self.card
        if shape is None:
            return card.takes_float_blocks
        return card.plan_alone(shape, BLOCK_ROWS, invariant=True).whole_block

    def make(self, linears: tuple[Linear, ...], norm: Norm | None, activation: Activation | None) -> ShapedMatmul:
        """Return a matmul of shapes, as `half_matmuls.MakeMatmul`."""
        return ShapedMatmul(
            self.card,
            [self.shapes.of(linear) for linear in linears],
            norm=None if norm is None else "layer" if isinstance(norm, LayerNorm) else "rms",
            activation=activation is not None,
        )

    def _half(self, module: Module, why: str | None) -> _Half:
        about, why = description_of(module), why or why_own_pass(module, self.shapes.is_padded)
        if why is not None:
            return _Half(module, about, None, why)
        assert isinstance(about, MatmulDescription), "why_own_pass"
        mlp = None
        if isinstance(about, AttentionDescription) and isinstance(about.mlp, MatmulDescription):
            mlp = HalfPlan(about.mlp, self.make, self.shapes.of_norm)
        return _Half(module, about, HalfPlan(about, self.make, self.shapes.of_norm, mlp), None)

    sharded = False  # the report is of one GPU

    def refusal(self) -> str | None:
        """See `ModelFacts`."""
        return self._eager

    def refusal_of_launches(self) -> str | None:
        """See `ModelFacts`."""
        return self._apart

    def unjoined(self, *, adapted: bool) -> str | None:
        """See `ModelFacts`."""
        return (refusal_of_joined_adapters() if adapted else None) or self._apart

    def rows_of(self, batch: int, q_len: int) -> int:
        """See `ModelFacts`; the report is of the rows as given."""
        return batch * q_len

    def refusal_of_rows(self, rows: int) -> str | None:
        """See `ModelFacts`."""
        whys = (self._refusal_of_half(half, rows) for half in self.halves)
        return refusal_of_blocks(rows, lambda: next((why for why in whys if why), None))

    def way(self, count: int, is_prompt: bool, *, adapted: bool) -> _Way:
        """Return how a step of `count` sequences, or a prompt of `count` tokens, runs; with adapters if `adapted`."""
        invariant = row_invariant() or runs_packed(count, decodes=not is_prompt, packed=self._packed_rows)
        captured = _UNCAPTURED if is_prompt else refusal_of_step(self, count, 1, adapted=adapted)
        way, reason = way_of(self, PassFacts(adapted, is_prompt=is_prompt), captured)
        refusal = self._refusal_of_joining(count, invariant)
        if way == "captured":
            apart = self._apart
            return _Way(way, () if apart is None else (apart,), refusal or self.unjoined(adapted=adapted), invariant)
        reasons = (reason,) if is_prompt else (captured, reason)
        why = tuple(dict.fromkeys(text for text in reasons if text is not None))
        return _Way(way, why, reason if way == "eager" else refusal, invariant)

    def _refusal_of_joining(self, count: int, invariant: bool) -> str | None:
        """Return why halves of so many rows do not join launches that their plans would join, or None."""
        if self._apart is not None:
            return self._apart
        if joins_rows(count, invariant=invariant):
            return None
        return refusal_of_joined_rows(count) or self.many_rows()

    def many_rows(self) -> str:
        """Return why a prompt of many rows dequantizes matrices."""
        return f"more than {self._packed_rows} rows are cheaper by dequantizing once"

    def _refusal_of_half(self, half: _Half, rows: int) -> str | None:
        return self._refusal_of_experts(half.about, rows) or refusal_of_code(half.module)

    def _refusal_of_experts(self, about: HalfDescription | None, rows: int) -> str | None:
        if isinstance(about, ExpertsDescription):
            found = self.experts(about, rows, invariant=True)
            if isinstance(found, str) or not found.joined:
                return f"the experts of {about.module.key} {_CHOSEN}"
        return None

    def _decided_by_host(self) -> str | None:
        """Return why every module runs its own pass, or None: the host chooses experts, so no step is captured."""
        for module in self.modules:
            about = description_of(module)
            if isinstance(about, ExpertsDescription):
                found = self.experts(about, 1, invariant=True)
                if isinstance(found, str) or found.refused:
                    why = found if isinstance(found, str) else found.reasons[0]
                    return f"the experts of {module.key} {_CHOSEN}: {why}"
        return None

    def router(self, about: ExpertsDescription, rows: int) -> RouterPlan:
        """Return how rows are routed, as `ExpertRouter.plan` of the loaded router."""
        router, norm = about.router, router_norm(about)
        return self.card.plan_router(
            rows,
            hidden=router.in_features,
            experts=router.out_features,
            chosen=about.chosen,
            sparse=about.jitter is not None,
            quantized=not self.shapes.is_float(router),
            rms=None if norm is None else prod(self.shapes.of_norm(norm)),
        )

    def experts(self, about: ExpertsDescription, rows: int, *, invariant: bool) -> Selection | str:
        """Return how rows run through experts, or why no number of rows has shared launches."""
        refusal = refusal_of_experts(about.activation, about.chosen)
        if refusal is not None:
            return refusal
        whole = [self.shapes.all(expert) for expert in about.experts]
        experts = [(parts[0], parts[1], parts[2]) for parts in whole if parts is not None]
        if not experts and all(self.shapes.is_float(linear) for expert in about.experts for linear in expert):
            gate = about.experts[0][0]
            sizes = {"experts": len(whole), "hidden": gate.in_features, "width": gate.out_features}
            return self.card.float_experts(rows, about.chosen, **sizes, invariant=invariant)
        if len(experts) < len(whole):
            return "some of their matrices are float"
        if any(self.shapes.is_padded(linear) for expert in about.experts for linear in expert):
            return "they have padding columns"
        return self.card.experts(experts, rows, about.chosen, invariant=invariant)


@dataclass
class _Found:
    """Kernels of an operation with their calls, and reasons."""

    kernels: dict[str, int] = field(default_factory=dict)
    why: dict[str, None] = field(default_factory=dict)


class _Uses:
    """Kernels and reasons by operation, over all layers, of one pass.

    Args:
        model: the model.
        way: how the pass runs.
        count: the number of rows.
        is_prompt: the rows are the tokens of one sequence.
        adapter_rank: rank of adapters of all matrices that all rows have; None: they have none.
    """

    def __init__(self, model: _Model, way: _Way, count: int, is_prompt: bool, adapter_rank: int | None) -> None:
        self._model, self._way, self._count, self._rank = model, way, count, adapter_rank
        self._adapted = adapted = adapter_rank is not None
        self._invariant = rows_are_invariant(count, invariant=way.invariant)
        self._tokens = count if is_prompt else 1
        self._found: dict[str, _Found] = {}
        self._add(WAY, way.way, way.why)
        self._halves = [self._with_adapters(half) for half in model.halves] if adapted else model.halves
        self._joins = [
            half.plan is not None and way.refusal is None and half.plan.joins(count) for half in self._halves
        ]
        *_, last, head = model.modules
        self._last_norm = last if isinstance(last, Norm) else None
        packed = None  # the last norm and the head as one matmul, whose input the last half may pack
        if way.way == "captured" and not adapted and isinstance(head, Head):
            packed = head_with_norm(self._last_norm, head, model.make, model.shapes.is_padded)
        self._runs = [
            HalfRun(half.about, half.plan, joins, self._routes_norm(half.about))
            for half, joins in zip(self._halves, self._joins, strict=True)
        ]
        plans = [half.plan for half in self._halves]
        self._prologues = next_prologues(plans, self._joins, rms_of(self._last_norm), packed, count, packs=not adapted)

    def _with_adapters(self, half: _Half) -> _Half:
        """Return how a half runs with adapters: as its module's own pass where no joined launches add them."""
        if half.plan is None:
            return half
        unjoined = (why for plan in _plans(half) for why in self._unjoined(plan))
        why = self._way.refusal or half.plan.refusal_of_adapters() or next(unjoined, None)
        return half if why is None else replace(half, plan=None, why=why)

    def rows(self) -> list[KernelUse]:
        """Return what was added, in order."""
        return [
            KernelUse(
                operation,
                self._count,
                self._tokens,
                ", ".join(found.kernels),
                tuple(found.why),
                tuple(found.kernels.values()),
            )
            for operation, found in self._found.items()
        ]

    def _add(self, operation: str, kernel: str, why: Iterable[str] = ()) -> None:
        found = self._found.setdefault(operation, _Found())
        found.kernels[kernel] = found.kernels.get(kernel, 0) + 1
        found.why.update(dict.fromkeys(why))

    def attention(self, cache: str, keys: int, rotated: int) -> None:
        """Add the attention of all layers, and the launches before it that rotate and store keys.

        Args:
            cache: storage format of the cache.
            keys: keys that attention reads.
            rotated: elements of a head that layers with a rotation rotate.
        """
        for half in self._halves:
            if isinstance(half.about, AttentionDescription):
                self._attention(half.about, cache, keys, rotated, own_pass=half.plan is None)

    def _attention(self, a: AttentionDescription, cache: str, keys: int, rotated: int, *, own_pass: bool) -> None:
        """own_pass: of the module. Otherwise attention of a decode step rotates and stores keys itself."""
        rotated = 0 if a.rope == "none" else rotated
        stores = not own_pass and attention_stores_keys(self._tokens)
        if not own_pass and rotated and not stores:
            store = rope_store_kernel(cache, a.head_dim, tokens=self._count, rotated=rotated, interleaved=a.interleaved)
            self._add("rope+store", store.kernel, store.reasons)
        found = self._model.card.attention(
            cache,
            a.head_dim,
            a.widths[0] // a.head_dim,
            a.widths[1] // a.head_dim,
            batch=self._count // self._tokens,
            tokens=self._tokens,
            keys=max(keys, self._tokens),
            window=a.window,
            softcap=a.softcap,
            rotated=rotated if stores else None,
            interleaved=a.interleaved,
            stored=not own_pass and not stores,
        )
        self._add("attention", found.kernel, found.reasons)

    def halves(self) -> None:
        """Add the matmuls of all layers."""
        for half, joins, normed in zip(self._halves, self._joins, self._normed(), strict=True):
            plans = _plans(half)
            apart = (
                [self._way.refusal] if self._way.refusal else [why for plan in plans for why in self._unjoined(plan)]
            )
            for plan in plans:
                if joins:
                    self._joined(plan, normed)
                else:
                    self._separate(plan, apart)
            if half.plan is None:
                self._own_pass(half)

    def _normed(self) -> list[bool]:
        """Return for each half whether launches of the one before leave it its input normed."""
        found = [False]
        for run, following in zip(self._runs, self._prologues, strict=True):
            plan = None if run.plan is None else run.plan.mlp or run.plan
            found.append(
                plan is not None
                and plan.norms_next(self._count, following, joined=run.joins, invariant=self._invariant)
            )
        return found[:-1]

    def _own_pass(self, half: _Half) -> None:
        assert half.why is not None
        if isinstance(half.about, ExpertsDescription):
            self._experts(half.about, half.why)
        else:
            self._alone_each(half.module.submodules(), [half.why])

    def _joined(self, plan: HalfPlan[ShapedMatmul], normed: bool) -> None:
        """Add the matmuls of a half whose launches are joined; the last one of an MLP may have no joined launch.

        normed: launches of the half before have normed the input.
        """
        first, last = _names(plan)
        if not self._adapted:
            self._matmul(first, plan.first_of_unnormed(self._count), plan.about.first)
            self._matmul(last, plan.last, (plan.about.last,), residual=plan.adds_residual)
            return
        for name, matmul, bare, linears, residual in (
            (first, plan.first_adapted(self._count, normed=normed), self._bare(plan), plan.about.first, False),
            (last, plan.last, plan.last, (plan.about.last,), plan.adds_residual),
        ):
            adding = self._adding(matmul, residual=residual)
            if adding is not None and adding.joined:
                self._add(name, adding.kernel, adding.reasons)
            else:
                self._matmul(name, bare, linears)

    def _adding(self, matmul: ShapedMatmul, *, residual: bool) -> Selection | None:
        """Return the launch of a matmul that adds the adapters of a captured step; not `joined`: why none does."""
        if self._rank is None or self._way.way != "captured":
            return None
        sizes = AdapterSizes(levels=1, most_rank=self._rank)
        return matmul.selection(self._count, residual=residual, adapters=sizes)

    def _bare(self, plan: HalfPlan[ShapedMatmul]) -> ShapedMatmul:
        """Return the first matmul that launches of adapters surround, as `JoinedHalf.first_bare`."""
        return self._model.make(plan.about.first, None, None)

    def _unjoined(self, plan: HalfPlan[ShapedMatmul]) -> list[str]:
        """Return why a half that may join launches does not."""
        found = []
        for name, matmul in zip(_names(plan), plan.required(), strict=False):
            if not matmul.joins(self._count):
                selected = matmul.selection(self._count)
                why = "it is not quantized" if selected is None else "".join(selected.reasons[-1:])
                found.append(f"{name} is launched apart: {why}")
        return found

    def _separate(self, plan: HalfPlan[ShapedMatmul], why: Sequence[str]) -> None:
        """Add the matmuls of a half with separate launches: all first ones at once where that is faster."""
        if plan.first_normed.pays_apart(self._count, invariant=self._way.invariant):
            self._matmul(_names(plan)[0], plan.first_normed, plan.about.first, why=why)
        else:
            self._alone_each(plan.about.first, why)
        self._alone_each((plan.about.last,), why)

    def head(self) -> None:
        """Add the head's matmul, which includes the last norm where the last half packs its input."""
        head = self._model.modules[-1]
        if not isinstance(head, Head):
            return
        chained = self._prologues[-1].chained if self._prologues else None
        if chained is not None:
            self._matmul("head", chained, (head.linear,))
        else:
            self._alone("head", head.linear, self._count)

    def norms(self) -> None:
        """Add the launches that only norm rows, of all layers and of the last norm."""
        launches = NormLaunches(
            self._model.hidden,
            self._count,
            tokens=self._tokens,
            invariant=self._way.invariant,
            adapted=self._adapted,
        )
        for found in launches.of(self._runs, self._prologues, self._last_norm):
            self._add("norm", found.kernel, found.reasons)

    def adapters(self) -> None:
        """Add the launches of adapters of all matrices, where a captured step has them and no matmul adds them."""
        if self._rank is None or self._way.way != "captured":
            return
        for half, normed in zip(self._halves, self._normed(), strict=True):
            for plan in _plans(half):
                first, ranks = plan.first_adapted(self._count, normed=normed), self._rank * len(plan.about.first)
                self._adapters(self._adding(first, residual=False), self._bare(plan), ranks, gated=first.is_gated)
                adding = self._adding(plan.last, residual=plan.adds_residual)
                self._adapters(adding, plan.last, self._rank, gated=False)
            for linear in half.module.submodules() if half.plan is None else ():
                if not linear.spec.in_mixture:
                    self._add("adapters", adapter_kernels(self._count, 0).kernel)

    def _adapters(self, adding: Selection | None, bare: ShapedMatmul, ranks: int, *, gated: bool) -> None:
        """Add the launches of adapters around a joined matmul, as `MatmulAdapters`; ranks: of all its matrices."""
        if adding is not None and adding.joined:
            return
        columns = bare.columns_for_adapters(self._count)
        found = adapter_kernels(self._count, ranks, columns=columns, gated=gated)
        self._add("adapters", found.kernel, (*found.reasons, *(adding.reasons if adding is not None else ())))

    def _routes_norm(self, about: HalfDescription | None) -> bool:
        """Return whether the launch of a router norms the hidden state, as `ExpertsTogether` lets it."""
        if not isinstance(about, ExpertsDescription):
            return False
        found = self._model.experts(about, self._count, invariant=self._invariant)
        return not isinstance(found, str) and found.joined and self._model.router(about, self._count).norms

    def _experts(self, about: ExpertsDescription, why_apart: str) -> None:
        """Add the router, the experts' matmuls (one entry where they share launches), and those of a shared expert."""
        known: set[Linear] = set()
        routes = self._model.router(about, self._count)
        self._add("router", routes.kernel, () if routes.refused is None else (routes.refused,))
        if routes.routes:
            known.add(about.router)
        reasons = [why_apart]
        found = self._model.experts(about, self._count, invariant=self._invariant)
        if not isinstance(found, str) and found.joined:
            self._add("experts", found.kernel)
            known.update(linear for expert in about.experts for linear in expert)
            reasons = []
        self._alone_each((linear for linear in about.module.submodules() if linear not in known), reasons)

    def _matmul(
        self,
        operation: str,
        matmul: ShapedMatmul,
        linears: Sequence[Linear],
        *,
        residual: bool = False,
        why: Iterable[str] = (),
    ) -> None:
        """Add a call of a `FusedLinear`: a launch for each block of its rows, or for each matrix."""
        for block in matmul.blocks(self._count):
            rows = block.stop - block.start
            found = matmul.selection(rows, residual=residual)
            if found is not None and found.joined:
                self._add(operation, found.kernel, (*why, *found.reasons))
                continue
            for linear in linears:
                self._alone(operation, linear, rows, why if found is None else found.reasons)

    def _alone_each(self, linears: Iterable[Linear], why: Sequence[str]) -> None:
        """Add matmuls of one matrix each."""
        for linear in linears:
            self._alone(linear.key.rpartition(".")[2], linear, self._count, why)

    def _alone(self, operation: str, linear: Linear, rows: int, why: Iterable[str] = ()) -> None:
        """Add a call of `QuantMatrix.matmul`: a launch for each block of its rows."""
        shape, card = self._model.shapes.of(linear), self._model.card
        invariant = rows_are_invariant(rows, invariant=self._way.invariant)
        if shape is None:
            sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
            kernel = card.float_matmul(rows, **sizes) if invariant else "cuBLAS"
            self._add(operation, kernel, ["the matrix is not quantized"])
            return
        plan = card.plan_alone(shape, rows, invariant=invariant)
        if plan.dequantizes:
            self._add(operation, plan.kernel, (*why, self._model.many_rows()))
            return
        for block in blocks_of(rows, plan.rows):
            found = card.matmul(shape, block.stop - block.start, invariant=invariant)
            self._add(operation, found.kernel, (*why, *found.reasons))


def _plans(half: _Half) -> list[HalfPlan[ShapedMatmul]]:
    """Return the plans of a half and of the MLP that is part of it; none where its module runs its own pass."""
    return [] if half.plan is None else [half.plan, *([] if half.plan.mlp is None else [half.plan.mlp])]


def _names(plan: HalfPlan[ShapedMatmul]) -> tuple[str, str]:
    """Return the names of the first and the last matmul of a half."""
    if isinstance(plan.about, AttentionDescription):
        return "q+k+v", "o"
    return "gate+up" if len(plan.about.first) > 1 else "up", "down"
