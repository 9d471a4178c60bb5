"""Broken filters that each break one law, to test that the kit detects them.

`Plain` is a correct filter, written in the simplest way (every token tried against every option). Every mutant changes
one detail that some real filter got wrong.
"""

from zoo.plain import LONG, OPTIONS, ZOO, Mutant, Plain, mutants

# Importing the modules registers their mutants in ZOO.
from zoo import copies, deep, states, texts  # isort: skip  # noqa: F401

__all__ = ["LONG", "OPTIONS", "ZOO", "Mutant", "Plain", "mutants"]
