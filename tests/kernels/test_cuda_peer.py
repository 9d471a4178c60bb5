"""Exchanges between GPUs; on one GPU sending and receiving are called apart. Needs a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exl_kernels.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from exl_kernels.peer import ExchangeBuffers, PeerResults
from exl_kernels.reference.peer import gather
from exl_kernels.selection import MOST_EXCHANGES

pytestmark = pytest.mark.cuda

GPU = torch.device("cuda", 0)


def several() -> list[torch.device]:
    """Two GPUs that have access to one another's memory."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here: this test runs on a machine with two")
    found = [torch.device("cuda", at) for at in range(2)]
    for one, other in (found, found[::-1]):
        torch.zeros(1, device=one).to(other)  # torch opens the access
    return found


def parts_of(widths: list[int], rows: int, dtype: torch.dtype, seed: int, devices: list[torch.device]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(rows, width, generator=generator) for width in widths]
    return [part.to(dtype).to(device) for part, device in zip(made, devices, strict=True)]


def begins_of(widths: list[int]) -> list[int]:
    return [sum(widths[:at]) for at in range(len(widths) + 1)]


@given(
    widths=st.lists(st.integers(1, 300), min_size=2, max_size=8),
    even=st.booleans(),
    rows=st.integers(1, 5),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    receivers=st.none() | st.sets(st.integers(0, 7)),
    steps=st.integers(1, 3),
)
@examples(40, 10)
def test_parts_are_gathered_bitwise(
    widths: list[int], even: bool, rows: int, dtype: torch.dtype, receivers: set[int] | None, steps: int
) -> None:
    """Several steps of two exchanges through the same buffers. GPUs that receive nothing keep their memory.

    Even numbers of words are sent in pairs."""
    widths = [width * (4 if even else 2) for width in widths]
    count, begins = len(widths), begins_of(widths)
    devices = [GPU] * count
    buffers = ExchangeBuffers(devices, rows * begins[-1] * 4)
    got = None if receivers is None else {one for one in receivers if one < count}
    for step in range(steps):
        for gpu in range(count):
            buffers.begin_step(gpu)
        for number, to in ((0, None), (1, got)):
            parts = parts_of(widths, rows, dtype, 2 * step + number, devices)
            full = [torch.full((rows, begins[-1]), 7.0, dtype=dtype, device=GPU) for _ in range(count)]
            for phase in ({"receive": False}, {"send": False}):
                for gpu in range(count):
                    buffers.gather(
                        gpu, parts[gpu], full[gpu], begins, number, to if to is None else sorted(to), **phase
                    )
            want = gather(parts)
            for gpu in range(count):
                expected = want if to is None or gpu in to else torch.full_like(want, 7.0)
                assert torch.equal(full[gpu].cpu(), expected), (step, number, gpu)
    buffers.check()


def test_only_receivers_of_a_larger_result_have_room_for_it() -> None:
    """An exchange of an odd number may have one. All buffers end where their results do: nothing else is written."""
    devices, begins = [GPU] * 3, [0, 8, 16, 40]
    buffers = ExchangeBuffers(devices, 2 * 10 * 4, {0: 2 * 40 * 4})
    for step in range(3):
        for gpu in range(3):
            buffers.begin_step(gpu)
        for number, ends, receivers in ((0, [0, 2, 4, 10], None), (1, begins, [0])):
            widths = [end - begin for begin, end in pairwise(ends)]
            parts = parts_of(widths, 2, torch.float32, 2 * step + number, devices)
            full = [torch.zeros(2, ends[-1], device=GPU) for _ in devices]
            for phase in ({"receive": False}, {"send": False}):
                for gpu in range(3):
                    buffers.gather(gpu, parts[gpu], full[gpu], ends, number, receivers, **phase)
            for gpu in range(3) if receivers is None else receivers:
                assert torch.equal(full[gpu].cpu(), gather(parts))
    buffers.check()
    own, full = torch.ones(2, 8, device=GPU), [torch.zeros(2, 40, device=GPU)]
    for number, receivers in ((2, [0]), (1, [0, 1]), (1, None)):
        with pytest.raises(ShapeError, match="exceed the exchange buffers"):
            buffers.gather(0, own, full[0], begins, number, receivers)


