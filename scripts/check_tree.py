"""Facts about the tree that no linter knows: lock hygiene, host names, machine paths, clocks in tests, long files and
functions, Python that chooses by limits of rows or by architecture, second definitions of such limits, members,
architectures and modules that are named by strings, private names in tests, and files of complete types with `Any`.

Prints every finding and exits 1 if one of them is an error. Long files are listed as a question, not as an error.
"""

from __future__ import annotations

import ast
import operator
import re
import subprocess
import sys
from collections.abc import Iterator, Set
from functools import cache, lru_cache
from pathlib import Path

from architecture_choices import ARCHITECTURE, NAMES_ARCHITECTURES, architecture_errors
from private_names import MOST_PRIVATE_LINES, private_errors, private_lines
from python_names import aliases, given_names, identifier, nodes, outside_calls, sides

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {"uv.lock", "rust/Cargo.lock", "rust/exl-format/fuzz/Cargo.lock"}
# Written in pieces, so that this file does not find itself.
HOSTS = re.compile(
    "|".join(
        ["py" + r"pi\.org", "python" + r"hosted\.org", "crates" + r"\.io", "deb" + r"ian\.org", "npm" + r"js\.org"]
    )
)
PATHS = re.compile("|".join(["/wo" + "rk/", "/ro" + "ot/", "/opt/whe" + "els", "/ho" + r"me/\w"]))
TEXT = {".py", ".rs", ".cu", ".cuh", ".toml", ".md", ".yml", ".yaml", ".json", ".sh", ".txt", ".lock", ".jinja", ""}
LONG = 600
# A function of a package's source has at most this many lines, its docstring included; generated stubs are .pyi and not
# counted. Longer functions that are older than the rule are named here, with the lines that they have at most, until
# somebody shortens them. The list may only shrink: with it, lower MOST_LONG_FUNCTIONS.
LONGEST_FUNCTION = 80
LONG_FUNCTIONS = {
    "packages/exl-filters/src/exl_filters/testing/machine.py:filter_machine": 142,
}
MOST_LONG_FUNCTIONS = 1
# A function of a Rust file, from the line with `fn` to its closing brace.
LONGEST_RUST_FUNCTION = 100
RUST_FUNCTION = re.compile(
    r"^( *)(?:pub(?:\([^)]*\))? )?(?:(?:const|async|unsafe|default|extern(?: \"C\")?) )*fn (\w+)"
)
# Files whose purpose bounds their lines.
LINES = {"packages/exl-core/src/exl_core/model.py": 200}
# Plans choose kernels (rust/exl-cuda, `ops::linear::select`), so Python compares numbers of rows with their limits in
# these files only, for these reasons. `min` and `max` choose, too. Limits are also the members of LIMITS, which Rust
# defines, and other names that a file gives one.
LIMIT_OBJECTS = {"LIMITS", "kernel_limits"}
COMPARE_ROWS = {
    "packages/exl-core/src/exl_core/execution/sharded/exchange_buffers.py": "rows of steps that have exchange buffers",
    "packages/exl-core/src/exl_core/execution/capturable.py": "buckets of captured steps, and their most tokens",
    "packages/exl-core/src/exl_core/execution/environment.py": "a variable's most rows of joined launches",
    "packages/exl-core/src/exl_core/execution/prompt_buckets.py": "windows of prompts in a bucket of captured steps",
    "packages/exl-core/src/exl_core/loading/sizes.py": "bytes of dequantized matrices, before anything is loaded",
    "packages/exl-generate/src/exl_generate/cli/conversation.py": "tokens of an answer, no rows",
    "packages/exl-generate/src/exl_generate/dynamic/engine.py": "rows that the sampler's memory is planned for",
    "packages/exl-generate/src/exl_generate/dynamic/generator.py": "tokens of a warm-up, no rows",
    "packages/exl-generate/src/exl_generate/dynamic/prompts.py": "logits of scored prompts, which need memory",
    "packages/exl-generate/src/exl_generate/sampling/static.py": "pairs of rows, with and without the negative prompt",
    "packages/exl-generate/src/exl_generate/static/streaming.py": "one prompt, or a pair of prompts",
    "packages/exl-serve/src/exl_serve/engine/admission.py": "tokens of a request, no rows",
}
# There `len(x)` is a tensor's rows, and the sizes of new tensors are no limits of rows, which have names.
TENSOR_PACKAGES = ("packages/exl-core/src/", "packages/exl-kernels/src/")
# Every limit of rows of a GPU has one definition, in this file. Python asks for it, and the build passes it to CUDA
# sources. All other files write the name and not the number. A constant with the value of a limit counts if its name
# ends with rows, tokens or columns, says nothing but that it is a limit (VAGUE), or if a file compares rows with it.
# Such constants that mean something else are named here with their meaning, as is the limit of the CPU.
ROWS_OF_GPU = "rust/exl-cuda/src/rows.rs"
VAGUE = r"(?:MOST|LEAST|LIMIT|MAX|MAXIMUM|MIN|MINIMUM|FEW|MANY|CHUNK)"
ROW_CONSTANTS = {
    "packages/exl-core/src/exl_core/execution/kernels.py:ROWS": "numbers of rows that a report is about",
    "packages/exl-core/src/exl_core/loading/linears.py:VOCABULARY_PADDING": "rows of a file's embeddings and heads",
    "packages/exl-core/src/exl_core/rope.py:TABLE_ROWS": "rows of a table of positions",
    "packages/exl-serve/src/exl_serve/engine/jobs.py:PAGES_AT_ONCE": "new tokens that a job reserves pages for",
    "rust/exl-cuda/src/ops/moe/select/mod.rs:FREE_ROWS": "padding that cuBLAS multiplies at no cost",
    "rust/exl-cpu/src/attention/plan.rs:TILE_ROWS": "measured: queries that share a decoding of the keys",
    "rust/exl-cpu/src/block.rs:CHUNK_ROWS": "the only definition of the rows of a fused block of the CPU",
    "rust/exl-cpu/src/sampling/chain.rs:FEW": "a share of the blocks of a row",
    "rust/exl-cpu/src/experts.rs:FEWEST_ROWS": "measured: fewest rows of a part of a large call",
    "rust/exl-cpu/src/matmul/activations.rs:ROWS": "measured: rows that share a pass over a tile of weights",
    "rust/exl-cpu/src/matmul/multiply.rs:PASS_ROWS": "cost of a pass, in rows",
    "rust/exl-cpu/src/simd/avx2.rs:COLUMNS": "columns of a block of registers",
    "rust/exl-cpu/src/simd/scalar.rs:COLUMNS": "columns of a block of registers",
    "rust/exl-cuda/kernels/attention/attention_prefill.cuh:ROWS": "queries of a matrix instruction",
    "rust/exl-cuda/src/ops/attention/mod.rs:ROWS": "queries of a matrix instruction",
    "rust/exl-cuda/kernels/linear/batch_task.cuh:STAGED_COLUMNS": "columns of the kernels, compared with Rust's",
    "rust/exl-cuda/kernels/linear/batch_task.cuh:SPREAD_COLUMNS": "columns of the kernels, compared with Rust's",
    "rust/exl-cuda/kernels/linear/lora.cu:MOST_COLUMNS": "columns of a block, compared with Rust's",
    "rust/exl-cuda/kernels/linear/prepared.cuh:UNTRANSPOSED": "columns of a layout, compared with Rust's",
    "rust/exl-cuda/kernels/linear/tile_layout.cuh:UNIT_ROWS": "rows of K in the layout of weights",
    "rust/exl-cuda/src/layout/mod.rs:CHUNK_ROWS": "rows of K in the layout of weights",
    "rust/exl-cuda/src/layout/mod.rs:COLUMN_TILE": "columns of a matrix instruction; FEW_ROWS is one such tile",
    "rust/exl-cuda/src/layout/mod.rs:SLICE_ROWS": "rows of K in the layout of weights",
    "rust/exl-cuda/src/layout/mod.rs:UNIT_ROWS": "rows of K in the layout of weights",
    "rust/exl-cuda/src/layout/pack.rs:BLOCK_COLUMNS": "columns of weights that are unpacked at a time",
    "rust/exl-cuda/src/ops/attention/select/mod.rs:PREFILL_ROWS": "measured: prefill blocks are faster from there on",
    "rust/exl-cuda/src/ops/kv/select.rs:MANY_TOKENS": "measured: rope_store_many is faster from there on",
    "rust/exl-cuda/src/ops/linear/batch/plan.rs:FEWEST_COLUMNS": "columns of the kernels",
    "rust/exl-cuda/src/ops/linear/batch/plan.rs:NARROW_COLUMNS": "columns of the kernels",
    "rust/exl-cuda/src/ops/linear/lora/select.rs:MOST_COLUMNS": "columns of a block",
    "rust/exl-cuda/src/ops/linear/lora/select.rs:MOST_SINGLE": "blocks of a launch",
    "rust/exl-cuda/src/ops/moe/select/route.rs:OWN_ROWS": "measured: more rows share the blocks of the router",
    "rust/exl-cuda/src/ops/moe/select/mod.rs:DEQUANTIZED_ROWS": "measured: average rows of an expert",
    "rust/exl-cuda/src/ops/moe/select/mod.rs:SHARED_ROWS": "measured: average rows of an expert",
}
RUST_LIMIT = re.compile(r"^pub const (\w+): usize = (\w+);$", re.MULTILINE)


