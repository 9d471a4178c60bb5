"""Mixtures of experts: the router on a GPU, and the grouped matmuls of the chosen experts."""

from .cpu import CpuExperts
from .cuda import ExpertRouter, GroupedExperts, expert_router, why_apart
from .grouped import ExpertGroup, group_experts

__all__ = ["CpuExperts", "ExpertGroup", "ExpertRouter", "GroupedExperts", "expert_router", "group_experts", "why_apart"]
