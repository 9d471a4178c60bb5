"""Interrupts at every line of a step, and at many random moments.

No token is lost or doubled, the counts of pages are consistent, and the caller gets KeyboardInterrupt.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from effort import trials
from internals import engine_of, has_redirects
from interrupting import skip_unless_with_is_safe

from exl_filters import ExLlamaV2Filter
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler, ExLlamaV2StreamingGenerator
from exl_generate.testing import check_pages, streamed_text, streamed_tokens
from exl_generate.testing.scripted import ScriptedCache, ScriptedConfig, ScriptedModel
from exl_generate.testing.small import TOKENIZER, VOCAB, ids, job, make, speculate

Settings = ExLlamaV2Sampler.Settings
WIDE = Settings(temperature=1.5, top_k=0, top_p=0)


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler was not put back"
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def at_line(number: int, what: Callable[[], None]) -> Iterator[list[int]]:
    """Calls `what` before the `number`-th line that runs inside the package; counts the lines."""
    lines = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "exl_generate" not in frame.f_code.co_filename or "testing" in frame.f_code.co_filename:
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == number:
                what()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


class Odd(ExLlamaV2Filter):
    """Odd ids only."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def clone(self, c: Any = None) -> Odd:
        return Odd()

    def begin(self, prefix_str: Any = "") -> None: ...

    def feed(self, token: Any) -> None: ...

    def next(self) -> tuple[set[int], set[int]]:
        return set(range(3, VOCAB, 2)), set()


def jobs() -> list[ExLlamaV2DynamicJob]:
    """A step with most of its parts: guesses, bans, filters, pairs, healing, shares, prompts over several chunks."""
    pair: Any = [ids("the fox"), ids("no")]
    return [
        job("abcabcabcabc", 9, gen_settings=WIDE, seed=1, banned_strings=["e", "ab"], return_probs=True),
        job("the the the", 7, gen_settings=WIDE, seed=2, filters=[Odd()], return_logits=True),
        ExLlamaV2DynamicJob(pair, 6, gen_settings=Settings(cfg_scale=1.5), seed=3),
        job("x" * 40, 8, token_healing=True, max_rq_tokens=3, stop_conditions=["zz"]),
    ]


def play(generator: ExLlamaV2DynamicGenerator, number: int) -> tuple[list[Any], int, int]:
    """Return the text of every job, how often the caller was interrupted, and the lines that ran."""
    asked, interrupts = jobs(), 0
    results: dict[ExLlamaV2DynamicJob, list[dict[str, Any]]] = defaultdict(list)
    generator.enqueue(asked)
    with at_line(number, interrupt) as lines:
        while any(not (results[one] and results[one][-1]["eos"]) for one in asked):
            try:
                for result in generator.iterate():
                    results[result["job"]].append(result)
                check_pages(generator)
            except KeyboardInterrupt:
                interrupts += 1
    assert generator.page_table.unreferenced == generator.max_pages
    events = [
        (streamed_tokens(r), streamed_text(r), r[-1]["eos_reason"], [x.get("suppressed_text") for x in r], len(r))
        for r in (results[one] for one in asked)
    ]
    return events, interrupts, lines[0]


@pytest.mark.parametrize("how", ["plain", "ngram", "model"])
@pytest.mark.covers("generators: random-numbers", "generators: failing-jobs")
def test_no_token_is_lost_or_doubled(how: str) -> None:
    def new() -> ExLlamaV2DynamicGenerator:
        return make() if how == "plain" else speculate(how)

    want = play(new(), -1)[0]
    _, none, lines = play(new(), -1)
    assert none == 0
    dice = random.Random(how)
    for number in [*range(1, 12, trials(1, 3)), *(dice.randrange(12, lines - 50) for _ in range(trials(30, 3)))]:
        events, interrupts, _ = play(new(), number)
        assert (events, interrupts) == (want, 1), number


