# The compiled module is private; each subject's wrapper checks and types its own calls.
from typing import Any

def __getattr__(name: str) -> Any: ...
