"""Write a trained Llama as a Hugging Face folder: config.json and FP16 safetensors in pieces of bounded size."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from model import Llama
from safetensors.torch import save_file
from torch import Tensor

#: The GPU machine hands files back in pieces of at most 16 MiB.
PIECE_BYTES = 15 * 2**20


def write_folder(model: Llama, folder: Path) -> None:
    """Write config.json and one or several safetensors files with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.shape.config(), indent=2) + "\n")
    pieces: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in model.state_dict().items():
        half = tensor.detach().to("cpu", torch.float16).contiguous()
        if filled and filled + half.nbytes > PIECE_BYTES:
            pieces.append({})
            filled = 0
        pieces[-1][name] = half
        filled += half.nbytes
    if len(pieces) == 1:
        save_file(pieces[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for index, piece in enumerate(pieces, 1):
        file = f"model-{index:05d}-of-{len(pieces):05d}.safetensors"
        save_file(piece, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(piece, file)
    index_text = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
    (folder / "model.safetensors.index.json").write_text(index_text + "\n")
