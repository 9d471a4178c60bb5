"""The official JSON-Schema-Test-Suite through the grammar filter: fetching it, running a case, the committed baseline.

The suite is third-party and not in this repository. The source distribution of `jsonschema` carries it; it is fetched
by the package client, pinned by hash, and kept in pytest's cache.

    python tests/filters/json_schema_suite.py [--backend xgrammar]    writes the baseline anew, unless it is worse

Outcomes, one letter a test: `a` valid and accepted, `r` invalid and not accepted, `x` the schema is refused with
`FilterCompileError`, `l` valid and not accepted (lost), `w` invalid and accepted (wrong).
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl_filters import CompileBudget, FilterCompileError, FilterStack, Vocabulary
from exl_filters.grammar import ExLlamaV2GrammarFilter

PINNED = "jsonschema==4.26.0 --hash=sha256:0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326\n"
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
BYTES = Vocabulary([*(bytes([i]) for i in range(256)), None], eos_token_id=256, special_ids=[256])
# Better before worse, for what a valid and what an invalid instance may come to.
RANK = {"a": 0, "r": 0, "x": 1, "l": 2, "w": 3}
MOST_ORDERS = 24
LONG = CompileBudget(seconds=250.0)  # a schema that a busy machine is slow with is not a refused one


class Unreachable(Exception):  # noqa: N818 - said of the registry
    """The suite is not here and cannot be fetched."""


def suite(folder: Path) -> Path:
    """The folder with the suite's drafts, fetched into `folder` when it is not there."""
    found = next(folder.glob("jsonschema-*/json/tests"), None)
    if found is not None:
        return found
    uvx = shutil.which("uvx")
    command = [uvx, "pip"] if uvx else [sys.executable, "-m", "pip"]
    pinned = folder / "pinned.txt"
    pinned.write_text(PINNED)
    options = ["--quiet", "--no-deps", "--no-binary", "jsonschema", "--require-hashes", "-r", str(pinned)]
    for _ in range(3):
        done = subprocess.run([*command, "download", *options, "-d", str(folder)], capture_output=True, text=True)
        archive = next(folder.glob("jsonschema-*.tar.gz"), None)
        if not done.returncode:
            break
    if done.returncode or archive is None:
        raise Unreachable(f"the JSON-Schema-Test-Suite cannot be fetched: {done.stderr.strip()[-300:]}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data", members=[m for m in tar.getmembers() if "/json/tests/" in m.name])
    return next(folder.glob("jsonschema-*/json/tests"))


@dataclass(frozen=True)
class Group:
    """One schema of the suite and the instances it is tried on."""

    name: str
    schema: Any
    tests: list[dict[str, Any]]


def groups(tests: Path) -> Iterator[Group]:
    """The required tests (not `optional`) of every draft, in a fixed order."""
    for draft, url in DRAFTS.items():
        for path in sorted((tests / draft).glob("*.json")):
            for index, group in enumerate(json.loads(path.read_text(encoding="utf-8"))):
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": url, **schema}
                yield Group(f"{draft}/{path.stem}/{index}", schema, group["tests"])


def outcomes(group: Group, backend: str = "llguidance") -> str:
    """One letter for each test of the group."""
    try:
        template = ExLlamaV2GrammarFilter(None, BYTES, json_schema=group.schema, backend=backend, budget=LONG)  # type: ignore[arg-type]
    except FilterCompileError:
        return "x" * len(group.tests)
    order = list(property_names(group.schema))
    letters = ""
    for test in group.tests:
        accepted = any(accepts(template, text) for text in texts(test["data"], order))
        letters += ("a" if accepted else "l") if test["valid"] else ("w" if accepted else "r")
    return letters


def accepts(template: Any, text: str) -> bool:
    with FilterStack([template], vocab_size=BYTES.size, stop_ids=BYTES.stop_ids) as stack:
        return stack.accept_text(text, BYTES) and (stack.ended or stack.complete)


def texts(instance: Any, order: list[str]) -> list[str]:
    """The instance as JSON text, as given and in other spellings: members of objects in the schema's order and in
    others, 1 for 1.0.

    A schema tells data apart, not their spellings; a grammar takes some of these, and one of them must be open.
    """
    rank = {name: index for index, name in enumerate(order)}

    def arranged(value: Any, of: Any) -> Any:
        if isinstance(value, dict):
            return {key: arranged(value[key], of) for key in of(list(value))}
        return [arranged(item, of) for item in value] if isinstance(value, list) else value

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: whole(item) for key, item in value.items()}
        if isinstance(value, list):
            return [whole(item) for item in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    ways = [lambda keys: sorted(keys, key=lambda k: rank.get(k, len(rank))), lambda keys: keys]
    found = [json.dumps(arranged(instance, way), ensure_ascii=False) for way in ways]
    if isinstance(instance, dict):
        orders = itertools.islice(itertools.permutations(instance), MOST_ORDERS)
        found += [json.dumps({key: instance[key] for key in keys}, ensure_ascii=False) for keys in orders]
    found.append(json.dumps(whole(instance), ensure_ascii=False))
    return list(dict.fromkeys(found))


def property_names(schema: Any) -> dict[str, None]:
    """All names under `properties`, in order of appearance."""
    names: dict[str, None] = {}
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            names |= dict.fromkeys(schema["properties"])
        for value in schema.values():
            names |= property_names(value)
    elif isinstance(schema, list):
        for value in schema:
            names |= property_names(value)
    return names


def read_baseline(backend: str) -> dict[str, str]:
    lines = baseline_file(backend).read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines if line and not line.startswith("#"))


def baseline_file(backend: str) -> Path:
    return Path(__file__).parent / "data" / f"json_schema_{backend}.txt"


def worse(before: str, now: str) -> bool:
    """Whether a test of the group came out worse than it did."""
    return len(before) != len(now) or any(RANK[b] < RANK[n] for b, n in zip(before, now, strict=True))


def write_baseline(backend: str, found: dict[str, str], accept_worse: bool = False) -> None:
    """Put `found` in the baseline's place; `SystemExit` where that is a step back and `accept_worse` is not said."""
    file = baseline_file(backend)
    before = read_baseline(backend) if file.exists() else {}
    back = [name for name, letters in before.items() if worse(letters, found.get(name, ""))]
    back += [name for name, letters in found.items() if name not in before and "w" in letters]
    if back and not accept_worse:
        raise SystemExit(
            f"not written: {len(back)} groups are worse than in {file.name}, such as {back[:5]}; fix that, or say "
            "--accept-worse"
        )
    head = f"# {backend}; suite of {PINNED.split()[0]}; letters: see json_schema_suite.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join([head, *(f"{name} {letters}" for name, letters in found.items())]) + "\n")


def counts(found: dict[str, str]) -> dict[str, int]:
    letters = "".join(found.values())
    return {letter: letters.count(letter) for letter in RANK} | {"tests": len(letters)}


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="llguidance")
    parser.add_argument("--suite", type=Path, help="folder with the suite, or where to fetch it to")
    parser.add_argument("--accept-worse", action="store_true", help="write a baseline that is worse than the present")
    args = parser.parse_args()
    folder = args.suite or Path(".pytest_cache") / "d" / "json-schema-suite"
    folder.mkdir(parents=True, exist_ok=True)
    found = {group.name: outcomes(group, args.backend) for group in groups(suite(folder))}
    print(json.dumps(counts(found)))
    write_baseline(args.backend, found, args.accept_worse)


if __name__ == "__main__":
    main()
