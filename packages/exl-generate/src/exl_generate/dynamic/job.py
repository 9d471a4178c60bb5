"""`ExLlamaV2DynamicJob`: one request, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import torch

from exl_filters import FilterDeadEnd, FilterError
from exl_generate.dynamic.decoder import Decoder, Outcome
from exl_generate.dynamic.draft_length import JobDrafts
from exl_generate.dynamic.events import FIRST, HELD, STARTED, Event, Events, aborted, ended
from exl_generate.dynamic.job_pages import JobPages
from exl_generate.dynamic.output import Match, Record, Released
from exl_generate.dynamic.request import request_of
from exl_generate.dynamic.resuming import Advance, Rerun
from exl_generate.dynamic.times import JobTimes
from exl_generate.errors import NoCandidatesError
from exl_generate.sampling import Sample, Settings

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from exl_generate.contracts import Embedding, RequestAdapter
    from exl_generate.dynamic.context import JobContext
    from exl_generate.dynamic.prompt_scores import TokenScore
    from exl_generate.dynamic.runner import Window
    from exl_kernels.sampling import Row

__all__ = ["ExLlamaV2DynamicJob"]

#: A job that keeps running into its banned strings ends with an error after this many rewinds.
MAX_REWINDS = 4096


class ExLlamaV2DynamicJob:
    """A request for one completion; single use. `generator.enqueue(job)` queues it, `generator.iterate()` returns its
    results.

    Args:
        input_ids: the prompt, int64 [1, n] with n >= 1; for CFG a list of two such tensors, the positive and the
            negative prompt, together with `gen_settings.cfg_scale`.
        max_new_tokens: most tokens to generate, a healed one not counted. The job ends at exactly this number if
            nothing else ends it.
        min_new_tokens: stop tokens of this job are avoided until so many tokens were sampled. Stop strings still end
            it.
        max_skips: how often smaller jobs may start before this one while it does not fit; None means any number.
        gen_settings: sampler settings; None means the defaults of `ExLlamaV2Sampler.Settings`. They are copied: later
            changes to the object do not reach this job, and jobs may share one object. (A subclass may choose otherwise
            by its `for_job` and `revision`, as that of exl-compat does.)
        seed: int of any size for the job's random numbers; None draws one from the operating system
            (`effective_seed`).
        stop_conditions: token ids and strings that end the job. None means none at all, not even EOS.
        decode_special_tokens: special tokens have their text in the output; otherwise they have none.
        return_top_tokens: report so many of the most probable candidates with each token.
        return_logits: report the model's logits with each token.
        return_probs: report the final sampling probability of each token.
        filters: filters that the output must satisfy. One list may serve many jobs: filters are cloned.
        filter_prefer_eos: choose a stop token as soon as the filters allow one.
        token_healing: sample the last token of the prompt again, among the tokens that begin with its text. It has no
            effect if a prompt has one token only.
        identifier: any object; it is returned in every result.
        banned_strings: strings that must not be generated, compared lower-cased. A token that leads into one is
            withdrawn and excluded at its place.
        embeddings: `ExLlamaV2MMEmbedding` objects whose ids are in `input_ids`.
        loras: an adapter or a list of adapters for this job. None means those of the generator when the job is queued,
            an empty list none. exllamav2 has neither this parameter nor those that follow.
        max_rq_tokens: new tokens to reserve cache pages for at a time; None reserves for `max_new_tokens`. A job that
            has used its share up while others wait goes back to the queue and is resumed later. Its results stay one
            continuous stream.
        return_hidden_state: report the last hidden state that each token's logits come from.
        prompt_logprobs: compute log-probabilities of the (positive) prompt's tokens, with so many of the most probable
            tokens at each place (`prompt_scores`). The whole prompt is then computed: nothing of it is taken from the
            cache. With `max_new_tokens` 0 the job ends after the prompt. Not together with `embeddings` or
            `token_healing`.
        cache_salt: at most 256 bytes. Jobs with different salts share no cached pages, so that nobody learns from
            timing what another user has asked.
        resume_from: ids that an earlier run of the same request has handed out (`token_ids` of its results so far, a
            healed token included; a list, or int64 [1, n]). The job continues after them, with the tokens, text and
            probabilities that the earlier run would have continued with: limits, penalties, random numbers, stop
            strings and filters count them, and results do not repeat them. On a GPU the continuation is bitwise the
            same only where docs/reference/reproducibility.md guarantees it for the passes of both runs: the new job
            computes the ids as part of its prompt. Filters see all of the ids. If the last id ended the job, the first
            result is the last one. With mirostat, whose state is more than the ids, the job samples them again and
            fails if they differ.

    Raises:
        RequestError: a parameter is malformed or out of its range. `enqueue` raises further errors for a request that
            does not fit the model or the cache.

    Each result is a dict. A key is present only where it has content.

    Keys of every result:

    - `job`: the `ExLlamaV2DynamicJob`.
    - `serial`: the job's `serial_number`.
    - `identifier`: as given; absent if it is None.
    - `stage`: "started", "prefill" or "streaming", the kind of the result. "started" comes once, when the job first
      leaves the queue.
    - `eos`: whether this is the last result.

    Keys of a "prefill" result, which comes after each part of the prompt that was computed or copied:

    - `curr_progress`: prompt tokens in the cache.
    - `max_progress`: prompt tokens to compute.

    Keys of a "streaming" result, which comes after sampled tokens (k of them were released):

    - `text`: new text that no later token can change. Text that may become part of a stop or banned string, and an
      incomplete character, are held back.
    - `token_ids`: int64 [1, k], a healed token and tokens of a stop string included.
    - `token_probs`: float32 [1, k], with `return_probs`.
    - `top_k_tokens`: int64 [1, k, K] in descending order of probability, with `return_top_tokens` = K.
    - `top_k_probs`: float32 [1, k, K], their probabilities. Unused places have probability 0.
    - `logits`: float32 [1, k, padded vocabulary], with `return_logits`; those of the positive prompt for CFG.
    - `hidden_states`: [1, k, hidden size], with `return_hidden_state`.
    - `suppressed_text`: a banned string that was withdrawn.
    - `suppressed_tokens`: int64 [1, j], its tokens.

    Keys of the last result, which is a "streaming" result too:

    - `eos_reason`: "stop_token", "stop_string", "max_new_tokens", "end_filter" (the filters ended), "cancelled",
      "filter_dead_end" (the filters allow no token), "filter_error" (a filter failed) or "error".
    - `eos_triggering_token_id`: the stop token, for "stop_token".
    - `eos_triggering_token_str`: its text, for "stop_token".
    - `eos_triggering_string`: the stop string, for "stop_string".
    - `held`: a dict with keys of a "streaming" result that are not part of the output: the stop token, the text from
      the stop string on, or what an error or a cancellation kept from coming out.
    - `exception`: the error that ended the job.
    - `full_completion`: all released text.
    - `new_tokens`: number of sampled tokens, the stop token included.
    - `prompt_tokens`: number of tokens of the (positive) prompt.
    - `time_enqueued`: seconds in the queue.
    - `time_prefill`: seconds from the first prefill to the first decode step.
    - `time_generate`: seconds from the first decode step to the last token.
    - `cached_pages`: full pages found in the cache, per sequence.
    - `cached_tokens`: prompt tokens found in the cache, per sequence.
    - `accepted_draft_tokens`: draft tokens that the model accepted, where the generator drafts.
    - `rejected_draft_tokens`: draft tokens that it rejected, where the generator drafts.
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
        embeddings: SequenceOf[Embedding] | None = None,
        *,
        loras: object = None,
        max_rq_tokens: int | None = None,
        return_hidden_state: bool = False,
        prompt_logprobs: int | None = None,
        cache_salt: bytes = b"",
        resume_from: SequenceOf[int] | torch.Tensor | None = None,
    ) -> None:
        self.request = request_of(
            input_ids=input_ids,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            max_skips=max_skips,
            gen_settings=gen_settings,
            seed=seed,
            stop_conditions=stop_conditions,
            decode_special_tokens=decode_special_tokens,
            return_top_tokens=return_top_tokens,
            return_logits=return_logits,
            return_probs=return_probs,
            return_hidden_state=return_hidden_state,
            prompt_logprobs=prompt_logprobs,
            filters=filters,
            filter_prefer_eos=filter_prefer_eos,
            token_healing=token_healing,
            identifier=identifier,
            banned_strings=banned_strings,
            embeddings=embeddings,
            loras=loras,
            max_rq_tokens=max_rq_tokens,
            cache_salt=cache_salt,
            resume_from=resume_from,
        )
        kept = self.request.settings
        self._settings: Settings = kept if gen_settings is None else gen_settings.for_job(kept)
        self.pages = JobPages(self.request)
        self.sequences, self.sequence = self.pages.sequences, self.pages.sequence
        self.serial_number: int | None = None
        self.skips = 0
        self.is_finished = self.has_failed = self.discarded = self.paused = False
        #: the K/V that it computed may be NaN
        self._is_broken = False
        self.times, self.drafts = JobTimes(), JobDrafts()
        self._decoder: Decoder | None = None
        self._rerun = Rerun(self.request.rerun) if self.request.rerun else None
        #: the way over `resume_from` before the job is enqueued, and where it was begun
        self._advance: Advance | None = None
        self._prepared_in: JobContext | None = None
        #: how the job ended in the run that it resumes
        self._ended_before: Outcome | None = None

    # ---- the request -----------------------------------------------------------------------------------------------

    @property
    def max_new_tokens(self) -> int:
        """Most tokens to generate, as given."""
        return self.request.max_new_tokens

    @property
    def min_new_tokens(self) -> int:
        """Tokens before stop tokens are permitted, as given."""
        return self.request.min_new_tokens

    @property
    def max_skips(self) -> int | None:
        """Number of times that smaller jobs may start before this one, as given."""
        return self.request.max_skips

    @property
    def gen_settings(self) -> Settings:
        """The request's copy of the settings, or the caller's object where the job follows its changes."""
        return self._settings

    @property
    def identifier(self) -> object:
        """The caller's object that every result holds, as given."""
        return self.request.identifier

    @property
    def filter_prefer_eos(self) -> bool:
        """Whether a stop token is chosen as soon as the filters allow one, as given."""
        return self.request.filter_prefer_eos

    @property
    def return_top_tokens(self) -> int:
        """Number of reported candidates for each token, as given."""
        return self.request.return_top_tokens

    @property
    def return_logits(self) -> bool:
        """Whether logits are reported, as given."""
        return self.request.return_logits

    @property
    def return_probs(self) -> bool:
        """Whether probabilities are reported, as given."""
        return self.request.return_probs

    # ---- progress --------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The settings in force: a copy, made again when `gen_settings` change."""
        return self._settings if self._decoder is None else self._decoder.sampler.settings

    @property
    def effective_seed(self) -> int | None:
        """The seed in use, drawn from the operating system if none was given; None before the job is enqueued."""
        return None if self._decoder is None else self._decoder.sampler.random.seed

    @property
    def loras(self) -> tuple[RequestAdapter, ...] | None:
        """The adapters in force; before the job is enqueued those requested, None for the generator's."""
        return self.request.loras if self._decoder is None else self.sequence.loras

    @property
    def full_completion(self) -> str:
        """All text released so far."""
        return "" if self._decoder is None else self._decoder.output.full_text

    @property
    def new_tokens(self) -> int:
        """Tokens generated so far, a healed one not counted; -1 before the healed token."""
        return self.pages.new_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens until `max_new_tokens`."""
        return self.request.max_new_tokens - self.pages.new_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the (positive) prompt."""
        return self.sequence.prompt_length + self.request.healing

    @property
    def prefilled(self) -> bool:
        """Whether the prompt is computed."""
        return self.pages.prefilled

    @property
    def prompt_scores(self) -> SequenceOf[TokenScore]:
        """The scores of the prompt's tokens so far, with `prompt_logprobs`; all of them from the first token on."""
        scores = self.sequence.scores
        return () if scores is None else scores.found

    @property
    def requeues(self) -> int:
        """Number of times that the job went back to the queue."""
        return self.pages.requeues

    @property
    def resumed(self) -> bool:
        """Whether the job has been started before and went back to the queue."""
        return self.pages.requeues > 0

    @property
    def total_pages(self) -> int:
        """Pages held and reserved at the last start."""
        return self.pages.total

    @property
    def cached_pages(self) -> int:
        """Full pages found in the cache, per sequence."""
        return self.pages.cached_pages

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache, per sequence."""
        return self.pages.cached_tokens

    @property
    def non_sequential_pages(self) -> int:
        """Number of pages taken so far that do not follow, in the cache, the previous page of their sequence."""
        return self.pages.non_sequential

    @property
    def drafted_tokens(self) -> int:
        """Draft tokens that were evaluated."""
        return self.drafts.drafted

    @property
    def accepted_draft_tokens(self) -> int:
        """Draft tokens that the model sampled itself."""
        return self.drafts.accepted

    @property
    def rejected_draft_tokens(self) -> int:
        """Draft tokens that were evaluated and discarded."""
        return self.drafts.rejected

    @property
    def time_enqueue(self) -> float | None:
        """`time.monotonic` when the job was enqueued, in seconds."""
        return self.times.enqueued

    @property
    def time_first_prefill(self) -> float | None:
        """`time.monotonic` when the prompt's first part began, in seconds."""
        return self.times.first_prefill

    @property
    def time_first_token(self) -> float | None:
        """`time.monotonic` when the first decode step began, in seconds."""
        return self.times.first_token

    @property
    def time_last_token(self) -> float | None:
        """`time.monotonic` when the last token so far was sampled, in seconds."""
        return self.times.last_token

    # ---- control ---------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Generate nothing from the next step on; prompt, pages and place in the batch are kept.

        May be called from any thread and in any state. A job that is paused before it starts computes its prompt and
        then waits; a job that has ended does not change. `cancel` ends a paused job.
        """
        if not self.is_finished:
            self.paused = True

    def unpause(self) -> None:
        """Continue where `pause` stopped, with the same tokens as without the pause."""
        self.paused = False

    def avoid(self, tokens: tuple[int, ...]) -> None:
        """Avoid these ids from the next step on, as long as any other token is possible; () ends that.

        For callers that decide step by step; call it only once the job is enqueued.
        """
        self.decoder.constraints.avoided = tokens

    # ---- for the generator -----------------------------------------------------------------------------------------

    def attach(self, context: JobContext, serial: int) -> None:
        """Prepare the job for a generator's queue. After an error call `undo_attach`.

        Generators call this. `context` holds what their jobs share, and `serial` is the job's number. Raises
        `RequestError` for settings or adapters that do not fit the model, `ResumeError`, and `FilterError`.
        """
        loras = tuple(context.current_loras) if self.request.loras is None else self.request.loras
        for lora in loras:
            lora.check_usable(context.model)
        self.pages.name(context, loras)
        self.drafts = JobDrafts(context.new_acceptance(), enabled=context.num_draft_tokens > 0)
        advance = self._advance_in(context)
        self._advance, self._decoder = None, advance.decoder
        advance.step()
        self._ended_before = advance.outcome
        self.serial_number = serial
        self.times.mark_enqueued()

    def prepare(self, context: JobContext, ids: int) -> bool:
        """Advance over up to `ids` further ids of `resume_from`, before `attach`. Returns whether none is left.

        `context` is that of `attach`. Raises as `attach` does for settings, filters and `resume_from`.
        `undo_attach` drops what was prepared.
        """
        return self._advance_in(context).step(ids)

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` has begun and `attach` has not."""
        return self._advance is not None

    def undo_attach(self) -> None:
        """Undo `attach`, however far it came, so that the job may be enqueued elsewhere."""
        self.serial_number = None
        self.pages.forget_names()
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.constraints.close()
        self._drop_advance()

    def detach(self) -> None:
        """Release pages and filters: the job is over."""
        self.is_finished = True
        self.drafts.end(self.sequence.ids)
        self.pages.release(broken=self._is_broken)
        if self._decoder is not None:
            self._decoder.constraints.close()

    def give_way(self) -> None:
        """Release all pages and prepare to start again."""
        self.pages.give_way(self.decoder.output.held_tokens)

    @property
    def decoder(self) -> Decoder:
        """Sampler, constraints and text stream of a job that has been enqueued."""
        assert self._decoder is not None, "the job has not been enqueued"
        return self._decoder

    def compile_ahead(self, pool: Callable[[], Executor]) -> None:
        """Compile in `pool` what the filters share with those of other jobs. The job does not wait for it."""
        self.decoder.constraints.compile_ahead(pool)

    def guess_row(self, logits: torch.Tensor, guesses: list[int], length: int | None = None) -> Row:
        """Return the sampler's input for a guess after the first `length` ids (None: all) and `guesses`.

        `logits` are those of a draft model, float32 [V].
        """
        ids = self.sequence.ids[:length]
        return self.decoder.guess_row(logits, ids, len(ids) - self.sequence.prompt_length, guesses)

    def accept(self, decoder: Decoder, drawn: Sample, guess: int | None, window: Window, at: int) -> tuple[Event, bool]:
        """Accept the token that `drawn` holds, sampled after position `at` of `window`, with the job's `decoder`.
        Generators call this.

        Returns the event to report, and whether the token is the draft token `guess` and stays, so that the logits
        after it are valid.
        """
        # Not before there is a sample: K/V of a pass whose logits are NaN must not be found by other jobs.
        self.pages.commit()
        record = decoder.record(drawn, window, at)
        held, rewinds = record.token == guess, decoder.constraints.rewinds
        self.drafts.accepted += held
        event = self._accept(decoder, record)
        return event, held and rewinds == decoder.constraints.rewinds

    def start(self) -> Events:
        """The events of a job that leaves the queue: none if it went back to the queue before. A request for no tokens,
        and one that resumes from its end, end at once."""
        if self.resumed:
            return []
        started = Event(self, "started", flags=STARTED)
        outcome = self._ended_before
        if self.max_new_tokens == 0 and (self.request.prompt_logprobs is None or self.pages.prefilled):
            outcome = Outcome("max_new_tokens")
        return [started] if outcome is None else [started, self._end(self.decoder, outcome)]

    def progress(self) -> Events:
        """Return an event with the computed part of the prompt; with it, the last event of a job for the prompt
        alone.
        """
        event = Event(self, "prefill")
        event.progress = self.pages.progress
        if self.max_new_tokens == 0 and self.pages.prefilled:
            return [event, self._end(self.decoder, Outcome("max_new_tokens"))]
        return [event]

    def fail(self, error: BaseException, *, broken: bool = False) -> Event:
        """Return the last event of a job that an error ended; held-back tokens are reported as `held`.

        broken: its logits were not finite, so the K/V that they come from are not used again.
        """
        self.is_finished = self.has_failed = True
        self._is_broken = broken
        reason = "filter_error" if isinstance(error, FilterError) else "error"
        return aborted(self, "filter_dead_end" if isinstance(error, FilterDeadEnd) else reason, self._held(), error)

    def cancelled(self) -> Event:
        """Return the last event of a cancelled job; held-back tokens are reported as `held`."""
        self.is_finished = True
        return aborted(self, "cancelled", self._held())

    def piece(self, token: int, special: bool | None = None) -> str:
        """Return the text of one token by itself; `special` None = as this job decodes special tokens."""
        return self.decoder.piece(token, self.request.decode_special_tokens if special is None else special)

    # ---- internals -------------------------------------------------------------------------------------------------

    def _advance_in(self, context: JobContext) -> Advance:
        """Return the way over `resume_from` in this generator; one that another generator began is dropped."""
        if self._advance is None or self._prepared_in is not context:
            self._drop_advance()
            width = context.model.config.vocab_size
            self._advance = Advance(Decoder(self.request, self._settings, context), self.request.resumed, width)
            self._prepared_in = context
        return self._advance

    def _drop_advance(self) -> None:
        advance, self._advance, self._prepared_in = self._advance, None, None
        if advance is not None:
            advance.decoder.constraints.close()

    def _held(self) -> Released | None:
        return None if self._decoder is None else self._decoder.output.flush_held()

    def _accept(self, decoder: Decoder, record: Record) -> Event:
        """Append a token and decide what may be shown."""
        outcome = decoder.take(record, self.sequence.generated + 1)
        self.pages.append(record.token)
        flags = FIRST if self.times.mark_token() else 0
        if outcome is None:
            return self._streaming(decoder, flags)
        if outcome.reason == "banned":
            assert outcome.match is not None
            return self._rewind(decoder, outcome.match, flags)
        return self._end(decoder, outcome, flags)

    def _streaming(self, decoder: Decoder, flags: int) -> Event:
        released = decoder.output.release()
        if self._rerun is not None:
            released = self._rerun.strip(released, ended=False)
        return Event(self, "streaming", released, flags | HELD if decoder.output.held else flags)

    def _end(self, decoder: Decoder, outcome: Outcome, flags: int = 0) -> Event:
        match = outcome.match
        released, held_text = (decoder.output.flush(), "") if match is None else decoder.output.stop_at(match)
        if self._rerun is not None:
            released = self._rerun.strip(released, ended=True)
        self.is_finished = True
        string = None if match is None else match.string
        return ended(
            self, outcome.reason, released, token=outcome.token, held_text=held_text, string=string, flags=flags
        )

    def _rewind(self, decoder: Decoder, match: Match, flags: int) -> Event:
        """Withdraw a banned string, exclude its first token at that position, and continue from there."""
        gone, text = decoder.output.withdraw(match)
        self.pages.rewind(len(gone))
        decoder.constraints.rewind(gone, self.sequence.generated)
        if decoder.constraints.rewinds > MAX_REWINDS:
            raise NoCandidatesError(
                f"gave up after {MAX_REWINDS} rewinds of banned strings, the last of them {match.string!r}"
            )
        event = self._streaming(decoder, flags)
        event.suppressed = (text, gone)
        return event
