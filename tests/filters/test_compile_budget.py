"""Compiling a grammar has an end: in time, in memory, and without ending the process, whatever the grammar."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exl_filters import (
    CompileBudget,
    ExLlamaV2SelectFilter,
    FilterCompileError,
    FilterError,
    FilterUsageError,
    Vocabulary,
    compile_in_background,
    compile_within,
    trial,
    trial_worker,
)
from exl_filters.cores import NICENESS
from exl_filters.plain import is_plain
from exl_filters.testing import standard_vocabulary

llguidance = pytest.importorskip("llguidance", reason="extra `grammar`")

from interrupting import interrupted_at  # noqa: E402
from preloaded import run  # noqa: E402
from sessions import niceness_of_session  # noqa: E402

from exl_filters import ExLlamaV2GrammarFilter  # noqa: E402

V = standard_vocabulary()
SHORT = CompileBudget(seconds=3.0, megabytes=256)
LONG = CompileBudget(seconds=120.0)  # for what takes milliseconds: a busy machine may take seconds
pytestmark = [pytest.mark.covers("filters: compile-errors"), pytest.mark.sampled(3)]


def doubled(levels, form, leaf):
    """A chain in which every definition names the next one twice."""
    names = {f"d{i}": form({"$ref": f"#/$defs/d{i + 1}"}) for i in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": {**names, f"d{levels}": leaf}}


def joined(patterns):
    return {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(5, 5 + patterns)]}


def choices(count):
    a, b = ("a", {"type": "string"}), ("b", {"type": "integer"})
    sides = [
        {"anyOf": [{"properties": {f"{n}{i}": s}, "required": [f"{n}{i}"]} for n, s in (a, b)]} for i in range(count)
    ]
    return {"type": "object", "allOf": sides}


# Specifications that take minutes, gigabytes or the whole stack without a budget (docs/reference/filter-guarantees.md).
ENDLESS = {
    "allOf of 40 patterns": {"json_schema": joined(40)},
    "Lark & of 40 patterns": {"lark": "start: X\nX: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(2, 42)) + "\n"},
    "10,000 $refs in a chain": {
        "json_schema": doubled(10_000, lambda ref: {"type": "array", "items": ref}, {"type": "null"})
    },
    "40,000 rules in a chain": {
        "lark": "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(40_000)) + 'r40000: "z"\n'
    },
    "many divisors": {
        "json_schema": {
            "type": "object",
            "properties": {f"p{i}": {"type": "integer", "multipleOf": 99_991 - 2 * i} for i in range(100)},
        }
    },
    "EBNF of 40,000 rules": {
        "ebnf": "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(40_000)) + 'r40000 ::= "z"\n'
    },
    "choice of 100,000": {"choice": [f"w{i}" for i in range(100_000)]},
    "10,000 optional properties": {
        "json_schema": {
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(10_000)},
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_compilation_is_ended(name):
    with ended(), pytest.raises(FilterCompileError, match=r"within 3 s|more than 256 MB"):
        ExLlamaV2GrammarFilter(None, V, **ENDLESS[name], budget=SHORT)
    # The next grammar is tried as if nothing had happened.
    assert ExLlamaV2GrammarFilter(None, V, json_schema=joined(1), budget=LONG).next()[0]


@contextlib.contextmanager
def no_workers():
    """No process waits for grammars at first: a test sees whether one is started."""
    trial.workers.stop()
    yield trial.workers


@contextlib.contextmanager
def ended():
    """Processes that try grammars wait for the next one or are gone, and they had no more of the processor's time than
    SHORT allows them, the second that it is rounded to, the two that `restrict` adds, and their start."""
    trial.workers.stop()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    assert all(worker.process.poll() is None for worker in trial.workers.idle)
    trial.workers.stop()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SHORT.seconds + 3 + 14


# Nasty to look at, cheap to llguidance, or refused by its own limits: in time, and never by a crash.
NASTY = {
    "huge repeat": {"regex": "(a|b){1,1000000000}"},
    "nested repeats": {"regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"},
    "nested quantifiers": {"regex": "(" * 30 + "a" + "+)" * 30 + "b"},
    "states": {"regex": "(a|b)*a(a|b){2000}"},
    "deep groups": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "classes": {"regex": "".join(f"[a-z{chr(0x400 + i)}]?" for i in range(900))},
    "optionals": {"regex": "a?" * 2000 + "a" * 2000},
    "references, doubled": {"json_schema": doubled(30, lambda ref: {"allOf": [ref, ref]}, {"type": "integer"})},
    "members, doubled": {
        "json_schema": doubled(30, lambda ref: {"type": "object", "properties": {"a": ref, "b": ref}}, {"type": "null"})
    },
    "2^24 ways": {"json_schema": choices(24)},
    "items": {"json_schema": {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}}},
    "length": {"json_schema": {"type": "string", "minLength": 10_000, "maxLength": 10**9}},
    "terminals, doubled": {
        "lark": "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(40)) + 'R40: "a"\n'
    },
    "rules, doubled": {
        "ebnf": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= "a"\n'
    },
    "ambiguous": {"lark": 'start: e\ne: e e | "a" | e e e\n'},
    "deep lark": {"lark": "start: " + "(" * 3000 + '"a"' + ")" * 3000 + "\n"},
    "deep ebnf": {"ebnf": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000 + "\n"},
}


@pytest.mark.parametrize("name", NASTY)
def test_nasty_inputs_are_compiled_or_refused_in_time(name):
    with ended():
        try:
            f = ExLlamaV2GrammarFilter(None, V, **NASTY[name], budget=SHORT)
        except FilterCompileError:
            pass
        else:
            assert not f.ended()


def test_limits_are_checked():
    nested: object = {"type": "null"}
    for _ in range(500):
        nested = {"type": "array", "items": nested}
    with pytest.raises(FilterCompileError, match="nested more than 120 deep"):
        ExLlamaV2GrammarFilter(None, V, json_schema=nested)
    for source in (
        {"regex": "a" * 2_000_000},
        {"json_schema": {"const": "a" * 2_000_000}},
        {"choice": ["a" * 2_000_000]},
    ):
        with pytest.raises(FilterCompileError, match="the limit is 1000000"):
            ExLlamaV2GrammarFilter(None, V, **source)
    for seconds in (0, float("inf"), float("nan")):
        with pytest.raises(FilterUsageError, match="finite seconds above 0"):
            CompileBudget(seconds)


@pytest.mark.parametrize(
    ("plain", "source"),
    [
        (True, {"regex": "(yes|no)+"}),
        (True, {"choice": ["yes", "no"]}),
        (True, {"lark": 'start: "a" b\nb: /x+/\n'}),
        (True, {"json_schema": {"$ref": "#/$defs/a", "title": "t", "$defs": {"a": {"anyOf": [{"type": "null"}]}}}}),
        (True, {"json_schema": {"type": "object", "properties": {"allOf": {"type": "string", "pattern": "a"}}}}),
        (False, {"regex": "a" * 10_000}),
        (False, {"llg": '{"grammars": []}'}),
        (False, {"lark": "start: X\nX: /a/ & /b/\n"}),
        (False, {"lark": "start: %json {}\n"}),
        (False, {"json_schema": joined(2)}),
        (False, {"json_schema": {"properties": {"a": {"patternProperties": {"^a": {}}}}}}),
        (False, {"json_schema": {"items": {"$ref": "#/$defs/a", "pattern": "a"}, "$defs": {"a": {"pattern": "b"}}}}),
        (False, {"json_schema": {"type": "integer", "multipleOf": 9_999}}),
        (False, {"json_schema": {"type": "object", "keywordOfTomorrow": {}}}),
    ],
)
def test_inputs_compiled_at_once_and_inputs_tried_first(plain, source):
    assert is_plain(source) is plain
    assert not is_plain(source, limits={"step_max_items": 10_000})


def test_plain_grammars_start_no_process():
    code = (
        "from exl_filters import ExLlamaV2GrammarFilter, trial\n"
        "from exl_filters.testing import standard_vocabulary\n"
        "ExLlamaV2GrammarFilter(None, standard_vocabulary(), json_schema={'type': 'object'})\n"
        "assert not trial.workers.idle\n"
        "ExLlamaV2GrammarFilter(None, standard_vocabulary(), json_schema={'allOf': [{'type': 'object'}]})\n"
        "assert len(trial.workers.idle) == 1\n"
        "print(trial.workers.idle[0].process.pid)\n"
    )
    done = run(["-c", code], torn_down=True)
    done.check_returncode()
    # At the end of the program the process is gone.
    assert not os.path.exists(f"/proc/{int(done.stdout)}")


def test_indentation_and_a_wrapper_do_not_make_a_schema_large():
    fields = {f"field_{i}": {"type": "string", "maxLength": 20} for i in range(100)}
    schema = {"type": "object", "properties": fields}
    indented = json.dumps(schema, indent=8)
    wrapped = {"name": "fields", "description": "d" * 10_000, "schema": schema}
    with no_workers() as workers:
        for written in (indented, wrapped, json.dumps(wrapped)):
            assert len(written if isinstance(written, str) else json.dumps(written)) > 8192
            ExLlamaV2GrammarFilter(None, V, json_schema=written)
        assert not workers.idle
        schema["description"] = "d" * 10_000
        ExLlamaV2GrammarFilter(None, V, json_schema=schema, budget=LONG)
        assert len(workers.idle) == 1


def test_a_grammar_that_has_passed_is_not_tried_again():
    source: dict[str, Any] = {"json_schema": {"allOf": [{"type": "string", "maxLength": 7}]}}
    ExLlamaV2GrammarFilter(None, V, **source)
    with no_workers() as workers:
        ExLlamaV2GrammarFilter(None, V, **source)
        assert not workers.idle


def test_a_large_schema_is_translated_in_the_other_process(monkeypatch):
    """Translating takes milliseconds of Python code, during which other threads of this process could not run."""
    fields = {f"large_field_{i}": {"type": "string", "maxLength": 20} for i in range(1000)}
    large = json.dumps({"type": "object", "properties": fields, "required": list(fields)})
    small = json.dumps({"type": "object", "properties": {"a": {"type": "string"}}})

    def translated(*_: Any, **__: Any) -> str:
        raise AssertionError("translated here")

    monkeypatch.setattr("exl_filters.grammar.plain_source", translated)
    monkeypatch.setattr("exl_filters.grammar.grammar_text", translated)
    filter_ = ExLlamaV2GrammarFilter(None, V, json_schema=large, budget=LONG)
    assert filter_.forced().startswith(b"{")
    with pytest.raises(AssertionError, match="translated here"):
        ExLlamaV2GrammarFilter(None, V, json_schema=small, budget=LONG)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_other_processes_come_before_one_that_tries_grammars():
    source: dict[str, Any] = {"json_schema": {"allOf": [{"type": "string", "maxLength": 17}]}}
    ExLlamaV2GrammarFilter(None, V, **source, budget=LONG)
    worker = trial.workers.idle[0].process.pid
    assert os.getpriority(os.PRIO_PROCESS, worker) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    if os.path.exists("/proc/self/autogroup"):
        assert niceness_of_session(worker) == min(19, niceness_of_session("self") + NICENESS)


@pytest.mark.skipif(not os.path.exists("/proc/self/autogroup"), reason="Linux schedules no sessions here")
def test_a_session_of_low_priority_comes_before_its_process_that_tries_grammars():
    """A new session has niceness 0 at first, which would put the process before its parent."""
    code = (
        "from exl_filters import ExLlamaV2GrammarFilter, cores, trial\n"
        "from exl_filters.testing import standard_vocabulary\n"
        "cores.yield_cores(12)\n"
        "ExLlamaV2GrammarFilter(None, standard_vocabulary(), json_schema={'allOf': [{'type': 'object'}]})\n"
        "for process in ('self', trial.workers.idle[0].process.pid):\n"
        "    print(open(f'/proc/{process}/autogroup').read().split()[-1])\n"
    )
    done = run(["-c", code])
    done.check_returncode()
    own, of_worker = map(int, done.stdout.split())
    assert own >= 12
    assert of_worker == min(19, own + NICENESS)


def test_a_smaller_budget_is_not_met_by_what_passed_under_a_larger_one():
    source: dict[str, Any] = {"regex": "|".join(f"word{i}" for i in range(2000))}
    ExLlamaV2GrammarFilter(None, V, **source)
    with pytest.raises(FilterCompileError, match=r"within 0\.001 s"):
        ExLlamaV2GrammarFilter(None, V, **source, budget=CompileBudget(seconds=0.001))


def test_a_budget_may_be_larger_than_any_memory():
    for megabytes in (1 << 43, sys.maxsize, 10**30):
        source: dict[str, Any] = {"json_schema": {"allOf": [{"type": "string", "const": str(megabytes)}]}}
        assert ExLlamaV2GrammarFilter(None, V, **source, budget=CompileBudget(120.0, megabytes)).next()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="resource.prlimit")
def test_a_budget_above_the_hard_limit_lifts_the_limit_of_the_last_grammar():
    schemas = [{"allOf": [{"type": "string", "maxLength": length}]} for length in (41, 43)]
    with no_workers() as workers:
        ExLlamaV2GrammarFilter(None, V, json_schema=schemas[0], budget=CompileBudget(120.0, 64))
        (worker,) = workers.idle
        soft, _ = resource.prlimit(worker.process.pid, resource.RLIMIT_AS)
        hard = soft + (1 << 30)
        resource.prlimit(worker.process.pid, resource.RLIMIT_AS, (soft, hard))
        ExLlamaV2GrammarFilter(None, V, json_schema=schemas[1], budget=CompileBudget(120.0, 1 << 20))
        assert workers.idle == (worker,)
        assert resource.prlimit(worker.process.pid, resource.RLIMIT_AS) == (hard, hard)


def test_a_process_that_cannot_be_started_is_reported(monkeypatch):
    source: dict[str, Any] = {"json_schema": {"allOf": [{"type": "string", "maxLength": 13}]}}
    with no_workers():
        for executable in ("", "/no/such/python"):
            monkeypatch.setattr(sys, "executable", executable)
            with pytest.raises(FilterError, match="trust=True"):
                ExLlamaV2GrammarFilter(None, V, **source)
        monkeypatch.undo()
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        with pytest.raises(FilterError, match="trust=True"):
            ExLlamaV2GrammarFilter(None, V, **source)


@pytest.mark.skipif(os.name == "nt", reason="scripts are not started by their first line here")
def test_a_process_that_is_ended_in_the_middle_of_its_answer(tmp_path, monkeypatch):
    """By the system for want of memory, say: what it has written is no answer, and no JSON either."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, struct, sys\n"
        "def send(message, less=0):\n"
        "    raw = json.dumps(message).encode()\n"
        "    sys.stdout.buffer.write(struct.pack('<I', len(raw)) + raw[:len(raw) - less])\n"
        "    sys.stdout.buffer.flush()\n"
        "send({'ready': True})\n"
        "sys.stdin.buffer.read(4)\n"
        "send({'begun': True})\n"
        "send({'error': '', 'warnings': [], 'took': 0.0}, less=5)\n"
    )
    script.chmod(0o755)
    trial.workers.stop()
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(FilterCompileError, match="exit code 0"):
        ExLlamaV2GrammarFilter(None, V, json_schema=joined(2), budget=CompileBudget(seconds=60))
    assert not trial.workers.idle


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package, which the processes that try grammars import."""
    copy = tmp_path / "exl_filters"
    shutil.copytree(Path(trial_worker.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(trial_worker, "__file__", str(copy / "trial_worker.py"))
    trial.workers.stop()
    yield copy
    trial.workers.stop()


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ({"json_schema": {"allOf": [{"type": "string", "maxLength": 23}]}}, ""),
        ({"json_schema": {"allOf": [{"type": "array", "uniqueItems": True}]}}, "uniqueItems"),
        ({"ebnf": 'root ::= "a" | "~"\n'}, ""),
    ],
)
def test_a_process_has_imported_all_modules_when_it_is_ready(package, monkeypatch, source, refused):
    """The package's files may be replaced under a program that runs."""
    ask = trial.Worker.ask

    def without_files(self, request, seconds):
        shutil.rmtree(package)
        return ask(self, request, seconds)

    monkeypatch.setattr(trial.Worker, "ask", without_files)
    if refused:
        with pytest.raises(FilterCompileError, match=refused):
            ExLlamaV2GrammarFilter(None, V, **source, budget=LONG)
    else:
        assert ExLlamaV2GrammarFilter(None, V, **source, budget=LONG).next()[0]
    assert not package.exists()


