"""Turn the prompts of `generate()` into jobs, and the results of those jobs into completions."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from exl_generate.dynamic.job import ExLlamaV2DynamicJob
from exl_generate.dynamic.parameters import seed_of
from exl_generate.errors import JobStateError, RequestError
from exl_generate.sampling import Settings

if TYPE_CHECKING:
    from exl_generate.contracts import OwnTokenizer

__all__ = ["Completions", "build_jobs", "reusable"]


def build_jobs(
    tokenizer: OwnTokenizer,
    prompt: Any,
    *,
    gen_settings: Settings | list[Settings] | None,
    filters: list[Any] | None,
    embeddings: list[Any] | None,
    seed: int | None,
    encode_special_tokens: bool,
    add_bos: bool,
    **kwargs: Any,
) -> list[ExLlamaV2DynamicJob]:
    """Build one job per prompt. Nothing is enqueued, so a rejected prompt leaves nothing behind."""
    prompts = _prompts(prompt)
    listed = isinstance(prompt, list)
    first = seed_of(seed)
    for name, value in (("filters", filters), ("embeddings", embeddings)):
        if value is not None and not isinstance(value, list | tuple):
            raise RequestError(f"{name} is {value!r}; pass a list or None")
    settings = _per_prompt("gen_settings", gen_settings, len(prompts), shared=not isinstance(gen_settings, list))
    all_filters = _per_prompt("filters", filters, len(prompts), shared=not listed or filters is None)
    all_embeddings = _per_prompt("embeddings", embeddings, len(prompts), shared=not listed or embeddings is None)
    unknown = set(kwargs) - _JOB_PARAMETERS
    if unknown:
        raise TypeError(
            f"generate() got unexpected keyword arguments {sorted(unknown)}; jobs take {sorted(_JOB_PARAMETERS)}"
        )
    return [
        ExLlamaV2DynamicJob(
            input_ids=[
                tokenizer.encode(
                    part,
                    encode_special_tokens=encode_special_tokens,
                    add_bos=add_bos,
                    embeddings=all_embeddings[i] or None,
                )
                for part in text
            ],
            gen_settings=settings[i],
            filters=all_filters[i],
            embeddings=all_embeddings[i],
            seed=None if first is None else first + i,
            **kwargs,
        )
        for i, text in enumerate(prompts)
    ]


class Completions:
    """Collects the results of the jobs of one `generate()` call."""

    def __init__(self, prompt: Any, jobs: list[ExLlamaV2DynamicJob], completion_only: bool) -> None:
        self._listed = isinstance(prompt, list)
        self._prompts = _prompts(prompt)
        self._jobs = jobs
        self._completion_only = completion_only
        self._last: dict[ExLlamaV2DynamicJob, dict[str, Any]] = {}

    def take(self, result: dict[str, Any]) -> None:
        """Keep the last result of a job."""
        if result["eos"]:
            self._last[result["job"]] = result

    def answer(self, return_last_results: bool) -> Any:
        """Return the value of `generate()`.

        Raises the first job's error, unless the caller asked for the last results.
        """
        if len(self._last) < len(self._jobs):
            raise JobStateError("the queue was cleared while these prompts were running")
        last = [self._last[job] for job in self._jobs]
        if not return_last_results:
            for result in last:
                if "exception" in result:
                    raise result["exception"]
        prefixes = ["" if self._completion_only else prompt[0] for prompt in self._prompts]
        texts = [prefix + result["full_completion"] for prefix, result in zip(prefixes, last, strict=True)]
        if self._listed:
            return (texts, last) if return_last_results else texts
        return (texts[0], last[0]) if return_last_results else texts[0]


_JOB_PARAMETERS = frozenset(inspect.signature(ExLlamaV2DynamicJob).parameters) - {
    "input_ids",
    "gen_settings",
    "filters",
    "embeddings",
    "seed",
}


def _prompts(prompt: Any) -> list[tuple[str, ...]]:
    """Each prompt as a tuple: (prompt,) or, for CFG, (positive, negative)."""
    prompts = [p if isinstance(p, tuple) else (p,) for p in (prompt if isinstance(prompt, list) else [prompt])]
    for texts in prompts:
        if not 1 <= len(texts) <= 2 or not all(isinstance(text, str) for text in texts):
            kinds = ", ".join(type(text).__name__ for text in texts)
            raise RequestError(f"a prompt is ({kinds}); pass a str, a pair of str for CFG, or a list of those")
        for text in texts:
            if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
                raise RequestError(
                    f"the prompt {text[:40]!r} holds an unpaired surrogate, which has no UTF-8; decode it first"
                )
    return prompts


def _per_prompt(name: str, value: Any, count: int, *, shared: bool) -> list[Any]:
    if shared:
        return [value] * count
    if not isinstance(value, list) or len(value) != count:
        raise RequestError(f"{name} must be a list with one entry for each of the {count} prompts")
    return value


def reusable(name: str, value: Iterable[Any] | None) -> list[Any] | str | None:
    """Return the value as a list that several jobs can read. A lone string stays a string: the job rejects it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {value!r}; pass a list")
    return list(value)
