"""Constraints of --json-schema and --regex."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from exl_generate.cli.models import Loaded
from exl_generate.errors import RequestError

if TYPE_CHECKING:
    from exl_filters.grammar import ExLlamaV2GrammarFilter

__all__ = ["Constraints", "read_schema"]


class Constraints:
    """The filters that an output must satisfy, of a schema's text (`read_schema`) and of a pattern; None: no such
    constraint. Raises FilterCompileError."""

    def __init__(self, loaded: Loaded, schema: str | None, regex: str | None) -> None:
        self.filters: list[ExLlamaV2GrammarFilter] = []
        #: names the text that the constraints ask for, in error messages
        self.what = "the JSON of --json-schema" if schema is not None else "the text that --regex asks for"
        if schema is None and regex is None:
            return
        from exl_filters.grammar import ExLlamaV2GrammarFilter

        if schema is not None:
            self.filters.append(ExLlamaV2GrammarFilter(loaded.model, loaded.tokenizer, json_schema=schema))
        if regex is not None:
            self.filters.append(ExLlamaV2GrammarFilter(loaded.model, loaded.tokenizer, regex=regex))

    def complete(self, ids: list[int]) -> bool:
        """Whether an output of these tokens may end there."""
        return all(_is_complete(constraint, ids) for constraint in self.filters)


def _is_complete(constraint: ExLlamaV2GrammarFilter, ids: list[int]) -> bool:
    """Whether an output of these tokens may end there. (The job works on a clone of the filter.)"""
    constraint.begin()
    for token in ids:
        constraint.feed(token)
    return constraint.is_complete()


def read_schema(source: str) -> str:
    """The text of a schema that was given as a file, or as itself."""
    if source.lstrip().startswith(("{", "[", '"')) or source.strip() in ("true", "false"):
        return source
    file = Path(source)
    shown = source if len(source) <= 200 else f"{source[:200]}..."
    try:
        if file.is_dir():
            raise RequestError(f"--json-schema {shown} is a folder: name a file, or write the schema itself")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RequestError(
            f"--json-schema {shown}: there is no such file, and a schema itself begins with {{: check the name"
        ) from None
    except OSError as error:
        raise RequestError(f"--json-schema {shown}: cannot read the file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"--json-schema {shown}: cannot read the file ({error})") from None