def rust_limits(file: str) -> dict[str, int]:
    """The public numbers of a Rust file by their names."""
    found = dict(RUST_LIMIT.findall((ROOT / file).read_text(encoding="utf-8")))
    return {name: int(value) for name, value in found.items() if value.isdecimal()}


def limits_of_rows() -> dict[str, int]:
    """The limits of rows by the names that Python has for them, as Rust defines them."""
    return rust_limits(ROWS_OF_GPU) | {"CPU_CHUNK_ROWS": rust_limits("rust/exl-cpu/src/block.rs")["CHUNK_ROWS"]}


LIMIT_NAMES = set(limits_of_rows())
LIMIT_VALUES = set(limits_of_rows().values())
NATIVE = ("rust/exl-cpu/", "rust/exl-cuda/", "rust/exl-python/src/")
SHIFTS = "|".join(str(value.bit_length() - 1) for value in sorted(LIMIT_VALUES))
NUMBER = f"(?:(?:{'|'.join(map(str, sorted(LIMIT_VALUES)))})(?:_?usize)?|1(?:_?usize)? << (?:{SHIFTS}))"
ALLOCATES = {"empty", "full", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "zeros"}
LEAST_ALLOCATED = 64
COMPUTES = {ast.LShift: operator.lshift, ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub}
AFTER_LIMIT = f"(?:{'|'.join(str(value + 1) for value in sorted(LIMIT_VALUES))})"
NATIVE_CONSTANT = re.compile(rf"\b([A-Z][A-Z0-9_]*)\b(?:(?:: \w+)? = | +){NUMBER}(?=[,;}}>]|\s*$)")
NAMED_CONSTANT = re.compile(rf"\w*(?:ROWS|TOKENS|COLUMNS)|{VAGUE}")
ROW_NAME = r"\b(?:(?!entry_)\w*(?:rows|tokens|columns)|m)\b(?:\.len)?(?:\(\))?"
COMPARES = "(?:[<>]=?|[=!]=)"
ROW_NUMBER = re.compile(
    rf"{ROW_NAME} {COMPARES} {NUMBER}\b"
    rf"|(?<![*+] )\b{NUMBER} {COMPARES} (?:\w+\.)*{ROW_NAME}"
    rf"|{ROW_NAME}\.(?:min|max)\({NUMBER}\)"
    rf"|\.\.=?{NUMBER} =>"
    rf"|\.\.(?:={NUMBER}|{AFTER_LIMIT})\)\.contains\(&\w*(?:rows|tokens|m)\)"
)
CONSTANT = r"(?:\w+::)*([A-Z][A-Z0-9_]*)\b"
ROW_COMPARISON = re.compile(
    rf"{ROW_NAME} {COMPARES} {CONSTANT}|{CONSTANT} {COMPARES} (?:\w+\.)*{ROW_NAME}"
    rf"|{ROW_NAME}\.(?:min|max)\({CONSTANT}\)"
)
# Protocols (contracts.py) say what models, caches and generators have: no code looks their members up by name, except
# where an argument of a caller is checked. Only architectures/ names architectures. Modules import one another by
# statements, which check_cycles.py and import-linter see; those that may not say why (`# late import: ...`).
LOOKS_UP = {
    "packages/exl-filters/src/exl_filters/readers.py": "models of sentencepiece",
}
# Files of protocols, and all files of COMPLETE, have complete types, with these exceptions.
LAYERS_AND_EXECUTORS = re.compile(r"/exl_core/(?:execution|layers)/")
COMPLETE = re.compile(
    r"/contracts\.py$|/exl_core/(?:cache|execution|layers|loading|lora)/|/exl_core/(?:model|placement)\.py$"
    r"|/src/exl_kernels/|/exl_generate/dynamic/"
)
ANY = {
    "packages/exl-core/src/exl_core/execution/recorder.py": "torch's handle of a graph's memory has no public type",
    "packages/exl-core/src/exl_core/model.py": "arguments of `forward` choose the type of its result",
    "packages/exl-generate/src/exl_generate/dynamic/columns.py": "statistics, as in the result dicts",
    "packages/exl-generate/src/exl_generate/dynamic/completion.py": "arguments of `generate`, which it checks",
    "packages/exl-generate/src/exl_generate/dynamic/events.py": "statistics, as in the result dicts",
    "packages/exl-generate/src/exl_generate/dynamic/generator.py": "arguments of `generate` choose its result's type",
    "packages/exl-generate/src/exl_generate/dynamic/results.py": "result dicts: a type for each key",
    "packages/exl-generate/src/exl_generate/dynamic/workers.py": "tasks with any arguments and results",
    "packages/exl-kernels/src/exl_kernels/quantize/folder.py": "documents of JSON",
    "packages/exl-kernels/src/exl_kernels/quantize/layout.py": "documents of JSON",
    "packages/exl-kernels/src/exl_kernels/reference/formats.py": "arrays of numpy, of any type of elements",
    "packages/exl-kernels/src/exl_kernels/reference/linear.py": "arrays of numpy, of any type of elements",
}
OWNER = re.compile(r"(?:^|_)(?:model|cache|generator)$")
OWN = ("exl_kernels.", "exl_core.", "exl_filters.", "exl_generate.", "exllamav2.", "exl_serve.")
# No test may fail because a machine is slow or busy: what is waited for in one has at least these seconds, which only a
# hang takes, and no other clock is looked at. A line that must says why: `# clock: ...`.
LEAST_WAIT = 120
WAITS = {"acquire", "communicate", "exception", "join", "result", "timeout", "wait", "wait_for"}
CLOCKS = {"monotonic", "perf_counter", "process_time", "time"}


