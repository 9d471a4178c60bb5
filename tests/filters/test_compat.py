"""exllamav2's import paths, registered only where exllamav2 is not."""

import importlib
import sys

import pytest

from exl_filters import ExLlamaV2Filter, ExLlamaV2SelectFilter, FilterUsageError, compat


def test_the_paths_that_third_parties_import():
    class Tokenizer: ...

    with compat.namespace(Tokenizer):
        for path in ("generator", "generator.base", "generator.filters", "generator.filters.base"):
            assert importlib.import_module(f"exllamav2.{path}").ExLlamaV2Filter is ExLlamaV2Filter
        from exllamav2 import ExLlamaV2Tokenizer
        from exllamav2.generator.filters import select

        assert ExLlamaV2Tokenizer is Tokenizer
        assert select.ExLlamaV2SelectFilter is ExLlamaV2SelectFilter
        compat.install()
        assert importlib.import_module("exllamav2.version").__version__ == "0.3.2"
    assert not [name for name in sys.modules if name.startswith("exllamav2")]
    with pytest.raises(ImportError):
        importlib.import_module("exllamav2.generator")


def test_a_real_exllamav2_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "exllamav2.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FilterUsageError):
        compat.install()


def test_lm_format_enforcers_own_module_imports_through_it():
    pytest.importorskip("lmformatenforcer", reason="extra `enforcer`")
    pytest.importorskip("torch")
    with compat.namespace():
        module = importlib.import_module("lmformatenforcer.integrations.exllamav2")
        assert callable(module.ExLlamaV2TokenEnforcerFilter)
    sys.modules.pop("lmformatenforcer.integrations.exllamav2", None)
