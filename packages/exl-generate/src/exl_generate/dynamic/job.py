"""One request: what was asked for, and how far it has come."""

from __future__ import annotations

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
from exl_generate.dynamic.draft_length import Acceptance
from exl_generate.dynamic.events import FIRST, HELD, STARTED, Event, Events, aborted, ended
from exl_generate.dynamic.output import Match, Record, TextStream
from exl_generate.dynamic.pages import PageTable, namespace_digest
from exl_generate.dynamic.request import (
    adapters_of,
    count_of,
    embeddings_of,
    flag_of,
    keys_of,
    listed,
    pictures_of,
    salt_of,
    seed_of,
    sequences_of,
    stop_conditions_of,
    strings_of,
)
from exl_generate.dynamic.sequence import EMBEDDING_INDEX, Sequence, full_pages
from exl_generate.dynamic.stopping import automaton_of
from exl_generate.errors import NoCandidatesError, RequestError
from exl_generate.interrupts import as_job_error, interruptible
from exl_generate.sampling import (
    UNCONSTRAINED,
    Constraint,
    Draw,
    ExLlamaV2PostSamplingResult,
    RequestSampler,
    Sample,
    Settings,
    Vocabulary,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from exl_generate.contracts import Tokenizer
    from exl_generate.dynamic.context import JobContext
    from exl_generate.dynamic.runner import Window

__all__ = ["ExLlamaV2DynamicJob"]

#: A job that keeps running into its banned strings ends with an error after this many rewinds.
MAX_REWINDS = 4096


class ExLlamaV2DynamicJob:
    """A request for one completion; single use. Parameters and result dicts: spec/generators.md 3.3 and 3.14.

    `input_ids`: int64 [1, n] on the CPU, n >= 1. `stop_conditions`: ids and strings; None means none at all, not
    even EOS. Settings are copied: later changes to the object do not reach this job, and jobs may share one object. (A
    class of settings may choose otherwise by its `for_job` and `revision`: that of exl-compat does.)
    Raises `RequestError` for malformed parameters.

    Beyond exllamav2: `loras`, the adapters of this job (None = those of the generator when the job is queued, [] =
    none); `max_rq_tokens`, new tokens to reserve pages for at a time (None = for `max_new_tokens`): a job that has used
    them up while others wait goes back to the queue and is resumed, in one continuous stream; `return_hidden_state`,
    the last hidden state behind each token's logits as `hidden_states` [1, k, hidden]; `cache_salt`, at most 256 bytes:
    jobs with different salts share no cached pages, so that nobody learns by timing what another has asked.
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
        embeddings: SequenceOf[Any] | None = None,
        *,
        loras: object = None,
        max_rq_tokens: int | None = None,
        return_hidden_state: bool = False,
        cache_salt: bytes = b"",
    ) -> None:
        self.max_new_tokens = count_of("max_new_tokens", max_new_tokens)
        self.min_new_tokens = count_of("min_new_tokens", min_new_tokens)
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens {self.max_new_tokens}; lower it"
            )
        self.max_skips = None if max_skips is None else count_of("max_skips", max_skips)
        self.return_top_tokens = count_of("return_top_tokens", return_top_tokens)
        self.return_logits = flag_of("return_logits", return_logits)
        self.return_probs = flag_of("return_probs", return_probs)
        if gen_settings is not None and not isinstance(gen_settings, Settings):
            raise RequestError(
                f"gen_settings is a {type(gen_settings).__name__}; pass ExLlamaV2Sampler.Settings or None"
            )
        given = Settings() if gen_settings is None else gen_settings
        given.validate()  # before a copy is made, which has the fields alone
        self.gen_settings = given.for_job()
        self.seed = seed_of(seed)
        self.identifier = identifier
        self.decode_special_tokens = flag_of("decode_special_tokens", decode_special_tokens)
        self.stop_tokens, self.stop_strings = stop_conditions_of(stop_conditions)
        self.banned_strings = strings_of("banned_strings", banned_strings)
        self.filters = listed("filters", filters)
        self.filter_prefer_eos = flag_of("filter_prefer_eos", filter_prefer_eos)
        rows = sequences_of(input_ids)
        if (len(rows) == 2) != (self.gen_settings.cfg_scale is not None):
            raise RequestError(
                f"input_ids holds {len(rows)} sequence(s) and cfg_scale is {self.gen_settings.cfg_scale}: a pair of "
                "prompts (positive, negative) and gen_settings.cfg_scale go together"
            )
        self.return_hidden_state = flag_of("return_hidden_state", return_hidden_state)
        self.max_rq_tokens = None if max_rq_tokens is None else count_of("max_rq_tokens", max_rq_tokens)
        if self.max_rq_tokens == 0:
            raise RequestError("max_rq_tokens is 0; reserve for at least 1 token, or pass None to reserve for all")
        self.cache_salt = salt_of(cache_salt)
        #: adapters asked for; None = the generator's
        self.loras = self._asked_loras = adapters_of(loras)
        self.embeddings = embeddings_of(embeddings)
        heal = flag_of("token_healing", token_healing)
        heal = heal and min(map(len, rows)) > 1 and int(max(row[-1] for row in rows)) < EMBEDDING_INDEX
        #: the last id of the prompt, which the first sampled token replaces and must begin with; None = no healing
        self.healed_id = int(rows[0][-1]) if heal else None
        #: 1 for a job that regenerates the last token of its prompt, else 0
        self.healing = int(heal)
        kept = [row[:-1] if heal else row for row in rows]
        self.sequences = [
            Sequence(row, self.embeddings, keys_of(row, self.embeddings), pictures_of(row, self.embeddings))
            for row in kept
        ]
        #: the sequence that is decoded: the only one, or the positive prompt
        self.sequence = self.sequences[0]

        self.serial_number: int | None = None
        #: tokens generated so far, a healed one not counted
        self.new_tokens = -self.healing
        self.skips = 0
        self.is_finished = False
        self.has_failed = False
        #: whether it counts as gone already; the generator takes it out as soon as it can
        self.discarded = False
        #: times it went back to the queue
        self.requeues = 0
        #: a paused job is prefilled but not decoded; `pause` and `unpause` set it
        self.paused = False
        #: ids to avoid in the next step, for callers that decide step by step
        self.avoided: tuple[int, ...] = ()
        self.accepted_draft_tokens = 0
        self.drafted_tokens = 0
        self.drafting = False
        #: how its guesses fare
        self.acceptance = Acceptance(1.0)
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
        #: the arrangement of the model that its pages were named for when it started last, by number
        self._named_in = -1
        self._output: TextStream | None = None
        #: whether its tokens are reported with more than themselves
        self.reports = self.return_probs or self.return_top_tokens > 0 or self.return_logits

    @property
    def full_completion(self) -> str:
        """All text released so far."""
        return "" if self._output is None else self._output.full_text

    @property
    def effective_seed(self) -> int | None:
        """The seed in use, drawn from the operating system if none was given; None before the job is enqueued."""
        return None if self._sampler is None else self._sampler.random.seed

    @property
    def settings(self) -> Settings:
        """The settings in force: those of the last `refresh`."""
        return self.gen_settings if self._sampler is None else self._sampler.settings

    @property
    def reads_logits_once(self) -> bool:
        """Whether nobody but the sampler of a GPU reads its logits, and that at once."""
        return (
            self._sampler is not None
            and self._sampler.never_left_to_cpu
            and not (self.return_logits or self.return_top_tokens or self.settings.post_sampling_hooks)
        )

    @property
    def prefilled(self) -> bool:
        first = self.sequence
        if first.kv_position < first.prefill_end:
            return False
        return len(self.sequences) == 1 or all(sequence.prefilled for sequence in self.sequences)

    @property
    def cached_pages(self) -> int:
        return sum(s.cached_pages for s in self.sequences) // len(self.sequences)

    @property
    def cached_tokens(self) -> int:
        return sum(s.cached_tokens for s in self.sequences) // len(self.sequences)

    @property
    def non_sequential_pages(self) -> int:
        """Pages taken so far that do not follow, in the cache, the page before them in their sequence."""
        return sum(s.non_sequential_pages for s in self.sequences)

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

    def pause(self) -> None:
        """Generate nothing from the next round on; prompt, pages and place in the batch stay. May be called from any
        thread and in any state: a job that is paused before it starts computes its prompt and waits then, and nothing
        changes for one that has ended. `cancel` works as ever."""
        if not self.is_finished:
            self.paused = True

    def unpause(self) -> None:
        """Go on where `pause` stopped, with the tokens that would have come without it."""
        self.paused = False

    def attach(self, context: JobContext, serial: int) -> None:
        """Become part of a generator's queue: build what needs its tokenizer. Fails as a whole or not at all."""
        self._tokenizer = context.tokenizer
        self.acceptance = context.new_acceptance()
        self.drafting = context.num_draft_tokens > 0
        vocabulary = Vocabulary.of(context.tokenizer)
        sampler = RequestSampler(self.gen_settings, vocabulary, self.seed)
        output = TextStream(
            PieceTable.of(context.tokenizer, self.decode_special_tokens),
            automaton_of(tuple(self.stop_strings)),
            automaton_of(tuple(self.banned_strings), fold=True),
            skip=self._healed_bytes(),
        )
        if self.filters:
            with interruptible():
                self._filters = FilterStack(
                    self.filters,
                    vocab_size=vocabulary.size,
                    stop_ids=self.stop_tokens,
                    logits_width=context.padded_vocab_size,
                    prefer_eos=self.filter_prefer_eos,
                )
        if self.loras is None:
            self.loras = tuple(context.current_loras)
        for lora in self.loras:
            if hasattr(lora, "check_usable"):
                lora.check_usable(context.model)
        for sequence in self.sequences:
            sequence.loras = self.loras
        self._name_pages(context)
        self._sampler, self._output = sampler, output
        self.serial_number = serial
        self.time_enqueue = time.monotonic()

    def before_start(self, context: JobContext) -> None:
        """A job starts, for the first time or again, with names of the arrangement that its model has now: another may
        have been met since, also while it was on its way into the queue."""
        if self._named_in != context.arrangements:
            self._name_pages(context)

    def part_pages(self, context: JobContext) -> None:
        """Its model has been changed while it runs: it keeps what it has, and pages from here on are its own alone.

        Prompt pages that it holds together with others which run as well are filled by whoever comes first, as ever:
        none of them gets K/V of an arrangement that it has not run under itself.
        """
        root = self._namespace(context)
        for number, sequence in enumerate(self.sequences):
            own = (root.hex(), f"job {self.serial_number}", f"sequence {number}")
            sequence.part(namespace_digest(own))

    def _namespace(self, context: JobContext) -> bytes:
        root = context.namespace_of(self.loras or ())
        return namespace_digest((root.hex(), f"salt {self.cache_salt.hex()}")) if self.cache_salt else root

    def _name_pages(self, context: JobContext) -> None:
        self._named_in = context.arrangements  # first: who meets another meanwhile sees that this is of before
        root = self._namespace(context)
        for sequence in self.sequences:
            sequence.prepare(context.page_table, root)

    def forget_generator(self) -> None:
        """Undo `attach`, however far it came, for a job that was refused, so that it may be enqueued elsewhere."""
        self.serial_number = None
        self.loras = self._asked_loras
        for sequence in self.sequences:
            sequence.labels.clear()
        filters, self._filters = self._filters, None
        if filters is not None:
            _close(filters)

    def detach(self) -> None:
        """Give back pages and filters; the job is over, whatever the reason."""
        self.is_finished = True
        for sequence in self.sequences:
            sequence.release()
        filters, self._filters = self._filters, None
        if filters is not None:
            _close(filters)

    def count_pages(self, page_size: int) -> int:
        """Pages under all sequences at their longest; pages of a common prefix count once."""
        return full_pages(self.sequences) + self.own_pages(page_size, self.max_new_tokens - self.new_tokens)

    def own_pages(self, page_size: int, new: int | None = None) -> int:
        """Pages for `new` more tokens (None = as many as it reserves at once) that no other job can share: those behind
        the full pages of the prompt."""
        new = self._share if new is None else new
        return sum(sequence.pages_needed(new, page_size) - len(sequence.labels) for sequence in self.sequences)

    def missing_pages(self, table: PageTable) -> int:
        """Pages that starting now would take away from others: all but those that running jobs hold already."""
        return full_pages(self.sequences) - full_pages(self.sequences, table) + self.own_pages(table.page_size)

    def uncached_tokens(self, table: PageTable) -> int:
        """Prompt tokens, or after `give_way` all, behind the leading full pages that stand in the cache now."""
        size = table.page_size
        return sum(max(0, s.prefill_end - size * table.computed(s.labels)) for s in self.sequences)

    def acquire_pages(self) -> None:
        self.total_pages = 0
        for sequence in self.sequences:
            self.total_pages += sequence.acquire(self._share)

    @property
    def has_room(self) -> bool:
        """Whether the next token has a place in every sequence's pages."""
        if len(self.sequences) == 1:
            return self.sequence.room >= 0
        return all(sequence.room >= 0 for sequence in self.sequences)

    @property
    def room(self) -> int:
        """Tokens that have a place already beside the next step's own."""
        return self.sequence.room if len(self.sequences) == 1 else min(sequence.room for sequence in self.sequences)

    def reserve_more(self, table: PageTable) -> bool:
        """Reserve another share; False if there are not enough free pages for it."""
        missing = [sequence.pages_missing(self._share) for sequence in self.sequences]
        if sum(missing) > table.available:
            return False
        for sequence, count in zip(self.sequences, missing, strict=True):
            sequence.reserve_more(count)
        return True

    def give_way(self) -> None:
        """Give all pages back and be ready to be started again."""
        self.requeues += 1
        for sequence in self.sequences:
            sequence.give_way(self._settled(sequence))

    @property
    def resumed(self) -> bool:
        """Whether it has been started before."""
        return self.requeues > 0

    @property
    def _share(self) -> int:
        """New tokens to reserve pages for at once."""
        left = self.max_new_tokens - self.new_tokens
        return left if self.max_rq_tokens is None else min(left, self.max_rq_tokens)

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

    def refresh(self) -> None:
        """Before a step: take over changes of live settings. Raises `RequestError` for values without meaning."""
        assert self._sampler is not None
        self._sampler.refresh()
        scale = self._sampler.settings.cfg_scale
        if scale is not None and len(self.sequences) == 1:
            raise RequestError(
                f"gen_settings.cfg_scale became {scale} while a job with one prompt runs; it needs a pair of prompts "
                "(positive, negative) from the start, so begin a new job"
            )

    def prefetch(self, pool: Callable[[], Executor]) -> None:
        """Let the filters work while the model runs."""
        if self._filters is not None and self._filters_begun:
            with interruptible():
                self._filters.prefetch(pool())

    def ask(self, windows: list[Window], at: int) -> Draw:
        """What the sampler needs to choose the next token behind position `at` of each sequence's window."""
        assert self._sampler is not None
        if at > 0:  # position 0 keeps what `refresh` found: the engine has planned with it which logits stay
            self.refresh()
        explored = self._explored.get(self.generated)
        return Draw(
            self._sampler,
            windows[0].row(at),
            self.sequence.ids,
            self.generated,
            self._constraint(explored),
            windows[1].row(at) if len(windows) > 1 else None,
            len(explored) if explored else 0,
            self.return_top_tokens,
        )

    def take(self, drawn: Sample, guess: int | None, window: Window, at: int) -> tuple[Event, bool]:
        """Take in a sampled token. Returns what to say, and whether it is the token that was guessed and stays, so that
        what was evaluated behind it is worth something."""
        sample, feed = drawn, True
        if self.settings.post_sampling_hooks:
            sample, feed = self._hooked(drawn, window.row(at))
        held, rewinds = sample.token == guess, self._rewinds
        self.accepted_draft_tokens += held
        record = Record(
            sample.token, sample.probability, sample.top_tokens, sample.top_probabilities, drawn=drawn.token, fed=feed
        )
        record.ids = sample.ids
        if self.return_logits:
            record.logits = window.row(at).cpu().clone()
        if self.return_hidden_state and window.state is not None:
            record.state = window.state[at].cpu().clone()
        event = self._accept(record)
        return event, held and rewinds == self._rewinds

    @property
    def rejected_draft_tokens(self) -> int:
        return self.drafted_tokens - self.accepted_draft_tokens

    def _constraint(self, explored: set[int] | None) -> Constraint:
        mask = None if self._filters is None else self._filter_mask()
        early = self.stop_tokens if self.new_tokens < self.min_new_tokens else ()
        heal = self.new_tokens < 0
        if mask is None and not (explored or early or heal or self.avoided):
            return UNCONSTRAINED
        return Constraint(
            mask=mask,
            blocked=tuple(sorted(explored or ())),
            discouraged=(*self.avoided, *early),
            prefix=self._healing_candidates() if heal else None,
        )

    def _hooked(self, sample: Sample, logits: torch.Tensor) -> tuple[Sample, bool]:
        """What the post-sampling hooks make of a sample, and whether filters are to see it."""
        told = self.return_top_tokens > 0
        seen = ExLlamaV2PostSamplingResult(
            sampled_token=torch.tensor([[sample.token]]),
            sampled_prob=torch.tensor([[sample.probability]]),
            candidate_tokens=torch.from_numpy(sample.top_tokens)[None, None] if told else None,
            candidate_probs=torch.from_numpy(sample.top_probabilities)[None, None] if told else None,
            logits=logits[None, None].cpu().clone(),
        )
        with interruptible():
            for hook in self.settings.post_sampling_hooks:
                hook(seen)
        token = -1 if seen.sampled_token is None else int(seen.sampled_token.reshape(-1)[0])
        if not 0 <= token < len(logits):
            raise RequestError(
                f"a post-sampling hook chose token {token}; the vocabulary has ids 0 to {len(logits) - 1}"
            )
        return replace(sample, token=token, ids=None), seen.feed_filters

    def _filter_mask(self) -> NDArray[np.int32] | None:
        if self._filters is None:
            return None
        with interruptible():
            if not self._filters_begun:
                self._filters.begin(self._healed_bytes() if self.healing else "")
                self._filters_begun = True
            return self._filters.next_mask()

    def _filters_end(self, record: Record) -> bool:
        """Let the filters see a token; True if they say that it was the last."""
        if self._filters is None or not record.fed:
            return False
        with interruptible():
            return self._filters.feed(record.token)

    def _accept(self, record: Record) -> Event:
        """Take a token in and say what may be shown: stop token, then text, then filter end, then the limit."""
        assert self._output is not None
        filter_ended = self._filters is not None and self._filters_end(record)
        for sequence in self.sequences:
            sequence.append(record.token)
        self.new_tokens += 1
        flags = FIRST if self.time_last_token is None else 0
        self.time_last_token = time.monotonic()
        if record.token in self.stop_tokens:
            return self._end("stop_token", token=record, flags=flags)
        match = self._output.push(record)
        if match is not None and match.kind == "ban":
            return self._rewind(match, flags)
        if match is not None:
            return self._end("stop_string", match=match, flags=flags)
        if filter_ended:
            return self._end("end_filter", flags=flags)
        if self.new_tokens >= self.max_new_tokens:
            return self._end("max_new_tokens", flags=flags)
        released = self._output.release()
        return Event(self, "streaming", released, flags | HELD if self._output.holds else flags)

    def settle(self) -> None:
        """After a step: the K/V of all ids but the last are computed, and full pages that cannot be rewound are
        shared."""
        assert self._output is not None
        for sequence in self.sequences:
            sequence.publish(self._settled(sequence))

    def _settled(self, sequence: Sequence) -> int:
        """Leading ids of a sequence that can no longer be taken back."""
        return len(sequence) - (0 if self._output is None else self._output.held_tokens) - 1

    def fail(self, error: BaseException) -> Event:
        """The last event of a job that an error ended; what was held is handed over as `held`."""
        reason = {"filter_dead_end": "filter_dead_end"}.get(getattr(error, "code", ""), "error")
        if reason == "error" and type(error).__module__.startswith("exl_filters"):
            reason = "filter_error"
        self.is_finished = self.has_failed = True
        held = None if self._output is None else self._output.flush_held()
        return aborted(self, reason, held, error)

    def cancelled(self) -> Event:
        self.is_finished = True
        return aborted(self, "cancelled", None if self._output is None else self._output.flush_held())

    def piece(self, token: int, special: bool | None = None) -> str:
        """Text of one token by itself; `special` None = as this job decodes special tokens."""
        assert self._tokenizer is not None
        table = PieceTable.of(self._tokenizer, self.decode_special_tokens if special is None else special)
        return table[token].decode(errors="replace")

    # ---- results ---------------------------------------------------------------------------------------------------

    def start(self) -> Events:
        """What to say when the job leaves the queue, for the first time; one that asked for no tokens is done at
        once."""
        if self.resumed:
            return []
        started = Event(self, "started", flags=STARTED)
        return [started] if self.max_new_tokens > 0 else [started, self._end("max_new_tokens")]

    def progress(self) -> Event:
        """How far the prompt has come."""
        event = Event(self, "prefill")
        done = sum(min(s.kv_position, s.prefill_end) for s in self.sequences)
        event.progress = (done, sum(s.prefill_end for s in self.sequences))
        return event

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

    def _end(self, reason: str, token: Record | None = None, match: Match | None = None, flags: int = 0) -> Event:
        assert self._output is not None
        self.is_finished = True
        if match is not None:
            released, held_text = self._output.stop_at(match)
            return ended(self, reason, released, held_text=held_text, string=match.string, flags=flags)
        released = self._output.flush()
        return ended(self, reason, released, token=token, flags=flags)

    def _rewind(self, match: Match, flags: int) -> Event:
        """Take a banned string back, exclude the token it began with at that position, and go on from there."""
        assert self._output is not None
        gone, text = self._output.withdraw(match)
        self.new_tokens -= len(gone)
        for sequence in self.sequences:
            sequence.rewind(len(sequence) - len(gone))
        if self._filters is not None:
            with interruptible():
                self._filters.rewind(sum(record.fed for record in gone))
        for position in [p for p in self._explored if p > self.generated]:
            del self._explored[position]
        self._explored.setdefault(self.generated, set()).update((gone[0].token, gone[0].drawn))
        self._rewinds += 1
        if self._rewinds > MAX_REWINDS:
            raise NoCandidatesError(
                f"gave up after {MAX_REWINDS} rewinds of banned strings, the last of them {match.string!r}"
            )
        released = self._output.release()
        event = Event(self, "streaming", released, flags | HELD if self._output.holds else flags)
        event.suppressed = (text, gone)
        return event


def _close(filters: FilterStack) -> None:
    """Give the filters back; one that cannot be closed is nobody else's problem."""
    try:
        with interruptible():
            filters.close()
    except BaseException as error:
        as_job_error(error)
