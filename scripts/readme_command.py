"""Prints the N-th `sh` block of README.md (1 = the main job, 2 = the tests), so that CI runs what the README says."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def sh_blocks(markdown: str) -> list[str]:
    """The contents of all fenced `sh` blocks, in order."""
    return [block.strip() for block in re.findall(r"^```sh\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE)]


if __name__ == "__main__":
    readme = Path(__file__).resolve().parent.parent / "README.md"
    print(sh_blocks(readme.read_text(encoding="utf-8"))[int(sys.argv[1]) - 1])
