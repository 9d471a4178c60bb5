"""One key of config.json changed at a time: transformers' logits, or a refusal; a script over all keys and families.

python tests/core/config_mutations.py [--foreign] [case...]      # lines of JSON: case, change, verdict, why
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from test_against_transformers import CASES, NORM_FROM_ONE, TOLERANCE
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Config
from exl_core.errors import ExlError

__all__ = ["Judge", "base_config", "changes_of"]

File = dict[str, Any]
GONE = object()  # the key taken out of the file
ROUNDED = 4 * TOLERANCE  # keys and values are half precision here: some changes make much of the rounding
LARGEST = 30_000_000  # parameters: what transformers assumes where a size is gone may be a whole model's
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "relu", "quick_gelu", "relu2")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 24}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: tuple[File, ...] = (
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    YARN,
    {**YARN, "attention_factor": 0.8},
    {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    {"partial_rotary_factor": 0.5},
)
UNCHANGED = {  # what says nothing about the logits of a pass, or is the model's name
    *("architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "vision_config", "_name_or_path"),
    *("bos_token_id", "eos_token_id", "image_token_id", "image_token_index", "boi_token_index", "eoi_token_index"),
    *("vision_start_token_id", "vision_end_token_id", "vision_token_id", "video_token_id", "id2label", "label2id"),
}


def replace_rope(new: dict[str, Any], t: File) -> None:
    """Write the parameters of RoPE into a config."""
    t.update(rope_parameters=new)


def base_config(case: str) -> File:
    """config.json with every key that transformers has for the family."""
    made: File = json.loads(CASES[case].configuration().to_json_string(use_diff=False))
    made["architectures"] = [CASES[case].model]
    return made


def values_of(key: str, value: Any) -> Iterator[Any]:
    """Other things that the key could say."""
    yield GONE
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from sorted({value + 1, value * 2, value // 2, *([1] if value < 8 else [])} - {value, 0})
    elif isinstance(value, float):
        yield from (value * 0.5 + 0.11, value * 2.0)
    elif isinstance(value, str):
        yield from (name for name in ACTIVATIONS if name != value and ("act" in key or "gelu" in value))
    elif isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        kinds = ("full_attention", "sliding_attention")
        yield from ([kinds[i % 2] for i in range(len(value))], [kinds[0]] * len(value), [kinds[1]] * len(value))
    elif isinstance(value, list):
        yield from ([0], [1, 2], [0] * len(value), [1] * len(value))
    elif value is None:
        yield from (True, 2, 8, 0.7, "gelu")


def changes_of(config: File) -> Iterator[tuple[str, File]]:
    """(what is changed, the file) for every key, of text_config where there is one."""
    inside = "text_config" if "text_config" in config else None

    def changed(change: Callable[[File], Any]) -> File:
        made = copy.deepcopy(config)
        change(made if inside is None else made[inside])
        return made

    for key, value in (config if inside is None else config[inside]).items():
        if key in UNCHANGED:
            continue
        if key == "rope_parameters" and isinstance(value, dict):
            yield from _rotations(value, changed)
            continue
        where = [key] if isinstance(value, dict) else []
        for name, old in value.items() if where else ((key, value),):
            for new in values_of(name, old):
                shown = "gone" if new is GONE else json.dumps(new)
                yield f"{'.'.join([*where, name])}={shown}", changed(_setting(where, name, new))


def foreign_keys(config: File) -> Iterator[tuple[str, File]]:
    """Keys that other families have and this one does not, saying something."""
    inside = config.get("text_config", config)
    others: File = {}
    for case in CASES:
        made = base_config(case)
        others.update(made.get("text_config", made))
    for key, value in sorted(others.items()):
        if key in inside or key in config or key in UNCHANGED or isinstance(value, (dict, list)):
            continue
        new = {bool: True, int: 3, float: 0.7, str: "gelu"}.get(type(value), 0.7)
        made = copy.deepcopy(config)
        made.get("text_config", made)[key] = new
        yield f"foreign {key}={json.dumps(new)}", made


def _setting(where: list[str], name: str, new: Any) -> Callable[[File], None]:
    def put(target: File) -> None:
        for step in where:
            target = target[step]
        if new is GONE:
            del target[name]
        else:
            target[name] = new

    return put


def _rotations(block: File, changed: Callable[[Callable[[File], Any]], File]) -> Iterator[tuple[str, File]]:
    """Other rotations, in the new, the old and the oldest spelling."""
    layered = bool(block) and all(isinstance(v, dict) for v in block.values())
    plain = next(iter(block.values())) if layered else block
    kept = {k: plain[k] for k in ("mrope_section", "partial_rotary_factor") if k in plain}
    base = {"rope_theta": plain.get("rope_theta", 10000.0), "rope_type": "default", **kept}
    yield "rope gone", changed(lambda t: t.pop("rope_parameters"))
    for rope in ({}, {"rope_theta": 123.0}, *ROPES):
        new: dict[str, Any] = {**base, **rope}
        top: dict[str, Any] = {k: new[k] for k in ("rope_theta", "partial_rotary_factor") if k in new}
        yield f"rope_parameters={json.dumps(new)}", changed(partial(replace_rope, new))
        for spelling in ("rope_type", "type"):
            scaling = {spelling if k == "rope_type" else k: v for k, v in new.items() if k not in top}
            if scaling == {"type": "default"}:
                continue
            older: dict[str, Any] = {**top, "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}

            def put(t: File, older: File = older) -> None:
                del t["rope_parameters"]
                t.update(older)

            yield f"old {json.dumps(older)}", changed(put)
    for kind in block if layered else ():
        for rope in ({"rope_theta": 123.0}, *ROPES):
            new = {**block, kind: {**block[kind], **rope}}
            yield f"rope {kind} {json.dumps(rope)}", changed(partial(replace_rope, new))


class Judge:
    """Compares transformers' logits with ours for files that differ in one key from a case's."""

    def __init__(self, case: str) -> None:
        self.case = case
        drawn = torch.Generator().manual_seed(5)
        self.ids = [torch.randint(3, 80, (1, 40), generator=drawn) for _ in range(3)]
        self.base: list[Tensor] | None = None

    def theirs(self, config: File, folder: Path) -> list[Tensor]:
        """transformers' logits of the file, with weights by their names, which are left in `folder`."""
        (folder / "config.json").write_text(json.dumps(config))
        kind = getattr(transformers, CASES[self.case].model)
        read = kind.config_class.from_pretrained(folder, attn_implementation="eager")
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(read).parameters())
        if size > LARGEST:
            raise ValueError(f"{size} parameters")
        model = kind(read).float().eval()
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            scale = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            norm = re.search(r"(norm|norm_[12]|ln_[12f])\.weight$", name) is not None
            offset = 1.0 if norm and not self.case.startswith(NORM_FROM_ONE) else 0.0
            parameter.copy_((drawn * scale + offset).half().float())
        logits = [model(input_ids=ids).logits for ids in self.ids]
        if not all(torch.isfinite(x).all() and x.abs().max() for x in logits):
            raise ValueError("its logits are not finite, or all zero")
        model.half().save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        return logits

    def ours(self, folder: Path) -> list[Tensor]:
        prepared = ExLlamaV2Config(folder)
        prepared.cpu_matmul = "exact"
        model = ExLlamaV2(prepared)
        model.load()
        return [model.forward(ids)[..., : prepared.vocab_size] for ids in self.ids]

    @torch.no_grad()
    def __call__(self, config: File) -> tuple[str, str]:
        """("same" | "refused" | "impossible" for transformers | "other" | "crash", why)."""
        with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = self.theirs(config, Path(name))
            except Exception as error:
                return "impossible", f"{type(error).__name__}: {error}"[:200]
            if self.base is None:
                self.base = expected
            try:
                found = self.ours(Path(name))
            except ExlError as error:
                return "refused", f"{type(error).__name__}: {error}".replace(name, "")[:200]
            except Exception as error:
                return "crash", f"{type(error).__name__}: {error}"[:200]
        return self.verdict(expected, found)

    def verdict(self, expected: list[Tensor], found: list[Tensor]) -> tuple[str, str]:
        """Judge by the middle one of three prompts: in mixtures a near tie of two experts may fall either way. A change
        too small for the tolerance must still be seen: nearer to what is asked for than to the unchanged model."""
        assert self.base is not None
        if any(f.shape != e.shape for f, e in zip(found, expected, strict=True)):
            return "other", f"shape {tuple(found[0].shape)} for {tuple(expected[0].shape)}"
        worst = _middle(found, expected)
        close = worst < ROUNDED
        if self.base[0].shape != expected[0].shape:
            return ("same" if close else "other"), f"{worst:.1e}"
        moved, stayed = _middle(self.base, expected), _middle(found, self.base)
        ignored = moved > TOLERANCE / 4 and stayed < worst
        return ("same" if close and not ignored else "other"), f"{worst:.1e}, changed by {moved:.1e}"


def _middle(found: list[Tensor], expected: list[Tensor]) -> float:
    return sorted(float((f - e).abs().max() / e.abs().max()) for f, e in zip(found, expected, strict=True))[1]


def main(names: list[str], foreign: bool = False) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for case in names or sorted(CASES):
        judge, base = Judge(case), base_config(case)
        print(json.dumps([case, "as it is", *judge(base)]), flush=True)
        for what, config in (foreign_keys if foreign else changes_of)(base):
            print(json.dumps([case, what, *judge(config)]), flush=True)


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--foreign"], "--foreign" in sys.argv)
