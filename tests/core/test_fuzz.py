"""Mutations of a kept corpus of model files: a result or a typed error, quickly, in bounded memory."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from exl_core import ExLlamaV2, ExLlamaV2Config, ExLlamaV2Lora, ExLlamaV2Tokenizer, errors
from exl_core.loading.checkpoint import Checkpoint, TensorReader

pytestmark = pytest.mark.covers("core: safetensors", "core: config", "core: tokenizer", "core: lora")

CORPUS = Path(__file__).parent / "corpus"  # <target>/<name>: whatever once was interesting; add what a run finds
SECONDS = 5.0  # of the processor
FACTOR, SLACK = 4, 48 << 20  # bytes beyond the file's size: the interpreter's and torch's own coming and going
WORDS = [
    *(b"null", b"true", b"-1", b"0", b"1e999", b"18446744073709551616", b"9223372036854775807", b"{}", b"[]", b'""'),
    *(b'"shape":[4294967296,4294967296]', b'"data_offsets":[0,18446744073709551615]', b"\xff", b"\x00", b'"\\ud800"'),
    *(b'"r":1000000000', b'"lora_alpha":1e400', b'"vocab_size":99999999999', b'"num_hidden_layers":1000000000'),
    *(b"\x80\x04c", b"PK\x03\x04", b"[" * 2000, b'{"a":' * 500, b"__metadata__", b"F8_E4M3", b"lora_A", b".weight"),
]


class Targets:
    """The readers of each kind of file, in a folder that holds every other file that they need."""

    def __init__(self, folder: Path, lab: Any) -> None:
        self.folder, self.config = folder, lab.config
        self.model: ExLlamaV2 = lab.load(lab.write())

    def header(self, raw: bytes) -> None:
        (self.folder / "model.safetensors").write_bytes(raw)
        found = Checkpoint.scan(self.folder)
        reader = TensorReader(found)
        for name in list(found.tensors)[:50]:
            reader.read(name)
        reader.read_group(list(found.tensors)[:50])

    def config_json(self, raw: bytes) -> None:
        (self.folder / "config.json").write_bytes(raw)
        config = ExLlamaV2Config()
        config.model_dir = str(self.folder)
        config.prepare(no_tensors=True)

    def tokenizer_json(self, raw: bytes) -> None:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        (self.folder / "tokenizer.json").write_bytes(raw)
        config = ExLlamaV2Config()
        config.model_dir = str(self.folder)
        config.prepare(no_tensors=True)
        tokenizer = ExLlamaV2Tokenizer(config)
        tokenizer.decode(tokenizer.encode("hello wörld\n", add_bos=True)[0])

    def adapter_config(self, raw: bytes) -> None:
        source = CORPUS / "adapter_safetensors" / "plain"
        (self.folder / "adapter_model.safetensors").write_bytes(source.read_bytes())
        (self.folder / "adapter_config.json").write_bytes(raw)
        ExLlamaV2Lora.from_directory(self.model, self.folder)

    def adapter_safetensors(self, raw: bytes) -> None:
        (self.folder / "adapter_config.json").write_bytes((CORPUS / "adapter_config" / "plain").read_bytes())
        (self.folder / "adapter_model.safetensors").write_bytes(raw)
        ExLlamaV2Lora.from_directory(self.model, self.folder)

    def adapter_bin(self, raw: bytes) -> None:
        (self.folder / "adapter_config.json").write_bytes((CORPUS / "adapter_config" / "plain").read_bytes())
        (self.folder / "adapter_model.safetensors").unlink(missing_ok=True)
        (self.folder / "adapter_model.bin").write_bytes(raw)
        ExLlamaV2Lora.from_directory(self.model, self.folder)


NAMES = ("header", "config_json", "tokenizer_json", "adapter_config", "adapter_safetensors", "adapter_bin")
# Errors that a damaged file of each kind may end in: an error of another family fails the test.
FAMILIES: dict[str, tuple[type[errors.ExlError], ...]] = {
    "header": (errors.FormatError,),
    "config_json": (errors.ConfigError, errors.UnsupportedError),
    "tokenizer_json": (errors.TokenizerError,),
    "adapter_config": (errors.ConfigError, errors.FormatError, errors.UnsupportedError),
    "adapter_safetensors": (errors.FormatError, errors.UnsupportedError),
    "adapter_bin": (errors.AdapterError,),
}
SEEDS = {name: sorted((CORPUS / name).iterdir()) for name in NAMES}


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def run(targets: Targets, name: str, raw: bytes) -> None:
    """Anything but a result or an error of the family fails the test, as do slowness and memory beyond the bound."""
    target: Callable[[bytes], None] = getattr(targets, name)
    for _ in range(4):  # once; other work of the process and the machine costs something, but not again and again
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before, highest = resident("VmRSS"), resident("VmHWM")
        start = time.thread_time()
        with contextlib.suppress(*FAMILIES[name]):
            target(raw)
        taken, peak = time.thread_time() - start, resident("VmHWM")
        most = max(highest, before + FACTOR * len(raw) + SLACK)
        if taken < SECONDS and peak <= most:
            break
    assert taken < SECONDS
    assert peak <= most


def mutate(raw: bytes, dice: random.Random, other: bytes) -> bytes:
    """A few random edits: bytes, words of the formats, pieces cut, doubled and taken from another file."""
    data = bytearray(raw)
    for _ in range(dice.choice([1, 1, 2, 4, 16])):
        begin = dice.randrange(len(data) + 1)
        end = min(len(data), begin + dice.choice([0, 1, 2, 8, 64]))
        kind = dice.randrange(6)
        if kind == 0:
            data[begin:end] = dice.randbytes(end - begin)
        elif kind == 1:
            data[begin:end] = dice.choice(WORDS)
        elif kind == 2:
            del data[begin:end]
        elif kind == 3:
            data[begin:begin] = data[begin:end] * dice.choice([1, 3, 20])
        elif kind == 4 and other:
            cut = dice.randrange(len(other))
            data[begin:end] = other[cut : cut + dice.choice([4, 32, 200])]
        elif data:
            place = dice.randrange(len(data))
            data[place] ^= 1 << dice.randrange(8)
    return bytes(data)


@pytest.fixture(scope="module")
def targets(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("fuzz"), lab)


@pytest.mark.parametrize("name", NAMES)
def test_corpus(targets: Targets, name: str) -> None:
    assert SEEDS[name]
    for seed in SEEDS[name]:
        run(targets, name, seed.read_bytes())
    getattr(targets, name)((CORPUS / name / "plain").read_bytes())  # the plain one is right


@pytest.mark.parametrize("name", NAMES)
@examples(150, 15, suppress=list(HealthCheck))
@given(seed=st.integers(0, 2**64), rounds=st.integers(1, 3))
def test_mutations(targets: Targets, name: str, seed: int, rounds: int) -> None:
    dice = random.Random(seed)
    raw = dice.choice(SEEDS[name]).read_bytes()
    for _ in range(rounds):
        raw = mutate(raw, dice, dice.choice(SEEDS[name]).read_bytes())
    run(targets, name, raw)
