"""The native module is private: the typed wrappers beside it are its doors, and each checks what it passes."""

from typing import Any

def __getattr__(name: str) -> Any: ...