def tracked() -> list[Path]:
    """Files git knows."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return [ROOT / name for name in names if name]


def clocks(test: str) -> Iterator[int]:
    """The lines of a test that look at a clock or wait for less than LEAST_WAIT."""
    lines = test.splitlines()
    for node in nodes(test):
        if not isinstance(node, ast.Call) or "# clock:" in lines[node.lineno - 1]:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = getattr(node.func.value, "id", "") if isinstance(node.func, ast.Attribute) else ""
        given = [word.value for word in node.keywords if word.arg in ("timeout", "within")]
        given += node.args if name in WAITS else []
        constants = [a.value for a in given if isinstance(a, ast.Constant)]
        numbers = [x for x in constants if isinstance(x, (int, float)) and not isinstance(x, bool)]
        if (owner == "time" and name in CLOCKS) or any(0 < number < LEAST_WAIT for number in numbers):
            yield node.lineno


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, int, int]]:
    """(name with the classes and functions around it, first line, number of lines) of every function."""
    for node in ast.iter_child_nodes(tree):
        name = within
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}.{node.name}" if within else node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1
        yield from functions(node, name)


def long_functions(name: str, source: str) -> list[str]:
    """Functions of a file that are too long, and exceptions that it no longer needs."""
    # A list and no mapping by name: the getter and the setter of a property share one.
    long = [
        (f"{name}:{inner}", first, lines)
        for inner, first, lines in functions(nodes(source)[0])
        if lines > LONGEST_FUNCTION
    ]
    errors = [
        f"{name}:{first}: {key.rpartition(':')[2]} has {lines} lines; at most {LONGEST_FUNCTION}, so split it"
        for key, first, lines in long
        if lines > LONG_FUNCTIONS.get(key, LONGEST_FUNCTION)
    ]
    unused = sorted(k for k in LONG_FUNCTIONS.keys() - {key for key, *_ in long} if k.startswith(f"{name}:"))
    return errors + [f"{key}: is not too long any more; take it out of LONG_FUNCTIONS" for key in unused]


def rust_functions(source: str) -> Iterator[tuple[str, int, int]]:
    """(name, first line, number of lines) of every function with a body, of source in the style of rustfmt."""
    lines = source.splitlines()
    for first, found in enumerate(map(RUST_FUNCTION.match, lines)):
        if found is None:
            continue
        head = next((at for at in range(first, len(lines)) if lines[at].endswith((";", "{", "}"))), first)
        last = head
        if lines[head].endswith("{"):
            last = next((at for at in range(head, len(lines)) if lines[at] == found[1] + "}"), len(lines) - 1)
        yield found[2], first + 1, last - first + 1


def long_rust_functions(name: str, source: str) -> list[str]:
    """Functions of a Rust file that are too long."""
    most = LONGEST_RUST_FUNCTION
    return [
        f"{name}:{first}: {inner} has {lines} lines; at most {most}, so split it"
        for inner, first, lines in rust_functions(source)
        if lines > most
    ]


def compared_rows(source: str, *, lengths: bool = False) -> list[tuple[int, str]]:
    """(line, code) of comparisons of rows with a limit of kernels; with `lengths` those of `len(x)`, too."""
    given = list(given_names(source))
    limits = aliases(given, LIMIT_NAMES | {name.lower() for name in LIMIT_NAMES})
    objects = aliases(given, LIMIT_OBJECTS)
    return [
        (node.lineno, ast.unparse(node))
        for node, names in comparisons(source)
        if names & limits
        or (of_rows(names) and (bounds(node, LIMIT_VALUES) or names & objects))
        or (lengths and "len" in names and bounds(node, LIMIT_VALUES - {min(LIMIT_VALUES)}))
    ]


@lru_cache(maxsize=1)
def comparisons(source: str) -> list[tuple[ast.Compare | ast.Call, set[str]]]:
    """The comparisons of a Python file, except with `is`, its calls of min and max, and the names in each.

    Functions that a side calls are among the names, their arguments are not.
    """
    return [
        (node, {identifier(part) for side in sides(node) for part in outside_calls(side)})
        for node in nodes(source)
        if (isinstance(node, ast.Compare) and not any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops))
        or (isinstance(node, ast.Call) and identifier(node.func) in {"min", "max"})
    ]


def of_rows(names: set[str]) -> bool:
    """Whether one of the names is that of a number of rows, or of tokens, which are the rows of a step."""
    return any("rows" in name.lower() or "tokens" in name.lower() for name in names)


@cache
def compared_constants(name: str, source: str) -> set[str]:
    """Names in capitals that a file compares with rows."""
    if not name.endswith(".py"):
        found = ROW_COMPARISON.finditer("\n".join(native_lines(source)))
        return {constant for match in found for constant in match.groups() if constant}
    return {constant for _, names in comparisons(source) if of_rows(names) for constant in names if constant.isupper()}


@cache
def limit_constants(source: str) -> list[tuple[int, str]]:
    """(line, name) of Python constants whose value is, or contains, a limit of kernels."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for name in map(identifier, targets) if name.isupper()]
            found += [(node.lineno, name) for name in names if any(map(is_limit, ast.walk(node.value)))]
    return found


