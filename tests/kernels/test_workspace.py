"""Workspaces for inter-block reductions: one for each stream, freed with its device's cache. Some tests need a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from internals import gpu_sleep

from exl_kernels.linear import QuantMatrix, workspace
from exl_kernels.linear.workspace import block_workspace, forget_workspaces, workspaces_in

HERE, ELSEWHERE = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Without a GPU, nothing known yet: whether the current stream is being captured."""
    now = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0])
    for device in (HERE, ELSEWHERE):
        forget_workspaces(device)
    yield now
    for device in (HERE, ELSEWHERE):
        forget_workspaces(device)


def test_a_stream_finds_its_memory_again_and_a_capture_never_takes_it(capturing: list[bool]) -> None:
    first = block_workspace(HERE, 1, 100)
    assert first is not None
    assert bool((first == 255).all())
    assert block_workspace(HERE, 1, 60) is first
    assert block_workspace(HERE, 2, 60) is not first
    assert block_workspace(HERE, 1, 0) is None
    larger = block_workspace(HERE, 1, 101)
    assert larger is not None
    assert larger.numel() == 101
    assert block_workspace(HERE, 1, 100) is larger
    capturing[0] = True
    own = [block_workspace(HERE, 1, 100) for _ in range(2)]
    assert len({id(memory) for memory in (larger, *own)}) == 3
    capturing[0] = False
    assert block_workspace(HERE, 1, 100) is larger


def test_forgotten_memory_is_let_go_of_on_its_device_alone(capturing: list[bool]) -> None:
    kept = [block_workspace(ELSEWHERE, 1, 10), block_workspace(ELSEWHERE, 2, 10)]
    held: list[torch.Tensor] = []
    with workspaces_in(held):
        captured = block_workspace(HERE, 1, 10)
    gone = [block_workspace(HERE, stream, 10) for stream in (1, 2)]
    forget_workspaces("cpu")
    assert [block_workspace(ELSEWHERE, stream, 10) for stream in (1, 2)] == kept
    assert not {id(block_workspace(HERE, stream, 10)) for stream in (1, 2)} & {id(memory) for memory in gone}
    with workspaces_in(held):
        assert block_workspace(HERE, 1, 10) is captured


def test_memory_may_be_forgotten_while_another_thread_looks_for_it(
    capturing: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgotten(dict[object, torch.Tensor]):
        """By somebody else, as soon as anything is asked of it."""

        def __contains__(self, key: object) -> bool:
            return self.pop(key, None) is not None

        def get(self, key: object, default: object = None) -> object:  # type: ignore[override]
            return self.pop(key, default)

    monkeypatch.setattr(workspace, "_by_stream", Forgotten())
    first = block_workspace(HERE, 1, 10)
    assert block_workspace(HERE, 1, 10) is first
    assert block_workspace(HERE, 1, 10) is not first


@pytest.mark.cuda
@pytest.mark.needs("wgmma|mma_pipeline")
def test_queued_work_outlives_its_memory() -> None:
    """On streams of its own, with what another stream writes to free memory meanwhile."""
    generator = torch.Generator().manual_seed(5)
    k = 4096
    words = torch.randint(-(2**31), 2**31, (k // 8 + k // 128, 64), generator=generator).to(torch.int32)
    parts = {
        "q_weight": words[: k // 8],
        "q_scale": words[k // 8 :, :8].contiguous(),
        "q_scale_max": torch.rand(k // 128, generator=generator).half() * 0.01 + 0.001,
        "q_groups": torch.tensor([[4, 16 * i] for i in range(k // 128)], dtype=torch.int16).flatten(),
        "q_invperm": torch.randperm(k, generator=generator).to(torch.int32),
    }
    matrix = QuantMatrix.from_exl2(parts, device="cuda")
    x = torch.randn(64, k, device="cuda").half()
    want = matrix.matmul(x)
    aside = torch.cuda.Stream()
    torch.cuda.synchronize()
    for give_back in (False, True):
        with torch.cuda.stream(aside):
            matrix.matmul(x)
            known = block_workspace(x.device, aside.cuda_stream, 1)
            assert known is not None
            size = known.numel()
            assert size > 1, "blocks of this matmul exchange nothing: another shape is needed"
            del known
            gpu_sleep(20_000_000)  # about 10 ms
            got = matrix.matmul(x)
        forget_workspaces(x.device)
        if give_back:
            torch.cuda.empty_cache()
        others = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(8)]
        with torch.cuda.stream(aside):
            again = matrix.matmul(x)
        torch.cuda.synchronize()
        assert torch.equal(got, want)
        assert torch.equal(again, want)
        del others