def test_a_faulty_installation_is_not_blamed_on_the_grammar(package):
    schema = {"allOf": [{"type": "string", "maxLength": 29}]}
    module = package / "grammar_source.py"
    text = module.read_text()
    for fault in (text.replace("import json\n", "import json_of_tomorrow\n"), "an error of the syntax"):
        module.write_text(fault)
        with pytest.raises(FilterError, match=r"the installation of exl-filters or llguidance") as raised:
            ExLlamaV2GrammarFilter(None, V, json_schema=schema, budget=LONG)
        assert not isinstance(raised.value, FilterCompileError)
    # A module that is missing only once a grammar needs it.
    module.write_text(text.replace("from llguidance.gbnf_to_lark", "from llguidance.gone"))
    with pytest.raises(FilterError, match=r"installation.*llguidance\.gone") as raised:
        ExLlamaV2GrammarFilter(None, V, ebnf='root ::= "b" | "~"\n', budget=LONG)
    assert not isinstance(raised.value, FilterCompileError)
    module.write_text(text)
    assert ExLlamaV2GrammarFilter(None, V, json_schema=schema, budget=LONG).next()[0]


@pytest.mark.skipif(os.name == "nt", reason="sends SIGKILL")
@pytest.mark.parametrize("large", [False, True])
def test_an_idle_process_that_ends_at_the_request_is_replaced(monkeypatch, large):
    """A request that nobody reads fails while it is written, or when its pipe is closed."""
    first = {"allOf": [{"type": "string", "maxLength": 31}]}
    second = {"allOf": [{"type": "string", "maxLength": 37 + large, "description": "d" * 300_000 * large}]}
    ExLlamaV2GrammarFilter(None, V, json_schema=first, budget=LONG)
    (*_, ended) = trial.workers.idle
    ask = trial.Worker.ask

    def ended_before(self, request, seconds):
        if self is ended:
            self.process.send_signal(signal.SIGKILL)
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return ask(self, request, seconds)

    monkeypatch.setattr(trial.Worker, "ask", ended_before)
    assert ExLlamaV2GrammarFilter(None, V, json_schema=second, budget=LONG).next()[0]
    assert ended.process.returncode == -signal.SIGKILL
    assert ended not in trial.workers.idle