def row_constants(source: str, compared: Set[str] = frozenset()) -> list[tuple[int, str]]:
    """The constants of `limit_constants` that are named as numbers of rows, or are in `compared`."""
    return [
        (line, name)
        for line, name in limit_constants(source)
        if re.fullmatch(rf"\w*ROWS|{VAGUE}", name) or name in compared
    ]


def allocated_rows(source: str) -> list[tuple[int, str]]:
    """(line, code) of new tensors with a size that is the number of a limit of rows, from LEAST_ALLOCATED on."""
    made = [node for node in nodes(source) if isinstance(node, ast.Call) and identifier(node.func) in ALLOCATES]
    sizes = [(node, part) for node in made for size in node.args for part in getattr(size, "elts", [size])]
    return [
        (node.lineno, ast.unparse(node))
        for node, part in sizes
        if is_limit(part) and (number_of(part) or 0) >= LEAST_ALLOCATED
    ]


def native_lines(source: str) -> list[str]:
    """The lines of Rust or CUDA without comments and without the module of tests."""
    return [line.partition("//")[0] for line in source.partition("#[cfg(test)]\nmod tests {")[0].splitlines()]


def native_rows(source: str, compared: Set[str] = frozenset()) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """(line, name) of constants of rows with the value of a limit, and (line, code) of comparisons with such a number.

    `source` is Rust or CUDA. Constants in `compared` count whatever their names.
    """
    numbered = list(enumerate(native_lines(source), 1))
    constants = [(at, found[1]) for at, line in numbered for found in NATIVE_CONSTANT.finditer(line)]
    constants = [(at, name) for at, name in constants if NAMED_CONSTANT.fullmatch(name) or name in compared]
    return constants, [(at, found[0].strip()) for at, line in numbered for found in ROW_NUMBER.finditer(line)]


