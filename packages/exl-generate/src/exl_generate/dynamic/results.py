"""The result dicts of `iterate()`, exactly as spec/generators.md 3.14 lists their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exl_generate.dynamic.output import Record, Released

if TYPE_CHECKING:
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["Results"]

Result = dict[str, Any]


class Results:
    """Writes one job's result dicts."""

    def __init__(self, job: ExLlamaV2DynamicJob) -> None:
        self._job = job

    def started(self) -> Result:
        return self._common("started")

    def prefill(self) -> Result:
        job = self._job
        return self._common("prefill") | {
            "curr_progress": sum(min(s.kv_position, s.prefill_end) for s in job.sequences),
            "max_progress": sum(s.prefill_end for s in job.sequences),
        }

    def streaming(self, released: Released, suppressed: tuple[str, list[Record]] | None = None) -> Result:
        result = self._common("streaming")
        self._fill_in(result, released.text, released.records)
        if suppressed is not None:
            text, records = suppressed
            result["suppressed_text"] = text
            result["suppressed_tokens"] = _ids(records)
        return result

    def end(
        self,
        reason: str,
        released: Released,
        *,
        token: Record | None = None,
        held_text: str = "",
        string: str | None = None,
    ) -> Result:
        """The last dict of a job. `token` is the stop token, which is reported as held; `held_text` begins with a
        stop string."""
        result = self._common("streaming", eos=True) | self._data(released.text, released.records)
        result["eos_reason"] = reason
        if token is not None:
            result["eos_triggering_token_id"] = token.token
            result["eos_triggering_token_str"] = self._job.piece(token.token, special=True)
            result["held"] = self._data(self._job.piece(token.token), [token])
        if string is not None:
            result["eos_triggering_string"] = string
            result["held"] = {"text": held_text}
        return result | self._statistics()

    def error(self, reason: str, error: BaseException, held: Released | None) -> Result:
        """A job ended by its own failure: the exception is attached, what was held back is under `held`."""
        return self._aborted(reason, held) | {"exception": error}

    def cancelled(self, held: Released | None) -> Result:
        return self._aborted("cancelled", held)

    def _aborted(self, reason: str, held: Released | None) -> Result:
        result = self._common("streaming", eos=True) | {"eos_reason": reason} | self._statistics()
        data = {} if held is None else self._data(held.text, held.records)
        return result | {"held": data} if data else result

    def _common(self, stage: str, eos: bool = False) -> Result:
        job = self._job
        common: Result = {"job": job, "stage": stage, "eos": eos, "serial": job.serial_number}
        if job.identifier is not None:
            common["identifier"] = job.identifier
        return common

    def _data(self, text: str, records: list[Record]) -> Result:
        """Text and per-token data, each key only where there is something to say."""
        data: Result = {}
        self._fill_in(data, text, records)
        return data

    def _fill_in(self, data: Result, text: str, records: list[Record]) -> None:
        job = self._job
        if text:
            data["text"] = text
        if not records:
            return
        data["token_ids"] = _ids(records)
        if job.return_probs:
            data["token_probs"] = torch.tensor([[r.probability for r in records]], dtype=torch.float32)
        if job.return_top_tokens > 0:
            data["top_k_tokens"] = torch.stack([torch.from_numpy(r.top_tokens) for r in records]).unsqueeze(0)
            data["top_k_probs"] = torch.stack([torch.from_numpy(r.top_probabilities) for r in records]).unsqueeze(0)
        if job.return_logits:
            data["logits"] = torch.stack([r.logits for r in records if r.logits is not None]).unsqueeze(0)
        if job.return_hidden_state:
            data["hidden_states"] = torch.stack([r.state for r in records if r.state is not None]).unsqueeze(0)

    def _statistics(self) -> Result:
        job = self._job
        enqueued = job.time_enqueue or 0.0
        last = job.time_last_token or job.time_first_token or job.time_first_prefill or enqueued
        prefill = job.time_first_prefill or last
        first = job.time_first_token or last
        statistics: Result = {
            "full_completion": job.full_completion,
            "new_tokens": max(0, job.new_tokens),
            "prompt_tokens": job.prompt_tokens,
            "time_enqueued": prefill - enqueued,
            "time_prefill": first - prefill,
            "time_generate": last - first,
            "cached_pages": job.cached_pages,
            "cached_tokens": job.cached_tokens,
        }
        if job.drafting:
            statistics["accepted_draft_tokens"] = job.accepted_draft_tokens
            statistics["rejected_draft_tokens"] = job.rejected_draft_tokens
        return statistics


def _ids(records: list[Record]) -> torch.Tensor:
    if len(records) == 1 and records[0].ids is not None:
        return records[0].ids
    return torch.tensor([[r.token for r in records]], dtype=torch.int64)
