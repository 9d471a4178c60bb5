"""Turn the logits of one job into its next token, and that token into text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from exl_filters import FilterStack
from exl_generate.dynamic.constraints import TokenConstraints
from exl_generate.dynamic.detokenize import PieceTable
from exl_generate.dynamic.output import Match, Record, TextStream
from exl_generate.dynamic.stopping import automaton_of
from exl_generate.errors import RequestError
from exl_generate.interrupts import interruptible
from exl_generate.sampling import (
    Draw,
    ExLlamaV2PostSamplingResult,
    RequestSampler,
    Sample,
    Settings,
    Vocabulary,
)
from exl_kernels.selection import MOST_REPORTED

if TYPE_CHECKING:
    from exl_generate.dynamic.context import JobContext
    from exl_generate.dynamic.request import Request
    from exl_generate.dynamic.runner import Window
    from exl_generate.dynamic.sequence import Ids, Sequence
    from exl_kernels.sampling import Row

__all__ = ["Decoder", "Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Effect of a token that does not let the job simply continue.

    The job has ended for `reason`, as in its last result, or a banned string must be withdrawn ("banned").
    """

    reason: str
    #: the stop token
    token: Record | None = None
    #: the stop string or banned string
    match: Match | None = None


class Decoder:
    """Sampler, constraints and text stream of one job. Built when a generator takes the job.

    `settings` are those of the request, or an object of the caller's whose changes the job follows (`refresh`).

    Raises `RequestError` for settings that do not fit the vocabulary and `FilterError` for filters.
    """

    __slots__ = ("_request", "_tokenizer", "constraints", "output", "sampler")

    def __init__(self, request: Request, settings: Settings, context: JobContext) -> None:
        self._request = request
        self._tokenizer = context.tokenizer
        vocabulary = Vocabulary.of(context.tokenizer)
        pieces = PieceTable.of(context.tokenizer, request.decode_special_tokens)
        self.sampler = RequestSampler(settings, vocabulary, request.seed)
        self.output = TextStream(
            pieces,
            automaton_of(request.stop_strings),
            automaton_of(request.banned_strings, fold=True),
            skip=b"" if request.healed_id is None else pieces[request.healed_id],
        )
        filters = None
        if request.filters:
            with interruptible():
                filters = FilterStack(
                    request.filters,
                    vocab_size=vocabulary.size,
                    stop_ids=request.stop_tokens,
                    logits_width=context.padded_vocab_size,
                    prefer_eos=request.filter_prefer_eos,
                )
        self.constraints = TokenConstraints(request, pieces, filters)

    @property
    def reads_logits_once(self) -> bool:
        """Whether the job's logits are read once only, at once, by the sampler on a GPU.

        Rows that report many candidates are left to the CPU, which reads them later.
        """
        request = self._request
        hooks = self.sampler.settings.post_sampling_hooks
        return not (request.return_logits or request.return_top_tokens > MOST_REPORTED or hooks)

    def refresh(self) -> None:
        """Apply changes of live settings before a step. Raises `RequestError` for invalid values."""
        self.sampler.refresh()
        scale = self.sampler.settings.cfg_scale
        if scale is not None and len(self._request.prompts) == 1:
            raise RequestError(
                f"gen_settings.cfg_scale became {scale} while a job with one prompt runs; it needs a pair of prompts "
                "(positive, negative) from the start, so begin a new job"
            )

    def draw(self, windows: list[Window], at: int, sequence: Sequence) -> Draw:
        """Return the sampler's input for the token after position `at` of each window."""
        if at > 0:  # position 0 keeps what `refresh` found: the engine has planned with it which logits stay
            self.refresh()
        generated = sequence.generated
        constraint = self.constraints.at(generated)
        return Draw(
            sampler=self.sampler,
            logits=windows[0].row(at),
            context=sequence.ids,
            position=generated,
            constraint=constraint,
            negative=windows[1].row(at) if len(windows) > 1 else None,
            attempt=len(constraint.blocked),  # each token that was excluded here took a random number
            top_n=self._request.return_top_tokens,
        )

    def draws(self, windows: list[Window], at: int, sequence: Sequence, guesses: list[int]) -> list[Draw]:
        """Return the sampler's inputs for position `at` and the later ones that are known beforehand.

        Position `at` + i has the input of the case that the first i of `guesses` hold; its sample is of no use
        otherwise. Filters, hooks and mirostat need the tokens before, so only position `at` is drawn with them.
        """
        drawn = [self.draw(windows, at, sequence)]
        settings = self.sampler.settings
        if not guesses or self.constraints.filters is not None or settings.mirostat or settings.post_sampling_hooks:
            return drawn
        ids, generated, reads = sequence.ids, sequence.generated, self.sampler.reads_context
        for i in range(1, len(guesses) + 1):
            constraint = self.constraints.at(generated + i)
            drawn.append(
                Draw(
                    sampler=self.sampler,
                    logits=windows[0].row(at + i),
                    context=np.concatenate([ids, np.array(guesses[:i], dtype=np.int64)]) if reads else ids,
                    position=generated + i,
                    constraint=constraint,
                    negative=windows[1].row(at + i) if len(windows) > 1 else None,
                    attempt=len(constraint.blocked),
                    top_n=self._request.return_top_tokens,
                )
            )
        return drawn

    def guess_row(self, logits: torch.Tensor, ids: Ids, generated: int, guesses: list[int]) -> Row:
        """Return the kernels' input for a guess at the token after `ids` and `guesses`.

        It has the settings and the random number of that token, so a draft model that agrees with the model draws the
        same token. Constraints, which change speed only, are left out.
        """
        if guesses and self.sampler.reads_context:
            ids = np.concatenate([ids, np.array(guesses, dtype=np.int64)])
        return self.sampler.row(logits, ids, generated + len(guesses))

    def record(self, drawn: Sample, window: Window, at: int) -> Record:
        """Return the sampled token after the post-sampling hooks, with the requested reports.

        `window` and `at` locate its logits.
        """
        sample, feed = drawn, True
        if self.sampler.settings.post_sampling_hooks:
            sample, feed = self._hooked(drawn, window.row(at))
        record = Record(
            sample.token, sample.probability, sample.top_tokens, sample.top_probabilities, drawn=drawn.token, fed=feed
        )
        record.ids = sample.ids
        if self._request.return_logits:
            record.logits = window.row(at).cpu().clone()
        if self._request.return_hidden_state and window.state is not None:
            record.state = window.state[at].cpu().clone()
        return record

    def take(self, record: Record, generated: int) -> Outcome | None:
        """Append a token to the output; returns None if the job continues.

        Stop tokens come first, then text, then the end of the filters, then the limit. `generated` is the number of
        tokens so far with this one, a healed one counted.
        """
        request = self._request
        filter_ended = self.constraints.filters is not None and self.constraints.feed(record)
        if record.token in request.stop_tokens:
            return Outcome("stop_token", token=record)
        match = self.output.push(record)
        if match is not None:
            return Outcome("banned" if match.kind == "ban" else "stop_string", match=match)
        if filter_ended:
            return Outcome("end_filter")
        return Outcome("max_new_tokens") if generated - request.healing >= request.max_new_tokens else None

    def piece(self, token: int, special: bool) -> str:
        """Return the text of one token by itself; `special`: special tokens have their text, too."""
        return PieceTable.of(self._tokenizer, special)[token].decode(errors="replace")

    def _hooked(self, sample: Sample, logits: torch.Tensor) -> tuple[Sample, bool]:
        """Return the sample after all post-sampling hooks, and whether filters receive it."""
        told = self._request.return_top_tokens > 0
        seen = ExLlamaV2PostSamplingResult(
            sampled_token=torch.tensor([[sample.token]]),
            sampled_prob=torch.tensor([[sample.probability]]),
            candidate_tokens=torch.from_numpy(sample.top_tokens)[None, None] if told else None,
            candidate_probs=torch.from_numpy(sample.top_probabilities)[None, None] if told else None,
            logits=logits[None, None].cpu().clone(),
        )
        with interruptible():
            for hook in self.sampler.settings.post_sampling_hooks:
                hook(seen)
        token = -1 if seen.sampled_token is None else int(seen.sampled_token.reshape(-1)[0])
        if not 0 <= token < len(logits):
            raise RequestError(
                f"a post-sampling hook chose token {token}; the vocabulary has ids 0 to {len(logits) - 1}"
            )
        return replace(sample, token=token, ids=None), seen.feed_filters