def defined(name: str, source: str, compared: Set[str]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Constants and numbers of a file that have the value of a limit of rows."""
    if not name.endswith(".py"):
        return native_rows(source, compared)
    return row_constants(source, compared), allocated_rows(source) if name.startswith(TENSOR_PACKAGES) else []


def second_limits(name: str, source: str, compared: Set[str] = frozenset()) -> list[str]:
    """Definitions of a file with the value of a limit of rows, and numbers in place of a limit's name.

    Constants in `compared`, which other files compare with rows, count whatever their names.
    """
    if name == ROWS_OF_GPU or name.endswith("tests.rs"):
        return []
    constants, numbers = defined(name, source, compared | compared_constants(name, source))
    return [
        f"{name}:{line}: {constant} has the value of a limit of rows, which rows.rs defines: use that, or name the "
        "constant and its meaning in ROW_CONSTANTS"
        for line, constant in constants
        if f"{name}:{constant}" not in ROW_CONSTANTS
    ] + [f"{name}:{line}: {code}: write the limit's name, of rows.rs" for line, code in numbers]


def unused_constants(sources: dict[str, str], compared: Set[str] = frozenset()) -> list[str]:
    """Names in ROW_CONSTANTS that no file defines, of the sources by file."""
    known = {
        f"{name}:{constant}"
        for name, text in sources.items()
        for _, constant in defined(name, text, compared | compared_constants(name, text))[0]
    }
    return [
        f"{key}: is no such constant any more; take it out of ROW_CONSTANTS"
        for key in sorted(ROW_CONSTANTS.keys() - known)
    ]


def is_limit(node: ast.AST) -> bool:
    """Whether the code is a number of LIMIT_VALUES, or computes one of numbers."""
    return number_of(node) in LIMIT_VALUES


def number_of(node: ast.AST) -> int | None:
    """The whole number that the code is or computes of numbers (`1 << 6`); None for other code."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if not isinstance(node, ast.BinOp) or type(node.op) not in COMPUTES:
        return None
    left, right = number_of(node.left), number_of(node.right)
    return None if left is None or right is None else COMPUTES[type(node.op)](left, right)


def bounds(node: ast.Compare | ast.Call, limits: Set[int]) -> bool:
    """Whether a side of a comparison is one of `limits` or, as the end of a range, the number after it."""
    compared = sides(node)
    if isinstance(node, ast.Call):
        return any(number_of(side) in limits for side in compared)
    compared += [
        end for side in compared if isinstance(side, ast.Call) and identifier(side.func) == "range" for end in side.args
    ]
    ends = {value + 1 for value in limits if value > min(LIMIT_VALUES)}
    return any(number_of(side) in limits | ends for side in compared)


def row_errors(name: str, source: str) -> list[str]:
    """Comparisons of a file that COMPARE_ROWS does not name, or that it is named without having any."""
    found = compared_rows(source, lengths=name.startswith(TENSOR_PACKAGES))
    if name not in COMPARE_ROWS:
        why = "plans choose kernels by rows: ask a plan, or name the file and the reason in COMPARE_ROWS"
        return [f"{name}:{line}: {code}: {why}" for line, code in found]
    return [] if found else [f"{name}: compares no rows any more; take it out of COMPARE_ROWS"]


def untyped(name: str, source: str) -> list[str]:
    """Uses of `Any` where types are complete: it would leave what a package or an executor takes unchecked.

    In layers and executors no method of a protocol takes an `object` either: that hides a type, and an import of it.
    """
    inner = bool(LAYERS_AND_EXECUTORS.search(name))
    if not COMPLETE.search(name):
        return []
    lines = {node.lineno for node in nodes(source) if isinstance(node, ast.expr) and identifier(node) == "Any"}
    stale = [] if lines or name not in ANY else [f"{name}: has no `Any` any more; take it out of ANY"]
    lines -= lines if name in ANY else set()
    classes = [node for node in nodes(source) if isinstance(node, ast.ClassDef)]
    protocols = [node for node in classes if "Protocol" in map(identifier, node.bases)]
    for node in (node for protocol in protocols if inner for node in ast.walk(protocol)):
        names = ast.walk(node.annotation) if isinstance(node, ast.arg) and node.annotation else ()
        lines |= {found.lineno for found in names if isinstance(found, ast.Name) and found.id == "object"}
    return stale + [
        f"{name}:{line}: types are complete here: write the type, or make it a parameter; if its file imports this "
        "one, turn one of the imports around"
        for line in sorted(lines)
    ]


def by_name(name: str, source: str) -> Iterator[str]:
    """Members of models, architectures and modules of ours that a file names by strings."""
    lines = source.splitlines()
    for node in nodes(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ARCHITECTURE.match(node.value):
            if not NAMES_ARCHITECTURES.search(name):
                yield f"{name}:{node.lineno}: {node.value}: only architectures/ names architectures"
        elif isinstance(node, ast.Call) and node.args:
            called, first, code = identifier(node.func), node.args[0], ast.unparse(node)
            if called in {"getattr", "hasattr"} and OWNER.search(identifier(first)) and name not in LOOKS_UP:
                yield f"{name}:{node.lineno}: {code}: its protocol says what it has (contracts.py)"
            ours = isinstance(first, ast.Constant) and str(first.value).startswith(OWN)
            if called in {"import_module", "__import__"} and ours and "# late import:" not in lines[node.lineno - 1]:
                yield f"{name}:{node.lineno}: {code}: import it by a statement, or say why not"


def findings() -> tuple[list[str], list[str]]:
    """(errors, questions) about the tracked files."""
    errors, questions, private = [], [], 0
    sources: dict[str, str] = {}
    if len(LONG_FUNCTIONS) > MOST_LONG_FUNCTIONS:
        errors.append(f"LONG_FUNCTIONS has {len(LONG_FUNCTIONS)} names, at most {MOST_LONG_FUNCTIONS}: split new ones")
    for path in tracked():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in TEXT or not path.is_file() or name.startswith("tests/golden/data/"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if name in LOCKS:
            if re.search(r'"file:|source = \{ (registry|path) = "(/|file:)', text):
                errors.append(f"{name}: names a local path; lock again without a find-links variable")
            continue
        errors += [f"{name}: names a registry's host ({m.group()})" for m in [HOSTS.search(text)] if m]
        errors += [f"{name}: holds a path of some machine ({m.group()})" for m in [PATHS.search(text)] if m]
        if name.startswith("tests/") and path.suffix == ".py" and "cuda" not in path.name:
            errors += [f"{name}:{line}: a test bounded by a clock fails on a busy machine" for line in clocks(text)]
        if name.startswith("tests/") and path.suffix == ".py":
            errors += private_errors(name, text)
            private += len(private_lines(text))
        if re.match(r"packages/[^/]+/src/", name) and path.suffix == ".py":
            errors += long_functions(name, text) + row_errors(name, text) + untyped(name, text)
            errors += [*by_name(name, text), *architecture_errors(name, text)]
            sources[name] = text
        if name.startswith(NATIVE) and path.suffix in {".rs", ".cu", ".cuh"}:
            sources[name] = text
        if path.suffix == ".rs":
            errors += long_rust_functions(name, text)
        if (lines := text.count("\n")) > LINES.get(name, lines):
            errors.append(f"{name}: {lines} lines; at most {LINES[name]}")
        if path.suffix in {".py", ".rs", ".cu", ".cuh"} and lines > LONG:
            questions.append(f"{name}: {lines} lines; is it still about one thing?")
    if private > MOST_PRIVATE_LINES:
        errors.append(f"tests use private names in {private} lines, at most {MOST_PRIVATE_LINES}: use public ones")
    return errors + limit_errors(sources), questions


def limit_errors(sources: dict[str, str]) -> list[str]:
    """Second definitions of limits, and stale names in ROW_CONSTANTS, of the sources by file."""
    # By name alone, as a file compares with constants that it imports: of files in its language.
    compared: dict[bool, set[str]] = {True: set(), False: set()}
    for name, text in sources.items():
        compared[name.endswith(".py")] |= compared_constants(name, text)
        if name.endswith(".py"):
            limit_constants(text)  # while the file's nodes are at hand
    errors = [e for name, text in sources.items() for e in second_limits(name, text, compared[name.endswith(".py")])]
    return errors + unused_constants(sources, compared[True] | compared[False])


if __name__ == "__main__":
    found, asked = findings()
    for line in asked:
        print(f"note: {line}")
    for line in found:
        print(f"error: {line}")
    sys.exit(1 if found else 0)
