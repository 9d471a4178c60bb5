"""The identity of a model: a digest of its weights and settings, equal in every process and on every machine.

Reading 40 GB takes a minute, so long tensors are sampled: name, element type, shape, and SAMPLES blocks of SAMPLE bytes
at places derived from their names. Another training, merge or quantization changes numbers all over a matrix and so the
digest; a change of a few rows of one matrix may not. The digest does not protect against forgery.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from exl_kernels.safetensors_file import TensorEntry

from ..config import ExLlamaV2Config
from ..errors import FormatError
from .checkpoint import Checkpoint

__all__ = ["ModelIdentity", "model_digest", "settings_of"]

log = logging.getLogger(__name__)

SAMPLE = 4096  # bytes of a block
SAMPLES = 2  # blocks of a tensor; a shorter tensor is read whole
# Settings that do not affect keys and values: paths, sizes of chunks and buffers, choices of code, end tokens. A new
# field of the config counts until it is listed here.
NEUTRAL = frozenset(
    {
        "allow_unknown_architecture",
        "arch",
        "architecture",
        "bos_token_id",
        "checkpoint",
        "eos_token_id",
        "fasttensors",
        "load_in_q4",
        "max_attention_size",
        "max_batch_size",
        "max_decode_batch",
        "max_dq_size",
        "max_input_len",
        "max_output_len",
        "max_seq_len",
        "model_dir",
        "no_flash_attn",
        "no_graphs",
        "no_sdpa",
        "no_xformers",
        "pad_token_id",
    }
)


class ModelIdentity:
    """The digest of a model, found when it is first asked for.

    Args:
        config: configuration of the model.
        modules: as the configuration has them.
    """

    def __init__(self, config: ExLlamaV2Config, modules: Sequence[object]) -> None:
        self._config, self._built, self._settings = config, list(modules), settings_of(config)
        self._digest: tuple[Checkpoint | None, bytes] | None = None
        self._foreign: tuple[Sequence[object], bytes] | None = None  # an arrangement with replaced modules, its digest

    def read_settings(self) -> None:
        """Read the settings of the configuration again, which may change until the model is loaded."""
        if (settings := settings_of(self._config)) != self._settings:
            self._settings, self._digest = settings, None

    def digest(self, arrangement: Sequence[object]) -> bytes:
        """Return the 16 bytes of the model with these modules: unique ones for each list that has replaced modules."""
        if arrangement != self._built:
            if self._foreign is None or self._foreign[0] is not arrangement:
                self._foreign = (arrangement, secrets.token_bytes(16))
            return self._foreign[1]
        checkpoint = self._config.checkpoint
        if self._digest is None or self._digest[0] is not checkpoint:
            self._digest = (checkpoint, self._found(checkpoint))
        return self._digest[1]

    def _found(self, checkpoint: Checkpoint | None) -> bytes:
        if checkpoint is None:
            return secrets.token_bytes(16)
        try:
            return model_digest(checkpoint, self._settings)
        except FormatError as error:
            log.warning("cached pages get names that other processes do not find: %s", error)
            return secrets.token_bytes(16)


def settings_of(config: ExLlamaV2Config) -> str:
    """Return all settings that decide the keys and values of a token, the caller's overrides included, as text."""
    names = sorted({*ExLlamaV2Config.__annotations__, "layer_rope", "layer_sparse", "layer_windows"} - NEUTRAL)
    rope = config.rope_settings()
    if rope.method != "dynamic":
        rope = replace(rope, max_positions=0)  # the length of the table, which does not affect its entries
    values = [f"{name}={getattr(config, name)!r}" for name in names]
    return "\n".join([config.arch.name, *values, repr(rope)])


def model_digest(checkpoint: Checkpoint, settings: str) -> bytes:
    """Return a digest of 16 bytes. The distribution of tensors over files does not matter.

    Raises:
        FormatError: a file changed after its header was read.
    """
    checkpoint.check_unchanged()
    by_file: dict[Path, list[tuple[str, TensorEntry]]] = {}
    for key, entry in checkpoint.tensors.items():
        by_file.setdefault(entry.path, []).append((key, entry))
    found: dict[str, bytes] = {}
    for file, entries in by_file.items():
        found.update(_tensors_of(file, entries))
    whole = hashlib.blake2b(settings.encode(), digest_size=16, person=b"exl-model")
    for key in sorted(found):
        whole.update(found[key])
    return whole.digest()


def _tensors_of(file: Path, entries: Iterable[tuple[str, TensorEntry]]) -> dict[str, bytes]:
    """Return the digest of each tensor of a file."""
    found = {}
    try:
        with open(file, "rb", buffering=0) as opened:
            for key, entry in sorted(entries, key=lambda item: item[1].offset):
                one = hashlib.blake2b(f"{key} {entry.dtype} {entry.shape}".encode(), digest_size=16)
                for start, length in samples(one.digest(), entry.nbytes):
                    opened.seek(entry.offset + start)
                    block = opened.read(length)
                    if len(block) != length:
                        raise FormatError(f"{file}: {entry.name}: the file ends early; download it again")
                    one.update(block)
                found[key] = one.digest()
    except OSError as e:
        raise FormatError(f"{file}: cannot be read ({e.strerror or e})") from e
    return found


def samples(seed: bytes, nbytes: int) -> list[tuple[int, int]]:
    """Return (offset in the tensor, length) of the blocks to read: one in each of SAMPLES equal parts."""
    if nbytes <= SAMPLES * SAMPLE:
        return [(0, nbytes)]
    part = nbytes // SAMPLES
    places = (int.from_bytes(seed[8 * i : 8 * i + 8], "little") % (part - SAMPLE + 1) for i in range(SAMPLES))
    return [(i * part + place, SAMPLE) for i, place in enumerate(places)]
