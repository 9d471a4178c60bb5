"""The engine process and its clients."""
