"""`exl-filters` and `python -m exl_filters`: list and describe filters, check one against the laws."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from exl_filters import registry
from exl_filters.errors import FilterError, FilterUsageError

__all__ = ["main"]


def _json(text: str) -> object:
    """Parse JSON for argparse, whose message for a ValueError would name this function instead of the fault."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON ({error}): {text!r:.60}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0 success, 1 a law is broken, 2 a usage or file error."""
    parser = argparse.ArgumentParser(prog="exl-filters", description="Filters for constrained decoding.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="names, distributions and values of all filters; imports nothing")
    listing.add_argument("--json", action="store_true", help="one JSON object per line")
    describe = commands.add_parser("info", help="parameters and documentation of one filter")
    describe.add_argument("name")
    _add_check(commands.add_parser("check", help="run the laws on a filter; status 1 if one is broken"))
    args = parser.parse_args(argv)
    try:
        return {"list": _list, "info": _info, "check": _check}[args.command](args)
    except FilterError as error:
        print(f"exl-filters: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"exl-filters: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
        return 2


def _tell(text: str) -> None:
    """Print a line. When the reader has closed the pipe (`| head`), continue silently and keep the exit status."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def _list(args: argparse.Namespace) -> int:
    for name in registry.names():
        info = registry.info(name)
        if args.json:
            _tell(json.dumps({"name": name, "dist": info.dist, "version": info.version, "value": info.value}))
        else:
            _tell(f"{name:24} {info.dist} {info.version:10} {info.value}")
    return 0


def _info(args: argparse.Namespace) -> int:
    info = registry.info(args.name, load=True)
    _tell(f"{info.name} ({info.value}, {info.dist} {info.version})\n{info.doc or 'no documentation'}")
    _tell(json.dumps(info.params, indent=2))
    if info.error:
        print(f"exl-filters: {info.error}", file=sys.stderr)
        return 2
    return 0


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="MODULE:FACTORY (called with a vocabulary), a registered name, or `installed`")
    parser.add_argument("--params", type=_json, default={}, metavar="JSON", help="parameters of a registered filter")
    parser.add_argument(
        "--language",
        metavar="JSON|MODULE:NAME",
        help="list of all texts the filter may produce, or a `Language`, a pattern, or a function that returns one",
    )
    parser.add_argument("--laws", metavar="IDS", help="only these, such as LAW-07,LAW-12 or 7,12")
    parser.add_argument("--xfail", metavar="FILE", help="known failures: lines `LAW-07 reason`")
    parser.add_argument("--profile", choices=["quick", "ci", "deep"], default="ci")
    parser.add_argument("--examples", type=int, help="examples per law, over the profile's")
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--tokenizer",
        metavar="FILE|bpe|unigram",
        help="test on this tokenizer.json, or on a trained vocabulary of the kit, and time next()",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per law")


def _check(args: argparse.Namespace) -> int:
    from exl_filters.readers import from_tokenizer_json
    from exl_filters.testing.runner import check_filter, next_times
    from exl_filters.testing.targets import targets
    from exl_filters.testing.vocabularies import real_vocabulary

    if not isinstance(args.params, dict):
        raise FilterUsageError(f"--params takes a JSON object of parameters; got {args.params!r:.60}")
    if args.examples is not None and args.examples < 1:
        raise FilterUsageError(f"--examples must be at least 1; got {args.examples}")
    vocabulary, language = None, _language(args.language)
    if args.tokenizer:
        trained = args.tokenizer in ("bpe", "unigram")
        vocabulary = real_vocabulary(args.tokenizer) if trained else from_tokenizer_json(args.tokenizer)
    status, found = 0, list(targets(args.target, args.params))
    if not found:
        raise FilterUsageError(f"{args.target}: no filter is installed, so nothing was checked")
    for name, factory in found:
        try:
            report = check_filter(
                factory,
                language=language,
                laws=args.laws.split(",") if args.laws else None,
                xfail=args.xfail,
                profile=args.profile,
                examples=args.examples,
                seed=args.seed,
                vocabulary=vocabulary,
            )
        except FilterError as error:
            # A filter that cannot be built does not keep the other installed filters from being checked.
            print(f"exl-filters: {name}: {error}", file=sys.stderr)
            status = 2
            continue
        if args.json:
            for outcome in report.outcomes:
                row = {"filter": name, "law": outcome.law.id, "title": outcome.law.title, "status": outcome.status}
                _tell(json.dumps({**row, "message": outcome.message}))
        else:
            _tell(f"{name}: {report}")
            if vocabulary is not None:
                p50, p99 = next_times(factory, vocabulary)
                _tell(f"next() on {vocabulary.size} tokens: median {p50:.0f} us, 99 of 100 below {p99:.0f} us")
        status = status if report.ok else max(status, 1)
    return status


def _language(given: str | None) -> Any:
    """Parse `--language`: a JSON list of texts, or the oracle that `module:name` refers to."""
    from exl_filters.testing.targets import imported

    if given is None:
        return None
    if re.fullmatch(r"[\w.]+:[\w.]+", given):
        return imported(given)
    try:
        language = json.loads(given)
        if not isinstance(language, list) or not all(isinstance(text, str) for text in language):
            raise FilterUsageError(f"--language takes a JSON list of texts or MODULE:NAME; got {given!r:.60}")
        return language
    except ValueError as error:
        raise FilterUsageError(f"--language takes JSON or MODULE:NAME; got {given!r:.60}: {error}") from error
