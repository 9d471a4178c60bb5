"""Damaged and hostile model folders: whatever the bytes, the answer is a model or a typed error, no crash, no hang."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from exl_core import ExLlamaV2Config, ExLlamaV2Tokenizer, errors

pytestmark = pytest.mark.covers("core: files-damaged", "core: safetensors")

FIXTURE = Path(__file__).parent.parent / "golden" / "data" / "pylib-4m-fp16"
quick = examples(80, 25, suppress=list(HealthCheck))

SHAPES = st.lists(st.sampled_from([0, 1, 2, 64, 96, 2**31, 2**62, -1]), max_size=3)
OFFSETS = st.lists(st.sampled_from([0, 1, 2**40, 2**63, 2**64, -5]), min_size=2, max_size=2)
DTYPES = st.sampled_from(["F16", "F32", "I32", "I16", "BF16", "U8", "F8_E4M3", "BOOL", "?"])


def damage_bytes(raw: bytearray, draw: random.Random) -> None:
    header = int.from_bytes(raw[:8], "little")
    begin, end = draw.choice([(0, 8 + header), (8 + header, len(raw))])
    for _ in range(draw.choice([1, 3, 1000])):
        raw[draw.randrange(begin, end)] = draw.randrange(256)


def damage_header(raw: bytearray, data: st.DataObject) -> bytearray:
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    entry = header[data.draw(st.sampled_from(sorted(header)))]
    entry.update(
        data.draw(st.fixed_dictionaries({}, optional={"shape": SHAPES, "dtype": DTYPES, "data_offsets": OFFSETS}))
    )
    text = json.dumps(header).encode()
    return bytearray(len(text).to_bytes(8, "little") + text + raw[8 + size :])


@pytest.fixture(scope="module")
def sources(lab: Any) -> dict[str, Path]:
    return {kind: lab.write(kind=kind) for kind in ("float", "exl2", "gptq", "gptq-act-order")}


@quick
@given(data=st.data())
def test_damaged_weights(sources: dict[str, Path], lab: Any, tmp_path: Path, data: st.DataObject) -> None:
    source = sources[data.draw(st.sampled_from(sorted(sources)))]
    raw = bytearray((source / "model.safetensors").read_bytes())
    how = data.draw(st.sampled_from(["bytes", "header", "truncated"]))
    if how == "bytes":
        damage_bytes(raw, random.Random(data.draw(st.integers(0, 2**32))))
    elif how == "header":
        raw = damage_header(raw, data)
    else:
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    shutil.copy(source / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(raw)
    with contextlib.suppress(errors.FormatError):  # anything else fails the test
        model = lab.load(tmp_path, cpu_matmul=data.draw(st.sampled_from(["exact", "int8"])))
        assert model.forward(lab.ids(1, 9)).shape == (1, 9, 96)


VALUES = st.sampled_from(
    [
        *(None, True, -1, 0, 3, 2**31, 2**32, 2**63, 1e300, "", "x", "\x00", [], {}, [1]),
        *({"type": "BPE"}, {"type": "Sequence"}, {"type": "Sequence", "decoders": [{"type": "Replace"}]}),
        {"type": "Replace", "pattern": {"Regex": "("}, "content": "a"},
    ]
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside a JSON value, but for all except the first entries of long tables."""
    found = [path] if path else []
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    for key, value in items[:12]:
        found += places(value, (*path, key))
    return found


