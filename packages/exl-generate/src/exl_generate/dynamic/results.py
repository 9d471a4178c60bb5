"""The result dicts of `iterate()`. `ExLlamaV2DynamicJob` documents their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from exl_generate.dynamic.events import Ending, Event
from exl_generate.dynamic.output import Record

if TYPE_CHECKING:
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["Result", "dict_of", "dicts_of"]

Result = dict[str, Any]


def dicts_of(events: list[Event]) -> list[Result]:
    """Return a result dict for each event."""
    return [dict_of(event) for event in events]


def dict_of(event: Event) -> Result:
    """Return one event as a result dict."""
    job, ending = event.job, event.ending
    result: Result = {"job": job, "stage": event.stage, "eos": ending is not None, "serial": job.serial_number}
    if job.request.identifier is not None:
        result["identifier"] = job.request.identifier
    if event.progress is not None:
        result["curr_progress"], result["max_progress"] = event.progress
    if event.released.text or event.released.records:
        _fill_in(result, job, event.released.text, event.released.records)
    if event.suppressed is not None:
        text, records = event.suppressed
        result["suppressed_text"] = text
        result["suppressed_tokens"] = _ids(records)
    if ending is not None:
        _end(result, job, ending)
    return result


def _end(result: Result, job: ExLlamaV2DynamicJob, ending: Ending) -> None:
    result["eos_reason"] = ending.reason
    if ending.token is not None:
        special, text = ending.token_texts
        result["eos_triggering_token_id"] = ending.token.token
        result["eos_triggering_token_str"] = special
        result["held"] = _data(job, text, [ending.token])
    if ending.string is not None:
        result["eos_triggering_string"] = ending.string
        result["held"] = {"text": ending.held_text}
    result |= ending.statistics
    if ending.kept is not None and (kept := _data(job, ending.kept.text, ending.kept.records)):
        result["held"] = kept
    if ending.error is not None:
        result["exception"] = ending.error


def _data(job: ExLlamaV2DynamicJob, text: str, records: list[Record]) -> Result:
    """Return text and per-token data; each key exists only where it has content."""
    data: Result = {}
    _fill_in(data, job, text, records)
    return data


def _fill_in(data: Result, job: ExLlamaV2DynamicJob, text: str, records: list[Record]) -> None:
    if text:
        data["text"] = text
    if not records:
        return
    data["token_ids"] = _ids(records)
    asked = job.request
    if asked.return_probs:
        data["token_probs"] = torch.tensor([[r.probability for r in records]], dtype=torch.float32)
    if asked.return_top_tokens > 0:
        # One torch call each: a step of many jobs pays for every one.
        data["top_k_tokens"] = torch.from_numpy(_joined([r.top_tokens for r in records]))
        data["top_k_probs"] = torch.from_numpy(_joined([r.top_probabilities for r in records]))
    if asked.return_logits:
        data["logits"] = torch.stack([r.logits for r in records if r.logits is not None]).unsqueeze(0)
    if asked.return_hidden_state:
        data["hidden_states"] = torch.stack([r.state for r in records if r.state is not None]).unsqueeze(0)


def _joined(rows: list[Any]) -> NDArray[Any]:
    """Return rows [n] as [1, rows, n]; a row by itself is not copied, since nothing else uses a released record."""
    return rows[0][None, None] if len(rows) == 1 else np.array(rows)[None]


def _ids(records: list[Record]) -> torch.Tensor:
    if len(records) == 1 and records[0].ids is not None:
        return records[0].ids
    return torch.tensor([[r.token for r in records]], dtype=torch.int64)
