"""The checks of slots, rows, positions and page numbers that GPU operators make on request; here on CPU tensors."""

from __future__ import annotations

import pytest
import torch

from exl_kernels.attention.cuda import AttentionTables, Rotation, attend_own, attend_stored, attention_options
from exl_kernels.errors import ShapeError, UnsupportedError
from exl_kernels.index_checks import CHECKS_VARIABLE, check_slots, check_tables, checks_enabled
from exl_kernels.kv import KVPages

PAGES = KVPages.allocate("q4", 3, 16, 2, 64)  # slots 0 to 47


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("slot", [-2, 48, 10**12])
def test_a_slot_outside_the_pages_is_refused_by_value_and_token(slot: int) -> None:
    check_slots("store_kv", PAGES.key, torch.tensor([-1, 0, 47]))
    with pytest.raises(ShapeError, match=rf"store_kv: slot {slot} of token 1; .* 0 to 47"):
        check_slots("store_kv", PAGES.key, torch.tensor([3, slot]))


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_outside_the_block_table_is_refused(row: int) -> None:
    table = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ShapeError, match=f"row {row} of token 1; .* 0 to 1"):
        check_tables("paged_attention", PAGES.key, table, ints(0, row), ints(3, 3), 0)


def test_a_position_beyond_the_block_table_is_refused() -> None:
    table = torch.zeros(1, 2, dtype=torch.int32)
    check_tables("paged_attention", PAGES.key, table, ints(0, 0), ints(31, -1), 0)
    with pytest.raises(ShapeError, match="position 32 of token 0; 2 pages of 16 end at 31"):
        check_tables("paged_attention", PAGES.key, table, ints(0), ints(32), 0)


def test_only_pages_that_are_looked_at_must_exist() -> None:
    table = ints(7, 1, 2, -5).view(1, 4)
    with pytest.raises(ShapeError, match="page 0 of token 0 is number 7; there are pages 0 to 2"):
        check_tables("paged_attention", PAGES.key, table, ints(0), ints(40), 0)
    check_tables("paged_attention", PAGES.key, table, ints(0), ints(40), 20)  # a window that begins in page 1
    with pytest.raises(ShapeError, match="page 3 of token 1 is number -5"):
        check_tables("paged_attention", PAGES.key, table, ints(0, 0), ints(40, 48), 20)


def test_checks_are_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECKS_VARIABLE, raising=False)
    assert not checks_enabled()
    monkeypatch.setenv(CHECKS_VARIABLE, "0")
    assert not checks_enabled()
    monkeypatch.setenv(CHECKS_VARIABLE, "1")
    assert checks_enabled()


def test_own_keys_are_rejected_on_a_cpu() -> None:
    q, kv = torch.zeros(1, 4, 64), torch.zeros(1, 2, 64)
    long, table = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1)
    tables, turn = (
        AttentionTables(ints(0).view(1, 1), rows=ints(0), positions=ints(0)),
        Rotation(cos=table, sin=table, positions=long, interleaved=False),
    )
    options = attention_options(1.0, window=0, softcap=0.0)
    with pytest.raises(UnsupportedError, match="attend_own: pages on cpu"):
        attend_own(q, kv, kv, PAGES, tables=tables, slots=long, rotation=turn, options=options)
    with pytest.raises(UnsupportedError, match=r"attend_stored: pages on cpu.*use paged_attention"):
        attend_stored(q, PAGES, tables, options, tokens=1)
