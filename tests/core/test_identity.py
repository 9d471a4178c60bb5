"""A model's digest: equal for equal weights and settings wherever they are loaded, another one for any others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from exl_core import ExLlamaV2, ExLlamaV2Config, ExLlamaV2Lora, Intervention
from exl_core.loading import identity
from exl_kernels.safetensors_file import read_safetensors_header, read_tensor, write_safetensors

FOLDER = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path_factory.mktemp("identity") / "model"))


def digest(folder: Path, change: Callable[[Any], None] = lambda config: None) -> bytes:
    config = ExLlamaV2Config(folder)
    change(config)
    return ExLlamaV2(config).content_digest


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return {name: read_tensor(entry) for name, entry in read_safetensors_header(file).entries.items()}


def rewritten(folder: Path, to: Path, *parts: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))
    for number, part in enumerate(parts):
        write_safetensors(to / f"part-{number}.safetensors", part)
    return to


def test_the_place_and_the_files_do_not_matter(folder: Path, tmp_path: Path) -> None:
    tensors = weights(folder)
    names = sorted(tensors)
    halves = [{name: tensors[name] for name in chosen} for chosen in (names[::2], names[1::2])]
    assert digest(rewritten(folder, tmp_path / "two", *halves)) == digest(folder) == digest(FOLDER)


def test_every_tensor_counts(folder: Path, tmp_path: Path) -> None:
    """Change all numbers of a tensor, as another training would."""
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    (file,) = copy.glob("*.safetensors")
    whole, tensors = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8), weights(folder)
    found = {digest(copy)}
    for entry in read_safetensors_header(file).entries.values():
        part = whole[entry.offset : entry.offset + entry.nbytes]
        part ^= 1
        file.write_bytes(whole.numpy().tobytes())
        part ^= 1
        found.add(digest(copy))
    assert len(found) == 1 + len(tensors)


@given(seed=st.binary(min_size=16, max_size=16), nbytes=st.integers(0, 1 << 40))
@examples(300, 30)
def test_samples_lie_in_their_tensor_and_small_ones_are_read_whole(seed: bytes, nbytes: int) -> None:
    found = identity.samples(seed, nbytes)
    assert all(0 <= start <= start + length <= nbytes for start, length in found)
    ends = [start + length for start, length in found]
    assert all(end <= start for end, (start, _) in zip(ends, found[1:], strict=False))
    assert sum(length for _, length in found) == min(nbytes, identity.SAMPLES * identity.SAMPLE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rotary_embedding_base", 5e5),
        ("scale_pos_emb", 2.0),
        ("scale_alpha_value", 2.5),
        ("norm_eps", 1e-3),
        ("cpu_matmul", "exact"),
        ("scale_emb", 3.0),
    ],
)
def test_settings_that_change_keys_and_values_count(folder: Path, name: str, value: Any) -> None:
    assert digest(folder, lambda config: setattr(config, name, value)) != digest(folder)


@pytest.mark.parametrize("name", ["max_seq_len", "max_batch_size", "max_input_len", "max_output_len"])
def test_sizes_of_buffers_do_not_count(folder: Path, name: str) -> None:
    assert digest(folder, lambda config: setattr(config, name, 96)) == digest(folder)


def test_the_length_counts_where_the_rotation_is_made_from_it(folder: Path) -> None:
    def dynamic(length: int) -> Callable[[Any], None]:
        return lambda config: vars(config).update(
            alt_rope_method="dynamic", dynamic_rope_factor=2.0, max_seq_len=config.max_position_embeddings * length
        )

    assert len({digest(folder, dynamic(length)) for length in (2, 3)}) == 2


def test_a_setting_that_is_changed_after_the_model_was_built_does_not_count(folder: Path) -> None:
    config = ExLlamaV2Config(folder)
    model = ExLlamaV2(config)
    config.norm_eps = 1.0
    assert model.content_digest == digest(folder)


def test_modules_of_others_have_a_digest_of_their_own(folder: Path) -> None:
    model = ExLlamaV2(ExLlamaV2Config(folder))
    plain, inner = model.content_digest, model.modules[3]
    found = [plain]
    for hook in (Intervention(inner, post_forward=lambda state, step: state) for _ in range(2)):
        model.modules[3] = hook
        found.append(model.content_digest)
        assert model.content_digest == found[-1]
    assert len(set(found)) == 3
    model.modules[3] = inner
    assert model.content_digest == plain


@pytest.mark.parametrize("how", ["gone", "written to"])
def test_files_that_are_not_as_they_were_have_no_common_digest(tmp_path: Path, how: str) -> None:
    """The model is in memory and goes on."""
    copy = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    model, twin = ExLlamaV2(ExLlamaV2Config(copy)), ExLlamaV2(ExLlamaV2Config(copy))
    (file,) = copy.glob("*.safetensors")
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes())
    assert model.content_digest == model.content_digest != digest(FOLDER)
    assert model.content_digest != twin.content_digest


def write_adapter(folder: Path, factor: float = 1.0, alpha: int = 8) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        f'{{"peft_type": "LORA", "r": 2, "lora_alpha": {alpha}, "target_modules": ["q_proj"]}}'
    )
    model = ExLlamaV2(ExLlamaV2Config(FOLDER))
    linear: Any = next(one for one in model.linears() if one.key.endswith("q_proj"))
    tensors = {
        f"base_model.model.{linear.key}.lora_A.weight": torch.full((2, linear.in_features), factor),
        f"base_model.model.{linear.key}.lora_B.weight": torch.ones(linear.out_features, 2),
    }
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


def test_adapters_are_identified_by_content_and_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    model = ExLlamaV2(ExLlamaV2Config(FOLDER))
    model.load()
    settings: dict[str, dict[str, Any]] = {
        "one": {},
        "same": {},
        "other": {"factor": 0.5},
        "stronger": {"factor": 1.0, "alpha": 16},
    }
    one, same, other, stronger = (write_adapter(tmp_path / name, **values) for name, values in settings.items())

    def name(folder: Path, scaling: float = 1.0) -> bytes:
        return ExLlamaV2Lora.from_directory(model, folder, scaling).content_digest

    assert name(one) == name(same)
    assert len({name(one), name(other), name(stronger), name(one, 0.5)}) == 4
