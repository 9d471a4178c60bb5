"""vLLM (V1 engine): filters as a logits processor, by its published protocol.

Load it with `--logits-processors exl_filters.adapters.vllm:VllmFilterProcessor`; a request asks for a filter with
`SamplingParams(extra_args={"exl_filter": {"type": "select", "options": ["yes", "no"]}})`. Only filters on the server's
allow-list (EXL_FILTERS_PLUGINS) and the built-ins can be asked for. vLLM refuses custom processors together with
speculative decoding.
"""

from __future__ import annotations

import importlib
from typing import Any

from exl_filters.adapters.rows import RowTracker
from exl_filters.errors import FilterError, FilterUsageError
from exl_filters.masking import apply_mask
from exl_filters.registry import from_spec
from exl_filters.vocabulary import Vocabulary, vocabulary_of

__all__ = ["VllmFilterProcessor"]

KEY = "exl_filter"


def _base() -> Any:
    """vLLM's abstract class where vLLM is installed; the protocol is the same without it."""
    try:
        return importlib.import_module("vllm.v1.sample.logits_processor").LogitsProcessor
    except ImportError:
        return object


_Base: Any = _base()


class _Request:
    """One request of the batch: its filters' rows and the live list of its output ids."""

    def __init__(self, tracker: RowTracker, output: list[int]) -> None:
        self.tracker, self.output = tracker, output


class VllmFilterProcessor(_Base):  # type: ignore[misc]
    """One per engine. Rows without a filter are left alone; a filter that fails or leaves nothing ends its own row
    only, by
    allowing that row its stop tokens."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._config = vllm_config
        self._requests: dict[int, _Request] = {}
        self._vocabulary: Vocabulary | None = None
        self.failures: dict[int, FilterError] = {}
        """Row -> why its filter ended it, for the server's logs."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request whose filter spec is no spec; vLLM answers the client with the `ValueError`."""
        spec = _spec_of(sampling_params)
        if spec is not None and (not isinstance(spec, dict) or not isinstance(spec.get("type"), str)):
            raise FilterUsageError(f'extra_args["{KEY}"] must be a mapping with "type"; got {spec!r:.80}')

    def is_argmax_invariant(self) -> bool:
        """Filters change which token is the most likely."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the batch: removed, then added, then moved rows."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._drop(index)
        for index, params, _prompt, output in batch_update.added:
            self._drop(index)
            spec = _spec_of(params)
            if spec is not None:
                vocabulary = self._vocabulary_of_model()
                tracker = RowTracker([from_spec(spec, vocabulary)], vocabulary, self._stops(params, vocabulary))
                self._requests[index] = _Request(tracker, output)
        for source, target, direction in batch_update.moved:
            moving, there = self._requests.pop(source, None), self._requests.pop(target, None)
            if moving is not None:
                self._requests[target] = moving
            if there is not None and getattr(direction, "name", str(direction)).upper() == "SWAP":
                self._requests[source] = there

    def apply(self, logits: Any) -> Any:
        """Mask the rows that have a filter, in place."""
        for index, request in self._requests.items():
            try:
                (mask,) = request.tracker.masks([request.output])
            except FilterError as error:
                self.failures[index] = error
                mask = request.tracker._stop_words
            apply_mask(logits[index], mask)
        return logits

    def _drop(self, index: int) -> None:
        request = self._requests.pop(index, None)
        if request is not None:
            request.tracker.reset()

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
