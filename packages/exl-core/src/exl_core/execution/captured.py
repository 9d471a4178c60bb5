"""Captured decode steps and short prompts of one model: which exist, when one applies, and the fallback.

A captured step is recorded once with static inputs and replayed as one launch, or one for each device of a split model.
It holds the joined launches of `fused.py` where these cover the model, adapters included, else the modules' own forward
pass. The results are bitwise identical to the eager pass. Grids and workspaces depend on the bucket only; kernels read
lengths and tables on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from exl_kernels.selection import DECODE_TOKENS, is_decode_step
from exl_kernels.staging import StepLimits

from ..errors import DeviceError
from ..layers import Module
from ..lora.adding import refusal_of_capture
from .adapter_sets import AdapterSets
from .attn_params import PagedParams
from .capturable import (
    NotCapturableError,
    padded_rows,
    refusal_of_model,
    refusal_of_settings,
    without_hooks,
)
from .capture_failure import CaptureFailure
from .captured_step import CapturedStep, StepReplay, UnrecordedStep, on_cpu
from .environment import refusal_of_joined_adapters
from .fused import JoinedLaunches, joined_launches_of
from .half import OutputTokens
from .prompt_buckets import PromptBuckets
from .sharded.exchange_buffers import refusal_of_access, refusal_of_rows
from .sharded.launches import ShardLaunches, shard_launches_of
from .sharded.prompts import ShardedPrompts
from .step_inputs import Bucket, ReplayInputs
from .step_recorder import StepRecorder
from .ways import refusal_of_step

if TYPE_CHECKING:
    from ..contracts import Adapter, Cache
    from ..language_model import LanguageModel

__all__ = ["INVALID", "CaptureFailure", "DecodeGraphs", "LoadedFacts", "StepCall"]

PLACE_PARTS = 4  # numbers of `_place`; the version of the adapters follows in keys of steps with adapters
ONE_TOKEN = Bucket(1, 1, 1, 1)
INVALID = "an argument is invalid"
"""A captured step checks all its arguments at once. The checks of other passes raise errors that name the argument."""
MAX_GRAPHS = 64
"""Most captured steps of one cache, each a few MB of GPU memory. Beyond them the one unused for longest is dropped."""
MAX_PROMPTS = 8
"""Most captured prompts of one cache with a length of their own, which also keep the hidden state of all tokens."""


class StepCall(NamedTuple):
    """A pass that a captured step may run, without its ids."""

    q_len: int
    """Tokens a row."""
    cache: Cache
    """The cache that has the pages."""
    params: PagedParams
    adapters: Sequence[tuple[Adapter, ...]] = ()
    """The adapters of each row; () where no row has any."""
    output_tokens: OutputTokens = "all"
    """All: a decode step. Otherwise the step stores a prompt."""
    whole: bool = False
    """The rows are whole prompts; else decode steps, or windows of prompts with as few tokens."""


class _StepArguments(NamedTuple):
    """The checked arguments of a call, on the CPU."""

    past: Tensor
    table: Tensor
    offsets: Tensor | None
    longest: int
    """Tokens of the longest sequence after the step."""


class DecodeGraphs:
    """The captured steps of one model, made when a bucket is first needed. One thread at a time, on one stream.

    `reason` says why the last paged step of few tokens was launched eagerly; None when it was captured. `apart_reason`
    says why steps are captured as the modules' own passes rather than as joined launches (`fused.py`); else None.

    Some prompts are captured steps, too (`prompt_graphs.py`).

    A failed capture, for lack of memory for example, does not affect other buckets. Its bucket runs eagerly and is
    tried again after 64 of its steps, then 128 and so on; `failures` lists those buckets. A model that cannot be
    captured at all is not tried again before `clear` or a change of its modules.

    Steps belong to the model's modules. Captured steps are kept while a hook (`Intervention`) is in place, for use
    after its removal. Replacing a module drops them.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = weakref.ref(model)
        self._graphs: dict[tuple[int, ...], dict[Bucket, CapturedStep]] = {}
        self._failed: dict[tuple[tuple[int, ...], Bucket], CaptureFailure] = {}
        self._recorder = StepRecorder()
        self._joined: JoinedLaunches | str | None = None
        self._shards: list[ShardLaunches] | str | None = None  # of a sharded model, or why there are none
        self._prompts: ShardedPrompts | None = None  # of `_shards`
        self._shards_failure: CaptureFailure | None = None  # why they could not be made, for lack of memory for example
        self._refused: str | None = None
        self._sets = AdapterSets()
        self._recording = False
        self._stored = PromptBuckets()
        self._arrangement: list[Module] | None = None  # the modules that `_refused` refers to
        self._modules: list[Module] | None = None  # the modules, without hooks, that the captured steps belong to
        self.steps = 0  # captured steps run so far; each may overwrite the logits of another
        self.generation = 0  # number of calls of `clear`: prelaunched steps of earlier ones are dropped
        self.reason: str | None = None
        self.apart_reason: str | None = None

    # ------------------------------------------------------------------------------------------------------- the step

    def refusal(self, model: LanguageModel, *, step: bool = False) -> str | None:
        """Return why passes of this model are neither captured nor run by joined launches; None if they may be.

        Reasons are settings, which are read at each call, and the model's modules. With `step`, a reason is also stored
        in `reason`.
        """
        found = model.arrangement
        if self._arrangement is not found:
            refused = refusal_of_model(model)
            # Captured steps are kept while a hook is in place, and used again when the same modules run without it.
            modules = [without_hooks(module) for module in found]
            if self._modules != modules:
                self.clear()
                self._modules = modules
            self._arrangement, self._refused = found, refused
        why = refusal_of_settings(model.config) or self._refused
        if step and why is not None:
            self.reason = why
        return why

    def decode_replay(
        self,
        q_len: int,
        cache: Cache | None,
        params: PagedParams,
        adapters: Sequence[tuple[Adapter, ...]] = (),
    ) -> StepReplay | UnrecordedStep | str:
        """Do all work of a step of `q_len` tokens a row that does not need its ids, except recording its graph.

        Args:
            q_len: tokens a row.
            cache: the cache of the pages.
            params: paged parameters.
            adapters: of each row; () where no row has any.

        Returns:
            The step, or the reason why no captured step covers the arguments. Reasons of steps of few tokens with valid
            arguments are in `reason`, too.
        """
        if cache is None or not params.decodes(q_len):
            return f"it is no step over pages of a cache of at most {DECODE_TOKENS} tokens a row"
        found = self.replay_of(StepCall(q_len, cache, params, adapters))
        self.reason = found if isinstance(found, str) and found != INVALID else None
        return found

    def replay_of(self, call: StepCall) -> StepReplay | UnrecordedStep | str:
        """Return the step of a call, not recorded yet if it is new, or the reason why no captured step covers it."""
        model = self._model()
        if model is None:
            return "the model is gone"
        adapted, facts = bool(call.adapters), LoadedFacts(self, model)
        rows, q_len = call.params.batch_size, call.q_len
        why = facts.refusal() if call.whole else refusal_of_step(facts, rows, q_len, adapted=adapted)
        if why is not None:
            return why
        arguments = _arguments_of(call, model.config.max_seq_len)
        if isinstance(arguments, str):
            return arguments
        slots = self._adapter_slots_of(model, call.adapters) if adapted else []
        if isinstance(slots, str):
            return slots
        bucket = self._bucket_of(call, arguments.longest)
        if isinstance(bucket, str):
            return bucket
        captured = (facts.sharded and self._refusal_of_shards(model, bucket)) or self._held(call.cache, bucket, adapted)
        if isinstance(captured, str):
            return captured
        places = call.cache.max_seq_len // bucket.page_size
        given = ReplayInputs(
            shape=(rows, q_len),
            past=arguments.past,
            table=arguments.table,
            limits=StepLimits(vocab=model.config.vocab_size, positions=model.config.max_seq_len, pages=places),
            offsets=arguments.offsets,
            longest=arguments.longest,
            adapter_slots=[slot for slot in slots for _ in range(q_len)],
        )
        if captured is not None:
            return StepReplay(self, call.cache, captured, given)
        return UnrecordedStep(partial(self._record_replay, model, call.cache, bucket, adapted, given))

    def _bucket_of(self, call: StepCall, longest: int) -> Bucket | str:
        """Return the bucket that covers a call, or the reason why there is none. A prompt is counted."""
        decodes = call.output_tokens == "all"
        batch, size = call.params.batch_size, call.params.page_size
        rows, places = batch if call.whole else padded_rows(batch, call.q_len), call.cache.max_seq_len // size
        sizes = Bucket(rows, call.q_len, _padded_pages(-(-longest // size), places), size)
        if decodes:
            return sizes
        found = self._stored.find(sizes, places, last=call.output_tokens == "last")
        return "too few prompts of this size have come for a captured step" if found is None else found

    def _record_replay(
        self, model: LanguageModel, cache: Cache, bucket: Bucket, adapted: bool, given: ReplayInputs
    ) -> StepReplay | str:
        """Record the step of a bucket and return its replay of `given`, or why it could not be recorded.

        The reason of a step with logits is in `reason`, too.
        """
        captured = self._recorded(model, cache, bucket, adapted)
        if not isinstance(captured, str):
            return StepReplay(self, cache, captured, given)
        if bucket.decodes:
            self.reason = captured
        return captured

    def forget_adapters(self) -> None:
        """Drop the captured steps with adapters, which hold the adapters' tensors."""
        self._sets.clear()
        self._drop_adapted()

    def _drop_adapted(self) -> None:
        self._drop([key for key in list(self._graphs) if len(key) > PLACE_PARTS])

    def _adapter_died(self) -> None:
        """Drop the captured steps that hold the tensors of an adapter that nothing else refers to any more."""
        self._sets.stale = True
        if not self._recording:  # the garbage collector may find the adapter at any time
            self._drop_adapted()

    def _adapter_slots_of(self, model: LanguageModel, adapters: Sequence[tuple[Adapter, ...]]) -> list[int] | str:
        """Return the slot in `_sets` of each row's adapters, -1 for none.

        Or return the reason why captured steps cannot have these adapters. New adapters invalidate the captured steps
        with others, whose tables have no room for more.
        """
        if model.tp_context is not None:
            return "adapters of a sharded model are added on its first device"
        if self._sets.stale:
            self.forget_adapters()
        new = self._sets.new_of(adapters)
        if new:
            why = refusal_of_capture(model, new)
            if why is not None:
                return why
            self._sets.add(new, adapters, weakref.WeakMethod(self._adapter_died))
        return self._sets.slots_of(adapters)

    def joined_launches(self, model: LanguageModel) -> JoinedLaunches | str:
        """Return the joined launches of a model that is on one GPU, or the reason why there are none."""
        if model.placement.several:
            return "the model is on several devices"
        return self._joined_or_reason(model)

    def joined_for_step(self, model: LanguageModel, adapted: bool) -> JoinedLaunches | str:
        """Return the joined launches for a captured step, with adapters or not, or the reason why there are none."""
        return (refusal_of_joined_adapters() if adapted else None) or self._joined_or_reason(model)

    def _joined_or_reason(self, model: LanguageModel) -> JoinedLaunches | str:
        if self._joined is None:
            self._joined = joined_launches_of(model)
        self.apart_reason = self._joined if isinstance(self._joined, str) else None
        return self._joined

    def check_peers(self) -> None:
        """Check the exchanges of a sharded model's steps, whose logits are NaN if one failed. Waits for the GPUs.

        Raises:
            DeviceError: a device waited in vain for another one. Later steps are recorded anew.
        """
        try:
            self._recorder.check_peers()
        except DeviceError:
            self.clear()
            raise

    def clear(self) -> None:
        """Drop every captured step, prelaunched ones that wait too, and free their memory."""
        self.generation += 1
        self._drop(list(self._graphs))
        self._sets.clear()
        self._failed.clear()
        self._stored.clear()
        self._recorder.clear()
        self._joined = self._shards = self._prompts = self._shards_failure = None
        self._arrangement = self._modules = None
        self._refused = self.reason = None

    @property
    def count(self) -> int:
        """Number of captured steps."""
        return sum(len(held) for held in self._graphs.values())

    @property
    def failures(self) -> list[CaptureFailure]:
        """Buckets whose last capture failed and that run eagerly."""
        return [*self._failed.values(), *([] if self._shards_failure is None else [self._shards_failure])]

    # ------------------------------------------------------------------------------------------------------- internals

    def _drop(self, keys: list[tuple[int, ...]]) -> None:
        for key in keys:
            self._graphs.pop(key, None)
        self._failed = {at: failure for at, failure in self._failed.items() if at[0] in self._graphs}
        if not self.count:
            self._recorder.drop_pools()

    def _refusal_of_shards(self, model: LanguageModel, bucket: Bucket) -> str | None:
        """Return why steps of a bucket have no launches on the devices of a sharded model, or None."""
        why = refusal_of_rows(bucket.tokens) if bucket.decodes else None
        if why is not None:
            return f"the matrices are sharded, and {why}"
        shards = self.shard_launches(model, bucket)
        return shards if isinstance(shards, str) else None

    def shard_launches(self, model: LanguageModel, bucket: Bucket = ONE_TOKEN) -> list[ShardLaunches] | str:
        """Return the launches of each device of a sharded model, or the reason why there are none.

        bucket: the bucket that needs them, for messages.
        """
        context = model.tp_context
        assert context is not None, "asked of sharded models"
        if self._shards is None:
            failure = self._shards_failure
            if failure is not None and failure.pause > 0:
                self._shards_failure = failure.waited()
                return str(self._shards_failure)
            try:
                with torch.inference_mode(False):
                    self._shards = refusal_of_access(context) or shard_launches_of(model)
            except (DeviceError, RuntimeError) as error:
                self._shards_failure = CaptureFailure.of(bucket, error, failure)
                return str(self._shards_failure)
            self._shards_failure = None
        if isinstance(self._shards, str):
            return f"the matrices are sharded, and {self._shards}"
        return self._shards

    def prompts(self, model: LanguageModel) -> ShardedPrompts | str:
        """Return what runs the prompts of a sharded model, or the reason why nothing does; `reason` gets it, too."""
        shards = self.shard_launches(model)
        if isinstance(shards, str):
            self.reason = shards
            return shards
        if self._prompts is None:
            assert model.tp_context is not None, "asked of sharded models"
            self._prompts = ShardedPrompts(model.tp_context, shards)
        return self._prompts

    def _key(self, cache: Cache, bucket: Bucket, adapted: bool) -> tuple[int, ...]:
        """Return the key of the captured steps of a cache whose tensors are where they are now."""
        place = _place(cache, bucket.page_size)
        return (*place, self._sets.version) if adapted else place

    def _held(self, cache: Cache, bucket: Bucket, adapted: bool) -> CapturedStep | str | None:
        """Return the captured step of a bucket; None if it is to be recorded, or why it is not recorded for now."""
        key = self._key(cache, bucket, adapted)
        held = self._graphs.get(key)
        if held is not None and (found := held.pop(bucket, None)) is not None:
            held[bucket] = found  # the one used last is the last one
            return found
        failure = self._failed.get((key, bucket))
        if failure is None or failure.pause <= 0:
            return None
        failure = self._failed[key, bucket] = failure.waited()
        return str(failure)

    def _make_room(self, cache: Cache, key: tuple[int, ...]) -> None:
        """Start an empty set of captured steps for a key; drop sets of moved tensors or of changed adapters."""
        known = any(k[0] == key[0] for k in self._graphs)
        place = key[:PLACE_PARTS]
        current = (place, (*place, self._sets.version))
        self._drop([k for k in self._graphs if k[:2] == key[:2] and k not in current])
        self._graphs[key] = {}
        if not known:
            weakref.finalize(cache, _forget, weakref.ref(self), key[0])

    def _recorded(self, model: LanguageModel, cache: Cache, bucket: Bucket, adapted: bool) -> CapturedStep | str:
        """Record and return the captured step of a bucket, or return why it cannot be recorded."""
        key = self._key(cache, bucket, adapted)
        if key not in self._graphs:
            self._make_room(cache, key)
        failure = self._failed.get((key, bucket))
        try:
            self._recording = True
            with torch.inference_mode(False), torch.no_grad():
                made = self._record(model, cache, bucket, adapted)
        except NotCapturableError as error:
            self._refused = f"the step could not be captured: {error}"
            return self._refused
        except (DeviceError, RuntimeError) as error:
            failure = CaptureFailure.of(bucket, error, failure)
            self._failed[key, bucket] = failure
            if not self.count:
                self._recorder.drop_pools()
            return str(failure)
        finally:
            self._recording = False
        self._failed.pop((key, bucket), None)
        held = self._graphs.setdefault(key, {})
        held[bucket] = made
        prompts = [one for one in held if not is_decode_step(one.q_len)]
        unused = prompts[0] if len(prompts) > MAX_PROMPTS else next(iter(held)) if len(held) > MAX_GRAPHS else None
        if unused is not None:
            del held[unused]
            self._stored.forget(unused)
        return made

    def _record(self, model: LanguageModel, cache: Cache, bucket: Bucket, adapted: bool) -> CapturedStep:
        if model.tp_context is not None:
            assert isinstance(self._shards, list), "_refusal_of_shards has made them"
            return self._recorder.record_sharded(model, self._shards, cache, bucket)
        joined = self.joined_for_step(model, adapted)
        if not bucket.decodes:
            assert isinstance(joined, JoinedLaunches), "`PromptGraphs` has checked it"
            return self._recorder.record_prompt(model, joined, cache, bucket)
        return self._recorder.record(model, joined, cache, bucket, self._sets.adapters() if adapted else None)


class LoadedFacts:
    """Facts about a loaded model, for `ways.py`. `step`: as for `DecodeGraphs.refusal`."""

    __slots__ = ("_graphs", "_model", "_step")

    def __init__(self, graphs: DecodeGraphs, model: LanguageModel, *, step: bool = False) -> None:
        self._graphs, self._model, self._step = graphs, model, step

    @property
    def sharded(self) -> bool:
        """See `ModelFacts`."""
        return self._model.tp_context is not None

    def refusal(self) -> str | None:
        """See `ModelFacts`."""
        return self._graphs.refusal(self._model, step=self._step)

    def refusal_of_launches(self) -> str | None:
        """See `ModelFacts`."""
        found = self._graphs.prompts(self._model) if self.sharded else self._graphs.joined_launches(self._model)
        return found if isinstance(found, str) else None

    def unjoined(self, *, adapted: bool) -> str | None:
        """See `ModelFacts`."""
        joined = self._graphs.joined_for_step(self._model, adapted)
        return joined if isinstance(joined, str) else None

    def rows_of(self, batch: int, q_len: int) -> int:
        """See `ModelFacts`."""
        return padded_rows(batch, q_len) * q_len

    def refusal_of_rows(self, rows: int) -> str | None:
        """See `ModelFacts`."""
        joined = self._graphs.joined_for_step(self._model, adapted=False)
        return joined if isinstance(joined, str) else joined.refusal_of_rows(rows)


def _forget(graphs: weakref.ref[DecodeGraphs], cache: int) -> None:
    owner = graphs()
    if owner is not None:
        owner._drop([key for key in owner._graphs if key[0] == cache])


def _arguments_of(call: StepCall, most_tokens: int) -> _StepArguments | str:
    """Return the arguments of a call, or why no captured step takes them; a sequence has at most `most_tokens`."""
    params, cache, size = call.params, call.cache, call.params.page_size
    past, table = on_cpu(params.cache_seqlens, torch.int32), on_cpu(params.block_index, torch.int32)
    if past is None or table is None:
        return "block_index or cache_seqlens is on a GPU"
    if cache.batch_size != 1 or params.q_len not in (0, call.q_len) or cache.max_seq_len % size:
        return INVALID
    offsets = None if params.rope_offsets is None else _offsets(params.rope_offsets, past)
    if params.rope_offsets is not None and offsets is None:
        return "rope_offsets lead beyond the tables of captured steps"
    longest = max(past.tolist(), default=0) + call.q_len  # faster on the host than the tensor's own maximum
    most = min(table.shape[1] * size, most_tokens)
    if longest > most:
        return f"the step ends at {longest} tokens; its pages and the model hold {most}"
    return _StepArguments(past, table, offsets, longest)


def _padded_pages(pages: int, places: int) -> int:
    """Return the pages of the bucket that holds `pages` pages, of a cache of `places`.

    Four buckets an octave: a launch is planned for all keys of its bucket.
    """
    grain = 1 << max(0, (pages - 1).bit_length() - 3)
    return min(-(-pages // grain) * grain, places)


def _offsets(offsets: Tensor, past: Tensor) -> Tensor | None:
    """Return int64 [batch] to add to rope positions; None where a sum is outside the tables of a captured step."""
    found = offsets.reshape(-1).to("cpu", torch.int64)
    inside = found.shape == past.shape and int(found.max()) <= 0 and int((past + found).min()) >= 0
    return found if inside else None


def _place(cache: Cache, page_size: int) -> tuple[int, ...]:
    """Return which cache it is and where its tensors, allocated together, are: captured steps hold these addresses."""
    shards, last = cache.shards(), cache.num_hidden_layers - 1
    first, end = shards[0].pages(0, page_size), shards[-1].pages(last, page_size)
    return (id(cache), page_size, first.value.data_ptr(), end.value.data_ptr())
