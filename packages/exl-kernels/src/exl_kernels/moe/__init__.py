"""Mixtures of experts: the router and the grouped matmuls of the chosen experts, on a GPU."""

from .cuda import MOST_PAIRS, ExpertRouter, GroupedExperts, why_apart

__all__ = ["MOST_PAIRS", "ExpertRouter", "GroupedExperts", "why_apart"]
