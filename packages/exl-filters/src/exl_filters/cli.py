"""`exl-filters` and `python -m exl_filters`: list and describe filters, and check one against the laws."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from exl_filters import registry
from exl_filters.errors import FilterError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 fine, 1 a law is broken, 2 the call cannot be carried out."""
    parser = argparse.ArgumentParser(prog="exl-filters", description="Filters for constrained decoding.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="names, distributions and values of all filters; imports nothing")
    listing.add_argument("--json", action="store_true", help="one JSON object per line")
    describe = commands.add_parser("info", help="parameters and documentation of one filter")
    describe.add_argument("name")
    args = parser.parse_args(argv)
    try:
        return _list(args) if args.command == "list" else _info(args)
    except FilterError as error:
        print(f"exl-filters: {error}", file=sys.stderr)
        return 2


def _list(args: argparse.Namespace) -> int:
    for name in registry.names():
        info = registry.info(name)
        if args.json:
            print(json.dumps({"name": name, "dist": info.dist, "version": info.version, "value": info.value}))
        else:
            print(f"{name:24} {info.dist} {info.version:10} {info.value}")
    return 0


def _info(args: argparse.Namespace) -> int:
    info = registry.info(args.name, load=True)
    print(f"{info.name} ({info.value}, {info.dist} {info.version})\n{info.doc or 'no documentation'}")
    print(json.dumps(info.params, indent=2))
    if info.error:
        print(f"exl-filters: {info.error}", file=sys.stderr)
        return 2
    return 0
