"""Settings shared by all tests."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

# The suite is written for the CPU, also where there is a GPU; a test of the GPU names its device. Programs that tests
# start inherit the variable.
os.environ.setdefault("EXL_DEVICE", "cpu")

# Containers often switch off the cache of compiled modules: each process that a test starts would compile torch again.
if sys.dont_write_bytecode:
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

# A shell starts background jobs with this signal ignored, and so would be the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import preloaded
import pytest
from forked import Forked
from hypothesis import HealthCheck, settings
from sampled import thin

# Two shared cores: a slow example is the machine's doing. CI prints what reproduces a failure.
settings.register_profile("default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", parent=settings.get_profile("default"), max_examples=10)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)

# Parts of libraries that these import when they are used first, in seconds.
LATE_IMPORTS = ("transformers.modeling_utils",)

# Those of `exl serve`: tests, too, make few cycles and many objects.
GC_THRESHOLDS = (50_000, 20, 100)

# Files that take long with few tests; the others begin by their number of tests.
LONG_FILES = {
    "test_against_transformers.py",
    "test_bench_features.py",
    "test_bundled_model.py",
    "test_chaos.py",
    "test_cli_output.py",
    "test_cli_terminal.py",
    "test_compile_budget.py",
    "test_config_mutations.py",
    "test_conformance.py",
    "test_cuda_driver.py",
    "test_cycles.py",
    "test_distribution.py",
    "test_equality.py",
    "test_example_plugin.py",
    "test_examples.py",
    "test_feeding.py",
    "test_generate_laws.py",
    "test_grad_modes.py",
    "test_helpers.py",
    "test_host_program.py",
    "test_interrupts.py",
    "test_kernels_covered.py",
    "test_known.py",
    "test_memory.py",
    "test_next_step.py",
    "test_operation.py",
    "test_page.py",
    "test_processes.py",
    "test_readme.py",
    "test_real_model.py",
    "test_resume_laws.py",
    "test_serving_guide.py",
    "test_soak.py",
    "test_syntaxes.py",
    "test_template_process.py",
    "test_tensor_parallel_texts.py",
    "test_tp_processes.py",
    "test_watch.py",
    "test_workers.py",
}


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples a property is tried on, where its test does not say: fewer in the default run.

    No garbage is collected until the tests are.
    """
    default = "quick" if "not full" in str(config.getoption("markexpr")) else "default"
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", default))
    if not config.getoption("numprocesses", None):  # a controller of pytest-xdist collects nothing
        gc.disable()  # imports and collection make a million objects that stay
    if hasattr(config, "workerinput"):
        _share_cores(int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses the number of forks."""
    parser.addoption(
        "--processes",
        type=int,
        help="run the tests in so many forks of the process that collects them (tests/forked.py), a file at a time; "
        "a run without files uses two more than cores",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Use every core for a run of all tests (`pytest` without files); `-n 0` or `--processes 0` uses one process.

    Forks cannot use a GPU that the first process has asked for its features: such a run has processes of pytest-xdist.
    """
    if hasattr(config, "workerinput"):  # a process of pytest-xdist has the options, and must not start further ones
        return
    given = config.option.processes
    xdist = config.pluginmanager.hasplugin("xdist")
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if given is None and (not everything or config.option.usepdb or (xdist and config.option.numprocesses is not None)):
        return
    if hasattr(os, "fork") and "not cuda" in config.option.markexpr:
        # A process waits a quarter of its time, for servers, timers and programs.
        processes = 2 + _cores() if given is None else given
        if processes > 1:
            _share_cores(processes)
            config.pluginmanager.register(Forked(processes), "forked")
            if everything and not config.option.collectonly:
                preloaded.prepare()  # while this process collects
    elif xdist:
        config.option.numprocesses = "auto" if given is None else given
        config.option.dist = "loadfile"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _share_cores(processes: int) -> None:
    """Leave each process its share of the cores: it would have a thread a core, and torch as many again."""
    for variable in ("EXL_CPU_THREADS", "OMP_NUM_THREADS"):
        share = max(1, _cores() // processes)
        os.environ[variable] = str(min(share, int(os.environ.get(variable, share))))
    if torch := sys.modules.get("torch"):
        # Imported already, by the conftest of a folder that was named, it has read the environment. A fork would wait
        # forever for its parent's threads of OpenMP.
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that a `sampled` test leaves to the full run, and leave out tests that the GPU cannot run."""
    thin(items)
    _order(config, items)
    _leave_out_gpu_tests(config, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import once what every fork would, and take what the imports made out of the garbage collector's sight."""
    if session.config.pluginmanager.hasplugin("forked") and not session.config.option.collectonly:
        for name in LATE_IMPORTS:
            if name.partition(".")[0] in sys.modules:  # a file of tests has imported the library
                importlib.import_module(name)
        _join_loggers()
    gc.enable()
    gc.set_threshold(*GC_THRESHOLDS)
    _freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None, item: pytest.Item) -> Generator[None, object, object]:
    """Do the same after each file: some import large libraries, and laws of the kit unfreeze."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect(1)  # an error in `__del__` counts against the file whose object it is
        _freeze()
    return result


def _join_loggers() -> None:
    """Let torch's forty loggers pass records on: pytest adds its handlers to each that does not, six times a test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


def _freeze() -> None:
    """Freeze the objects of large libraries: each of the many full collections would visit a million of them."""
    if len(gc.get_objects()) > 200_000:
        gc.collect()
        gc.freeze()


def _order(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let several processes begin with what takes long, so that none of them ends long after the others."""
    if not config.pluginmanager.hasplugin("forked"):
        return
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONG_FILES, -tests[item.path], item.path))


def _leave_out_gpu_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `cuda` tests without a usable GPU; asking for them there (`-m cuda`) is an error that says why."""
    needs_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if not needs_gpu or "not cuda" in str(config.getoption("markexpr")):
        return
    from exl_kernels.device import cuda_status
    from exl_kernels.errors import DeviceError
    from exl_kernels.selection import Card

    reason = cuda_status().reason
    if reason is not None and str(config.getoption("markexpr")).strip() != "cuda":
        return
    if reason is not None:
        raise pytest.UsageError(f"-m cuda: {reason}")
    try:
        features = Card.device(0).features
    except DeviceError as error:
        raise pytest.UsageError(f"-m cuda: {error}") from error
    lacking = [item for item in items if not all(features & set(need.split("|")) for need in _needs(item))]
    if lacking:
        config.hook.pytest_deselected(items=lacking)
        items[:] = [item for item in items if item not in set(lacking)]


def _needs(item: pytest.Item) -> set[str]:
    """Features of the GPU's code that a test's kernels use; "a|b" where one of them is enough."""
    return {name for marker in item.iter_markers("needs") for name in marker.args}
