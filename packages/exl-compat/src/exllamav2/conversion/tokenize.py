"""`exllamav2.conversion.tokenize`: rows of tokens for measuring perplexity."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from exl_core import ExLlamaV2Tokenizer
from exl_core.errors import ConfigFileError, InputError
from exl_kernels.errors import UnsupportedError
from exllamav2._names import without_counterpart

__all__ = ["get_tokens"]


def get_tokens(num_rows: int, length: int, filename: str | os.PathLike[str], tokenizer: ExLlamaV2Tokenizer) -> Tensor:
    """Tokenize a text file, or the first text column of a parquet file, and cut it into rows.

    Returns int64 ids [rows, length]: `num_rows` rows, or as many as the file fills. Texts of a parquet file follow each
    other without a separator. Raises InputError if not a single row is filled or a number is not positive,
    ConfigFileError if there is no such file, UnsupportedError for parquet without the package pyarrow.
    """
    for name, number in (("num_rows", num_rows), ("length", length)):
        if number < 1:
            raise InputError(f"get_tokens: {name} is {number}, must be at least 1")
    path = Path(filename)
    if not path.is_file():
        raise ConfigFileError(f"get_tokens: {path} is not a file")
    parts: list[Tensor] = []
    found = 0
    for text in _texts(path):
        parts.append(tokenizer.encode(text)[0])
        found += parts[-1].shape[0]
        if found >= num_rows * length:
            break
    rows = min(num_rows, found // length)
    if rows < 1:
        raise InputError(f"get_tokens: {path} has {found} tokens, one row needs {length}; use a shorter length")
    return torch.cat(parts)[: rows * length].view(rows, length)


def _texts(path: Path) -> Iterator[str]:
    """The whole text of a text file, or the texts of the first text column of a parquet file."""
    if path.suffix != ".parquet":
        yield path.read_text(encoding="utf-8")
        return
    try:
        from pyarrow import parquet, types
    except ImportError as error:
        raise UnsupportedError(f"{path}: parquet needs pyarrow, the extra `parquet` of exl-compat") from error
    with parquet.ParquetFile(path) as file:
        kinds = {field.name: field.type for field in file.schema_arrow}
        names = [name for name, kind in kinds.items() if types.is_string(kind) or types.is_large_string(kind)]
        if not names:
            raise InputError(f"get_tokens: {path} has no text column; its columns are {', '.join(kinds) or 'none'}")
        for batch in file.iter_batches(columns=names[:1]):
            yield from (text for text in batch.column(0).to_pylist() if text)


__getattr__ = without_counterpart(__name__)
