"""The parts of a model. `build_modules` puts them in order; each file holds one kind."""

from .attention import Attention
from .build import build_modules
from .embedding import Embedding
from .head import Head
from .intervention import Intervention
from .linear import Linear
from .mlp import GatedMLP
from .module import Module, Step
from .norm import RMSNorm

__all__ = [
    "Attention",
    "Embedding",
    "GatedMLP",
    "Head",
    "Intervention",
    "Linear",
    "Module",
    "RMSNorm",
    "Step",
    "build_modules",
]
