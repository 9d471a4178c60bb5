"""Test engines and in-process servers, for tests and notebooks."""
