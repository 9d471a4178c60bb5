"""Images of requests: decoded in a process with limits, before any of their bytes reach a model."""
