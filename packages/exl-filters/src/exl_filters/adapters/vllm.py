"""vLLM (V1 engine): filters as a logits processor that implements its published protocol.

Load it with `--logits-processors exl_filters.adapters.vllm:VllmFilterProcessor`. A request asks for a filter with
`SamplingParams(extra_args={"exl_filter": {"type": "select", "options": ["yes", "no"]}})`. Only built-in filters and
those on the server's allow-list (EXL_FILTERS_PLUGINS) are available. vLLM rejects custom processors together with
speculative decoding.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from exl_filters import bits
from exl_filters.adapters.rows import RowTracker
from exl_filters.bits import Words
from exl_filters.errors import FilterError, FilterFailed, FilterUsageError
from exl_filters.masking import apply_mask
from exl_filters.registry import from_spec
from exl_filters.vocabulary import Vocabulary, vocabulary_of

__all__ = ["VllmFilterProcessor"]

KEY = "exl_filter"


def _base() -> Any:
    """Return vLLM's abstract class where vLLM is installed, else `object`; the protocol is the same."""
    try:
        return importlib.import_module("vllm.v1.sample.logits_processor").LogitsProcessor
    except ImportError:
        return object


_Base: Any = _base()


class _Request:
    """One request of the batch: its filters' rows, or the reason that there are none, and the live list of its output
    ids.
    """

    def __init__(self, make: Callable[[], RowTracker], stop_words: Words, output: list[int]) -> None:
        self.stop_words, self.output = stop_words, output
        self.tracker: RowTracker | None = None
        self.failure: FilterError | None = None
        try:
            self.tracker = make()
        except FilterError as error:
            self.failure = error
        except Exception as error:  # a plugin may raise anything
            self.failure = FilterFailed(f"no filter can be made: {type(error).__name__}: {error}")

    def mask(self) -> Words | None:
        """Return the mask of the next token; after a failure, the stop tokens alone."""
        if self.failure is None and self.tracker is not None:
            try:
                return self.tracker.masks([self.output])[0]
            except FilterError as error:
                self.failure = error
        return self.stop_words

    def close(self) -> None:
        """Release the filters."""
        if self.tracker is not None:
            self.tracker.reset()


class VllmFilterProcessor(_Base):  # type: ignore[misc]
    """The filters of all requests of one engine. Rows without a filter are left alone.

    A filter that cannot be built, fails or leaves no token ends only its own row, by allowing the stop tokens alone.

    Args:
        vllm_config: vLLM's configuration; names the tokenizer.
        device: Device of the logits.
        is_pin_memory: Not used.
    """

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._config = vllm_config
        self._requests: dict[int, _Request] = {}
        self._vocabulary: Vocabulary | None = None

    @property
    def failures(self) -> dict[int, FilterError]:
        """Row numbers and the reason that the filter ended the row, for the server's logs."""
        return {index: r.failure for index, r in self._requests.items() if r.failure is not None}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Reject `sampling_params` whose filter spec is not a mapping with "type".

        Raises FilterUsageError, a `ValueError` with which vLLM answers the client.
        """
        spec = _spec_of(sampling_params)
        if spec is not None and (not isinstance(spec, dict) or not isinstance(spec.get("type"), str)):
            raise FilterUsageError(f'extra_args["{KEY}"] must be a mapping with "type"; got {spec!r:.80}')

    def is_argmax_invariant(self) -> bool:
        """Return False: filters change which token is the most likely."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Apply `batch_update`, vLLM's changes of the batch: removed, then added, then moved rows."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._drop(index)
        for index, params, _prompt, output in batch_update.added:
            self._drop(index)
            spec = _spec_of(params)
            if spec is not None:
                self._requests[index] = self._request(spec, params, output)
        for source, target, direction in batch_update.moved:
            moving, there = self._requests.pop(source, None), self._requests.pop(target, None)
            if moving is not None:
                self._requests[target] = moving
            if there is not None and getattr(direction, "name", str(direction)).upper() == "SWAP":
                self._requests[source] = there

    def apply(self, logits: Any) -> Any:
        """Mask the rows that have a filter, in place: `logits` has shape [rows, width]."""
        for index, request in self._requests.items():
            apply_mask(logits[index], request.mask())
        return logits

    def _request(self, spec: Any, params: Any, output: list[int]) -> _Request:
        vocabulary = self._vocabulary_of_model()
        stops = self._stops(params, vocabulary)
        # Without any stop id, a failed row repeats id 0 until its length ends it: every row needs a token.
        words = bits.from_ids(stops or {0}, vocabulary.size)
        return _Request(lambda: RowTracker([from_spec(spec, vocabulary)], vocabulary, stops), words, output)

    def _drop(self, index: int) -> None:
        request = self._requests.pop(index, None)
        if request is not None:
            request.close()

    def _stops(self, params: Any, vocabulary: Vocabulary) -> set[int]:
        own = getattr(params, "stop_token_ids", None) or ()
        every = getattr(params, "all_stop_token_ids", None) or ()
        return {*vocabulary.stop_ids, *own, *every}

    def _vocabulary_of_model(self) -> Vocabulary:
        if self._vocabulary is None:
            transformers = importlib.import_module("transformers")
            model = self._config.model_config
            tokenizer = transformers.AutoTokenizer.from_pretrained(model.tokenizer)
            self._vocabulary = vocabulary_of(tokenizer)
        return self._vocabulary


def _spec_of(params: Any) -> Any:
    extra = getattr(params, "extra_args", None)
    return extra.get(KEY) if isinstance(extra, dict) else None
