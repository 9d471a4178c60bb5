"""The decode step as one graph launch: captured per bucket of batch, tokens a row and pages."""

from .graphs import GRAPHS_VARIABLE, CaptureFailure, DecodeGraphs, NextStep
from .plan import DecodePlan

__all__ = ["GRAPHS_VARIABLE", "CaptureFailure", "DecodeGraphs", "DecodePlan", "NextStep"]