def small_tokenizer() -> dict[str, Any]:
    """The fixture's tokenizer.json with 300 tokens."""
    tokenizer: dict[str, Any] = json.loads((FIXTURE / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = dict(list(tokenizer["model"]["vocab"].items())[:300])
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:30]
    return tokenizer


def use(folder: Path) -> None:
    """Everything that reads the tokenizer's files."""
    config = ExLlamaV2Config()
    config.model_dir = str(folder)
    config.prepare(no_tensors=True)
    tokenizer = ExLlamaV2Tokenizer(config, lazy_init=False)
    ids = tokenizer.encode("hello wörld <s>\n", add_bos=True)
    assert isinstance(tokenizer.decode(ids[0]), str)
    tokenizer.encode("<s>a", encode_special_tokens=True)
    assert len(tokenizer.get_id_to_bytes_list(include_special_tokens=True)) == tokenizer.get_vocab_size()
    tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


@quick
@given(data=st.data())
def test_damaged_tokenizer(lab: Any, tmp_path: Path, data: st.DataObject) -> None:
    tokenizer = small_tokenizer()
    *parents, last = data.draw(st.sampled_from(places(tokenizer)))
    node = tokenizer
    for key in parents:
        node = node[key]
    node[last] = data.draw(VALUES)
    (tmp_path / "config.json").write_text(json.dumps(lab.config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with contextlib.suppress(errors.TokenizerError):
        use(tmp_path)


TOKENIZER_CONFIG = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token"), VALUES),
        "added_tokens_decoder": VALUES
        | st.dictionaries(
            st.sampled_from(["1", "-1", "x", "99999999999", "5"]),
            VALUES | st.fixed_dictionaries({"content": VALUES, "special": VALUES}),
            max_size=2,
        ),
        "chat_template": VALUES
        | st.text("{}%# abm[]", max_size=12)
        | st.lists(st.fixed_dictionaries({"name": VALUES, "template": VALUES}), max_size=2),
    },
)


@quick
@given(config=TOKENIZER_CONFIG, added=st.none() | st.dictionaries(st.text(max_size=4), VALUES, max_size=2))
def test_damaged_side_files(lab: Any, tmp_path: Path, config: dict[str, Any], added: dict[str, Any] | None) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(small_tokenizer()))
    (tmp_path / "config.json").write_text(json.dumps({**lab.config, "bos_token_id": None, "eos_token_id": None}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").unlink(missing_ok=True)
    if added is not None:
        (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    with contextlib.suppress(errors.TokenizerError, errors.ConfigError):
        use(tmp_path)


@pytest.mark.parametrize("prefix", ["\0", "##", "ä"])
def test_merges_without_the_declared_prefix_are_refused(lab: Any, tmp_path: Path, prefix: str) -> None:
    """The tokenizers library aborts the process over such a file."""
    tokenizer = small_tokenizer()
    tokenizer["model"]["continuing_subword_prefix"] = prefix
    (tmp_path / "config.json").write_text(json.dumps(lab.config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(errors.TokenizerError, match="continuing_subword_prefix"):
        use(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"), [("pytorch_model.bin", "pickle"), ("model.pth", "pickle"), ("m.gguf", "GGUF")]
)
def test_weights_in_other_forms_are_named_and_not_opened(lab: Any, tmp_path: Path, name: str, words: str) -> None:
    folder = shutil.copytree(lab.write(), tmp_path / "other")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / name).write_bytes(b"")
    with pytest.raises(errors.ConfigFileError, match=rf"{name} is .*{words}.*safetensors"):
        ExLlamaV2Config(str(folder))


def test_a_shard_that_the_index_names_and_the_folder_lacks_is_named(lab: Any, tmp_path: Path) -> None:
    tensors = lab.random_tensors(lab.config)
    kept = {name: t for name, t in tensors.items() if "layers.1." not in name}
    folder = lab.write_model(tmp_path / "shards", lab.config, kept)
    index = folder / "model.safetensors.index.json"
    files = {name: "there.safetensors" if name in kept else "model-00002-of-00002.safetensors" for name in tensors}
    (present,) = folder.glob("*.safetensors")
    present.rename(folder / "there.safetensors")
    index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(errors.MissingTensorError, match=r"Could not find.*names model-00002-of-00002\.safetensors"):
        ExLlamaV2Config(str(folder))
    for other in ("[1]", "{", '{"weight_map": [1]}', '{"weight_map": {"a": 5}}'):
        index.write_text(other)
        with pytest.raises(errors.MissingTensorError, match=r"in model$"):
            ExLlamaV2Config(str(folder))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes in folders are of POSIX systems")
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("config.json", errors.ConfigFileError),
        ("generation_config.json", errors.ConfigFileError),
        ("tokenizer.json", errors.TokenizerFileError),
        ("tokenizer_config.json", errors.ConfigFileError),
    ],
)
def test_a_pipe_in_the_folder_is_not_waited_for(lab: Any, tmp_path: Path, name: str, error: type[Exception]) -> None:
    folder = shutil.copytree(lab.write(), tmp_path / "pipe")
    for side in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURE / side, folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(error, match="not a regular file"):
        ExLlamaV2Tokenizer(ExLlamaV2Config(str(folder)))
