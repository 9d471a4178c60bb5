"""scripts/check_tree.py finds long functions and files, second limits of rows, and Python that chooses by such limits
or by architecture."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_tree.py"
FILE = "packages/p/src/p/x.py"
CODE = {".py", ".rs"}


@pytest.fixture(scope="module")
def tree() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("check_tree", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.parametrize(
    "code",
    [
        "many = rows > PACKED_ROWS",
        "many = x.numel() // 2 >= selection.STEP_ROWS",
        "some = 8 < count_of_rows",
        "one = given.columns != FEW_ROWS",
        "many = given.rows() > 64",
        "few = rows <= 2",
        "many = rows > 512",
        "few = x.shape[0] <= 64",
        "few = tokens <= 64",
        "few = rows < 65",
        "few = rows in range(65)",
        "few = rows in range(1, 65)",
        "few = rows <= 1 << 6",
        "few = 8 * 8 >= rows",
        "some = min(rows, 64)",
        "some = max(8, x.shape[0])",
        "some = min(count, PACKED_ROWS)",
        "few = count <= LIMITS.packed_rows",
        "few = rows <= selection.LIMITS.most_logits",
        "few = rows <= kernel_limits().most_logits",
        "few = tokens <= model.packed_rows",
    ],
)
def test_a_comparison_of_rows_needs_a_reason(tree: ModuleType, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (error,) = tree.row_errors(FILE, code)
    assert error.startswith(f"{FILE}:1: {code.partition('= ')[2]}")
    monkeypatch.setitem(tree.COMPARE_ROWS, FILE, "a reason")
    assert tree.row_errors(FILE, code) == []
    (stale,) = tree.row_errors(FILE, "x = 1")
    assert "take it out of COMPARE_ROWS" in stale


@pytest.mark.parametrize(
    "code",
    [
        "x = rows % 8 == 0",
        "x = refusal(PACKED_ROWS) is None",
        "x = f(BLOCK_ROWS) > 1",
        "x = rows > 1",
        "ROWS = 5",
        "x = len(q) > 64",
        "x = min(rows, columns)",
        "x = max(rows, 1)",
        "x = width > LIMITS.most_packed_width",
    ],
)
def test_other_comparisons_need_none(tree: ModuleType, code: str) -> None:
    assert tree.row_errors(FILE, code) == []


@pytest.mark.parametrize(
    "alias",
    [
        "from exl_kernels.selection import PACKED_ROWS as few",
        "few = PACKED_ROWS",
        "self.few = selection.PACKED_ROWS",
        "few: Final = LIMITS.packed_rows",
        "most = PACKED_ROWS\nfew = most",
        "few, more = PACKED_ROWS, 5",
        "limits = kernel_limits()\nfew = limits.packed_rows",
        "def f(x, few=PACKED_ROWS): ...",
        "def f(*, few=PACKED_ROWS): ...",
    ],
)
def test_other_names_of_a_limit_are_limits(tree: ModuleType, alias: str) -> None:
    (error,) = tree.row_errors(FILE, f"{alias}\nx = rows > few")
    assert "rows > few: plans choose kernels by rows" in error
    assert tree.row_errors(FILE, "few = 5\nx = rows > few") == []


def test_other_names_of_the_limits_object_are_limits(tree: ModuleType) -> None:
    for alias in ("limits = LIMITS", "from exl_kernels.selection import LIMITS as limits", "limits = kernel_limits()"):
        assert len(tree.row_errors(FILE, f"{alias}\nx = rows > limits.most_logits")) == 1
    assert tree.row_errors(FILE, "x = rows > limits.most_logits") == []


def test_lengths_of_tensors_are_rows(tree: ModuleType) -> None:
    file = "packages/exl-core/src/exl_core/execution/x.py"
    assert len(tree.row_errors(file, "few = len(q) > 64")) == 1
    assert len(tree.row_errors(file, "some = min(len(q), 64)")) == 1
    assert tree.row_errors(file, "pair = len(q) == 2") == []


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (FILE, "MOST_ROWS = 64"),
        (FILE, "MOST_ROWS = 1 << 6"),
        (FILE, "MOST_TOKENS = 64\nfew = tokens <= MOST_TOKENS"),
        ("rust/exl-cuda/src/ops/x.rs", "const MOST_ROWS: usize = 1 << 6;"),
        ("rust/exl-cuda/src/ops/x.rs", "const SMALL: usize = 1 << 6;\nlet few = rows <= SMALL;"),
        ("rust/exl-cuda/kernels/linear/x.cuh", "#define MOST_ROWS 64"),
        ("rust/exl-cuda/kernels/linear/x.cuh", "template <int MOST_ROWS = 64>"),
        (FILE, "MOST_ROWS: Final = 8"),
        (FILE, "ROWS = (1, 8, 32)"),
        (FILE, "LIMIT = 64"),
        (FILE, "MOST = 512"),
        (FILE, "BATCH = 64\nmany = rows > BATCH"),
        ("rust/exl-cuda/src/ops/x.rs", "const MOST: usize = 64;"),
        ("rust/exl-cuda/src/ops/x.rs", "const BATCH: usize = 64;\nlet many = a.rows() > BATCH;"),
        ("rust/exl-cpu/src/x.rs", "pub const BATCH: usize = 512;\nlet some = tokens.rows.len().min(BATCH);"),
        ("rust/exl-cuda/src/ops/x.rs", "pub const MOST_ROWS: usize = 64;"),
        ("rust/exl-cuda/src/ops/x.rs", "const MANY_TOKENS: usize = 64;"),
        ("rust/exl-cuda/kernels/linear/x.cuh", "constexpr int WARPS = 4, DIRECT_ROWS = 8, OTHER = 2;"),
    ],
)
def test_a_limit_of_rows_has_one_definition(
    tree: ModuleType, file: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (error,) = tree.second_limits(file, code)
    assert "has the value of a limit of rows" in error
    constant = error.split()[1]
    monkeypatch.setattr(tree, "ROW_CONSTANTS", {f"{file}:{constant}": "a meaning"})
    assert tree.second_limits(file, code) == []
    assert tree.unused_constants({file: code}) == []
    (stale,) = tree.unused_constants({file: ""})
    assert stale.startswith(f"{file}:{constant}: is no such constant any more")


@pytest.mark.parametrize(
    "code",
    [
        "if dim > 128 && rows > 8 { 1 } else { 2 }",
        "        ..=8 => (1, 1),",
        "if (a.columns == 8) store();",
        "const size_t place = p.pack_columns == 8 ? 1 : 2;",
        "if op.m > 64 {",
        "if 128 < call.tokens {",
        "if call.rows() > 64 {",
        "if tokens.rows.len() > 512 {",
        "let few = rows <= 2;",
        "let at_once = rows.min(64);",
        "if (1..65).contains(&rows) {",
        "if (1..=64).contains(&rows) {",
        "let few = rows <= 1 << 6;",
    ],
)
def test_kernels_and_launchers_write_the_name_of_a_limit(tree: ModuleType, code: str) -> None:
    (error,) = tree.second_limits("rust/exl-cuda/x.rs", code)
    assert error.endswith("write the limit's name, of rows.rs")
    assert tree.second_limits("rust/exl-cuda/x.rs", f"// {code}") == []
    assert tree.second_limits("rust/exl-cuda/x.rs", f"#[cfg(test)]\nmod tests {{\n{code}\n}}") == []


@pytest.mark.parametrize(
    "code",
    [
        "if chunk * 8 < to.rows {",
        "if row + 2 <= rows {",
        "entry_rows == 128",
        "rows > FEW_ROWS",
        "width == 64",
        "const LANES: usize = 64;\nif lanes > LANES {",
    ],
)
def test_numbers_that_are_no_limits_of_rows(tree: ModuleType, code: str) -> None:
    assert tree.second_limits("rust/exl-cuda/x.rs", code) == []


@pytest.mark.parametrize("code", ["torch.zeros(64, dtype=torch.int32)", "x.new_empty((rows, 1 << 7))"])
def test_sizes_of_new_tensors_are_no_numbers_of_limits(tree: ModuleType, code: str) -> None:
    file = "packages/exl-kernels/src/exl_kernels/x.py"
    (error,) = tree.second_limits(file, f"y = {code}")
    assert code in error
    assert tree.second_limits("packages/exl-serve/src/exl_serve/x.py", f"y = {code}") == []
    assert tree.second_limits(file, "y = torch.zeros(PACKED_ROWS, 8, 3 * 64, rows)") == []


def test_constants_count_where_other_files_compare_rows_with_them(tree: ModuleType) -> None:
    compared = tree.compared_constants("rust/exl-cpu/src/y.rs", "if rows <= x::BATCH { 1 } else { 2 }")
    assert compared == {"BATCH"}
    (error,) = tree.second_limits("rust/exl-cpu/src/x.rs", "pub const BATCH: usize = 64;", compared)
    assert error.startswith("rust/exl-cpu/src/x.rs:1: BATCH has the value")
    assert tree.second_limits("rust/exl-cpu/src/x.rs", "pub const BATCH: usize = 64;") == []


def test_the_rows_of_a_block_of_the_cpu_have_one_definition(tree: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "ROW_CONSTANTS", {})
    folders = ("rust/exl-cpu/", "packages/exl-core/src/exl_core/loading/")
    names = {path: path.relative_to(tree.ROOT).as_posix() for path in tree.tracked()}
    errors = tree.limit_errors(
        {name: path.read_text() for path, name in names.items() if name.startswith(folders) and path.suffix in CODE}
    )
    (error,) = (error for error in errors if error.startswith("rust/exl-cpu/src/block.rs:"))
    assert "CHUNK_ROWS has the value" in error
    assert not any(error.startswith("packages/exl-core/src/exl_core/loading/sizes.py:") for error in errors)


def test_protocols_have_complete_types(tree: ModuleType) -> None:
    code = (
        "class Model(Protocol):\n    def run(self, cache: Any, *, loras: Sequence[Any]) -> dict[str, typing.Any]: ...\n"
    )
    (error,) = tree.untyped("packages/p/src/p/contracts.py", code)
    assert error.startswith("packages/p/src/p/contracts.py:2: ")
    assert tree.untyped(FILE, code) == []


EXECUTOR = "packages/exl-core/src/exl_core/execution/x.py"


def test_layers_and_executors_have_complete_types(tree: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """No parameter hides a type whose file imports this one, whatever its comment says."""
    code = "class Sharding(Protocol):\n    def attend(self, attention: {}, h: Tensor) -> Tensor: ...\n"
    for hidden in ("Any", "object", "object | None"):
        (error,) = tree.untyped(EXECUTOR, code.format(hidden))
        assert error.startswith(f"{EXECUTOR}:2: ")
    assert tree.untyped(EXECUTOR, code.format("Attention")) == []
    assert tree.untyped(EXECUTOR, "def check(value: object) -> None: ...") == []
    for checked in ("exl_core/layers", "exl_core/loading", "src/exl_kernels/kv", "exl_generate/dynamic"):
        assert len(tree.untyped(f"packages/p/{checked}/x.py", "x: Any = 1")) == 1
    monkeypatch.setitem(tree.ANY, EXECUTOR, "a reason")
    assert tree.untyped(EXECUTOR, "x: Any = 1") == []
    assert "take it out of ANY" in tree.untyped(EXECUTOR, "x = 1")[0]


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ('getattr(model, "config")', "its protocol"),
        ('hasattr(self.cache, "pages")', "its protocol"),
        ("getattr(draft_model, name, None)", "its protocol"),
        ('name == "Qwen3ForCausalLM"', "architectures"),
        ('import_module("exl_core.model")', "import it by a statement"),
        ('__import__("exl_core.model")', "import it by a statement"),
    ],
)
def test_nothing_is_looked_up_by_a_string(tree: ModuleType, code: str, what: str) -> None:
    (error,) = tree.by_name(EXECUTOR, f"x = {code}")
    assert error.startswith(f"{EXECUTOR}:1: ")
    assert what in error


def test_an_executor_asks_neither_for_members_nor_for_architectures(tree: ModuleType) -> None:
    code = 'x = getattr(model, "config").architecture == "Qwen3ForCausalLM"'
    assert len(list(tree.by_name(EXECUTOR, code))) == 2


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (EXECUTOR, 'x = getattr(module, "forward")'),
        (EXECUTOR, 'x = import_module("torch.cuda")'),
        (EXECUTOR, 'x = import_module("exl_core.model")  # late import: a reason'),
        ("packages/exl-core/src/exl_core/architectures/x.py", 'x = "Qwen3ForCausalLM"'),
        (EXECUTOR, '"""Qwen3ForCausalLM has norms of q and k."""'),
    ],
)
def test_names_that_strings_may_be(tree: ModuleType, file: str, code: str) -> None:
    assert list(tree.by_name(file, code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "arch.name in (LLAMA, QWEN)",
        'arch.name == "X"',
        'config.arch.name.startswith("X")',
        'config.architecture.lower() != "x"',
        '"X" in config.architecture',
        'config.architecture[:4] == "X"',
        'config.get("model_type") == "x"',
        'read.string("text_config->model_type", default=None) == "x"',
        'read["architectures"][0] == "X"',
        're.match("X", config.architecture)',
        "TABLE[arch.name]",
        "TABLE.get(arch.name)",
        'name.startswith("Qwen")',
        'name.endswith(("x", "LlamaModel"))',
        'kind in ("x", "Qwen3")',
    ],
)
def test_only_architectures_choose_by_architecture(
    tree: ModuleType, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (error,) = tree.architecture_errors(EXECUTOR, f"x = {code}".replace('"', "'"))
    assert error.startswith(f"{EXECUTOR}:1: ")
    assert "chooses by architecture" in error
    assert tree.architecture_errors("packages/exl-core/src/exl_core/architectures/x.py", f"x = {code}") == []
    reasons = sys.modules["architecture_choices"].ASKS_ARCHITECTURE
    monkeypatch.setitem(reasons, EXECUTOR, "a reason")
    assert tree.architecture_errors(EXECUTOR, f"x = {code}") == []
    assert "take it out of ASKS_ARCHITECTURE" in tree.architecture_errors(EXECUTOR, "x = 1")[0]


@pytest.mark.parametrize(
    "code",
    [
        "name = arch.name\nx = name == 'X'",
        "kind = read.string('model_type')\nx = kind in ('x', 'y')",
        "kind = arch.name\nname = kind\nx = TABLE[name]",
        "match config.architecture:\n    case 'X': ...",
        "match name:\n    case 'Qwen3': ...",
    ],
)
def test_an_architecture_is_found_by_any_name(tree: ModuleType, code: str) -> None:
    assert len(tree.architecture_errors(EXECUTOR, code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "x = config.arch.name != config.architecture",
        "x = config.arch is None",
        "x = config.arch.norm == 'layer'",
        "x = text['model_type']",
        "x = text.get('architecture')",
        "x = self.name == 'x'",
        "x = rope.startswith('llama3')",
        "x = f'{arch.name} has no such layer'",
    ],
)
def test_fields_of_an_architecture_may_choose(tree: ModuleType, code: str) -> None:
    assert tree.architecture_errors(EXECUTOR, code) == []


def test_names_of_limits_are_compared_within_a_language(tree: ModuleType) -> None:
    rust = {"rust/exl-cpu/src/x.rs": "if rows <= SMALL { 1 } else { 2 }"}
    assert "SMALL" not in " ".join(tree.limit_errors({**rust, FILE: "SMALL = 64"}))
    assert f"{FILE}:1: SMALL has" in " ".join(
        tree.limit_errors({"packages/y.py": "x = rows <= SMALL", FILE: "SMALL = 64"})
    )


def test_functions_that_are_too_long_may_not_grow(tree: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def source(lines: int) -> str:
        return "def f():\n" + "    pass\n" * (lines - 1)

    documented = source(79).replace("    pass", '    """Do it.\n\n    So."""', 1)
    assert "f has 81 lines" in tree.long_functions(FILE, documented)[0]
    assert tree.long_functions(FILE, source(80)) == []
    assert "f has 81 lines" in tree.long_functions(FILE, source(81))[0]
    monkeypatch.setitem(tree.LONG_FUNCTIONS, f"{FILE}:f", 81)
    assert tree.long_functions(FILE, source(81)) == []
    assert "f has 82 lines" in tree.long_functions(FILE, source(82))[0]
    assert "take it out of LONG_FUNCTIONS" in tree.long_functions(FILE, source(80))[0]
    monkeypatch.setattr(tree, "tracked", list)
    errors, _ = tree.findings()
    most = tree.MOST_LONG_FUNCTIONS
    assert any(error.startswith(f"LONG_FUNCTIONS has {most + 1} names, at most {most}") for error in errors)


@pytest.mark.parametrize(
    "head",
    ["fn f() {", "pub(super) const fn f() {", 'unsafe extern "C" fn f(\n    a: u32,\n) -> u32 {', "fn f()\nwhere\n{"],
)
@pytest.mark.parametrize("indent", ["", "    "])
def test_a_long_rust_function(tree: ModuleType, head: str, indent: str) -> None:
    def source(lines: int) -> str:
        body = ["    {", "    }"] + ["    x();"] * (lines - len(head.splitlines()) - 3)
        before = ["fn declared(", "    a: u32,", ");", "fn empty() {}"]
        return "".join(f"{indent}{line}\n" for line in [*before, *head.splitlines(), *body, "}", "fn g() {", "}"])

    assert tree.long_rust_functions("a.rs", source(100)) == []
    assert tree.long_rust_functions("a.rs", source(101)) == ["a.rs:5: f has 101 lines; at most 100, so split it"]


def test_rust_files_are_asked_for_long_functions(tree: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "rust/exl-cuda/src/ops/linear/ring/plan.rs"
    monkeypatch.setattr(tree, "tracked", lambda: [tree.ROOT / path])
    monkeypatch.setattr(tree, "LONGEST_RUST_FUNCTION", 20)
    errors, _ = tree.findings()
    assert any(error.startswith(f"{path}:") and ": plan has " in error for error in errors)


def test_the_model_is_a_facade(tree: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "packages/exl-core/src/exl_core/model.py"
    assert tree.ROOT / path in tree.tracked()
    monkeypatch.setattr(tree, "tracked", lambda: [tree.ROOT / path])
    monkeypatch.setitem(tree.LINES, path, 10)
    errors, _ = tree.findings()
    assert next(error for error in errors if error.startswith(path)).endswith("lines; at most 10")


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ('monkeypatch.setattr(module, "_places", {})', ["_places"]),
        ('monkeypatch.setattr("exl_core.memory._free", 1)', ["_free"]),
        ('hasattr(thing, "_runner")', ["_runner"]),
        ("from exl_core.loading import _plan", ["_plan"]),
        ("from exl_kernels import _native", []),
        ('monkeypatch.setattr("exl_serve.ray.replica.os._exit", leave)', []),
        ('monkeypatch.setattr(module, "places", {})', []),
    ],
)
def test_private_names_in_tests_are_found(tree: ModuleType, code: str, names: list[str]) -> None:
    errors = tree.private_errors("tests/x/test_x.py", code)
    assert [error.split(": ")[1] for error in errors] == names


def test_private_names_that_are_allowed_are_still_used(tree: ModuleType) -> None:
    (error,) = tree.private_errors("tests/core/test_ways.py", "")
    assert "_native_experts any more" in error


def test_lines_of_tests_with_private_names_are_counted(tree: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = "SLF001"  # apart, for this line would count
    code = f'a = x._y  # noqa: {rule}\nmonkeypatch.setattr(module, "_places", 1)\nb = x.y\n'
    assert tree.private_lines(code) == {1, 2}
    monkeypatch.setattr(tree, "MOST_PRIVATE_LINES", 1)
    assert any(error.startswith("tests use private names in ") for error in tree.findings()[0])
