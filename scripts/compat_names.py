"""Write docs/reference/compat-names.md: every name of exllamav2's modules, and what it is here.

    python scripts/compat_names.py [--check]

`--check` writes nothing and exits 1 if the page is not current.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "packages" / "exl-compat" / "src"
PAGE = ROOT / "docs" / "reference" / "compat-names.md"
HEAD = """# Names of exllamav2

Every name that a module of exllamav2 exports, and what it is here. `python scripts/compat_names.py` writes the page.

*isinstance only*: the name can be imported and used in `isinstance`; a model makes its objects. *not available*: any
use raises an error that names [the guide](../guides/compat.md). Modules with the note "inner names" take any further
name in the same way.
"""


def modules() -> list[str]:
    """Dotted names of the modules."""
    found = []
    for path in sorted((SOURCE / "exllamav2").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if not any(part.startswith("_") and part != "__init__" for part in parts):
            found.append(".".join(part for part in parts if part != "__init__"))
    return sorted(set(found))


def meaning(module: str, name: str) -> str:
    """Say in a few words how a name is provided."""
    from exllamav2._names import _StandIn

    value = getattr(importlib.import_module(module), name)
    if isinstance(value, _StandIn):
        return "isinstance only" if value.counterparts else "not available"
    home = getattr(value, "__module__", None)
    if home is None or not hasattr(value, "__qualname__"):
        return "a value"
    package = home.split(".")[0]
    if package == "exllamav2":
        return "of exl-compat"
    return f"`{package}`: `{value.__qualname__}`"


def page() -> str:
    """The whole page."""
    lines = [HEAD, "| module | name | here |", "|---|---|---|"]
    for module in modules():
        loaded = importlib.import_module(module)
        names = [name for name in getattr(loaded, "__all__", []) if not name.startswith("_")]
        if "__getattr__" in vars(loaded) and module != "exllamav2":
            lines.append(f"| `{module}` | inner names | not available |")
        lines += [f"| `{module}` | `{name}` | {meaning(module, name)} |" for name in names]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the page."""
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE} is not current: run `python scripts/compat_names.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
