"""One request: what was asked for, and how far it has come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from exl_filters import FilterStack
from exl_generate.dynamic.detokenize import PieceTable
from exl_generate.dynamic.output import Match, Record, TextStream
from exl_generate.dynamic.pages import PageTable
from exl_generate.dynamic.request import count_of, sequences_of, stop_conditions_of, strings_of
from exl_generate.dynamic.results import Results
from exl_generate.dynamic.sequence import Sequence
from exl_generate.dynamic.stopping import Automaton
from exl_generate.errors import NoCandidatesError, RequestError
from exl_generate.sampling import Constraint, ExLlamaV2PostSamplingResult, RequestSampler, Sample, Settings, Vocabulary
from exl_kernels.errors import UnsupportedError

if TYPE_CHECKING:
    from exl_generate.contracts import Tokenizer
    from exl_generate.dynamic.generator import ExLlamaV2DynamicGenerator

__all__ = ["ExLlamaV2DynamicJob"]

#: A job that keeps running into its banned strings ends with an error after this many rewinds.
MAX_REWINDS = 4096

Result = dict[str, Any]


class ExLlamaV2DynamicJob:
    """A request for one completion; single use. Parameters and result dicts: spec/generators.md 3.3 and 3.14.

    `input_ids`: int64 [1, n] on the CPU, n >= 1. `stop_conditions`: ids and strings; None means none at all, not
    even EOS. Settings are copied: later changes to the object do not reach this job, and jobs may share one object.
    Raises `RequestError` for malformed parameters and `UnsupportedError` for features that are not built yet.
    """

    def __init__(
        self,
        input_ids: torch.Tensor | SequenceOf[torch.Tensor],
        max_new_tokens: int,
        min_new_tokens: int = 0,
        max_skips: int | None = 4,
        gen_settings: Settings | None = None,
        seed: int | None = None,
        stop_conditions: Iterable[int | str] | None = None,
        decode_special_tokens: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        return_probs: bool = False,
        filters: SequenceOf[object] | None = None,
        filter_prefer_eos: bool = False,
        token_healing: bool = False,
        identifier: object = None,
        banned_strings: Iterable[str] | None = None,
        embeddings: SequenceOf[object] | None = None,
    ) -> None:
        if embeddings:
            raise UnsupportedError("embeddings are not supported yet; pass text prompts")
        self.max_new_tokens = count_of("max_new_tokens", max_new_tokens)
        self.min_new_tokens = count_of("min_new_tokens", min_new_tokens)
        self.max_skips = None if max_skips is None else count_of("max_skips", max_skips)
        self.return_top_tokens = count_of("return_top_tokens", return_top_tokens)
        self.return_logits = return_logits
        self.return_probs = return_probs
        if gen_settings is not None and not isinstance(gen_settings, Settings):
            raise RequestError(
                f"gen_settings is a {type(gen_settings).__name__}; pass ExLlamaV2Sampler.Settings or None"
            )
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise RequestError(f"seed is {seed!r}; pass an int or None")
        self.gen_settings = (Settings() if gen_settings is None else gen_settings).clone()
        self.gen_settings.validate()
        self.seed = seed
        self.identifier = identifier
        self.decode_special_tokens = decode_special_tokens
        self.stop_tokens, self.stop_strings = stop_conditions_of(stop_conditions)
        self.banned_strings = strings_of("banned_strings", banned_strings)
        self.filters = list(filters or [])
        self.filter_prefer_eos = filter_prefer_eos
        rows = sequences_of(input_ids)
        if (len(rows) == 2) != (self.gen_settings.cfg_scale is not None):
            raise RequestError(
                f"input_ids holds {len(rows)} sequence(s) and cfg_scale is {self.gen_settings.cfg_scale}: a pair of "
                "prompts (positive, negative) and gen_settings.cfg_scale go together"
            )
        #: the last id of the prompt, which the first sampled token replaces and must begin with; None = no healing
        self.healed_id = int(rows[0][-1]) if token_healing and min(map(len, rows)) > 1 else None
        self.sequences = [Sequence(row if self.healed_id is None else row[:-1]) for row in rows]

        self.serial_number: int | None = None
        #: tokens generated so far, a healed one not counted
        self.new_tokens = -self.healing
        self.skips = 0
        self.is_finished = False
        #: a paused job is prefilled but not decoded
        self.paused = False
        #: ids to avoid in the next step, for callers that decide step by step
        self.avoided: tuple[int, ...] = ()
        self.accepted_draft_tokens = 0
        self.drafted_tokens = 0
        self.drafting = False
        #: guesses worth making in the next step, by how the last ones fared
        self.draft_length = 0
        self.total_pages = 0
        self.time_enqueue: float | None = None
        self.time_first_prefill: float | None = None
        self.time_first_token: float | None = None
        self.time_last_token: float | None = None
        #: generated position -> first tokens of banned strings met there, and what hooks had replaced by them
        self._explored: dict[int, set[int]] = {}
        self._rewinds = 0
        self._tokenizer: Tokenizer | None = None
        self._sampler: RequestSampler | None = None
        self._filters: FilterStack | None = None
        self._filters_begun = False
        self._most_drafts = 0
        self._output: TextStream | None = None
        self._results = Results(self)

    @property
    def sequence(self) -> Sequence:
        """The sequence that is decoded: the only one, or the positive prompt."""
        return self.sequences[0]

    @property
    def full_completion(self) -> str:
        """All text released so far."""
        return "" if self._output is None else self._output.full_text

    @property
    def effective_seed(self) -> int | None:
        """The seed in use, drawn from the operating system if none was given; None before the job is enqueued."""
        return None if self._sampler is None else self._sampler.random.seed

    @property
    def prefilled(self) -> bool:
        return all(sequence.prefilled for sequence in self.sequences)

    @property
    def cached_pages(self) -> int:
        return sum(s.cached_pages for s in self.sequences) // len(self.sequences)

    @property
    def cached_tokens(self) -> int:
        return sum(s.cached_tokens for s in self.sequences) // len(self.sequences)

    @property
    def healing(self) -> int:
        """1 for a job that regenerates the last token of its prompt, else 0."""
        return int(self.healed_id is not None)

    @property
    def generated(self) -> int:
        """Tokens generated so far, a healed one included: the place of the next one."""
        return self.new_tokens + self.healing

    @property
    def prompt_tokens(self) -> int:
        return self.sequence.prompt_length + self.healing

    @property
    def remaining_tokens(self) -> int:
        return self.max_new_tokens - self.new_tokens

    # ---- life ------------------------------------------------------------------------------------------------------

    def attach(self, generator: ExLlamaV2DynamicGenerator, serial: int) -> None:
        """Become part of a generator's queue: build what needs its tokenizer. Fails as a whole or not at all."""
        self._tokenizer = generator.tokenizer
        self.draft_length = generator.num_draft_tokens
        self._most_drafts = generator.num_draft_tokens
        self.drafting = generator.num_draft_tokens > 0
        vocabulary = Vocabulary.of(generator.tokenizer)
        sampler = RequestSampler(self.gen_settings, vocabulary, self.seed)
        output = TextStream(
            PieceTable.of(generator.tokenizer, self.decode_special_tokens),
            Automaton(self.stop_strings),
            Automaton(self.banned_strings, fold=True),
            skip=self._healed_bytes(),
        )
        if self.filters:
            self._filters = FilterStack(
                self.filters,
                vocab_size=vocabulary.size,
                stop_ids=self.stop_tokens,
                logits_width=generator.padded_vocab_size,
                prefer_eos=self.filter_prefer_eos,
            )
        for sequence in self.sequences:
            sequence.prepare(generator.page_table, generator.namespace)
        self._sampler, self._output = sampler, output
        self.serial_number = serial
        self.time_enqueue = time.monotonic()

    def forget_generator(self) -> None:
        """Undo `attach` for a job that was refused, so that it may be enqueued elsewhere."""
        self.serial_number = None
        for sequence in self.sequences:
            sequence.labels.clear()
        if self._filters is not None:
            self._filters.close()
            self._filters = None

    def detach(self) -> None:
        """Give back pages and filters; the job is over, whatever the reason."""
        self.is_finished = True
        for sequence in self.sequences:
            sequence.release()
        filters, self._filters = self._filters, None
        if filters is not None:
            with contextlib.suppress(Exception):  # a filter that cannot be closed is nobody else's problem
                filters.close()

    def count_pages(self, page_size: int) -> int:
        """Pages under all sequences at their longest; pages of a common prefix count once."""
        shared = {label for sequence in self.sequences for label in sequence.labels}
        return len(shared) + self.own_pages(page_size)

    def own_pages(self, page_size: int) -> int:
        """Those of them that no other job can share: behind the full pages of the prompt."""
        new = self.max_new_tokens + self.healing
        return sum(sequence.pages_needed(new, page_size) - len(sequence.labels) for sequence in self.sequences)

    def missing_pages(self, table: PageTable) -> int:
        """Pages that starting now would take away from others: all but those that running jobs hold already."""
        held = {
            label
            for sequence in self.sequences
            for label, ids in sequence.context_pages()
            if (page := table.find(label, ids)) is not None and page.ref_count > 0
        }
        return self.count_pages(table.page_size) - len(held)

    def acquire_pages(self) -> None:
        self.total_pages = 0
        for sequence in self.sequences:
            self.total_pages += sequence.acquire(self.max_new_tokens + self.healing)

    def mark_prefill(self) -> None:
        if self.time_first_prefill is None:
            self.time_first_prefill = time.monotonic()

    def mark_decode(self) -> None:
        self.mark_prefill()
        if self.time_first_token is None:
            self.time_first_token = time.monotonic()

    # ---- one token -------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """The K/V of all ids so far have been computed."""
        for sequence in self.sequences:
            sequence.commit(len(sequence))

    def advance(self, logits: list[torch.Tensor], guess: int | None, deliver: Callable[[list[Result]], None]) -> bool:
        """Choose and take in one token, given float32 logits [Vp] of each sequence. True if it is the one that was
        guessed and stays, so that what was evaluated behind it is worth something."""
        drawn = self._sample(logits)
        sample, feed = self._hooked(drawn, logits[0])
        held, rewinds = sample.token == guess, self._rewinds
        self.accepted_draft_tokens += held
        deliver([self._accept(self._record(sample, drawn.token, logits[0], feed))])
        return held and rewinds == self._rewinds

    def note_drafts(self, drafted: int) -> None:
        self.drafted_tokens += drafted

    def adapt_drafts(self, drafted: int, accepted: int) -> None:
        """Guess further next time where all guesses held, less far where they did not."""
        if drafted:
            self.draft_length = min(self._most_drafts, accepted + 2)

    @property
    def rejected_draft_tokens(self) -> int:
        return self.drafted_tokens - self.accepted_draft_tokens

    def _sample(self, logits: list[torch.Tensor]) -> Sample:
        assert self._sampler is not None
        explored = self._explored.get(self.generated, set())
        constraint = Constraint(
            mask=self._filter_mask(),
            blocked=tuple(sorted(explored)),
            discouraged=(*self.avoided, *(self.stop_tokens if self.new_tokens < self.min_new_tokens else ())),
            prefix=self._healing_candidates() if self.generated < self.healing else None,
        )
        return self._sampler.sample(
            logits[0].numpy(),
            self.sequence.ids,
            self.generated,
            constraint,
            negative=logits[1].numpy() if len(logits) > 1 else None,
            attempt=len(explored),
            top_n=self.return_top_tokens,
        )

    def _hooked(self, sample: Sample, logits: torch.Tensor) -> tuple[Sample, bool]:
        """What the post-sampling hooks make of a sample, and whether filters are to see it."""
        if not self.gen_settings.post_sampling_hooks:
            return sample, True
        told = self.return_top_tokens > 0
        seen = ExLlamaV2PostSamplingResult(
            sampled_token=torch.tensor([[sample.token]]),
            sampled_prob=torch.tensor([[sample.probability]]),
            candidate_tokens=torch.from_numpy(sample.top_tokens)[None, None] if told else None,
            candidate_probs=torch.from_numpy(sample.top_probabilities)[None, None] if told else None,
            logits=logits[None, None].clone(),
        )
        for hook in self.gen_settings.post_sampling_hooks:
            hook(seen)
        token = -1 if seen.sampled_token is None else int(seen.sampled_token.reshape(-1)[0])
        if not 0 <= token < len(logits):
            raise RequestError(
                f"a post-sampling hook chose token {token}; the vocabulary has ids 0 to {len(logits) - 1}"
            )
        return replace(sample, token=token), seen.feed_filters

    def _filter_mask(self) -> NDArray[np.int32] | None:
        if self._filters is None:
            return None
        if not self._filters_begun:
            self._filters.begin(self._healed_bytes() if self.healing else "")
            self._filters_begun = True
        return self._filters.next_mask()

    def _accept(self, record: Record) -> Result:
        """Take a token in and say what may be shown: stop token, then text, then filter end, then the limit."""
        assert self._output is not None
        filter_ended = record.fed and self._filters is not None and self._filters.feed(record.token)
        for sequence in self.sequences:
            sequence.append(record.token)
        self.new_tokens += 1
        self.time_last_token = time.monotonic()
        if record.token in self.stop_tokens:
            return self._end("stop_token", token=record)
        match = self._output.push(record)
        if match is not None and match.kind == "ban":
            return self._rewind(match)
        if match is not None:
            return self._end("stop_string", match=match)
        if filter_ended:
            return self._end("end_filter")
        if self.new_tokens >= self.max_new_tokens:
            return self._end("max_new_tokens")
        return self._results.streaming(self._output.release())

    def settle(self) -> None:
        """After a step: the K/V of all ids but the last are computed, and full pages that cannot be rewound are
        shared."""
        assert self._output is not None
        for sequence in self.sequences:
            sequence.publish(len(sequence) - self._output.held_tokens - 1)

    def fail(self, error: BaseException) -> Result:
        """The result of a job that an error ended; what was held is handed over as `held`."""
        reason = {"filter_dead_end": "filter_dead_end"}.get(getattr(error, "code", ""), "error")
        if reason == "error" and type(error).__module__.startswith("exl_filters"):
            reason = "filter_error"
        self.is_finished = True
        held = None if self._output is None else self._output.flush_held()
        return self._results.error(reason, error, held)

    def cancelled(self) -> Result:
        self.is_finished = True
        return self._results.cancelled(None if self._output is None else self._output.flush_held())

    def piece(self, token: int, special: bool | None = None) -> str:
        """Text of one token by itself; `special` None = as this job decodes special tokens."""
        assert self._tokenizer is not None
        table = PieceTable.of(self._tokenizer, self.decode_special_tokens if special is None else special)
        return table[token].decode(errors="replace")

    # ---- results ---------------------------------------------------------------------------------------------------

    def start(self) -> list[Result]:
        """What to say when the job leaves the queue; one that asked for no tokens is done at once."""
        started = self._results.started()
        return [started] if self.max_new_tokens > 0 else [started, self._end("max_new_tokens")]

    def progress(self) -> Result:
        return self._results.prefill()

    def _healed_bytes(self) -> bytes:
        if self.healed_id is None or self._tokenizer is None:
            return b""
        return PieceTable.of(self._tokenizer, self.decode_special_tokens)[self.healed_id]

    def _healing_candidates(self) -> NDArray[np.int64]:
        """Ids whose bytes begin with the removed token's; a token without text can only be itself."""
        assert self.healed_id is not None
        assert self._tokenizer is not None
        prefix = self._healed_bytes()
        if not prefix:
            return np.array([self.healed_id], dtype=np.int64)
        return PieceTable.of(self._tokenizer, self.decode_special_tokens).starting_with(prefix)

    def _record(self, sample: Sample, drawn: int, logits: torch.Tensor, fed: bool) -> Record:
        return Record(
            sample.token,
            sample.probability,
            sample.top_tokens,
            sample.top_probabilities,
            logits.clone() if self.return_logits else None,
            drawn=drawn,
            fed=fed,
        )

    def _end(self, reason: str, token: Record | None = None, match: Match | None = None) -> Result:
        assert self._output is not None
        self.is_finished = True
        if match is not None:
            released, held_text = self._output.stop_at(match)
            return self._results.end(reason, released, held_text=held_text, string=match.string)
        released = self._output.flush()
        return self._results.end(reason, released, token=token)

    def _rewind(self, match: Match) -> Result:
        """Take a banned string back, exclude the token it began with at that position, and go on from there."""
        assert self._output is not None
        gone, text = self._output.withdraw(match)
        self.new_tokens -= len(gone)
        for sequence in self.sequences:
            sequence.rewind(len(sequence) - len(gone))
        if self._filters is not None:
            self._filters.rewind(sum(record.fed for record in gone))
        for position in [p for p in self._explored if p > self.generated]:
            del self._explored[position]
        self._explored.setdefault(self.generated, set()).update((gone[0].token, gone[0].drawn))
        self._rewinds += 1
        if self._rewinds > MAX_REWINDS:
            raise NoCandidatesError(
                f"gave up after {MAX_REWINDS} rewinds of banned strings, the last of them {match.string!r}"
            )
        return self._results.streaming(self._output.release(), suppressed=(text, gone))
