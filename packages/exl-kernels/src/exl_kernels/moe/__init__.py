"""Mixtures of experts: the router and the grouped matmuls of the chosen experts, on a GPU."""

from .cuda import ExpertRouter, GroupedExperts, why_apart

__all__ = ["ExpertRouter", "GroupedExperts", "why_apart"]
