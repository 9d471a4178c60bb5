"""pytest options that run the laws on any factory: `pytest --filter-contract my_pkg:make`. Inert unless used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the law kit."""
    group = parser.getgroup("filter-contract", "the laws of constrained-decoding filters")
    group.addoption(
        "--filter-contract",
        action="append",
        default=[],
        metavar="MODULE:FACTORY|NAME|installed",
        help="run the laws on this factory, registered filter, or all installed plugins",
    )
    group.addoption("--filter-xfail", default=None, metavar="FILE", help="known failures: lines `LAW-07 reason`")
    group.addoption("--filter-profile", default="ci", choices=["quick", "ci", "deep"], help="how many examples per law")
    group.addoption("--filter-examples", type=int, default=None, help="examples per law, instead of the profile's")
    group.addoption("--filter-laws", default=None, metavar="IDS", help="only these, such as LAW-07,LAW-12 or 7,12")
    group.addoption("--filter-seed", type=int, default=None, help="hypothesis seed")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[Any]) -> None:
    """Add the items of every `--filter-contract` target."""
    wanted = config.getoption("--filter-contract")
    if not wanted:
        return
    from exl_filters.testing.pytest_items import items_for

    for target in wanted:
        items.extend(items_for(session, target))
