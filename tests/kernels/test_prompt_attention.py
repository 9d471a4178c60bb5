"""Attention of a prompt in the same tensors in every layer is rotation, storing and attention one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from exl_kernels.attention import paged_attention
from exl_kernels.attention.cuda import AttentionOptions, AttentionTables, Rotation
from exl_kernels.attention.prompt import PromptAttention
from exl_kernels.errors import DTypeError, ShapeError
from exl_kernels.fused import rope_store
from exl_kernels.kv import KVPages, store_kv

TOKENS, HEADS, GROUPS, DIM, PAGE = 70, 2, 3, 64, 32
PLAIN = AttentionOptions(0.125, window=0, softcap=0.0)
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)]


class Operands:
    """Queries, keys and values of each layer, and what all layers share."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(7)
        dtype = torch.float32 if device == "cpu" else torch.float16

        def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.layers = [[drawn(TOKENS, n, DIM) for n in (HEADS * GROUPS, HEADS, HEADS)] for _ in range(2)]
        q, k, v = (torch.empty_like(t) for t in self.layers[0])
        self.same = (q, k, v)
        # Two sequences of 40 and 30 tokens in pages that lie in another order.
        rows = torch.tensor([0] * 40 + [1] * 30, dtype=torch.int32)
        positions = torch.cat([torch.arange(40), torch.arange(30)])
        table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
        slots = table[rows.long(), positions // PAGE].long() * PAGE + positions % PAGE
        self.tables = (table.to(device), rows.to(device), positions.to(device, torch.int32))
        self.slots = slots.to(device)
        cos, sin = (drawn(64, DIM // 2, dtype=torch.float32) for _ in range(2))
        self.rotation = Rotation(cos=cos, sin=sin, positions=positions.to(device), interleaved=False)
        self.device = device

    def pages(self) -> KVPages:
        return KVPages.allocate("fp16", 4, PAGE, HEADS, DIM, torch.device(self.device))


def prompt(
    made: Operands,
    parts: tuple[Tensor, Tensor, Tensor] | None = None,
    places: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    rotates: bool = True,
    options: AttentionOptions = PLAIN,
    max_keys: int | None = None,
) -> PromptAttention:
    """Attention of the operands, or of other queries, keys and values, or with other tables."""
    table, rows, positions = made.tables if places is None else places
    return PromptAttention(
        made.pages(),
        *(made.same if parts is None else parts),
        tables=AttentionTables(table, rows=rows, positions=positions, max_keys=max_keys),
        slots=made.slots,
        rotation=made.rotation if rotates else None,
        options=options,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 15.0}])
def test_each_layer_gets_the_results_of_the_separate_operators(
    device: str, rotates: bool, options: dict[str, Any]
) -> None:
    """Two layers, whose queries, keys and values are written into the same tensors."""
    made = Operands(device)
    scores = AttentionOptions(0.125, window=options.get("window", 0), softcap=options.get("softcap", 0.0))
    attend = prompt(made, rotates=rotates, options=scores, max_keys=64)
    for layer in made.layers:
        pages, other = made.pages(), made.pages()
        for same, own in zip(made.same, layer, strict=True):
            same.copy_(own)
        q, k, v = (t.clone() for t in layer)
        if rotates:
            rope_store(other, q, k, v, rotation=made.rotation, slots=made.slots)
        else:
            store_kv(other, k, v, made.slots)
        want = paged_attention(q, other, *made.tables, scale=0.125, max_keys=64, **options)
        got = attend(pages)
        assert got is attend.out
        assert torch.equal(got, want)
        assert torch.equal(pages.key, other.key)
        assert torch.equal(pages.value, other.value)


@pytest.mark.parametrize("device", DEVICES)
def test_operands_that_do_not_fit_are_named(device: str) -> None:
    """When the object is made, before anything is launched."""
    made = Operands(device)
    q, k, v = made.same
    wide = torch.empty(TOKENS, 2 * HEADS, DIM, dtype=k.dtype, device=device)[:, ::2]
    wrong: list[tuple[type[Exception], str, tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = [
        (ShapeError, "not contiguous", (q, wide, v), made.tables),
        (ShapeError, "expected contiguous", (q[:, :5], k, v), made.tables),
        (ShapeError, "k: shape", (q, k[:9], v), made.tables),
        (DTypeError, "v: dtype bfloat16", (q, k, v.bfloat16()), made.tables),
        (ShapeError, "rows", (q, k, v), (made.tables[0], made.tables[1][:5], made.tables[2])),
        (DTypeError, "positions", (q, k, v), (*made.tables[:2], made.tables[2].long())),
    ]
    for error, says, parts, tables in wrong:
        with pytest.raises(error, match=says):
            prompt(made, parts, tables)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_of_another_device_are_rejected(device: str) -> None:
    made = Operands(device)
    attend = prompt(made)
    other = KVPages.allocate("fp16", 4, PAGE, HEADS, DIM, torch.device("meta"))
    with pytest.raises(DTypeError, match="the pages are on meta"):
        attend(other)
