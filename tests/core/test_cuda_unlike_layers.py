"""A model of which one layer allows no joined launches: the other layers keep theirs. Needs a GPU or its emulation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from make_random_model import Shape, make_model
from random_models import loaded_on
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache, PagedParams
from exl_core.execution.build_step import Chunk, build_step
from exl_core.execution.fused import JoinedLaunches, joined_launches_of
from exl_kernels import _native
from exl_kernels.safetensors_file import read_safetensors_folder, read_tensor, write_safetensors
from exl_kernels.selection import Card

pytestmark = pytest.mark.cuda

PAGE = 16
LAYERS = 3
ODD = "model.layers.1.self_attn.k_proj"


def unlike(folder: Path, odd: str, key: str = ODD) -> Path:
    """A model whose matrix `key` is a float matrix, or reads its input in an order of its own."""
    make_model(folder, Shape(256, 256, LAYERS, 4, 2, 96), 4.0)
    return changed(folder, odd, key)


def changed(folder: Path, odd: str, key: str) -> Path:
    """The model in the folder with such a matrix `key`."""
    (path,) = folder.glob("*.safetensors")
    tensors = {name: read_tensor(entry).clone() for name, entry in read_safetensors_folder(folder).items()}
    generator = torch.Generator().manual_seed(5)
    if odd == "permuted":
        old = tensors[f"{key}.q_invperm"]
        tensors[f"{key}.q_invperm"] = torch.randperm(len(old), generator=generator).to(old.dtype)
    else:
        columns = tensors[f"{key}.q_weight"].shape[1]
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(key)}
        tensors[f"{key}.weight"] = (torch.randn(columns, 256, generator=generator) / 16).half()
    path.unlink()
    write_safetensors(path, tensors)
    return folder


def has_batch_kernels() -> bool:
    """Whether 9 to 64 rows are multiplied by launches of several matrices: not on Turing cards."""
    return bool(Card.device(0).features & {"wgmma", "mma_pipeline"})


class Launches:
    """Counts launches of kernels between two readings."""

    def __init__(self) -> None:
        self._before: dict[str, int] = _native.cuda_launches()

    def read(self, *starts: str) -> int:
        """Launches so far of kernels whose names begin so."""
        now = _native.cuda_launches()
        return sum(n - self._before.get(name, 0) for name, n in now.items() if name.startswith(starts))


def passes(model: ExLlamaV2, plan: JoinedLaunches, rows: int) -> tuple[Tensor, Tensor, Launches]:
    """Logits of a step by the modules and by joined launches, which also leave the same keys and values."""
    device = torch.device("cuda:0")
    table = torch.arange(rows, dtype=torch.int32).flip(0)[:, None].contiguous()
    ids = torch.randint(0, 96, (rows,), generator=torch.Generator().manual_seed(rows))
    caches = [ExLlamaV2Cache(model, max_seq_len=PAGE * rows) for _ in range(2)]
    params = PagedParams(rows, table, torch.zeros(rows, dtype=torch.int32), 0, PAGE, 1)
    steps = [build_step(model, Chunk(cache, params, rows, 1), device, invariant=True) for cache in caches]
    with torch.inference_mode():
        x = ids.to(device)
        for module in model.modules:
            x = module.forward(x, steps[0])
        launches, logits = Launches(), torch.empty_like(x)
        plan.run(ids.to(device), steps[1], logits)
    for one, other in zip(caches[0].all_tensors(), caches[1].all_tensors(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())
    return x.cpu(), logits.cpu(), launches


@pytest.mark.parametrize("odd", ["permuted", "float"])
def test_other_layers_keep_their_joined_launches(odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are bitwise those of the modules, and only the odd half launches each matmul alone."""
    model = loaded_on("cuda:0", unlike(tmp_path, odd), monkeypatch)
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches), plan
    for rows in (1, 5, 8, 12, 64, 70):
        assert plan.refusal_of_rows(rows) is None
        want, got, launches = passes(model, plan, rows)
        assert torch.equal(want, got), rows
        if rows in (12, 64) and has_batch_kernels():
            # q+k+v, o, gate+up and down; in the odd layer three quantized matrices, or two, for q+k+v. The head.
            assert launches.read("gemm_batch_") == 4 * (LAYERS - 1) + 3 + (3 if odd == "permuted" else 2) + 1
            assert launches.read("add_rms_norm") == 1, "of the odd half, which alone adds in a launch of its own"
        if rows <= 8 and "bulk_copy" not in Card.device(0).features:
            # All matmuls but the first pack the next one's input, also for the last norm and the head. The odd q, k and
            # v read an input that no matmul packs; so does the o after matmuls that are apart.
            assert launches.read("norm_packed") == 2 * LAYERS - (1 if odd == "permuted" else 2)


def test_a_float_head_is_multiplied_in_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All halves keep their joined launches, and results are bitwise those of the modules."""
    model = loaded_on("cuda:0", unlike(tmp_path, "float", "lm_head"), monkeypatch)
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches), plan
    for rows in (5, 64, 70, 150):
        assert plan.refusal_of_rows(rows) is None
        want, got, launches = passes(model, plan, rows)
        assert torch.equal(want, got), rows
        if rows == 64 and has_batch_kernels():
            assert launches.read("gemm_batch_") == 4 * LAYERS


@pytest.mark.parametrize("rows", [5, 64, 70, 150])
def test_a_mixture_takes_no_joined_launches_from_attention(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that share launches are captured for any number of rows, as their own pass."""
    make_model(tmp_path, Shape(256, 256, 1, 4, 2, 96, head_norms=True, experts=4, chosen=2), 4.0)
    model = loaded_on("cuda:0", tmp_path, monkeypatch)
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches), plan
    assert plan.refusal_of_rows(rows) is None
    want, got, launches = passes(model, plan, rows)
    assert torch.equal(want, got)
    assert launches.read("experts_route") > 0