class RandomInterrupts:
    """Send signals at random moments while `armed`; each one that Python handles raises KeyboardInterrupt.

    On a slow machine every call may be interrupted. `next_rate` then sends fewer, until calls complete.
    """

    def __init__(self, seed: int) -> None:
        self.armed = False
        self.signals = self.raised = 0
        self.places: set[tuple[str, int]] = set()
        self.mean = 1e-3
        self._patience, self._row, self._before = 1.0, 0, 0
        self._dice = random.Random(seed)

    def __enter__(self) -> RandomInterrupts:
        skip_unless_with_is_safe()
        self._alarm = signal.setitimer(signal.ITIMER_REAL, 0)[0]  # pytest's
        self._began = time.monotonic()  # clock: pytest's, for a hang
        self._former = signal.signal(signal.SIGALRM, self._on_alarm), signal.signal(signal.SIGINT, self._raise)
        # Python reports an interrupt in a destructor and continues. The next signal could interrupt pytest's code for
        # such reports, but not this C function.
        self._reports, sys.unraisablehook = sys.unraisablehook, deque(maxlen=0).append  # type: ignore[assignment]
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.armed = False
        # `_on_alarm` handles a signal that comes before this line, and sets the timer again.
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._former[0])
        signal.signal(signal.SIGINT, self._former[1])
        sys.unraisablehook = self._reports
        if self._alarm:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, self._alarm - self._passed()))

    def _passed(self) -> float:
        return time.monotonic() - self._began  # clock: pytest's, for a hang

    def next_rate(self) -> None:
        """Choose the mean time between signals: longer after 20 interrupted calls, so that one completes."""
        self._row = self._row + 1 if self.raised > self._before else 0
        self._before = self.raised
        if self._row and self._row % 20 == 0:
            self._patience *= 2
        elif not self._row:
            self._patience = max(1.0, self._patience / 2)
        self.mean = self._patience * self._dice.choice([5e-5, 2e-4, 1e-3, 5e-3])

    def wait(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 2e-5 + self._dice.expovariate(1 / self.mean))

    def _on_alarm(self, _: int, frame: FrameType | None) -> None:
        self.wait()
        if self._alarm and self._passed() > self._alarm:
            self.armed = False
            self._former[0](signal.SIGALRM, frame)  # type: ignore[operator, misc]
        if self.armed:
            self.signals += 1
            if frame is not None:
                self.places.add((frame.f_code.co_filename, frame.f_lineno))
            interrupt()

    def _raise(self, *_: object) -> None:
        if self.armed:
            self.raised += 1
            raise KeyboardInterrupt


Output = dict[str, Any]


def output_of(results: list[dict[str, Any]]) -> Output:
    """Return a job's output without its prompt's progress: an interrupted pass is repeated without a result."""
    streamed = [r for r in results if r["stage"] == "streaming"]
    return {
        "tokens": streamed_tokens(results),
        "text": streamed_text(results),
        "why": results[-1]["eos_reason"],
        "withdrawn": [r["suppressed_text"] for r in streamed if "suppressed_text" in r],
        "rounds": len(streamed),
        "logits": [r["logits"] for r in streamed if "logits" in r],
        "probs": torch.cat([r["token_probs"] for r in streamed if "token_probs" in r] or [torch.zeros(1, 0)], dim=1),
        "last": {k: v for k, v in results[-1].items() if k in ("full_completion", "new_tokens", "prompt_tokens")},
    }


def same(a: Output, b: Output) -> bool:
    whole = all(a[key] == b[key] for key in a if key not in ("logits", "probs"))
    return whole and torch.equal(a["probs"], b["probs"]) and all(map(torch.equal, a["logits"], b["logits"]))


def interrupted_results(generator: ExLlamaV2DynamicGenerator, sender: RandomInterrupts) -> list[list[dict[str, Any]]]:
    """Run `jobs` to their end and return their results. Only calls of `iterate` are interrupted."""
    asked = jobs()
    generator.enqueue(asked)
    results: dict[ExLlamaV2DynamicJob, list[dict[str, Any]]] = defaultdict(list)
    while any(not (results[one] and results[one][-1]["eos"]) for one in asked):
        sender.next_rate()
        events: list[dict[str, Any]] = []
        try:
            sender.armed = True
            events = generator.iterate()
            sender.armed = False
        except KeyboardInterrupt:
            sender.armed = False
        for result in events:
            results[result["job"]].append(result)
        check_pages(generator)
    assert generator.page_table.unreferenced == generator.max_pages
    return [results[one] for one in asked]


@pytest.mark.parametrize("how", ["plain", "ngram", "model"])
@pytest.mark.covers("generators: page-publication", "generators: random-numbers", "generators: failing-jobs")
def test_interrupts_at_any_moment_change_no_results(how: str) -> None:
    """A job whose filter is interrupted ends there; all others give the results that they give without interrupts."""

    def new() -> ExLlamaV2DynamicGenerator:
        return make() if how == "plain" else speculate(how)

    with RandomInterrupts(1) as sender:
        sender.mean = 1e9
        sender.wait()
        want = [output_of(results) for results in interrupted_results(new(), sender)]
    broken = 0
    signals, raised, places = trials(2000, 250), trials(500, 65), trials(200, 80)
    with RandomInterrupts(2) as sender:
        for _ in range(2000):
            if sender.signals > signals and sender.raised > raised and len(sender.places) > places:
                break
            for results, one in zip(interrupted_results(new(), sender), want, strict=True):
                got = output_of(results)
                if "exception" in results[-1] and results[0]["job"].request.filters:
                    broken += 1
                    assert isinstance(results[-1]["exception"].__cause__, KeyboardInterrupt)
                    held = results[-1].get("held", {}).get("token_ids", torch.zeros(1, 0, dtype=torch.int64))
                    so_far = got["tokens"] + held[0].tolist()
                    assert so_far == one["tokens"][: len(so_far)]
                else:
                    assert same(got, one)
    assert sender.signals > signals
    assert sender.raised > raised
    assert len(sender.places) > places, "too few lines were interrupted"


