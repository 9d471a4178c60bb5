"""The models that the reference made, and how far logits are from its own."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

DATA = Path(__file__).parent / "data"
MODELS = ("fp16", "exl2-3.5", "exl2-4.5")
GREEDY_KEY = {"fp16": "tiny", "exl2-3.5": "exl2-3.5", "exl2-4.5": "exl2-4.5"}


def kl_divergence(reference: Tensor, logits: Tensor) -> float:
    """Mean over positions of KL(reference || logits), in float64."""
    p, q = reference.cpu().double().log_softmax(-1), logits.cpu().double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
