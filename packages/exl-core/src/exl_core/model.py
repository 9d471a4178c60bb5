"""ExLlamaV2: a model's modules in order, loading them, running token ids through them (spec core.md 1, 7, 9)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any

import torch
from torch import Tensor

from .attn_params import AttentionParams, PagedParams
from .cache import ExLlamaV2CacheBase
from .config import ExLlamaV2Config
from .decode import DecodeGraphs
from .device import default_device, out_of_memory_as_error
from .embeddings import ExLlamaV2MMEmbedding
from .errors import CacheError, ModelStateError, SequenceTooLongError, UnsupportedError
from .inputs import (
    check_context,
    check_ids,
    check_indices,
    check_length,
    check_loras,
    chunk_size,
    contiguous_params,
    paged_params,
)
from .loading.loader import Callback, CallbackGen, check_callbacks, load_modules, progress_bar
from .lora import ExLlamaV2Lora
from .modules import Attention, Linear, Module, build_modules
from .rope import RopeTable
from .step import build_step

__all__ = ["ExLlamaV2"]


class ExLlamaV2:
    """A language model. Building it reads no weights; `load` or `load_autosplit` does, `unload` gives them back.

    Not thread-safe: one thread at a time may call forward.
    """

    def __init__(self, config: ExLlamaV2Config, lazy_load: bool = False, archparams: None = None) -> None:
        if archparams is not None:
            raise UnsupportedError("archparams is not supported: the architecture comes from config.arch")
        config.check_for_load()
        self.config = config
        self.modules: list[Module] = build_modules(config)
        self.modules_dict: dict[str, Module | Linear] = {}
        for module in self.modules:
            submodules = list(module.submodules())
            self.modules_dict.update({s.key: s for s in submodules} if submodules else {module.key: module})
        self.last_kv_layer_idx = max(i for i, m in enumerate(self.modules) if isinstance(m, Attention))
        self.head_layer_idx = len(self.modules) - 1
        self.rope = RopeTable(config.rope_settings())
        alternative = config.rope_settings_alt()
        self.rope_alt = None if alternative is None else RopeTable(alternative)
        self.device: torch.device | None = None  # where the modules are; None until load
        self.cache_map: dict[int, str] = {}  # layer index -> device of its cache
        self.device_context: dict[str, Any] = {}
        self.tp_context: None = None
        self.loaded = False
        self.decode = DecodeGraphs(self)  # captured steps on a GPU; `decode.reason` says why there are none
        self.load_count = 0  # how often weights were loaded: adapters belong to one load

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
        """Load all weights. `lazy` only decides the devices. Loading a loaded model does nothing.

        gpu_split is a list of GB a device; on a machine without a usable GPU everything goes to the CPU and it has no
        effect. callback(index, total) runs before each module and at the end. An error leaves nothing loaded.
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
    ) -> Iterator[Any]:
        """As `load`, as a generator that must be exhausted; yields what `callback_gen(index, total)` yields."""
        yield from self._load(callback, callback_gen, lazy=lazy, cache=None)

    def load_autosplit(
        self,
        cache: ExLlamaV2CacheBase,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: Callback | None = None,
        callback_gen: CallbackGen | None = None,
        progress: bool = False,
    ) -> None:
        """Load all weights and create the tensors of the lazy `cache` beside them.

        On a machine without a usable GPU everything goes to the CPU: reserve_vram and last_id_only have no effect.
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
    ) -> Iterator[Any]:
        """As `load_autosplit`, as a generator that must be exhausted."""
        if any(t is not None for t in cache.key_states):
            raise CacheError("load_autosplit needs a cache made with lazy=True: it decides where the tensors go")
        yield from self._load(callback, callback_gen, lazy=False, cache=cache)

    def load_tp(self, *args: Any, **kwargs: Any) -> None:
        """Tensor parallel: not built in this version."""
        raise UnsupportedError("load_tp (tensor parallel) is not built in this version; use load or load_autosplit")

    def load_tp_gen(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Tensor parallel: not built in this version."""
        raise UnsupportedError("load_tp_gen (tensor parallel) is not built in this version; use load_gen")

    def _load(
        self,
        callback: Callback | None,
        callback_gen: CallbackGen | None,
        *,
        lazy: bool,
        cache: ExLlamaV2CacheBase | None,
    ) -> Iterator[Any]:
        self.config.check_for_load()
        checkpoint = self.config.checkpoint
        if checkpoint is None:
            raise ModelStateError("the config was prepared with no_tensors=True: call config.prepare() before loading")
        device = default_device()
        self.device = device
        if not lazy and not self.loaded:
            tied = [f"{self.config.arch.embed_tokens}.weight"] if self.config.tie_word_embeddings else []
            with out_of_memory_as_error("load the model"):
                yield from load_modules(self.modules, checkpoint, device, callback, callback_gen, shared=tied)
            self.loaded = True
            self.load_count += 1
        self.cache_map = {m.layer_idx: str(device) for m in self.modules if isinstance(m, Attention)}
        if cache is not None:
            cache.update_cache_tensors()

    def unload(self) -> None:
        """Drop all weights. The model may be loaded again; caches keep their own memory until they are dropped."""
        self.decode.clear()
        for module in self.modules:
            module.unload()
        self.cache_map = {}
        self.device = None
        self.loaded = False

    # ------------------------------------------------------------------------------------------------------- queries

    def get_modules(self) -> list[Module]:
        """The modules in the order of the forward pass."""
        return self.modules

    def get_cache_devices(self) -> list[str]:
        """Devices that hold a part of the cache."""
        return sorted(set(self.cache_map.values()))

    def is_quant(self) -> bool:
        """Whether any loaded matrix is EXL2 or GPTQ."""
        return any(linear.is_quant() for linear in self._linears() if linear.matrix is not None)

    def update_loras(self) -> None:
        """Nothing to do: adapters are looked up by every forward pass. Kept for callers of the original."""

    def weight_bytes(self) -> int:
        """Bytes held by loaded weights."""
        return sum(m.weight_bytes() for m in self.modules)

    def _linears(self) -> Iterator[Linear]:
        for module in self.modules:
            yield from module.submodules()

    # ------------------------------------------------------------------------------------------------------- forward

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        cache: ExLlamaV2CacheBase | None = None,
        input_mask: Tensor | None = None,
        preprocess_only: bool = False,
        last_id_only: bool = False,
        loras: Sequence[ExLlamaV2Lora] | None = None,
        return_last_state: bool = False,
        position_offsets: Tensor | None = None,
        abort_event: Event | None = None,
        cpu_logits: bool = False,
        *,
        indexed_embeddings: Sequence[ExLlamaV2MMEmbedding] | None = None,
    ) -> Any:
        """Run ids [batch, q_len] through the model, in chunks if they are many, appending to `cache`.

        Returns float32 logits [batch, q_len (1 with last_id_only), padded vocabulary] on the model's device, whose
        columns beyond the vocabulary are -65504; None with preprocess_only; (logits or None, state) with
        return_last_state, where state [batch, tokens of the last chunk, hidden], float32 or on a GPU half, is taken
        before the final norm. If `abort_event` is set
        the result is None and cache.current_seq_len stays at the last finished chunk.

        input_mask: additive [batch, past + q_len], 0 attends to a key, -inf ignores it. position_offsets: int
        [batch, 1], added to RoPE positions (minus the left padding of each row). cpu_logits: bring the logits to the
        CPU. loras: adapters to add, in this order. indexed_embeddings: rows that ids from
        EMBEDDING_INDEX on stand for.

        Raises ModelStateError, SequenceTooLongError, TokenIdError, InputError before anything is computed.
        """
        ids, embeddings = check_ids(self, input_ids, indexed_embeddings)
        adapters = check_loras(self, loras)
        batch, q_len = ids.shape
        check_context(cache, input_mask, position_offsets, abort_event, batch)
        past = 0 if cache is None else cache.current_seq_len
        check_length(self.config, cache, batch, past, q_len)
        logits: list[Tensor] = []
        state: Tensor | None = None
        begin = 0
        while begin < q_len:
            end = begin + chunk_size(self.config, batch, past + begin, q_len - begin, cache is not None)
            skip_head = preprocess_only or (last_id_only and end < q_len)
            result = self._run(
                ids[:, begin:end],
                cache,
                AttentionParams(batch, end - begin, past + begin, input_mask, position_offsets),
                preprocess_only=skip_head,
                last_id_only=last_id_only,
                return_last_state=return_last_state and end == q_len,
                abort_event=abort_event,
                loras=adapters,
                embeddings=embeddings,
            )
            if result is None:
                return None
            if "logits" in result:
                logits.append(result["logits"].cpu() if cpu_logits else result["logits"])
            state = result.get("last_state")
            begin = end
        joined = None if not logits else logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)
        return (joined, state) if return_last_state else joined

    @torch.no_grad()
    def forward_chunk(
        self,
        input_ids: Tensor,
        cache: ExLlamaV2CacheBase | None = None,
        input_mask: Tensor | None = None,
        preprocess_only: bool = False,
        last_id_only: bool = False,
        loras: Sequence[ExLlamaV2Lora] | None = None,
        return_last_state: bool = False,
        position_offsets: Tensor | None = None,
        abort_event: Event | None = None,
        attn_params: AttentionParams | PagedParams | None = None,
        extract_state_indices: Sequence[int] | None = None,
        *,
        indexed_embeddings: Sequence[ExLlamaV2MMEmbedding] | None = None,
    ) -> dict[str, Any]:
        """One chunk, contiguous or paged. Returns a dict with the keys that apply: "logits" as in `forward`,
        "last_state" [batch, q_len, hidden], "states" {index: input of model.modules[index]}; "aborted": True and
        nothing else if `abort_event` was set, in which case cache.current_seq_len has not moved.

        Contiguous AttentionParams carry the past length, and set cache.current_seq_len to it. In paged mode the
        lengths are PagedParams', and current_seq_len means nothing. On a GPU a paged step of few tokens is one launch
        of a captured graph (`exl_core.decode`; EXL_CUDA_GRAPHS=0 forbids it), to the same bits; its logits lie in
        memory that the next such call overwrites.
        """
        plain = not (preprocess_only or last_id_only or loras or return_last_state or extract_state_indices)
        plain = plain and input_mask is None and position_offsets is None and abort_event is None
        if plain and isinstance(attn_params, PagedParams) and not indexed_embeddings:
            logits = self._graph_step(input_ids, cache, attn_params)
            if logits is not None:
                return {"logits": logits}
        ids, embeddings = check_ids(self, input_ids, indexed_embeddings)
        adapters = check_loras(self, loras)
        batch, q_len = ids.shape
        check_context(cache, input_mask, position_offsets, abort_event, batch)
        if isinstance(attn_params, PagedParams):
            params: AttentionParams | PagedParams = paged_params(attn_params, input_mask, position_offsets)
        else:
            params = contiguous_params(attn_params, cache, batch, q_len, input_mask, position_offsets)
            check_context(cache, params.input_mask, params.position_offsets, abort_event, batch)
        result = self._run(
            ids,
            cache,
            params,
            preprocess_only=preprocess_only,
            last_id_only=last_id_only,
            return_last_state=return_last_state,
            abort_event=abort_event,
            loras=adapters,
            embeddings=embeddings,
            extract=check_indices(extract_state_indices, len(self.modules)),
        )
        return {"aborted": True} if result is None else result

    def _graph_step(self, ids: Tensor, cache: ExLlamaV2CacheBase | None, params: PagedParams) -> Tensor | None:
        if not self.loaded or self.device is None or self.device.type != "cuda":
            return None
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.int64 or not ids.numel():
            return None
        logits = self.decode.step(ids, cache, params)
        if logits is not None and cache is not None:
            cache.current_seq_len = _end_of_chunk(params, ids.shape[1])
        return logits

    def _run(
        self,
        ids: Tensor,
        cache: ExLlamaV2CacheBase | None,
        params: AttentionParams | PagedParams,
        *,
        preprocess_only: bool,
        last_id_only: bool,
        return_last_state: bool,
        abort_event: Event | None,
        loras: tuple[ExLlamaV2Lora, ...] = (),
        embeddings: tuple[ExLlamaV2MMEmbedding, ...] = (),
        extract: frozenset[int] = frozenset(),
    ) -> dict[str, Any] | None:
        """The pass itself: every module in turn, None when aborted."""
        batch, q_len = ids.shape
        limit = self.config.max_output_len
        if limit is not None and q_len > limit and not (preprocess_only or last_id_only):
            raise SequenceTooLongError(
                f"seq_len exceeds max_output_len: {q_len} positions of logits, config.max_output_len is {limit}; use "
                "last_id_only=True or preprocess_only=True, or raise it"
            )
        device = self.device or torch.device("cpu")
        step = build_step(
            *(self.config, self.rope, cache, params, batch, q_len, abort_event, device, loras, embeddings),
            self.rope_alt,
        )
        result: dict[str, Any] = {}
        x = ids.reshape(-1).to(device)
        for index, module in enumerate(self.modules):
            if abort_event is not None and abort_event.is_set():
                return None
            if index in extract:
                result.setdefault("states", {})[index] = x.view(batch, q_len, -1).clone()
            if index == self.last_kv_layer_idx + 1 and preprocess_only and not (return_last_state or extract):
                break
            if index == self.head_layer_idx - 1:
                if return_last_state:
                    result["last_state"] = x.view(batch, q_len, -1).clone()
                if preprocess_only:
                    break
                if last_id_only:
                    x = x.view(batch, q_len, -1)[:, -1].contiguous()
            x = module.forward(x, step)
        else:
            result["logits"] = x.view(batch, -1, x.shape[-1])
        if cache is not None:
            cache.current_seq_len = _end_of_chunk(params, q_len)
        return result


def _end_of_chunk(params: AttentionParams | PagedParams, q_len: int) -> int:
    if isinstance(params, PagedParams):
        return int(params.cache_seqlens.max()) + q_len
    return (params.past_len or 0) + q_len
