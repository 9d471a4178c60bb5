"""exllamav2's import paths, registered where it is not installed; other people's filters through them."""

import importlib
import sys
import types
from pathlib import Path

import pytest
from answers import mask_ids

from exl_filters import (
    ExLlamaV2Filter,
    ExLlamaV2SelectFilter,
    FilterBusy,
    FilterStack,
    FilterUsageError,
    Status,
    compat,
)


@pytest.fixture(autouse=True)
def without_exllamav2(monkeypatch):
    """exl-compat provides that name where it is installed; these tests are about where it is not."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not (Path(place) / "exllamav2").is_dir()])
    users = ("exllamav2", "lmformatenforcer.integrations.exllamav2", "formatron.integrations.exllamav2")
    for name in [name for name in sys.modules if name.startswith(users)]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()


@pytest.mark.covers("filters: import-paths")
def test_the_paths_that_third_parties_import():
    class Tokenizer: ...

    with compat.namespace(Tokenizer):
        for path in ("generator", "generator.base", "generator.filters", "generator.filters.base"):
            assert importlib.import_module(f"exllamav2.{path}").ExLlamaV2Filter is ExLlamaV2Filter
        from exllamav2 import ExLlamaV2Tokenizer
        from exllamav2.generator.filters import select

        assert ExLlamaV2Tokenizer is Tokenizer  # type: ignore[comparison-overlap]
        assert select.ExLlamaV2SelectFilter is ExLlamaV2SelectFilter
        compat.install()
        assert importlib.import_module("exllamav2.version").__version__ == "0.3.2"
    assert not [name for name in sys.modules if name.startswith("exllamav2")]
    with pytest.raises(ImportError):
        importlib.import_module("exllamav2.generator")


def test_a_real_exllamav2_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "exllamav2.py").write_text("")
    # Not syspath_prepend: it would write the shortened path back after the fixture has restored the whole.
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    with pytest.raises(FilterUsageError):
        compat.install()


@pytest.mark.covers("filters: foreign-classes")
def test_lm_format_enforcers_own_module_imports_through_it():
    pytest.importorskip("lmformatenforcer", reason="extra `enforcer`")
    pytest.importorskip("torch")
    with compat.namespace():
        module = importlib.import_module("lmformatenforcer.integrations.exllamav2")
        assert callable(module.ExLlamaV2TokenEnforcerFilter)
    sys.modules.pop("lmformatenforcer.integrations.exllamav2", None)


@pytest.mark.covers("filters: foreign-classes")
def test_formatrons_own_filter_runs_unmodified():
    pytest.importorskip("kbnf", reason="formatron is not here (it is among the development dependencies)")
    pytest.importorskip("torch")

    class Tokenizer:
        """The attributes that formatron reads: bytes as <0xHH> pieces, one EOS."""

        eos_token_id = 256
        extended_id_to_piece = types.MappingProxyType({256: "</s>"})

        class Model:
            vocab = None

            def vocab_size(self):
                return 257

            def id_to_piece(self, i):
                return f"<0x{i:02X}>" if i < 256 else "</s>"

        tokenizer = tokenizer_model = Model()

        def decode(self, ids):
            return bytes(int(i) for i in ids if int(i) < 256).decode("utf-8", "replace")

        def get_id_to_piece_list(self):
            return [chr(i) if i < 128 else "\ufffd" for i in range(256)] + ["</s>"]

    compat.restore_pydantic_names()
    with compat.namespace(Tokenizer):
        from formatron.formatter import FormatterBuilder
        from formatron.integrations.exllamav2 import create_formatter_filter
        from formatron.integrations.utils import update_vocab_0xHH

        builder = FormatterBuilder()
        builder.append_str("a")
        builder.append_line(f"{builder.choose('yes', 'no', capture_name='c')}")
        theirs = create_formatter_filter(None, Tokenizer(), builder, vocab_processors=[update_vocab_0xHH])
        with FilterStack([theirs], vocab_size=257, stop_ids=[256]) as stack:
            with pytest.raises(FilterBusy):
                FilterStack([theirs], vocab_size=257)
            for byte in b"ano":
                assert byte in mask_ids(stack)
                stack.feed(byte)
            stack.rewind(2)
            assert mask_ids(stack) == [ord("n"), ord("y")]
            for byte in b"no\n":
                stack.feed(byte)
            assert mask_ids(stack) == [256]
            assert stack.feed(256)
            assert stack.status is Status.DONE
