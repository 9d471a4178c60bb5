"""Tiny random vision-language models, made by transformers when a test asks for one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Config, ExLlamaV2VisionTower

VOCAB = 90
IMAGE, START, END, VIDEO = 10, 11, 12, 13  # ids of the placeholder and of the framing tokens

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_TEXT = {**TEXT, "rope_parameters": QWEN_ROPE, "rms_norm_eps": 1e-6}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 256,
    "max_pixels": 4096,
}
QWEN2_VISION = {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
QWEN2_5_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "window_size": 24,  # three merged patches a side
    "fullatt_block_indexes": [1, 3],
    "tokens_per_second": 2,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 48,
    "patch_size": 4,
    "vision_use_head": False,
}
GEMMA_TEXT = {**TEXT, "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 12, "sliding_window_pattern": 3}
GEMMA_PROCESSOR = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 48, "width": 48}}

FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": ({"text_config": QWEN_TEXT, "vision_config": QWEN2_VISION, **QWEN_TOKENS}, QWEN_PROCESSOR),
    "Qwen2_5_VL": ({"text_config": QWEN_TEXT, "vision_config": QWEN2_5_VISION, **QWEN_TOKENS}, QWEN_PROCESSOR),
    "Gemma3": (
        {
            "text_config": GEMMA_TEXT,
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 16,
            "image_token_index": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
        },
        GEMMA_PROCESSOR,
    ),
}
QWEN = ["Qwen2VL", "Qwen2_5_VL"]
PIECES = {"Qwen2VL": ("<|vision_start|>", "<|vision_end|>"), "Gemma3": ("<start_of_image>", "<end_of_image>")}
PIECES["Qwen2_5_VL"] = PIECES["Qwen2VL"]


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and here."""

    family: str
    theirs: Any
    tower: ExLlamaV2VisionTower
    ours: ExLlamaV2
    tokenizer: Any

    @property
    def qwen(self) -> bool:
        return self.family.startswith("Qwen")


def randomize(model: Any, seed: int = 1) -> None:
    """Weights at which every part of a model counts, and which half holds exactly."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.dim() == 1
            scale = 0.3 if flat else parameter[0].numel() ** -0.5
            parameter.copy_((torch.randn_like(parameter) * scale + (1.0 if flat else 0.0)).half().float())


def write_model(family: str, folder: Path, **changes: Any) -> Any:
    """A random model of transformers, saved to `folder` with its processor's settings."""
    import transformers

    fields, processor = FAMILIES[family]
    given = {"tie_word_embeddings": False, "attn_implementation": "eager", **changes}
    config = getattr(transformers, f"{family}Config")(**{**fields, **given})
    theirs = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    randomize(theirs)
    theirs.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return theirs


def write_tokenizer(folder: Path) -> None:
    """One token a byte, and those that frame turns and images; ids up to 262."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    turn = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    template = "{% for m in messages %}" + turn + "{% endfor %}<|im_start|>assistant\n"
    about = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def make_pair(family: str, folder: Path) -> Pair:
    theirs = write_model(family, folder)
    config = ExLlamaV2Config(folder)
    config.cpu_matmul = "exact"
    tower = ExLlamaV2VisionTower(config)
    tower.load()
    ours = ExLlamaV2(config)
    ours.load()
    ids = dict(zip(PIECES[family], (START, END), strict=True))
    return Pair(family, theirs, tower, ours, SimpleNamespace(single_id=ids.get))


def picture(width: int, height: int, mode: str = "RGB", seed: int = 3) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, len(mode)), dtype=np.uint8)
    return Image.fromarray(values[..., 0] if len(mode) == 1 else values, mode)


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())
