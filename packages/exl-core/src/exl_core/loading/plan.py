"""The device of every module and its memory, before a byte is allocated; errors have the numbers."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from exl_kernels.kv import KVKind
from exl_kernels.safetensors_file import read_safetensors_header

from ..device import CPU_REMEDY, GIB, Device, devices
from ..errors import DeviceError, InputError, ModelStateError
from ..layers import Module, build_modules
from .memory import free_bytes
from .sizes import CacheSize, ModuleSize, cache_layer_bytes, module_sizes, rope_bytes, state_bytes

if TYPE_CHECKING:
    from ..config import ExLlamaV2Config

__all__ = ["DevicePlan", "LoadPlan", "plan", "plan_modules"]

MIB = 1024**2
PAGE = 256
DEFAULT_RESERVE = (192 * MIB, 64 * MIB)  # first device, every other
MOST_TOKENS = 1 << 26


@dataclass
class DevicePlan:
    """One device's share, in bytes. `budget` is the usable memory (None: unknown), `used` the planned use.

    Attributes:
        device: the device.
        free: free memory; None if unknown.
        reserve: memory to leave free.
        modules: indices of the modules on it.
        weights: of these modules.
        cache: keys and values of its layers.
        loras: adapters.
        draft: a draft model with its cache.
        tables: RoPE and hidden states.
        scratch: working memory of the widest module.
    """

    device: Device
    free: int | None
    reserve: int
    modules: list[int] = field(default_factory=list)
    weights: int = 0
    cache: int = 0
    loras: int = 0
    draft: int = 0
    tables: int = 0
    scratch: int = 0

    @property
    def used(self) -> int:
        """Planned bytes."""
        return self.weights + self.cache + self.loras + self.draft + self.tables + self.scratch

    @property
    def budget(self) -> int | None:
        """Usable bytes: free memory minus the reserve; None if unknown."""
        return None if self.free is None else max(self.free - self.reserve, 0)

    def fits(self, more: int = 0) -> bool:
        """Return whether `more` further bytes fit."""
        return self.budget is None or self.used + more <= self.budget


@dataclass(frozen=True)
class LoadPlan:
    """The result of `plan`.

    Attributes:
        devices: the share of each device.
        assignment: device of each module ("" where none had room).
        cache: the planned cache, or None.
        fits: whether everything fits.
        max_cache_tokens: the largest cache (all rows together, whole pages) that fits with everything else as planned.
        problem: the error message if it does not fit.
        embedding_bytes: weights of the first module.
    """

    devices: list[DevicePlan]
    assignment: list[str]
    cache: CacheSize | None
    fits: bool
    max_cache_tokens: int | None
    problem: str = ""
    embedding_bytes: int = 0

    @property
    def used(self) -> int:
        """Planned bytes over all devices."""
        return sum(d.used for d in self.devices)

    def table(self) -> str:
        """Return the plan as text, in MiB a device."""
        rows = [["device", "modules", "weights", "cache", "LoRA", "draft", "tables", "scratch", "sum", "budget"]]
        for d in self.devices:
            parts = (d.weights, d.cache, d.loras, d.draft, d.tables, d.scratch, d.used)
            sizes = [_mib(part) for part in parts]
            rows.append([d.device.name, str(len(d.modules)), *sizes, "?" if d.budget is None else _mib(d.budget)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        lines.append(self.verdict())
        return "\n".join(lines)

    def verdict(self) -> str:
        """Return one sentence: whether it fits, and the largest context."""
        most = "" if self.max_cache_tokens is None else f"; largest cache that fits: {self.max_cache_tokens} tokens"
        return ("fits (MiB)" if self.fits else self.problem) + most

    def check(self) -> LoadPlan:
        """Return this plan. Raises DeviceError with the numbers if it does not fit."""
        if not self.fits:
            on_gpu = any(d.device.is_cuda for d in self.devices)
            remedy = f"; the CPU runs it without GPU memory: {CPU_REMEDY}" if on_gpu else ""
            raise DeviceError(f"Insufficient space in device allocation: {self.table()}{remedy}")
        return self


def plan(
    config: ExLlamaV2Config,
    *,
    cache: KVKind | None = "fp16",
    cache_tokens: int | None = None,
    gpu_split: Sequence[float] | None = None,
    reserve: int | Sequence[int] | None = None,
    loras: Sequence[str | os.PathLike[str]] = (),
    draft: ExLlamaV2Config | None = None,
    draft_cache_tokens: int | None = None,
    last_id_only: bool = True,
    on: Sequence[Device] | None = None,
) -> LoadPlan:
    """Plan a model folder without building or allocating anything.

    Compared with measurements, weights are within 1 % on the CPU and 3.5 % on a GPU for models beyond 100 MB, caches
    are exact, and scratch memory is an upper bound.

    Args:
        config: a prepared config.
        cache: format of the cache; None for no cache.
        cache_tokens: length of the cache over all rows; default config.max_seq_len.
        gpu_split: GiB a device for weights and fixed buffers, caches not included; None fills the devices in order.
        reserve: bytes to leave free, of all devices or each; default 192 MiB on the first, 64 MiB on the others.
            Entries beyond the devices have no effect.
        loras: adapter folders.
        draft: config of a second model, placed whole on the first device.
        draft_cache_tokens: length of the draft model's cache; default that of the main model.
        last_id_only: False counts logits for a whole chunk.
        on: the devices; default those of EXL_DEVICE.

    Raises:
        ModelStateError: the config was prepared without tensors.
        InputError: a split, a reserve or an adapter folder is invalid.
    """
    if config.checkpoint is None:
        raise ModelStateError("the config was prepared with no_tensors=True: call config.prepare() first")
    size = None if cache is None else CacheSize(cache, config.max_seq_len if cache_tokens is None else cache_tokens)
    places = list(devices() if on is None else on)
    extra = _lora_bytes(loras, places)
    draft_bytes = 0 if draft is None else _draft_bytes(draft, places[0], size, draft_cache_tokens, last_id_only)
    return plan_modules(
        config, build_modules(config), places, size, gpu_split, reserve, last_id_only, loras=extra, draft=draft_bytes
    )


def plan_modules(
    config: ExLlamaV2Config,
    modules: Sequence[Module],
    places: Sequence[Device],
    cache: CacheSize | None,
    gpu_split: Sequence[float] | None,
    reserve: int | Sequence[int] | None,
    last_id_only: bool,
    *,
    loras: int = 0,
    draft: int = 0,
) -> LoadPlan:
    """Plan as `plan`, for existing `modules` on `places`.

    `config`, `cache`, `gpu_split`, `reserve` and `last_id_only` are those of `plan`; `loras` and `draft` are the bytes
    of adapters on each device and of a draft model on the first.
    """
    budgets = budgets_of(places, gpu_split, reserve)
    planner = _planner(config, modules, places, last_id_only)
    planner.split, planner.loras, planner.draft = gpu_split is not None, loras, draft
    found, fits, assignment = planner.place(budgets, cache)
    most = None
    if cache is not None and gpu_split is None and all(d.free is not None for d in budgets):
        most = planner.most_tokens(budgets, cache)
    sizes = next(iter(planner.sizes.values()))
    problem = "" if fits else _problem(found, assignment, sizes)
    return LoadPlan(found, assignment, cache, fits, most, problem, sizes[0].weights)


def _planner(
    config: ExLlamaV2Config, modules: Sequence[Module], places: Sequence[Device], last_id_only: bool
) -> _Planner:
    rows = config.max_input_len * config.max_batch_size
    output_rows = config.decode_rows if last_id_only else min(rows, config.max_output_len or rows)
    kinds = {"cuda" if d.is_cuda else "cpu" for d in places}
    return _Planner(config, {kind: module_sizes(config, modules, kind, rows, output_rows) for kind in kinds}, rows)


@dataclass
class _Planner:
    """First fit in the order of the layers, so that a token crosses each border between devices once."""

    config: ExLlamaV2Config
    sizes: dict[str, list[ModuleSize]]
    rows: int
    split: bool = False  # budgets hold weights and fixed buffers only
    loras: int = 0
    draft: int = 0

    def place(self, budgets: list[DevicePlan], cache: CacheSize | None) -> tuple[list[DevicePlan], bool, list[str]]:
        """Assign modules to devices; return (plans, whether all fit, device of each module)."""
        plans = [self._opened(d, first=i == 0) for i, d in enumerate(budgets)]
        per_layer = 0 if cache is None or self.split else cache_layer_bytes(self.config, cache)
        count = len(next(iter(self.sizes.values())))
        whole = max(sum(s.weights for s in next(iter(self.sizes.values()))), 1)
        assignment, current, ok = [""] * count, 0, True
        for index in range(count):
            while ok:
                d = plans[current]
                size = self._sizes_on(d)[index]
                lora = self.loras * size.weights // whole
                layers = len(size.layers) * per_layer
                more = size.weights + layers + lora + max(size.scratch - d.scratch, 0)
                if d.fits(more):
                    break
                ok = current + 1 < len(plans)
                current += ok
            if not ok:
                break
            d.weights += size.weights
            d.cache += layers
            d.loras += lora
            d.scratch = max(d.scratch, size.scratch)
            d.modules.append(index)
            assignment[index] = d.device.name
        return [p if p.modules else replace(p, tables=0) for p in plans], ok, assignment

    def most_tokens(self, budgets: list[DevicePlan], cache: CacheSize) -> int:
        """Return the largest multiple of a page that `place` accepts."""
        low, high = 0, MOST_TOKENS // PAGE
        while low < high:
            middle = (low + high + 1) // 2
            if self.place(budgets, replace(cache, tokens=middle * PAGE))[1]:
                low = middle
            else:
                high = middle - 1
        return low * PAGE

    def _opened(self, d: DevicePlan, *, first: bool) -> DevicePlan:
        tables = rope_bytes(self.config) + state_bytes(self.config, "cuda" if d.device.is_cuda else "cpu", self.rows)
        return replace(d, tables=tables, draft=self.draft if first else 0, modules=[])

    def _sizes_on(self, d: DevicePlan) -> list[ModuleSize]:
        return self.sizes["cuda" if d.device.is_cuda else "cpu"]


def budgets_of(
    places: Sequence[Device], gpu_split: Sequence[float] | None, reserve: int | Sequence[int] | None
) -> list[DevicePlan]:
    """Return the devices with their usable memory.

    Args:
        places: the devices.
        gpu_split: GiB a device for weights and fixed buffers, or None for the free memory.
        reserve: bytes to leave free, of all devices or each; None for the default.

    Raises:
        InputError: a split or a reserve is invalid.
    """
    if gpu_split is not None:
        split = check_split(gpu_split, len(places))
        return [DevicePlan(place, int(gb * GIB), 0) for place, gb in zip(places[: len(split)], split, strict=True)]
    if reserve is None:
        reserves = [DEFAULT_RESERVE[min(i, 1)] for i in range(len(places))]
    elif isinstance(reserve, (list, tuple)):
        reserves = [*reserve, *([0] * (len(places) - len(reserve)))]
    else:
        reserves = [cast(int, reserve)] * len(places)
    if any(isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in reserves):
        raise InputError(f"reserve_vram is {reserve!r}, must be bytes, or a list of bytes, one number a device")
    free = free_bytes(places)
    # A list written for a machine with more devices is also valid: an unused device has nothing to leave free.
    return [DevicePlan(place, f, r) for place, f, r in zip(places, free, reserves[: len(places)], strict=True)]


def check_split(gpu_split: Sequence[float], count: int) -> list[float]:
    """Return gpu_split as numbers. Raises InputError for other values, and for more numbers than devices."""
    split = list(gpu_split) if isinstance(gpu_split, (list, tuple)) else [None]
    for gb in split:
        if isinstance(gb, bool) or not isinstance(gb, (int, float)) or not math.isfinite(gb) or gb < 0:
            raise InputError(f"gpu_split is {gpu_split!r}, must be a list of GB, one number a device")
    if not 1 <= len(split) <= count:
        raise InputError(
            f"gpu_split has {len(split)} entries for {count} device(s); EXL_DEVICE names the devices, as in "
            "EXL_DEVICE=cuda:0,cuda:1"
        )
    return [float(gb) for gb in split if gb is not None]


def _lora_bytes(folders: Sequence[str | os.PathLike[str]], places: Sequence[Device]) -> int:
    """Return the bytes of the adapters' tensors in the type of their files; matrices on the CPU pad ranks to 32."""
    multiple = 32 if any(not d.is_cuda for d in places) else 1
    total = 0
    for folder in folders:
        file = Path(folder) / "adapter_model.safetensors"
        if file.is_file():
            for entry in read_safetensors_header(file).entries.values():
                rank = max(min(entry.shape, default=1), 1)
                total += entry.nbytes * (-(-rank // multiple) * multiple) // rank
        elif (Path(folder) / "adapter_model.bin").is_file():
            total += (Path(folder) / "adapter_model.bin").stat().st_size
        else:
            raise InputError(f"no LoRA adapter in {folder}")
    return total


def _draft_bytes(
    draft: ExLlamaV2Config, place: Device, cache: CacheSize | None, tokens: int | None, last_id_only: bool
) -> int:
    """Return the bytes of a second model on one device."""
    size = None if cache is None else replace(cache, tokens=cache.tokens if tokens is None else tokens)
    planner = _planner(draft, build_modules(draft), [place], last_id_only)
    return planner.place([DevicePlan(place, None, 0)], size)[0][0].used


def _problem(plans: list[DevicePlan], assignment: list[str], sizes: list[ModuleSize]) -> str:
    index = assignment.index("")
    budget = sum(d.budget or 0 for d in plans)
    missing = sum(s.weights for s in sizes[index:])
    return (
        f"does not fit (MiB): no room from module {index} ({sizes[index].key}) on, {_mib(missing)} MiB of weights are "
        f"left over, {_mib(budget)} MiB may be used on {', '.join(d.device.name for d in plans)}; take a shorter or "
        "quantized cache, a smaller config.max_input_len, more devices, or a smaller model"
    )


def _mib(count: int) -> str:
    return f"{count / MIB:,.1f}" if count < 10 * MIB else f"{round(count / MIB):,}"
