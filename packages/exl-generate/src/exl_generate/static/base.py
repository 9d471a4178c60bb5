"""`ExLlamaV2BaseGenerator`: prompts in, texts out."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Sequence
from operator import index
from typing import Any, cast

import torch

from exl_generate.contracts import Cache, Model, OwnModel, OwnTokenizer, Tokenizer
from exl_generate.dynamic import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.dynamic.limits import check_part
from exl_generate.dynamic.parameters import check_abort_event, count_of, seed_of
from exl_generate.dynamic.sequence import EMBEDDING_INDEX
from exl_generate.errors import CapacityError, RequestError
from exl_generate.interrupts import defer_sigint
from exl_generate.sampling import Settings
from exl_generate.static.rows import one_row, page_size_of

__all__ = ["ExLlamaV2BaseGenerator", "eos_ids"]

#: Marks the place of `input_embeddings` in a prompt.
MARKER = "{{EMBED_HERE}}"


class ExLlamaV2BaseGenerator:
    """Complete one prompt or a batch of prompts.

    Every prompt is a request of its own on the dynamic generator's engine. So batches need no padding, and a prompt's
    text does not depend on the others. `sequence_ids` holds all ids of the last call, int64 [B, n], left-padded with
    the pad id (0 if there is none).

    Args:
        model: A loaded model.
        cache: A cache of the model.
        tokenizer: The model's tokenizer.
    """

    def __init__(self, model: Model, cache: Cache, tokenizer: Tokenizer) -> None:
        check_part("cache", cache, Cache)
        # The parts belong together, as the caller says; model and tokenizer check what they are given.
        self.model = cast("OwnModel", model)
        self.cache = cache
        self.tokenizer = cast("OwnTokenizer", tokenizer)
        self.sequence_ids: torch.Tensor | None = None
        self.abort_event: threading.Event | None = None
        #: prompt tokens that the last call cut off on the left, per prompt
        self.truncated_tokens: list[int] = []
        self._engine: ExLlamaV2DynamicGenerator | None = None

    def __repr__(self) -> str:
        held = 0 if self.sequence_ids is None else self.sequence_ids.shape[-1]
        return f"{type(self).__name__}({held} of {self.limit} tokens held)"

    @property
    def limit(self) -> int:
        """Longest sequence, prompt and completion together: the shorter limit of model and cache."""
        return int(min(self.model.config.max_seq_len, self.cache.max_seq_len))

    def warmup(self) -> None:
        """Run the model once, so that lazily built state exists."""
        engine = self.engine()
        engine.generate("a", 1, add_bos=True)
        engine.reset_page_table()

    def full(self) -> bool:
        """Whether the last sequence has reached the limit of model or cache; False before the first one."""
        return self.sequence_ids is not None and self.sequence_ids.shape[-1] >= self.limit

    def engine(self) -> ExLlamaV2DynamicGenerator:
        """Return the dynamic generator over all rows of the cache."""
        if self._engine is None:
            self._engine = ExLlamaV2DynamicGenerator(
                self.model, one_row(self.cache), self.tokenizer, page_size=page_size_of(self.cache), max_q_size=1
            )
        return self._engine

    def generate_simple(
        self,
        prompt: str | list[str],
        gen_settings: Settings,
        num_tokens: int,
        seed: int | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        loras: Any = None,
        stop_token: int | None = -1,
        add_bos: bool = False,
        abort_event: threading.Event | None = None,
        input_embeddings: torch.Tensor | None = None,
        completion_only: bool = False,
        filters: Sequence[Any] | None = None,
        filter_prefer_eos: bool = False,
    ) -> Any:
        """Complete `prompt`, a str or a list of str; returns the same shape.

        Args:
            prompt: A text or a list of texts. A prompt without room for `num_tokens` is cut on the left, with a
                warning; `truncated_tokens` holds the number of removed tokens.
            gen_settings: Sampler settings.
            num_tokens: Most tokens sampled per prompt, a healed one included.
            seed: Prompt i draws with `seed` + i. None draws a seed from the operating system.
            token_healing: Sample the last token of the prompt again, among tokens that begin with its text.
            encode_special_tokens: Special tokens in a prompt's text become their ids.
            decode_special_tokens: Special tokens have their text in the completion.
            loras: An adapter or a list of adapters.
            stop_token: A token id; -1 means every EOS of the tokenizer, None means none.
            add_bos: Put the BOS token in front of each prompt.
            abort_event: When it is set, the text so far is returned ("" if there is none).
            input_embeddings: float [B, m, hidden]: hidden states for m tokens at the marker {{EMBED_HERE}}, which each
                prompt then holds once. Spaces and tabs around the marker are dropped.
            completion_only: Leave the prompt out of the returned text.
            filters: Filters for every prompt, or one list per prompt.
            filter_prefer_eos: Choose a stop token as soon as the filters allow one.

        Raises:
            RequestError: a parameter is not valid.
            CapacityError: `num_tokens` does not fit the model or the cache.
        """
        check_abort_event(abort_event)
        first_seed, num_tokens = seed_of(seed), count_of("num_tokens", num_tokens)
        prompts = prompt if isinstance(prompt, list) else [prompt]
        lists = _filters_per_prompt(filters, len(prompts))
        embedded = self._embeddings(input_embeddings, prompts)
        encoded = [
            self._encode(text, encode_special_tokens, add_bos, one) for text, one in zip(prompts, embedded, strict=True)
        ]
        rows = [self._fit(ids, num_tokens) for ids in encoded]
        self.truncated_tokens = [cut for _, cut in rows]
        if any(self.truncated_tokens):
            warnings.warn(
                f"prompts were cut on the left by {self.truncated_tokens} tokens to fit {self.limit}", stacklevel=2
            )
        jobs = [
            ExLlamaV2DynamicJob(
                ids,
                num_tokens - int(bool(token_healing) and ids.shape[1] > 1),
                gen_settings=gen_settings,
                seed=None if first_seed is None else first_seed + i,
                stop_conditions=self._stops(stop_token),
                decode_special_tokens=decode_special_tokens,
                filters=lists[i],
                filter_prefer_eos=filter_prefer_eos,
                token_healing=token_healing,
                loras=[] if loras is None else loras,
                embeddings=None if embedded[i] is None else [embedded[i]],
            )
            for i, (ids, _) in enumerate(rows)
        ]
        texts = self._run(jobs, abort_event)
        if texts is None:
            texts = [""] * len(jobs)
        elif not completion_only:
            shown = [self.tokenizer.decode(ids[0][ids[0] < EMBEDDING_INDEX], decode_special_tokens) for ids, _ in rows]
            texts = [before + text for before, text in zip(shown, texts, strict=True)]
        return texts if isinstance(prompt, list) else texts[0]

    def _run(self, jobs: list[ExLlamaV2DynamicJob], abort_event: threading.Event | None) -> list[str] | None:
        """Return the completions of all jobs; None if aborted before the first token."""
        engine = self.engine()
        aborted = False
        last: dict[ExLlamaV2DynamicJob, dict[str, Any]] = {}
        with defer_sigint() as section:  # delivers a Ctrl-C between steps and leaves no job behind
            try:
                engine.enqueue(jobs)
                while engine.num_remaining_jobs():
                    if abort_event is not None and abort_event.is_set():
                        aborted = True
                        break
                    last.update((result["job"], result) for result in engine.iterate() if result["eos"])
                    section.deliver()
            finally:
                engine.clear_queue()
        for result in last.values():
            if "exception" in result:
                raise result["exception"]
        self.sequence_ids = self._padded([job.sequence.ids for job in jobs])
        if aborted and not any(job.new_tokens > 0 for job in jobs):
            return None
        return [job.full_completion for job in jobs]

    def _padded(self, rows: list[Any]) -> torch.Tensor:
        pad = max(0, self.tokenizer.pad_token_id)
        ids = torch.full((len(rows), max(map(len, rows), default=0)), pad, dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, ids.shape[1] - len(row) :] = torch.from_numpy(row.copy())
        return ids.masked_fill(ids >= EMBEDDING_INDEX, pad)

    def _encode(self, text: str, special: bool, add_bos: bool, embedding: Any) -> torch.Tensor:
        if not isinstance(text, str):
            raise RequestError(f"prompt holds a {type(text).__name__}; pass a str or a list of str")
        if embedding is None:
            return self.tokenizer.encode(text, add_bos, encode_special_tokens=special)
        before, after = text.split(MARKER)
        front = self.tokenizer.encode(before.rstrip(" \t"), add_bos, encode_special_tokens=special)
        back = self.tokenizer.encode(after.lstrip(" \t"), encode_special_tokens=special)
        return torch.cat([front, torch.tensor([embedding.get_ids()], dtype=torch.int64), back], dim=1)

    def _embeddings(self, rows: torch.Tensor | None, prompts: list[str]) -> list[Any]:
        """Return one embedding per prompt, or None for each."""
        if rows is None:
            return [None] * len(prompts)
        if not isinstance(rows, torch.Tensor) or rows.dim() != 3 or rows.shape[0] != len(prompts):
            shape = list(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
            raise RequestError(f"input_embeddings has shape {shape}; pass [{len(prompts)} prompts, m, hidden]")
        for text in prompts:
            if isinstance(text, str) and text.count(MARKER) != 1:
                raise RequestError(f"the prompt holds {MARKER} {text.count(MARKER)} times; it marks one place")
        from exl_core import ExLlamaV2MMEmbedding

        return [ExLlamaV2MMEmbedding(self.model, row) for row in rows]

    def _fit(self, ids: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, int]:
        if not 1 <= num_tokens < self.limit:
            raise CapacityError(
                f"num_tokens is {num_tokens}; it must be from 1 to {self.limit - 1}, one below the limit"
            )
        cut = max(0, ids.shape[1] + num_tokens - self.limit)
        return ids[:, cut:], cut

    def _stops(self, stop_token: int | None) -> list[int]:
        if stop_token is None:
            return []
        given: object = stop_token
        if not isinstance(stop_token, bool):
            with contextlib.suppress(TypeError):  # `count_of` raises the error
                given = index(stop_token)  # also of numpy's numbers and of an id out of a tensor
        return eos_ids(self.tokenizer) if isinstance(given, int) and given == -1 else [count_of("stop_token", given)]


def eos_ids(tokenizer: Tokenizer) -> list[int]:
    """Return every id that ends a text of this tokenizer: a model may have several."""
    first = tokenizer.eos_token_id
    every = [*([] if first is None else [first]), *tokenizer.eos_token_ids]
    return sorted({int(i) for i in every if i >= 0})


def _filters_per_prompt(filters: Sequence[Any] | None, count: int) -> list[list[Any] | None]:
    if filters is not None and not isinstance(filters, list | tuple):
        raise RequestError(f"filters is a {type(filters).__name__}; pass a list of filters, or of one list per prompt")
    given = list(filters or [])
    if given and all(f is None or isinstance(f, list | tuple) for f in given):
        if len(given) != count:
            raise RequestError(f"filters holds {len(given)} lists for {count} prompts; give one list per prompt")
        return [None if f is None else list(f) for f in given]
    return [given or None] * count