def test_a_part_that_never_comes_is_an_error() -> None:
    """Also one of the step before: its mark is another."""
    buffers = ExchangeBuffers([GPU] * 2, 64, limit=0.0)
    own, full = torch.ones(1, 8, device=GPU), torch.zeros(1, 16, device=GPU)
    for step in range(2):
        for gpu in range(2):
            buffers.begin_step(gpu)
        if step == 0:
            for gpu in range(2):
                buffers.gather(gpu, own, full, [0, 8, 16], 0, receive=False)
            buffers.gather(0, own, full, [0, 8, 16], 0, send=False)
            buffers.check()
    buffers.gather(0, own, full, [0, 8, 16], 0, send=False)
    assert bool(full[:, 8:].isnan().all()), "no value of another step"
    with pytest.raises(DeviceError, match="waited in vain"):
        buffers.check()
    own.fill_(5.0)
    for gpu in (0, 1):
        buffers.gather(gpu, own, full, [0, 8, 16], 1, receive=False)
    buffers.gather(1, own, full, [0, 8, 16], 1, send=False)
    assert bool(full[:, :8].isnan().all()), "what a GPU that gave up would send is not to be had"


@pytest.mark.parametrize("apart", [False, True])
def test_a_gpu_that_gave_up_gets_nan_in_its_own_columns_too(apart: bool) -> None:
    """Otherwise values of an earlier step would stay there."""
    buffers = ExchangeBuffers([GPU] * 2, 64, limit=0.0)
    own = torch.ones(2, 4, device=GPU)
    buffers.begin_step(0)
    buffers.gather(0, own, torch.zeros(2, 8, device=GPU), [0, 4, 8], 0)
    full = torch.full((2, 8), 7.0, device=GPU)
    for send, receive in ((True, False), (False, True)) if apart else ((True, True),):
        buffers.gather(0, own, full, [0, 4, 8], 1, send=send, receive=receive)
    assert bool(full.isnan().all())
    full.fill_(7.0)
    buffers.gather(0, own, full, [0, 4, 8], 1, [1])
    assert bool((full == 7.0).all()), "a GPU that receives nothing keeps its memory"


def test_operands_that_do_not_fit_are_rejected() -> None:
    buffers = ExchangeBuffers([GPU] * 2, 64)
    own, full = torch.ones(1, 8, device=GPU), torch.zeros(1, 16, device=GPU)
    with pytest.raises(UnsupportedError, match="1 GPUs"):
        ExchangeBuffers([GPU], 64)
    with pytest.raises(DTypeError, match="one dtype"):
        buffers.gather(0, own.half(), full, [0, 8, 16], 0)
    with pytest.raises(ShapeError, match="begins"):
        buffers.gather(0, own, full, [0, 16], 0)
    with pytest.raises(ShapeError, match="multiples of 2"):
        buffers.gather(0, own.half(), full.half(), [0, 7, 16], 0)
    with pytest.raises(ShapeError, match="own"):
        buffers.gather(1, own, full, [0, 10, 16], 0)
    with pytest.raises(ShapeError, match="exceed the exchange buffers"):
        buffers.gather(0, torch.ones(2, 8, device=GPU), torch.ones(2, 16, device=GPU), [0, 8, 16], 0)
    with pytest.raises(ShapeError, match="at most"):
        buffers.gather(0, own, full, [0, 8, 16], MOST_EXCHANGES)


