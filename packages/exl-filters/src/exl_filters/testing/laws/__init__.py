"""The laws that every filter must obey, by number."""

from exl_filters.testing.laws.law import LAWS, Law, applicable

# Importing the modules enters their laws in LAWS.
from exl_filters.testing.laws import answers, copies, language, masks, robustness, states  # isort: skip  # noqa: F401

__all__ = ["LAWS", "Law", "applicable"]