@pytest.mark.covers("generators: generate-isolation")
def test_generate_with_many_interrupts_leaves_no_jobs_and_pages() -> None:
    want = make().generate(["abc", "the fox"], 12, gen_settings=WIDE, seed=1)
    generator, got, caught = make(), 0, 0
    interrupts, texts = trials(300, 80), trials(20, 6)
    with RandomInterrupts(3) as sender:
        for _ in range(20_000):
            if caught > interrupts and got > texts:
                break
            sender.next_rate()
            sender.mean *= 4
            text = None
            try:
                sender.armed = True
                text = generator.generate(["abc", "the fox"], 12, gen_settings=WIDE, seed=1)
                sender.armed = False
            except KeyboardInterrupt:
                sender.armed = False
                caught += 1
            if text is not None:
                assert text == want
                got += 1
            assert generator.num_remaining_jobs() == 0
            assert not has_redirects(generator)
            check_pages(generator)
            assert generator.page_table.unreferenced == generator.max_pages
    assert caught > interrupts
    assert got > texts
    assert generator.iterate() == []


def test_enqueue_cancel_and_clear_with_many_interrupts() -> None:
    generator = make()
    refused = queued = 0
    enough = trials(60, 15)
    with RandomInterrupts(4) as sender:
        for _ in range(20_000):
            if queued > enough and refused > enough:
                break
            sender.next_rate()
            asked = jobs()
            try:
                sender.armed = True
                generator.enqueue(asked)
                generator.iterate()
                generator.cancel(asked[1])
                sender.armed = False
            except KeyboardInterrupt:
                sender.armed = False
            there = [one.serial_number is not None for one in asked]
            assert there in ([True] * len(asked), [False] * len(asked))
            queued, refused = queued + there[0], refused + (not there[0])
            check_pages(generator)
            if not there[0]:  # may be queued again
                generator.enqueue(asked)
            while generator.num_remaining_jobs():
                try:
                    sender.armed = True
                    generator.clear_queue()
                    sender.armed = False
                except KeyboardInterrupt:
                    sender.armed = False
                check_pages(generator)
            assert generator.page_table.unreferenced == generator.max_pages
    assert queued > enough
    assert refused > enough


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.covers("generators: stream-results", "generators: stream-abort")
def test_a_stream_with_many_interrupts_gives_the_same_results(older: bool) -> None:
    def new() -> ExLlamaV2StreamingGenerator:
        model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=128))
        return ExLlamaV2StreamingGenerator(model, ScriptedCache(model, max_seq_len=128), TOKENIZER)

    def stream(sender: RandomInterrupts) -> list[Any]:
        generator, begun = new(), False
        while not begun:
            sender.next_rate()
            try:
                sender.armed = True
                generator.begin_stream_ex(
                    ids("the fox and the"), WIDE, token_healing=True, seed=5, return_probabilities=True
                )
                sender.armed = False
                begun = True
            except KeyboardInterrupt:
                sender.armed = False
        results: list[Any] = []
        while len(results) < 20:
            sender.next_rate()
            result: Any = None
            try:
                sender.armed = True
                result = generator.stream() if older else generator.stream_ex()
                sender.armed = False
            except KeyboardInterrupt:
                sender.armed = False
            if result is not None:
                result = list(result.values()) if isinstance(result, dict) else result
                results.append([x.tolist() if isinstance(x, torch.Tensor) else x for x in result])
        return results

    with RandomInterrupts(5) as sender:
        sender.mean = 1e9
        sender.wait()
        calm = stream(sender) if not sender.armed else []
    with RandomInterrupts(6) as sender:
        for _ in range(2000):
            if sender.signals > 1000 and sender.raised > 300:
                break
            assert stream(sender) == calm
    assert sender.signals > 1000
    assert sender.raised > 300


def test_enqueue_is_all_or_nothing() -> None:
    for number in range(1, 200, 7):
        generator, asked = make(), jobs()
        with at_line(number, interrupt), contextlib.suppress(KeyboardInterrupt):
            generator.enqueue(asked)
        assert generator.num_remaining_jobs() in (0, len(asked))
        generator.clear_queue()
        check_pages(generator)