def test_a_grammar_may_name_control_tokens_where_it_is_tried():
    vocab = Vocabulary(
        [*(bytes([i]) for i in range(256)), None, None],
        eos_token_id=256,
        special_ids=[256, 257],
        special_texts={256: "</s>", 257: "<|call|>"},
    )
    for lark in ("start: <|call|> X\nX: /a+/ & /a.*/\n", "start: <[257]> X\nX: /a+/ & /a.*/\n"):
        assert not is_plain({"lark": lark})
        f = ExLlamaV2GrammarFilter(None, vocab, lark=lark)
        assert f.next()[0] == [257]
    with pytest.raises(FilterCompileError, match="call"):
        ExLlamaV2GrammarFilter(None, V, lark="start: <|call|> X\nX: /a+/ & /a.*/\n")


@pytest.mark.parametrize("token", ["<|call|>", "<[257]>"])
@pytest.mark.parametrize("escaped", ["", "<", "[", "<["])
def test_json_may_escape_the_signs_that_name_control_tokens(token, escaped):
    vocab = Vocabulary(
        [*(bytes([i]) for i in range(256)), None, None],
        eos_token_id=256,
        special_ids=[256, 257],
        special_texts={256: "</s>", 257: "<|call|>"},
    )
    written = "".join(f"\\u{ord(sign):04X}" if sign in escaped else sign for sign in token)
    llg = json.dumps({"grammars": [{"lark_grammar": f'start: {token} "a"\n'}]}).replace(token, written)
    assert ExLlamaV2GrammarFilter(None, vocab, llg=llg).next()[0] == [257]


