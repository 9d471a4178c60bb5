"""Helpers of exllamav2's own scripts: rows of tokens of a file, and arguments that end a script with a message."""

from __future__ import annotations

import argparse
import builtins
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core.errors import ConfigFileError, InputError
from exl_generate.bundled import default_model_dir
from exl_kernels.errors import UnsupportedError
from exllamav2 import ExLlamaV2Config, ExLlamaV2Tokenizer, model_init
from exllamav2.conversion.tokenize import get_tokens

TEXTS = ["The cat sat on the mat.", "", "A dog barked at the cat, and ran away.", "Grüße, 猫!"] * 3


@pytest.fixture(scope="module")
def tokenizer() -> ExLlamaV2Tokenizer:
    return ExLlamaV2Tokenizer(ExLlamaV2Config(default_model_dir()))


def test_rows_of_a_text_file(tokenizer: ExLlamaV2Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("\n".join(TEXTS), encoding="utf-8")
    ids = tokenizer.encode("\n".join(TEXTS))[0]
    for rows, length in ((1, 5), (3, 7), (2, 16)):
        assert torch.equal(get_tokens(rows, length, file, tokenizer), ids[: rows * length].view(rows, length))
    whole = get_tokens(10**6, 4, str(file), tokenizer)
    assert whole.shape == (ids.shape[0] // 4, 4)
    with pytest.raises(InputError, match=f"has {ids.shape[0]} tokens, one row needs {ids.shape[0] + 1}"):
        get_tokens(1, ids.shape[0] + 1, file, tokenizer)


def test_rows_of_a_parquet_file(tokenizer: ExLlamaV2Tokenizer, tmp_path: Path) -> None:
    """The first column of texts, text after text; other columns and empty texts count for nothing."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "data.parquet"
    table = {"id": list(range(len(TEXTS))), "text": [*TEXTS[:-1], None], "more": ["no"] * len(TEXTS)}
    parquet.write_table(pyarrow.table(table), file)
    ids = torch.cat([tokenizer.encode(text)[0] for text in TEXTS[:-1]])
    assert torch.equal(get_tokens(4, 8, file, tokenizer), ids[:32].view(4, 8))
    assert get_tokens(10**6, 4, file, tokenizer).shape == (ids.shape[0] // 4, 4)
    parquet.write_table(pyarrow.table({"id": [1, 2]}), file)
    with pytest.raises(InputError, match="no text column; its columns are id"):
        get_tokens(1, 1, file, tokenizer)


def test_parquet_without_its_library_names_the_extra(
    tokenizer: ExLlamaV2Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data.parquet"
    file.write_bytes(b"PAR1")
    real = builtins.__import__

    def without_pyarrow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(UnsupportedError, match=r"pyarrow, the extra `parquet` of exl-compat"):
        get_tokens(1, 1, file, tokenizer)


def test_bad_arguments_of_rows(tokenizer: ExLlamaV2Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match="nowhere"):
        get_tokens(1, 1, tmp_path / "nowhere.txt", tokenizer)
    file = tmp_path / "text.txt"
    file.write_text("some text")
    for rows, length, name in ((0, 4, "num_rows is 0"), (1, -1, "length is -1")):
        with pytest.raises(InputError, match=name):
            get_tokens(rows, length, file, tokenizer)


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    model_init.add_args(parser)
    return parser.parse_args(list(flags))


def test_a_script_ends_with_a_message_where_no_model_is(tmp_path: Path) -> None:
    """The helper ends the program, as exllamav2's does; exl_core.model_init raises ConfigFileError."""
    model_init.check_args(parse("-m", str(default_model_dir())))
    for flags, message in (((), "no model folder"), (("-m", str(tmp_path)), "config.json"), (("-m", "no"), "no")):
        with pytest.raises(SystemExit, match=rf" ## Error: .*{message}") as caught:
            model_init.check_args(parse(*flags))
        assert caught.value.__suppress_context__
