"""Broken filters, each breaking one law: the proof that the kit bites.

`Plain` is a correct filter written the simplest way (every token tried against every option). Every mutant changes one
thing of it that some real filter got wrong.
"""

from exl_filters.testing.zoo.plain import LONG, OPTIONS, ZOO, Mutant, Plain, mutants

# Importing the modules enters their mutants in ZOO.
from exl_filters.testing.zoo import copies, deep, states, texts  # isort: skip  # noqa: F401

__all__ = ["LONG", "OPTIONS", "ZOO", "Mutant", "Plain", "mutants"]