def test_other_work_goes_on_and_the_thread_ends():
    """A mask is computed many times while a grammar is on trial; the trial ends with the time allowed."""
    other = ExLlamaV2SelectFilter(None, V, ["yes", "no"])
    before = set(threading.enumerate())
    answers = 0
    for seconds in (1.5, 6.0, 24.0):  # a busy machine gives this thread little of them
        failure: list[BaseException] = []

        def compile_it(seconds: float = seconds, failure: list[BaseException] = failure) -> None:
            try:
                compile_within(seconds, ExLlamaV2GrammarFilter, None, V, **ENDLESS["Lark & of 40 patterns"])
            except FilterCompileError as error:
                failure.append(error)

        thread = threading.Thread(target=compile_it)
        thread.start()
        answers = 0
        while thread.is_alive() and answers < 10**7:
            assert other.next()[0]
            answers += 1
        thread.join()
        for left in set(threading.enumerate()) - before:
            left.join(250)
            assert not left.is_alive(), f"{left.name} works on"
        if answers > 200:
            break
    assert answers > 200
    assert f"{seconds:g} s" in str(failure[0])


def test_cancelling_ends_the_trial(monkeypatch):
    asked, compiling = threading.Event(), []
    ask = trial.Worker.ask

    def noted(self, request, seconds):
        compiling.append((self.process, threading.current_thread()))
        asked.set()
        return ask(self, request, seconds)

    monkeypatch.setattr(trial.Worker, "ask", noted)
    budget = CompileBudget(seconds=1000.0, megabytes=1 << 20)
    future = compile_in_background(ExLlamaV2GrammarFilter, None, V, **ENDLESS["Lark & of 40 patterns"], budget=budget)
    assert asked.wait(250)
    assert future.cancel()
    ((process, thread),) = compiling
    thread.join(250)
    assert not thread.is_alive()
    assert process.returncode is not None
    assert future.cancelled()


