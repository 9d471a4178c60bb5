"""Images of requests: decoded in a process that has limits, before anything of them reaches a model."""
