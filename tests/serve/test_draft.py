"""Draft models of served models."""

from __future__ import annotations

from pathlib import Path

import pytest

from exl_generate import RequestError, bundled
from exl_serve.config.model import ModelConfig
from exl_serve.engine.load import load

OTHER = Path(__file__).resolve().parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"


def test_a_draft_model_with_another_tokenizer_is_rejected() -> None:
    config = ModelConfig(id="fable", path=str(bundled.default_model_dir()), draft=str(OTHER), device="cpu")
    with pytest.raises(RequestError, match="take a draft model that shares the tokenizer"):
        load(config)