def test_two_gpus_gather_within_captured_graphs() -> None:
    """Many replays on both, queued without a wait: each step sums what it gathered into its next part."""
    devices, widths, rows, exchanges = several(), [96, 160], 3, 6
    begins = begins_of(widths)
    buffers = ExchangeBuffers(devices, rows * begins[-1] * 4)
    own = parts_of(widths, rows, torch.float32, 1, devices)
    first = [part.clone() for part in own]
    full = [torch.zeros(rows, begins[-1], device=device) for device in devices]
    graphs = []
    for gpu, device in enumerate(devices):
        graph = torch.cuda.CUDAGraph()
        buffers.gather(gpu, own[gpu], full[gpu], begins, 0, receive=False)  # loads the kernel
        torch.cuda.synchronize(device)
        # torch's own capture stream is of the first device that captured.
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
            buffers.begin_step(gpu)
            for number in range(exchanges):
                buffers.gather(gpu, own[gpu], full[gpu], begins, number)
                own[gpu].add_(full[gpu].mean(1, keepdim=True))
        graphs.append(graph)
    steps = 50
    for _ in range(steps):
        for graph in graphs:
            graph.replay()
    buffers.check()
    want = [part.clone() for part in first]
    for _ in range(steps * exchanges):
        whole = torch.cat([part.to(devices[0]) for part in want], 1)
        for gpu, device in enumerate(devices):
            want[gpu].add_(whole.to(device).mean(1, keepdim=True))
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(own, want, strict=True))


@given(
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=8),
    wide=st.booleans(),
    rows=st.integers(1, 40),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    steps=st.integers(1, 3),
)
@examples(30, 10)
def test_columns_are_stored_in_all_results(
    widths: list[int], wide: bool, rows: int, dtype: torch.dtype, steps: int
) -> None:
    """Compare the last two stores, with marks and without. Columns of whole vectors are stored 16 bytes at once."""
    widths = [width * (8 if wide else 2) for width in widths]
    count, begins = len(widths), begins_of(widths)
    results = PeerResults([GPU] * count, rows * begins[-1] * 4, rows * begins[-1] * 4 + 64)
    for step in range(steps):
        for gpu in range(count):
            results.begin_step(gpu)
        for number in (0, 1):
            parts = parts_of(widths, rows, dtype, 2 * step + number, [GPU] * count)
            for gpu in range(count):
                results.store(gpu, parts[gpu], begins, number, mark=True)
            for gpu in range(count):
                found = results.store(gpu, parts[gpu], begins, number, wait=bool(step % 2))
                assert torch.equal(found.cpu(), gather(parts)), (step, number, gpu)
            for gpu in range(count):
                results.store(gpu, parts[gpu][:0], begins, number)
                assert torch.equal(results.result_of(gpu, number, rows, begins[-1], dtype).cpu(), gather(parts))
        first = [results.result_of(gpu, 0, rows, begins[-1], dtype).cpu() for gpu in range(count)]
        assert all(torch.equal(first[0], other) for other in first)
    results.check()


def test_a_store_that_waits_in_vain_gives_nan_and_the_others_give_up() -> None:
    results, begins = PeerResults([GPU] * 2, 64, 48, limit=0.0), [0, 2, 8]
    parts = parts_of([2, 6], 3, torch.float16, 0, [GPU] * 2)
    for gpu in range(2):
        results.begin_step(gpu)
    found = results.store(0, parts[0], begins, 0, mark=True, wait=True)
    assert bool(found.isnan().all())
    with pytest.raises(DeviceError, match="waited in vain"):
        results.check()
    results.store(1, parts[1], begins, 0, mark=True)
    assert bool(results.store(0, parts[0], begins, 1, mark=True, wait=True).isnan().all())
    assert bool(results.store(1, parts[1], begins, 1, mark=True, wait=True).isnan().all())


def test_stores_check_their_operands() -> None:
    results = PeerResults([GPU] * 2, 3 * 8 * 2, 3 * 8)
    own = torch.zeros(3, 4, dtype=torch.float16, device=GPU)
    with pytest.raises(DTypeError, match="float64"):
        results.store(0, own.double(), [0, 4, 8], 0)
    for begins in ([0, 3, 8], [0, 4], [0, 4, 4], [0, 6, 8]):
        with pytest.raises(ShapeError):
            results.store(0, own, begins, 0)
    with pytest.raises(ShapeError, match="at most"):
        results.store(0, own, [0, 4, 12], 0)
    for number in (1, MOST_EXCHANGES):
        with pytest.raises(ShapeError, match="at most"):
            results.store(0, own, [0, 4, 8], number)
    with pytest.raises(ShapeError, match="contiguous"):
        results.store(0, own.t().contiguous().t(), [0, 4, 8], 0)
    with pytest.raises(UnsupportedError, match="from 2 to"):
        PeerResults([GPU], 64, 64)
