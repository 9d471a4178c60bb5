"""SeqTensor and Timer."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exl_core import SeqTensor, Timer, errors

pytestmark = pytest.mark.covers("core: helpers")


@given(
    st.lists(
        st.one_of(st.tuples(st.just("append"), st.integers(0, 600)), st.tuples(st.just("keep"), st.floats(0, 1))),
        max_size=12,
    )
)
def test_appending_and_truncating_like_a_plain_tensor(steps: list[tuple[str, float]]) -> None:
    grown, plain, counter = SeqTensor((2, 0, 3), torch.int64, seq_dim=1), torch.empty(2, 0, 3, dtype=torch.int64), 0
    for action, amount in steps:
        if action == "append":
            new = torch.arange(counter, counter + 6 * int(amount)).view(2, int(amount), 3)
            counter += new.numel()
            grown.append(new)
            plain = torch.cat([plain, new], dim=1)
        else:
            length = int(amount * len(grown))
            grown.truncate(length)
            plain = plain[:, :length]
        assert torch.equal(grown.torch(), plain)
        assert len(grown) == plain.shape[1]
        assert bool(grown) == (len(grown) > 0)
        assert grown.seq_cap % 256 == 0
    assert torch.equal(grown.torch_slice(-3, None), plain[:, -3:])
    assert torch.equal(grown.slice(1, 4).torch(), plain[:, 1:4])


def test_clone_set_clear_and_self_append() -> None:
    a = SeqTensor.from_tensor(torch.arange(10)[None], seq_dim=-1)
    b = a.clone(drop=3)
    a.append(b)
    a.append(None)
    assert a.torch().tolist() == [[*range(10), *range(7)]]
    assert b.torch().tolist() == [[*range(7)]]
    b.set(torch.tensor([[5]]))
    assert b.torch().tolist() == [[5]]
    b.clear()
    assert not b


def test_wrong_shapes() -> None:
    a = SeqTensor((2, 0), torch.int64, seq_dim=1)
    for bad in (torch.zeros(3, 4), torch.zeros(2), torch.zeros(2, 4, 1)):
        with pytest.raises(errors.ShapeError, match="append"):
            a.append(bad)
    with pytest.raises(errors.ShapeError, match="truncate"):
        a.truncate(1)
    with pytest.raises(errors.ShapeError, match="seq_dim"):
        SeqTensor((2, 0), torch.int64, seq_dim=2)


@pytest.mark.covers("core: import")
def test_importing_changes_nothing_of_the_process() -> None:
    """No thread counts, environment, random states, streams, output, log handlers or warnings' filters; no driver."""
    script = """
import json, logging, os, random, sys, warnings
import torch
def state():
    return [torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype() is torch.float32,
        dict(os.environ), torch.initial_seed(), random.getstate()[1][:8], len(logging.getLogger().handlers),
        logging.getLogger().level, len(warnings.filters), torch.is_grad_enabled(), sys.getrecursionlimit(),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()]
torch.manual_seed(7)
before = json.dumps(state())
import exl_core, exl_kernels.device, exl_kernels.cuda_ops
assert json.dumps(state()) == before
assert not torch.cuda.is_initialized()
assert sys.platform != "linux" or "libcuda.so" not in open("/proc/self/maps").read()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_timer() -> None:
    before = time.perf_counter()  # clock: the timer's own
    with Timer() as t:
        time.sleep(0.01)
    assert t.interval == t.end_time - t.start_time
    assert 0.01 <= t.interval <= time.perf_counter() - before  # clock: as above
