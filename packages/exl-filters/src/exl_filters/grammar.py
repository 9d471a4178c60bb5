"""`ExLlamaV2GrammarFilter`: JSON schema, regular expressions, Lark and EBNF, on llguidance (extra `grammar`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, ClassVar, Literal

from exl_filters import bits
from exl_filters.base import Allowed, ExLlamaV2Filter
from exl_filters.bits import Words
from exl_filters.compiling import CompileBudget
from exl_filters.context import FilterContext
from exl_filters.errors import FilterCompileError, FilterFailed, FilterRejected, FilterUsageError
from exl_filters.grammar_source import grammar_text, plain_source, text_source, the_one_source
from exl_filters.llg import Matcher, compile_matcher, parser_limits
from exl_filters.masking import masked
from exl_filters.plain import is_plain, is_small
from exl_filters.reasons import source_reason
from exl_filters.regex_states import PatternStates, State, states_of
from exl_filters.start_states import AnyMatcher, StartState
from exl_filters.tokens import as_prefix, as_token
from exl_filters.trial import tried_grammar
from exl_filters.vocabulary import Vocabulary, vocabulary_of
from exl_filters.xgr import compile_xgrammar

__all__ = ["ExLlamaV2GrammarFilter"]

# Probing whether an id ends the text takes time for each id; beyond this many the probes would dominate a step.
MAX_PROBED = 64


# Before each feed, for rewinding: tokens the matcher had consumed, done, ended, pending prefix, state of the pattern.
_Step = tuple[int, bool, bool, bytes, State | None]


class ExLlamaV2GrammarFilter(ExLlamaV2Filter):
    """Constrain the output to a sentence of a grammar. Give exactly one source.

    Args:
        model: Kept for exllamav2's API; may be None.
        tokenizer: A `Vocabulary` or any tokenizer that `vocabulary_of` takes.
        json_schema: A JSON schema: object, boolean, JSON text, `{"name", "schema"}` wrapper or pydantic model class.
            Keywords that cannot be enforced raise.
        regex: A pattern for the whole output, in the syntax of Rust's regex crate.
        lark: A Lark grammar with a rule `start`.
        gbnf: A grammar in llama.cpp's EBNF. `ebnf` is another name for it.
        ebnf: See `gbnf`.
        choice: A list of strings.
        llg: A grammar in llguidance's own form.
        whitespace: Whitespace in JSON: "bounded" (one space, or a newline and indentation), "compact", "any", or a
            pattern.
        on_complete: "end" finishes the job at the token after which nothing can follow. "eos" offers only the stop ids
            there instead.
        no_forcing: Allow every tokenization of forced text, as lark, ebnf and llg always do. Without it, the mask of
            the other sources has the canonical tokens only; `feed` takes any tokenization.
        leading_space: Allow one space before the text.
        limits: llguidance's parser limits by name, such as `max_grammar_size` or `step_max_items`.
        backend: "llguidance", or "xgrammar" (extra `xgrammar`), which is faster where one grammar serves many requests.
            It compiles more slowly, takes fewer schemas and never forces a tokenization.
        budget: Limits for compiling; default 10 s and 1 GB. A grammar that is not small and plain is compiled first in
            a separate process, which is killed beyond the limits.

    Raises:
        FilterUsageError: `budget` is no `CompileBudget`.
        FilterCompileError: the source cannot be enforced, or exceeds the budget.
        FilterError: no process for trying the grammar can be started, or its installation is faulty.
        MemoryError: this process has not enough memory to compile the grammar.
        MissingExtra: llguidance (or xgrammar) is not installed.
    """

    native: ClassVar[bool] = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        json_schema: Any = None,
        regex: str | None = None,
        lark: str | None = None,
        gbnf: str | None = None,
        ebnf: str | None = None,
        choice: Sequence[str] | None = None,
        llg: str | None = None,
        whitespace: str = "bounded",
        on_complete: Literal["end", "eos"] = "end",
        no_forcing: bool = False,
        leading_space: bool = False,
        limits: Mapping[str, int] | None = None,
        backend: Literal["llguidance", "xgrammar"] = "llguidance",
        budget: CompileBudget | None = None,
    ) -> None:
        super().__init__(model, tokenizer)
        if on_complete not in ("end", "eos"):
            raise FilterCompileError(f'on_complete is "end" or "eos"; got {on_complete!r}')
        if not isinstance(whitespace, str):
            raise FilterCompileError(f'whitespace is "bounded", "compact", "any" or a pattern; got {whitespace!r:.60}')
        if not isinstance(budget, CompileBudget | None):
            raise FilterUsageError(f"budget must be a CompileBudget; got {budget!r:.60}")
        sources = {
            "json_schema": json_schema,
            "regex": regex,
            "lark": lark,
            "gbnf": gbnf,
            "ebnf": ebnf,
            "choice": choice,
            "llg": llg,
        }
        if backend not in ("llguidance", "xgrammar"):
            raise FilterCompileError(f'backend is "llguidance" or "xgrammar"; got {backend!r}')
        self._options: dict[str, Any] = {
            "whitespace": whitespace,
            "on_complete": on_complete,
            "no_forcing": no_forcing,
            "leading_space": leading_space,
            "limits": dict(limits) if limits else None,
            "backend": backend,
        }
        self._ends = on_complete == "end"
        # For the law kit: the mask allows forced text in one tokenization only, though feed() takes any. Nothing is
        # forced in Lark and EBNF, see `grammar_source`.
        given = {name for name, value in sources.items() if value is not None}
        forced = backend == "llguidance" and not no_forcing and not {"json_schema", "regex", "choice"}.isdisjoint(given)
        self.capabilities: tuple[str, ...] = ("canonical_only",) if forced else ()
        self._forces = backend == "xgrammar" or not {"json_schema", "regex", "choice"}.isdisjoint(given)
        self.vocabulary: Vocabulary = vocabulary_of(tokenizer)
        self._source = the_one_source(sources)
        budget = budget if budget is not None else CompileBudget()
        if backend == "xgrammar":
            if leading_space:
                raise FilterCompileError("the xgrammar back end takes no leading_space")
            source = plain_source(self._source)
            compiled: AnyMatcher = compile_xgrammar(source, self.vocabulary, whitespace, limits, budget)
        else:
            compiled = self._compiled(budget)
        self._template = StartState(compiled, self._pattern_states())
        self._prepared: Words | None = None
        self._healing: Words | None = None
        self._keep = bits.from_ids(self.vocabulary.defined, self.vocabulary.size)
        self._all_defined = bool((self._keep == -1).all())
        # llguidance's mask needs no correction where every id is defined and the host's only stop id is its own.
        self._every_id = len(self.vocabulary.defined) == self.vocabulary.size
        exact = self._every_id and isinstance(compiled, Matcher) and compiled.width == self.vocabulary.size
        self._only_stop = frozenset({compiled.eos}) if exact and isinstance(compiled, Matcher) else None
        self._set_stops(self.vocabulary.stop_ids)
        self.begin("")
        self._refuse_empty()

    # Methods of the contract.

    def attach(self, context: FilterContext) -> None:
        """Receive the host's stop ids."""
        super().attach(context)
        self._set_stops(context.stop_ids)
        self._changed()

    def begin(self, prefix_str: Any = "") -> None:
        """Reset the matcher to the start of the grammar."""
        self._matcher = self._template.start()
        self._pending = as_prefix(prefix_str)
        states = self._template.states
        self._state = None if states is None or self._pending else states.start
        self._done = self._ended = False
        self._steps: list[_Step] = []
        self._changed()

    def fill_bitmask(self, words: Words) -> bool:
        """Write the packed mask of the current state. Always returns True."""
        if self._verbatim and not self._done and not self._pending and not self._mask_into(words):
            return True
        whole = True
        if self._done:
            words[:] = 0
        elif self._pending:
            bits.copy_into(self._healing_words(), words)
            whole = False
        elif self._matcher.stopped:
            words[:] = 0
            whole = self._matcher.accepting
        else:
            self._mask_into(words)
            self._correct(words)
            return True
        for stop in self._stops:
            bits.put(words, stop, whole)
        return True

    def next(self) -> Allowed:
        """Return the allowed ids, and those of them that end the text, probed where at most MAX_PROBED are allowed."""
        words = bits.empty(self.vocabulary.size)
        self.fill_bitmask(words)
        ids = bits.to_ids(words)
        return ids, self._probed_ends(ids)

    def feed(self, token: Any) -> None:
        """Accept a token in any tokenization of the grammar's text. Raises `FilterRejected`; the state is then
        unchanged.
        """
        token = as_token(token)
        matcher = self._matcher
        before = (matcher.consumed, self._done, self._ended, self._pending, self._state)
        if not self._done:
            if token in self._stops:
                if not self.is_complete():
                    raise FilterRejected(f"stop token {token}: {self.describe()} is not complete", token)
                self._done = self._ended = True
            else:
                self._consume(token)
                if self._ends and not self._pending and matcher.stopped:
                    self._done = self._ended = True
            self._prepared = self._healing = None
        self._steps.append(before)

    def is_complete(self) -> bool:
        """Whether the text so far is a sentence of the grammar."""
        return self._done or (not self._pending and self._matcher.accepting)

    def ended(self) -> bool:
        """Whether the last feed finished the constraint."""
        return self._ended

    def rewind(self, n: int) -> None:
        """Undo the last `n` feeds. Raises `FilterUsageError` for more than were fed."""
        if not 0 <= n <= len(self._steps):
            raise FilterUsageError(f"rewind({n}) after {len(self._steps)} tokens")
        if n == 0:
            return
        consumed, self._done, self._ended, self._pending, self._state = self._steps[len(self._steps) - n]
        self._matcher.rollback(self._matcher.consumed - consumed)
        del self._steps[len(self._steps) - n :]
        self._changed()

    def validate(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may follow in order; the state is unchanged."""
        if self._done:
            return 0
        if self._pending:
            return super().validate(tokens)
        plain = 0
        while plain < len(tokens) and tokens[plain] not in self._stops and self._may_be(tokens[plain]):
            plain += 1
        accepted = self._matcher.accepts(tokens[:plain])
        if "canonical_only" in self.capabilities:
            accepted = self._canonical(tokens[:accepted])
        if accepted == plain < len(tokens) and tokens[plain] in self._stops:
            trial = self._matcher.copy()
            trial.consume(list(tokens[:plain]))
            over = self._ends and trial.stopped
            accepted += trial.accepting and not over
        return accepted

    def forced(self) -> bytes:
        """Return the bytes that every continuation begins with; b"" where the filter forces nothing."""
        if self._done or self._pending or self._matcher.stopped or not self._forces:
            return b""
        return self._matcher.forced()

    def clone(self, c: Any = None) -> Any:
        """Return a filter with a copy of the matcher, in the same state."""
        new = self._clone_sharing(c)
        new._matcher = self._template.copy(self._matcher)
        new._steps = list(self._steps)
        return new

    def captures(self) -> list[tuple[str, bytes]]:
        """Return the named captures of a Lark grammar so far, as (name, bytes)."""
        return self._matcher.captures()

    # For hosts that use only exllamav2's methods.

    def use_background_worker(self) -> bool:
        """Return True: masks may be computed on another thread."""
        return True

    def prepare_logit_mask(self) -> bool:
        """Compute the mask of the current state. Returns True."""
        if self._prepared is None:
            words = bits.empty(self.vocabulary.size)
            self.fill_bitmask(words)
            self._prepared = words
        return True

    def mask_logits(self, logits: Any) -> Any:
        """Return a copy of `logits` (W,), numpy or torch, with the excluded entries at -inf."""
        self.prepare_logit_mask()
        assert self._prepared is not None
        return masked(logits, self._prepared)

    @property
    def asked_matcher(self) -> Matcher | None:
        """The llguidance matcher that computes the mask of the current state, unless it is stopped; or None."""
        if self._done or self._pending or not isinstance(self._matcher, Matcher):
            return None
        return self._matcher

    def compile_ahead(self, pool: Executor) -> None:
        """Compile on `pool` what the jobs of this template need to compute their masks side by side."""
        self._template.compile_ahead(pool)

    def finish_mask(self, words: Words) -> bool:
        """Turn the mask of `asked_matcher` in the current state, in place, into that of the filter.

        Returns False, with `words` unchanged, where only `fill_bitmask` can tell the mask.
        """
        matcher = self._matcher
        if matcher.stopped or len(words) != len(self._keep):
            return False
        if self._template.states is not None and self._state is not None:
            self._template.states.keep(self._state, words)
        if not self._verbatim:
            self._correct(words)
        return True

    @property
    def mask_key(self) -> tuple[int, int] | None:
        """Return the template and the state of its pattern, which filters of one mask share; None: unknown."""
        states = self._template.states
        if states is None or self._state is None or not (key := states.key(self._state)):
            return None
        return id(states), key

    @property
    def knows_mask(self) -> bool:
        """Whether the mask of the current state is known already, from this filter or another one of the template."""
        states = self._template.states
        return states is not None and not self._pending and states.mask(self._state) is not None

    def describe(self) -> str:
        """Return the source's kind and its first characters."""
        ((kind, value),) = self._source.items()
        return f"Grammar({kind}={value!r:.60})"

    def spec(self) -> dict[str, Any]:
        """Return `{"type": "grammar", ...}` with the source and the options."""
        return {"type": "grammar", **self._source, **self._options}

    # Internal methods.

    def _correct(self, words: Words) -> None:
        """Correct the matcher's mask: it takes an id without text for its placeholder, and supports one stop id."""
        if not self._all_defined or len(words) != len(self._keep):
            bits.and_into(self._keep, words)
        whole = self._matcher.accepting
        for stop in self._stops:
            bits.put(words, stop, whole)

    def _mask_into(self, words: Words) -> bool:
        """Write the matcher's mask over `words`, from the pattern's known masks if it is there.

        Returns whether the matcher is stopped; it is not in a state whose masks are shared.
        """
        states = self._template.states
        if states is None or self._state is None:
            return self._matcher.mask_into(words)
        known = states.mask(self._state)
        if known is not None:
            bits.copy_into(known, words)
            return False
        stopped = self._matcher.mask_into(words)
        if not stopped and len(words) == bits.word_count(self.vocabulary.size):
            states.keep(self._state, words)
        return stopped

    def _pattern_states(self) -> PatternStates | None:
        """Return the states of a regular expression whose masks can be shared."""
        pattern = self._source.get("regex")
        if not isinstance(pattern, str) or self._options["backend"] != "llguidance" or self._options["leading_space"]:
            return None
        return states_of(pattern, self.vocabulary.longest)

    def _set_stops(self, stops: frozenset[int]) -> None:
        self._stops = stops
        self._verbatim = stops == self._only_stop

    def _compiled(self, budget: CompileBudget) -> Matcher:
        """Compile the grammar with llguidance, within the budget."""
        source, limits = text_source(self._source), self._options["limits"]
        parser_limits(limits)
        options = {name: self._options[name] for name in ("whitespace", "no_forcing", "leading_space")}
        plain = plain_source(source) if budget.trust or is_small(source) else None
        if plain is not None and (budget.trust or is_plain(plain, options["whitespace"], limits)):
            text = grammar_text(plain, **options)
        else:
            text = tried_grammar(source, options, limits, budget, self.vocabulary)
        try:
            return compile_matcher(text, self.vocabulary, limits)
        except FilterCompileError as error:
            ((kind, value),) = plain_source(source).items()
            raise FilterCompileError(source_reason(kind, value, str(error))) from error.__cause__

    def _refuse_empty(self) -> None:
        """Raise `FilterCompileError` for a grammar that has no text, rather than fail at the first token."""
        if self._matcher.accepting:
            return
        words = bits.empty(self.vocabulary.size)
        try:
            self.fill_bitmask(words)
        except FilterFailed as error:
            raise FilterCompileError(f"{self.describe()}: no text can begin it ({error})") from error
        if bits.is_empty(words):
            raise FilterCompileError(f"{self.describe()}: no token of the vocabulary can begin it")

    def _changed(self) -> None:
        self._prepared = self._healing = None

    def _may_be(self, token: int) -> bool:
        """Whether `token` is defined. The matcher would take an undefined id for its placeholder."""
        return 0 <= token < self.vocabulary.size if self._every_id else bits.test(self._keep, token)

    def _canonical(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, all accepted by the grammar, the masks would have allowed."""
        trial, words = self._matcher.copy(), bits.empty(self.vocabulary.size)
        for count, token in enumerate(tokens):
            trial.mask_into(words)
            if not bits.test(words, token):
                return count
            trial.consume([token])
        return len(tokens)

    def _consume(self, token: int) -> None:
        if not self._pending:
            if not self._may_be(token) or not self._matcher.consume([token]):
                raise FilterRejected(f"token {token} is not allowed by {self.describe()}", token)
            states = self._template.states
            if states is not None and self._state is not None:
                self._state = states.feed(self._state, self.vocabulary.bytes_of(token))
            return
        raw = self.vocabulary.bytes_of(token)
        if not raw or not bits.test(self._healing_words(), token):
            raise FilterRejected(f"token {token} is not allowed by {self.describe()}", token)
        if len(raw) < len(self._pending):
            self._pending = self._pending[len(raw) :]
            return
        surplus = raw[len(self._pending) :]
        if surplus and not self._matcher.consume(self._spelled(surplus)):
            raise FilterRejected(f"token {token}: {surplus!r} is not allowed by {self.describe()}", token)
        self._pending = b""

    def _spelled(self, text: bytes) -> list[int]:
        """Return tokens that spell `text`, by longest match."""
        ids, position = [], 0
        while position < len(text):
            length, token = self.vocabulary.trie.longest(text, position)
            if not length:
                raise FilterRejected(f"no token begins {text[position:]!r}")
            ids.append(token)
            position += length
        return ids

    def _healing_words(self) -> Words:
        """Return the mask of tokens that start with the pending text and whose surplus the grammar accepts.

        Where no token starts with the pending text, the tokens that are its proper prefixes are allowed.
        """
        if self._healing is None:
            trie = self.vocabulary.trie
            found: list[int] = []
            node = trie.find(self._pending)
            if node >= 0:
                found.extend(trie.exact(node))
                self._walk_surplus(node, found)
            if not found:
                found = [i for n in range(1, len(self._pending)) for i in self.vocabulary.ids_of(self._pending[:n])]
            self._healing = bits.from_ids(found, self.vocabulary.size)
        return self._healing

    def _walk_surplus(self, node: int, found: list[int]) -> None:
        """Search the tokens below `node` depth first. A branch ends where the grammar rejects its bytes."""
        trie = self.vocabulary.trie
        todo = [(child, bytes([byte])) for byte, child in trie.children(node)]
        while todo:
            at, text = todo.pop()
            try:
                spelled = self._spelled(text)
            except FilterRejected:
                # Part of a character that no token spells; a longer token may complete it.
                todo.extend((child, text + bytes([byte])) for byte, child in trie.children(at))
                continue
            if self._matcher.accepts(spelled) < len(spelled):
                continue
            found.extend(trie.exact(at))
            todo.extend((child, text + bytes([byte])) for byte, child in trie.children(at))

    def _probed_ends(self, ids: list[int]) -> set[int]:
        """Return which of a few allowed ids finish the constraint, for hosts that read end tokens beforehand."""
        ends = {i for i in ids if i in self._stops}
        if self._done or self._pending or not self._ends or len(ids) > MAX_PROBED:
            return ends
        trial = self._matcher.copy()
        for token in ids:
            if token not in ends and trial.consume([token]):
                if trial.stopped:
                    ends.add(token)
                trial.rollback(1)
        return ends
