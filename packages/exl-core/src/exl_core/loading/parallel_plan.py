"""Shares of the devices for sharded matrices, and the memory that each will need, before anything is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from exl_kernels.linear import QUARTERS
from exl_kernels.selection import DECODE_TOKENS

from ..device import Device, devices
from ..errors import DeviceError, ModelStateError
from ..execution.capturable import refusal_of_settings, without_hooks
from ..execution.sharded.coverage import StoredWeights, refusal_of_exchange, row_bytes
from ..execution.sharded.cutting import output_bounds
from ..execution.sharded.exchange_buffers import bytes_by_rows
from ..execution.sharded.shares import Shares
from ..layers import Linear, Module, build_modules
from .checkpoint import TensorReader
from .plan import MOST_TOKENS, PAGE, DevicePlan, LoadPlan, budgets_of
from .sizes import CacheSize, cache_layer_bytes, linear_bytes, module_sizes, rope_bytes, state_bytes

if TYPE_CHECKING:
    from exl_kernels.kv import KVKind

    from ..config import ExLlamaV2Config

__all__ = ["plan_parallel", "plan_tp"]


def plan_parallel(
    config: ExLlamaV2Config,
    modules: Sequence[Module],
    places: Sequence[Device],
    cache: CacheSize,
    gpu_split: Sequence[float] | None,
    *,
    separate: bool = False,
) -> tuple[LoadPlan, Shares]:
    """Plan as `plan_tp`, for existing modules, and return the share of each device as well.

    Args:
        config: a prepared config.
        modules: the model's modules.
        places: the devices.
        cache: size of the future cache.
        gpu_split: budgets in GiB a device, for weights and fixed buffers; default free memory.
        separate: each device has its own process, with embedding, norms and routers.

    Raises:
        DeviceError: the model does not fit, or GPUs and CPUs, whose arithmetic differs, are mixed.
    """
    plan, shares = _planned(config, modules, places, cache, gpu_split, separate)
    return plan.check(), shares


def plan_tp(
    config: ExLlamaV2Config,
    *,
    cache: KVKind = "fp16",
    cache_tokens: int | None = None,
    gpu_split: Sequence[float] | None = None,
    on: Sequence[Device] | None = None,
) -> LoadPlan:
    """Plan what `load_tp` puts on each device, without building or allocating anything.

    Args:
        config: a prepared config.
        cache: format of the cache.
        cache_tokens: length of the cache over all rows; default config.max_seq_len.
        gpu_split: GiB a device for weights and fixed buffers, caches not included; default free memory.
        on: the devices; default those of EXL_DEVICE.

    Raises:
        DeviceError: there is one device, or GPUs and CPUs, whose arithmetic differs, are mixed.
        InputError: the split is invalid.
        ModelStateError: the config was prepared without tensors.
    """
    if config.checkpoint is None:
        raise ModelStateError("the config was prepared with no_tensors=True: call config.prepare() first")
    places = list(devices() if on is None else on)
    if len(places) < 2:
        raise DeviceError(
            f"tensor parallelism needs several devices, this run has one ({places[0].name}): name them, as in "
            "EXL_DEVICE=cuda:0,cuda:1, or --device cuda:0,cuda:1 on the command line"
        )
    size = CacheSize(cache, config.max_seq_len if cache_tokens is None else cache_tokens)
    return _planned(config, build_modules(config), places, size, gpu_split, False)[0]


def _planned(
    config: ExLlamaV2Config,
    modules: Sequence[Module],
    places: Sequence[Device],
    cache: CacheSize,
    gpu_split: Sequence[float] | None,
    separate: bool,
) -> tuple[LoadPlan, Shares]:
    """Distribute heads, features and experts in proportion to the devices' budgets.

    MLPs are cut at quarters of K on the CPU, where every device gets one and all fits; otherwise by outputs.
    """
    if len({place.is_cuda for place in places}) > 1:
        names = ", ".join(place.name for place in places)
        raise DeviceError(f"load_tp: {names} are of two kinds: use GPUs or CPUs alone, or split by layers with load")
    planner = _Planner.of(config, modules, places)
    budgets = budgets_of(places, gpu_split, None)
    planner.split, planner.separate = gpu_split is not None, separate
    # Kernels of GPUs cannot return the sums of quarters of K.
    planner.sums = not places[0].is_cuda
    found, shares = planner.place(budgets, cache)
    if planner.sums and not (all(d.fits() for d in found) and shares.all_have_quarters()):
        planner.sums = False
        found, shares = planner.place(budgets, cache)
    planner.exchanged = (0, 0) if separate or not places[0].is_cuda else _exchange_bytes(config, modules, shares)
    if any(planner.exchanged):
        found, shares = planner.place(budgets, cache)
    fits = all(d.fits() for d in found)
    most = None
    if not planner.split and all(d.free is not None for d in budgets):
        most = planner.most_tokens(budgets, cache)
    problem = "does not fit (MiB): take a shorter or quantized cache, a smaller config.max_input_len, or more devices"
    homes = [budgets[0].device.name] * len(modules)
    return LoadPlan(found, homes, cache, fits, most, "" if fits else problem, planner.embedding), shares


def _exchange_bytes(config: ExLlamaV2Config, modules: Sequence[Module], shares: Shares) -> tuple[int, int]:
    """Return the bytes through which captured steps exchange results, on the first GPU and on each other one.

    That is 0 where no steps are captured, else memory for `config.decode_rows` sequences with their draft tokens.
    """
    assert config.checkpoint is not None
    inner, count = [without_hooks(module) for module in modules], len(shares.rest)
    bounds = output_bounds(inner, shares, shares.kv_heads(config.num_key_value_heads))
    weights = StoredWeights(TensorReader(config.checkpoint), bounds, count)
    if refusal_of_settings(config) or refusal_of_exchange(inner, count, weights):
        return 0, 0
    return bytes_by_rows(DECODE_TOKENS * config.decode_rows, row_bytes(inner, count))


@dataclass
class _Planner:
    """Sums over the model: bytes that are divided by heads, features and experts, and bytes that are not divided."""

    config: ExLlamaV2Config
    reader: TensorReader
    by_heads: int  # bytes of q, k and v
    by_features: dict[int, int]  # outputs of a matrix -> bytes of all matrices with so many
    by_mlp: dict[int, int]  # the same, of the matrices of MLPs
    experts: dict[int, int]  # experts of a layer -> bytes of all layers with so many
    home: int  # bytes on the home device
    scratch: int
    embedding: int
    modules: int
    rows: int
    kind: str
    split: bool = False
    separate: bool = False
    sums: bool = False
    exchanged: tuple[int, int] = (
        0,
        0,
    )  # bytes of buffers through which GPUs exchange results, on the first one and on each other one

    @classmethod
    def of(cls, config: ExLlamaV2Config, modules: Sequence[Module], places: Sequence[Device]) -> _Planner:
        kind = "cuda" if any(d.is_cuda for d in places) else "cpu"
        rows = config.max_input_len * config.max_batch_size
        sizes = module_sizes(config, modules, kind, rows, config.decode_rows)
        assert config.checkpoint is not None, "module_sizes has read it"
        made = cls(
            *(config, TensorReader(config.checkpoint), 0, {}, {}, {}),
            *(sum(s.weights for s in sizes), max(s.scratch for s in sizes), sizes[0].weights),
            *(len(modules), rows, kind),
        )
        for module in modules:
            made._count(module)
        return made

    def _count(self, module: Module) -> None:
        linears = list(module.submodules())
        experts = len({linear.spec.expert for linear in linears} - {None})
        for linear in linears:
            division, width = linear.spec.division, linear.out_features
            if division is None:
                continue
            held = self._taken(linear)
            if division == "heads":
                self.by_heads += held
            elif division == "experts":
                self.experts[experts] = self.experts.get(experts, 0) + held
            else:
                sums = self.by_mlp if division == "mlp" else self.by_features
                sums[width] = sums.get(width, 0) + held

    def _taken(self, linear: Linear) -> int:
        """Return the bytes of a matrix and subtract them from those of the first device."""
        held = linear_bytes(linear, self.reader, self.kind, set())
        self.home -= held
        return held

    def place(self, budgets: Sequence[DevicePlan], cache: CacheSize) -> tuple[list[DevicePlan], Shares]:
        """Compute the load of every device, with shares in proportion to its budget."""
        tables = rope_bytes(self.config) + state_bytes(self.config, self.kind, self.rows)
        cached = self.config.num_hidden_layers * cache_layer_bytes(self.config, cache)
        plans = [
            replace(
                d,
                tables=tables + self.exchanged[min(i, 1)],
                scratch=self.scratch,
                weights=0 if i and not self.separate else self.home,
                modules=[*range(self.modules)],
            )
            for i, d in enumerate(budgets)
        ]
        room = [1.0 if d.budget is None else float(max(d.budget - d.used, 0)) for d in plans]
        if any(d.budget is None for d in plans) or not sum(room):
            room = [1.0] * len(plans)
        wanted = [part / sum(room) for part in room]
        unsplit = 0 if self.split else cached
        rest = sum(self.by_features.values()) + sum(self.by_mlp.values()) + sum(self.experts.values())
        count = self.config.num_key_value_heads
        heads = [0.0] * len(plans)
        for shard, begin, end in Shares(tuple(wanted), tuple(wanted)).kv_heads(count):
            heads[shard] = (end - begin) / count
        total = self.by_heads + unsplit + rest
        left = [max(wanted[i] * total - heads[i] * (self.by_heads + unsplit), 0.0) for i in range(len(plans))]
        others = tuple(part / sum(left) for part in left) if sum(left) else tuple(wanted)
        shares = Shares(tuple(wanted), others, self.sums)
        for i, d in enumerate(plans):
            d.weights += math.ceil(self.by_heads * heads[i])
            d.cache = 0 if self.split else math.ceil(cached * heads[i])
        cuts = [(held, width, shares.features(width)) for width, held in self.by_features.items()]
        for width, held in self.by_mlp.items():
            cuts.append((held, QUARTERS, shares.quarters()) if self.sums else (held, width, shares.features(width)))
        for held, width, bounds in cuts:
            for shard, begin, end in bounds:
                plans[shard].weights += math.ceil(held * (end - begin) / width)
        for number, held in self.experts.items():
            for shard in shares.experts(number):
                plans[shard].weights += held // number
        return [d if d.weights or d.cache else replace(d, tables=0, scratch=0, modules=[]) for d in plans], shares

    def most_tokens(self, budgets: Sequence[DevicePlan], cache: CacheSize) -> int:
        """Return the largest cache, in whole pages, with which `place` fits."""
        low, high = 0, MOST_TOKENS // PAGE
        while low < high:
            middle = (low + high + 1) // 2
            fits = all(d.fits() for d in self.place(budgets, replace(cache, tokens=middle * PAGE))[0])
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * PAGE
