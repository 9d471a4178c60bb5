"""The modules of a model and their weights: devices, loading, unloading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from exl_kernels.linear.workspace import forget_workspaces

from ..cache import ExLlamaV2Cache, ExLlamaV2CacheBase
from ..config import ExLlamaV2Config
from ..device import GIB, Device, devices, out_of_memory_as_error, torch_device
from ..errors import CacheError, DeviceError, InputError, ModelStateError
from ..execution.own_pass import choose_own_pass
from ..execution.sharded.context import TensorParallel
from ..execution.sharded.cutting import shard_modules, unshard_modules
from ..execution.sharded.exchange import Exchange, LocalExchange
from ..layers import Attention, Intervention, Linear, Module, build_modules
from ..placement import Placement
from ..rope import RopeTable
from .checkpoint import Checkpoint, TensorReader
from .identity import ModelIdentity
from .loader import Callback, CallbackGen, check_callbacks, load_modules, progress_bar
from .parallel_plan import plan_parallel
from .plan import LoadPlan, check_split, plan_modules
from .sizes import CacheSize

__all__ = ["LoadableModel"]

LONGEST_SPLIT = 64  # entries of gpu_split that a machine without GPUs accepts


class LoadableModel:
    """The modules of a configuration, on devices. Owns the loaded weights; `ExLlamaV2` adds the forward pass."""

    def __init__(self, config: ExLlamaV2Config) -> None:
        if not isinstance(config, ExLlamaV2Config):
            raise InputError(f"a model is made of an ExLlamaV2Config, not {config!r:.80}; pass ExLlamaV2Config(folder)")
        config.check_for_load()
        self.config = config
        self.modules: list[Module] = build_modules(config)
        self._arrangement = list(self.modules)
        self._hooked: tuple[list[Module], bool] = [], False
        self._identity = ModelIdentity(config, self.modules)
        self.modules_dict: dict[str, Module | Linear] = {}
        for module in self.modules:
            submodules = list(module.submodules())
            self.modules_dict.update({s.key: s for s in submodules} if submodules else {module.key: module})
        self.last_kv_layer_idx = max(i for i, m in enumerate(self.modules) if isinstance(m, Attention))
        self.head_layer_idx = len(self.modules) - 1
        self.rope, self.rope_alt = self._rope_tables()
        self.device: torch.device | None = None  # device of the logits; None until load
        self.placement = Placement(["cpu"] * len(self.modules))
        self.cache_map: dict[int, str] = {}  # layer index -> device of its cache
        self.device_context: dict[str, object] = {}
        self.tp_context: TensorParallel | None = None  # the sharding made by load_tp
        self.loaded = False
        self.load_count = 0  # number of loads so far: adapters belong to one load

    def _weights_change(self) -> None:
        """Prepare for weights to be dropped or replaced; subclasses drop captured steps here."""

    # ------------------------------------------------------------------------------------------------------- loading

    def load(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Callback | None = None,
        callback_gen: CallbackGen | None = None,
        progress: bool = False,
    ) -> None:
        """Load all weights. Loading a loaded model does nothing; an error leaves nothing loaded.

        Everything goes to the first device of EXL_DEVICE (default: every usable GPU, else the CPU), or with gpu_split
        to its devices in order.

        Args:
            gpu_split: GiB a device for weights and fixed buffers, caches not included. No effect on the CPU alone.
            lazy: only decide the devices.
            stats: ignored.
            callback: called as callback(index, total) before each module and at the end.
            callback_gen: generator function called likewise.
            progress: draw a bar on standard error.

        Raises:
            DeviceError: the model does not fit; raised with the numbers before anything is read.
            FormatError: a weight file is broken.
            MissingTensorError: a tensor is missing.
            ModelStateError: the config was prepared without tensors.
            InputError: progress and callback are both given, or gpu_split is invalid.
        """
        check_callbacks(callback, progress)
        for _ in self.load_gen(gpu_split, lazy, stats, progress_bar() if progress else callback, callback_gen):
            pass

    def load_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Callback | None = None,
        callback_gen: CallbackGen | None = None,
    ) -> Iterator[object]:
        """Load as `load`, as a generator that must be exhausted; yields the items of `callback_gen(index, total)`.

        `gpu_split`, `lazy`, `stats` and `callback`, and the errors, are those of `load`.
        """
        places = devices()
        if gpu_split is None or [d.name for d in places] == ["cpu"]:
            check_split([0.0] if gpu_split is None else gpu_split, max(len(places), LONGEST_SPLIT))
            places, gpu_split, reserve = places[:1], None, 0
        else:
            reserve = None
        yield from self._load(callback, callback_gen, self._plan(places, None, gpu_split, reserve), lazy=lazy)

    def load_autosplit(
        self,
        cache: ExLlamaV2CacheBase,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: Callback | None = None,
        callback_gen: CallbackGen | None = None,
        progress: bool = False,
    ) -> None:
        """Load all weights and create the tensors of the lazy `cache` with them, filling the devices in order.

        The plan (`exl_core.loading.plan`) is made before anything is read. It counts weights, cache, working memory of
        a chunk of max_input_len * max_batch_size tokens, and logits for all of them (max_output_len limits their
        number; with last_id_only one a row).

        Args:
            cache: a cache made with lazy=True.
            reserve_vram: bytes to leave free, of every device or a list. Entries beyond the devices have no effect.
                Default: 192 MiB on the first and 64 MiB on the others.
            last_id_only: plan for logits of one token a row.
            callback: as for `load`.
            callback_gen: as for `load`.
            progress: as for `load`.

        Raises:
            DeviceError: the model does not fit; the message has the numbers.
            CacheError: the cache is not lazy.
            InputError: an argument is invalid.
        """
        check_callbacks(callback, progress)
        report = progress_bar() if progress else callback
        for _ in self.load_autosplit_gen(cache, reserve_vram, last_id_only, report, callback_gen):
            pass

    def load_autosplit_gen(
        self,
        cache: ExLlamaV2CacheBase,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: Callback | None = None,
        callback_gen: CallbackGen | None = None,
    ) -> Iterator[object]:
        """Load as `load_autosplit`, as a generator that must be exhausted; yields the items of `callback_gen`.

        `cache`, `reserve_vram`, `last_id_only` and `callback`, and the errors, are those of `load_autosplit`.
        """
        if not isinstance(cache, ExLlamaV2CacheBase):
            raise InputError(f"load_autosplit needs a cache made with lazy=True, not a {type(cache).__name__}")
        if any(t is not None for t in cache.key_states):
            raise CacheError("load_autosplit needs a cache made with lazy=True: it decides where the tensors go")
        size = CacheSize(cache.kind, cache.batch_size * cache.max_seq_len)
        found = self._plan(devices(), size, None, reserve_vram, last_id_only)
        for share in found.devices:
            if share.cache:
                cache.check_device(share.device.name)
        yield from self._load(callback, callback_gen, found, cache=cache)

    def load_tp(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: Callback | None = None,
        callback_gen: CallbackGen | None = None,
        progress: bool = False,
        expect_cache_tokens: int = 0,
        expect_cache_base: type[ExLlamaV2CacheBase] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Load all weights, every matrix sharded over all devices, in proportion to their free memory.

        Sums are not cut, or only where one device cuts them too, so results are those of one device (bitwise on the
        CPU). Key/value heads and experts are not cut: each is on one device. The cache must be an `ExLlamaV2Cache_TP`.
        With one device this is `load`.

        Args:
            gpu_split: GiB a device for weights and fixed buffers, whose proportions replace those of the free memory.
            callback: as for `load`.
            callback_gen: as for `load`.
            progress: as for `load`.
            expect_cache_tokens: tokens of the future cache, to be planned for; default max_seq_len * max_batch_size.
            expect_cache_base: class of the future cache.
            exchange: a `ProcessExchange` where each device has its own process, all of which call this; default one
                process for all devices.

        Raises:
            DeviceError: the model does not fit, the devices are of two kinds, or a process would have no heads.
            PeerError: another process failed.
            InputError: an argument is invalid.
        """
        check_callbacks(callback, progress)
        report = progress_bar() if progress else callback
        arguments = (gpu_split, report, callback_gen, expect_cache_tokens, expect_cache_base, exchange)
        for _ in self.load_tp_gen(*arguments):
            pass

    def load_tp_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: Callback | None = None,
        callback_gen: CallbackGen | None = None,
        expect_cache_tokens: int = 0,
        expect_cache_base: type[ExLlamaV2CacheBase] | None = None,
        exchange: Exchange | None = None,
    ) -> Iterator[object]:
        """Load as `load_tp`, as a generator that must be exhausted; yields the items of `callback_gen`.

        `gpu_split`, `callback`, `expect_cache_tokens`, `expect_cache_base` and `exchange`, and the errors, are those of
        `load_tp`.
        """
        places = devices()
        if gpu_split is not None:
            places = places[: len(check_split(gpu_split, len(places)))]
        tokens = expect_cache_tokens or self.config.max_seq_len * self.config.max_batch_size
        size = CacheSize((expect_cache_base or ExLlamaV2Cache).kind, tokens)
        if len(places) == 1 or self.loaded:
            yield from self._load(callback, callback_gen, self._plan(places, size, gpu_split, None))
            return
        self.config.check_for_load()
        self._checkpoint()
        if exchange is None:
            exchange = LocalExchange(len(places))
        separate = not exchange.whole
        found, shares = plan_parallel(self.config, self.modules, places, size, gpu_split, separate=separate)
        # Each process measures free memory at another time: all take the first one's shares.
        shares = exchange.agree(shares)
        names = [place.name for place in places]
        found = replace(found, assignment=[names[exchange.home]] * len(self.modules))
        heads, float_residual = self.config.num_key_value_heads, self.config.arch.float_residual
        context = TensorParallel(names, shares, heads, float_residual=float_residual, exchange=exchange)
        idle = set(range(len(names))) - {shard for shard, _, _ in context.heads}
        if separate and idle:  # in every process, so that none waits for another
            raise DeviceError(
                f"load_tp: {', '.join(names[shard] for shard in sorted(idle))} would have none of the {heads} "
                "key/value heads, and each process needs one: take fewer processes, or one process for all devices"
            )
        self.tp_context = context
        shard_modules(self.modules, self.tp_context)
        yield from self._load(callback, callback_gen, found)

    def set_device_map(self, allocation: Sequence[float], embed_cpu: bool = True) -> list[float]:
        """Decide the device of every module without loading any.

        Args:
            allocation: GiB a device, for weights and fixed buffers.
            embed_cpu: keep the embedding in the CPU's memory.

        Returns:
            The GiB left over on each device.

        Raises:
            ModelStateError: the model is loaded.
            DeviceError: the model does not fit.
        """
        if self.loaded:
            raise ModelStateError("the model is loaded: unload it before its devices are decided again")
        found = self._plan(devices(), None, allocation, None).check()
        names = ["cpu", *found.assignment[1:]] if embed_cpu else found.assignment
        self._place(names)
        weights = 0 if not embed_cpu else found.embedding_bytes
        left = [(d.budget or 0) - d.used + (weights if i == 0 else 0) for i, d in enumerate(found.devices)]
        return [bytes_left / GIB for bytes_left in left]

    def set_cache_map(self) -> None:
        """Set the device of every layer's keys and values to that of the layer."""
        layers = [(i, m.layer_idx) for i, m in enumerate(self.modules) if isinstance(m, Attention)]
        names, context = self.placement.names, self.tp_context
        first = None if context is None else context.names[context.local_heads[0][0]]
        self.cache_map = {layer: first or names[i] for i, layer in layers}

    def load_module(self, index: int) -> None:
        """Load `modules[index]` on the device decided by `load(lazy=True)` or `set_device_map`.

        The model can run once all modules are loaded. Loading a loaded module reads it again.

        Raises:
            ModelStateError: the devices are not decided.
        """
        if self.device is None:
            raise ModelStateError("no device is decided: call model.load(lazy=True) or set_device_map first")
        module = self.modules[index]
        self._weights_change()
        try:
            with out_of_memory_as_error(f"load {module.key}"), torch.inference_mode(False):
                module.load(TensorReader(self._checkpoint()), self.placement.device(index))
                choose_own_pass(module)
        finally:
            self._settle()

    def unload_module(self, index: int) -> None:
        """Drop the weights of `modules[index]`."""
        self._weights_change()
        self.modules[index].unload()
        self._settle()

    def _settle(self) -> None:
        loaded = all(m.loaded for m in self.modules)
        self.load_count += loaded and not self.loaded
        self.loaded = loaded

    @torch.inference_mode(False)  # the tables live as long as the model
    def _rope_tables(self) -> tuple[RopeTable, RopeTable | None]:
        alternative = self.config.rope_settings_alt()
        return RopeTable(self.config.rope_settings()), None if alternative is None else RopeTable(alternative)

    def _checkpoint(self) -> Checkpoint:
        if self.config.checkpoint is None:
            raise ModelStateError("the config was prepared with no_tensors=True: call config.prepare() before loading")
        return self.config.checkpoint

    def _plan(
        self,
        places: Sequence[Device],
        cache: CacheSize | None,
        gpu_split: Sequence[float] | None,
        reserve: int | Sequence[int] | None,
        last_id_only: bool = True,
    ) -> LoadPlan:
        self.config.check_for_load()
        self._checkpoint()
        modules = self.modules
        return plan_modules(self.config, modules, places, cache, gpu_split, reserve, last_id_only)

    def _place(self, names: Sequence[str]) -> None:
        # Settings of the rotation may change after the model is made, as long as it is not loaded.
        self.rope, self.rope_alt = self._rope_tables()
        self._identity.read_settings()
        self.placement = Placement(list(names), self.config.arch.float_residual)
        self.device = self.placement.device(len(self.modules) - 1)
        self.set_cache_map()

    def _load(
        self,
        callback: Callback | None,
        callback_gen: CallbackGen | None,
        found: LoadPlan,
        *,
        lazy: bool = False,
        cache: ExLlamaV2CacheBase | None = None,
    ) -> Iterator[object]:
        if not self.loaded:
            found.check()
            self._place(found.assignment)
        if not lazy and not self.loaded:
            tied = [f"{self.config.arch.embed_tokens}.weight"] if self.config.tie_word_embeddings else []
            places = [self.placement.device(i) for i in range(len(self.modules))]
            try:
                with out_of_memory_as_error("load the model"):
                    yield from load_modules(
                        self.modules, self._checkpoint(), places, callback, callback_gen, shared=tied
                    )
            except BaseException:
                self.unload()
                raise
            self.loaded = True
            self.load_count += 1
        if cache is not None:
            cache.update_cache_tensors()

    def unload(self) -> None:
        """Drop all weights. The model may be loaded again; caches keep their own memory until they are dropped."""
        self._weights_change()
        for module in self.modules:
            module.unload()
        if self.tp_context is not None:
            unshard_modules(self.modules)
        self.cache_map = {}
        self.loaded = False
        names = [*self.placement.names, *(self.tp_context.local_names if self.tp_context is not None else ())]
        self.tp_context = None
        if self.device is not None and any(name.startswith("cuda") for name in names):
            self.rope, self.rope_alt = self._rope_tables()  # copies on GPUs go too
            for name in {name for name in names if name.startswith("cuda")}:
                forget_workspaces(torch_device(name))
            torch.cuda.empty_cache()
        self.device = None
        self.placement = Placement(["cpu"] * len(self.modules))

    # ------------------------------------------------------------------------------------------------------- queries

    def get_modules(self) -> list[Module]:
        """Return the modules in the order of the forward pass."""
        return self.modules

    def linears(self) -> Iterator[Linear]:
        """Yield every linear of every module, in the order of the modules."""
        for module in self.modules:
            yield from module.submodules()

    def get_cache_devices(self) -> list[str]:
        """Return the devices that hold a part of the cache."""
        if self.tp_context is not None:
            return sorted(self.tp_context.names[shard] for shard, _, _ in self.tp_context.local_heads)
        return sorted(set(self.cache_map.values()))

    def is_quant(self) -> bool:
        """Return whether any loaded matrix is EXL2 or GPTQ."""
        return any(linear.is_quant() for linear in self.linears() if linear.matrix is not None)

    def weight_bytes(self) -> int:
        """Return the bytes of loaded weights."""
        return sum(m.weight_bytes() for m in self.modules)

    @property
    def hooked(self) -> bool:
        """Whether a module is wrapped in an `Intervention`, whose hooks may look along a sequence."""
        arrangement = self.arrangement
        if self._hooked[0] is not arrangement:  # asked several times a step
            self._hooked = arrangement, any(isinstance(module, Intervention) for module in arrangement)
        return self._hooked[1]

    @property
    def arrangement(self) -> list[Module]:
        """The current modules, as one list object that must not be changed.

        The object is replaced when one of `modules` is replaced, or wrapped in or taken out of an `Intervention`.
        Anything computed under another list object is stale.
        """
        if self._arrangement != self.modules:
            self._arrangement = list(self.modules)
        return self._arrangement

    @property
    def content_digest(self) -> bytes:
        """16 bytes that identify the weights and all settings that decide the keys and values of a token.

        The digest includes rotation and `cpu_matmul`, and is equal in every process and on every machine that loads the
        same model (`loading.identity`). A model with replaced modules has a unique digest for each arrangement, and so
        has a model whose weight files cannot be read any more. The first use samples the files, which takes up to a
        second.
        """
        return self._identity.digest(self.arrangement)
