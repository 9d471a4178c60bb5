"""The supervisor: starts, watches, restarts and drains engine processes and API workers."""