def test_a_stream_goes_on_where_it_was() -> None:
    def stream(generator: ExLlamaV2StreamingGenerator) -> str:
        generator.begin_stream_ex(ids("the fox and the"), WIDE, token_healing=True, seed=5)
        text = ""
        for _ in range(20):
            while True:
                try:
                    result = generator.stream_ex()
                    break
                except KeyboardInterrupt:
                    pass
            text += result["chunk"]
        return text

    def new() -> ExLlamaV2StreamingGenerator:
        model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=128))
        return ExLlamaV2StreamingGenerator(model, ScriptedCache(model, max_seq_len=128), TOKENIZER)

    want = stream(new())
    with at_line(-1, interrupt) as lines:
        stream(new())
    dice = random.Random(1)
    for number in (dice.randrange(lines[0]) for _ in range(trials(150, 8))):
        generator = new()
        with at_line(number, interrupt):
            try:
                assert stream(generator) == want
            except KeyboardInterrupt:  # it came into begin_stream_ex
                assert generator.sequence_ids is None
                continue


def test_cancel_and_clear_are_done_when_they_are_left() -> None:
    for number in range(1, 60, trials(1, 4)):
        generator = make()
        asked = jobs()
        generator.enqueue(asked)
        for _ in range(3):
            generator.iterate()
        with at_line(number, interrupt), contextlib.suppress(KeyboardInterrupt):
            generator.cancel(asked[0])
            generator.clear_queue()
        check_pages(generator)
        generator.clear_queue()
        check_pages(generator)
        assert generator.page_table.unreferenced == generator.max_pages


def test_a_loop_gets_the_results_of_an_interrupted_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = make()
    one = job("the quick", 3)
    generator.enqueue(one)
    step, interrupts = engine_of(generator).step, 0

    def interrupted() -> None:
        step()
        if one.is_finished and not interrupts:
            interrupt()

    monkeypatch.setattr(engine_of(generator), "step", interrupted)
    results: list[dict[str, Any]] = []
    while generator.num_remaining_jobs():
        try:
            results += generator.iterate()
        except KeyboardInterrupt:
            interrupts += 1
            assert (generator.num_remaining_jobs(), generator.num_active_jobs()) == (1, 0)
    assert interrupts == 1
    assert len(streamed_tokens(results)) == 3
    assert results[-1]["eos_reason"] == "max_new_tokens"
    assert generator.iterate() == []


def test_the_usual_loop_gets_the_last_result_of_cancelled_jobs_and_ends() -> None:
    generator = make()
    running, queued = job("the quick", 30), job("the fox", 30)
    generator.enqueue([running])
    generator.iterate()
    generator.enqueue([queued])
    generator.cancel(running)
    generator.cancel(queued)
    assert generator.num_remaining_jobs() == 2
    rounds = []
    while generator.num_remaining_jobs():
        rounds.append([(result["job"], result["eos_reason"]) for result in generator.iterate()])
    assert rounds == [[(running, "cancelled"), (queued, "cancelled")]]
    generator.enqueue(again := job("abc", 5))
    generator.cancel(again)
    generator.clear_queue()
    assert generator.num_remaining_jobs() == 0


def test_a_second_one_leaves_a_filter_that_hangs_and_ends_its_job_alone() -> None:
    class Hangs(Odd):
        def clone(self, c: Any = None) -> Hangs:
            return self

        def next(self) -> tuple[set[int], set[int]]:
            interrupt()
            interrupt()
            time.sleep(250)
            raise AssertionError

    generator = make(filter_background_eval=False)
    hanging, other = job("abc", 5, filters=[Hangs()]), job("the", 5)
    generator.enqueue([hanging, other])
    results: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    interrupts = 0
    while generator.num_remaining_jobs() or not results[other]:
        try:
            for result in generator.iterate():
                results[result["job"]].append(result)
        except KeyboardInterrupt:
            interrupts += 1
    for result in generator.iterate():
        results[result["job"]].append(result)
    assert interrupts == 1
    assert results[hanging][-1]["eos_reason"] == "error"
    assert len(streamed_tokens(results[other])) == 5
    check_pages(generator)


def test_a_handler_of_the_caller_is_called_after_the_step() -> None:
    seen: list[bool] = []
    generator = make()
    signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    try:
        settings = Settings.greedy(post_sampling_hooks=[lambda _: interrupt()])
        generator.enqueue(job("abc", 1, gen_settings=settings))
        results = generator.iterate()
        assert seen == [True]
        assert results[-1]["eos"]
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_the_default_action_and_threads_are_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        assert make().generate("abc", 2, gen_settings=Settings.greedy()) is not None
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_generate_takes_its_jobs_back_when_interrupted_while_they_are_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = make()
    attach = ExLlamaV2DynamicJob.attach

    def interrupted(self: ExLlamaV2DynamicJob, *args: Any) -> Any:
        result = attach(self, *args)
        interrupt()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(ExLlamaV2DynamicJob, "attach", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generator.generate("abc", 5)
    assert generator.num_remaining_jobs() == 0
    assert not has_redirects(generator)
    check_pages(generator)
    assert generator.generate("abc", 5, completion_only=True)