def test_a_budget_is_not_part_of_the_spec():
    """A client that names a filter by its data has no say in what compiling it may take."""
    from exl_filters import from_spec

    f = ExLlamaV2GrammarFilter(None, V, json_schema=joined(1), budget=CompileBudget(seconds=100))
    assert "budget" not in json.dumps(f.spec())
    with pytest.raises(FilterError):
        from_spec({"type": "grammar", "regex": "a", "budget": {"trust": True}}, V)


def test_trust_compiles_at_once():
    with no_workers() as workers:
        source: dict[str, Any] = {"json_schema": {"allOf": [{"type": "string", "maxLength": 11}]}}
        assert ExLlamaV2GrammarFilter(None, V, **source, budget=CompileBudget(trust=True)).next()[0]
        assert not workers.idle


class Answering(trial.Worker):
    """A worker that answers at once that a grammar is fine."""

    process: Any = SimpleNamespace(poll=lambda: None, kill=lambda: None)

    def __init__(self, library: str) -> None:
        self.library = library

    def ask(self, request, seconds):
        if "together" in request:
            request["together"].wait()
        return {"error": "", "warnings": [], "took": 0.0}

    def kill(self) -> None: ...


def test_an_interrupt_at_any_call_leaves_all_places():
    """Afterwards as many grammars as before can compile at once."""
    pool = trial.WorkerPool(2, start=Answering)
    budget = CompileBudget(seconds=20.0)
    for number in itertools.count(1):
        try:
            with interrupted_at(number) as raised:
                pool.ask({}, budget)
        except KeyboardInterrupt:
            pass
        if not raised:
            break
        together = threading.Barrier(2, timeout=120)
        request = {"together": together}
        asked = [compile_in_background(pool.ask, request, budget) for _ in range(2)]
        assert all(not future.result(timeout=120)["error"] for future in asked)
    assert number > 20
    working = threading.Barrier(3, timeout=120)
    held = [compile_in_background(pool.ask, {"together": working}, budget) for _ in range(2)]
    while working.n_waiting < 2:
        time.sleep(0.001)
    with pytest.raises(FilterCompileError, match=r"^not tried: 2 other grammars have been compiling for 0\.1 s"):
        pool.ask({}, CompileBudget(seconds=0.01))
    with pytest.raises(FilterCompileError, match=r"not compiled within 0\.05 s"):
        compile_within(0.05, pool.ask, {}, budget)
    working.wait()
    assert all(not future.result(timeout=120)["error"] for future in held)
