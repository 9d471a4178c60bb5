"""Page accounting as a state machine: whatever is enqueued, run, cancelled, cleared or fails, no page is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from effort import trials
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from internals import prelaunch

from exl_generate import CapacityError, ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.testing import ScriptedCache, ScriptedConfig, ScriptedModel, ScriptedTokenizer, check_pages

pytestmark = pytest.mark.covers("generators: dynamic-queue", "generators: page-counts")

TOKENIZER = ScriptedTokenizer([chr(c) for c in range(97, 107)])
POISON = TOKENIZER.get_vocab_size() - 1
STYLES = [ExLlamaV2Sampler.Settings.greedy(), ExLlamaV2Sampler.Settings(top_p=0, temperature=1.0)]

#: Few distinct prompts, so that prefixes are shared: whole, cut short, and with another end.
STEMS = [[3, 4, 5, 6, 7, 8] * 5, [3, 4, 5, 6] * 3 + [9] * 10, [10]]


class Pages(RuleBasedStateMachine):
    """A small cache under pressure: 12 pages of 4 tokens, at most three sequences at once."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ScriptedModel(
            ScriptedConfig(vocab_size=TOKENIZER.get_vocab_size(), max_seq_len=64, max_input_len=32)
        )
        self.model.faults[POISON] = RuntimeError("poisoned token")
        self.generator = ExLlamaV2DynamicGenerator(
            self.model,
            ScriptedCache(self.model, max_seq_len=48),
            TOKENIZER,
            page_size=4,
            max_chunk_size=8,
            max_batch_size=3,
            max_q_size=1,
        )
        self.jobs: list[ExLlamaV2DynamicJob] = []
        self.ended: set[ExLlamaV2DynamicJob] = set()
        self.cleared: set[ExLlamaV2DynamicJob] = set()

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(1, 30),
        tail=st.lists(st.integers(3, POISON), max_size=6),
        new=st.integers(0, 20),
        style=st.sampled_from(STYLES),
        bans=st.lists(st.sampled_from(["ab", "c", "dde"]), max_size=2),
        seed=st.integers(0, 3),
    )
    def enqueue(self, stem: list[int], cut: int, tail: list[int], new: int, **kw: Any) -> None:
        prompt = stem[:cut] + tail
        job = ExLlamaV2DynamicJob(
            torch.tensor([prompt]), new, gen_settings=kw["style"], seed=kw["seed"], banned_strings=kw["bans"]
        )
        try:
            self.generator.enqueue(job)
        except CapacityError:
            assert len(prompt) + new > 48
        else:
            assert len(prompt) + new <= 48
            self.jobs.append(job)

    @rule(rounds=st.integers(1, 12))
    def iterate(self, rounds: int) -> None:
        for _ in range(rounds):
            self._note(self.generator.iterate())
            check_pages(self.generator)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.generator.cancel(data.draw(st.sampled_from(self.jobs)))

    @rule()
    def clear(self) -> None:
        self.cleared.update(job for job in self.jobs if job not in self.ended)
        self.generator.clear_queue()

    @precondition(lambda self: self.generator.num_active_jobs() == 0)
    @rule()
    def forget(self) -> None:
        self.generator.reset_page_table()

    @invariant()
    def pages_add_up(self) -> None:
        check_pages(self.generator)

    def teardown(self) -> None:
        """The queue always drains, every job ends exactly once, and every page comes back."""
        for _ in range(3000):
            self._note(self.generator.iterate())
            if self.generator.num_remaining_jobs() == 0:
                break
        self._note(self.generator.iterate())
        assert self.generator.num_remaining_jobs() == 0
        assert self.ended | self.cleared >= set(self.jobs)
        check_pages(self.generator)
        table = self.generator.page_table
        assert (table.unreferenced, table.reserved) == (len(table.pages), 0)

    def _note(self, results: list[dict[str, Any]]) -> None:
        for result in results:
            if result["eos"]:
                assert result["job"] not in self.ended
                self.ended.add(result["job"])
                if "exception" in result:
                    assert "poisoned" in str(result["exception"]) or "no token is left" in str(result["exception"])


class PagesWithStepsAhead(Pages):
    """The same where each step is queued before the last one's text is made, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        prelaunch(self.generator, True)


TestPagesWithStepsAhead = PagesWithStepsAhead.TestCase
TestPagesWithStepsAhead.settings = settings(max_examples=trials(60, 15), stateful_step_count=30, deadline=None)
TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=trials(120, 15), stateful_step_count=30, deadline=None)
