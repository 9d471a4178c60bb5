"""Turn the engine's events into the client's: channels, queues, chunks."""
