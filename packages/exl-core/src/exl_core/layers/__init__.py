"""The parts of a model. `build_modules` makes them in order; each file holds one kind."""

from .attention import Attention, ParallelDecoder
from .build import build_modules
from .embedding import Embedding
from .head import Head
from .intervention import Intervention
from .linear import Linear
from .mlp import DenseMLP, FeedForward, GatedMLP, PlainMLP
from .module import Module
from .moe import Expert, MoE
from .norm import LayerNorm, Norm, RMSNorm
from .positions import PositionEmbedding

__all__ = [
    "Attention",
    "DenseMLP",
    "Embedding",
    "Expert",
    "FeedForward",
    "GatedMLP",
    "Head",
    "Intervention",
    "LayerNorm",
    "Linear",
    "MoE",
    "Module",
    "Norm",
    "ParallelDecoder",
    "PlainMLP",
    "PositionEmbedding",
    "RMSNorm",
    "build_modules",
]
