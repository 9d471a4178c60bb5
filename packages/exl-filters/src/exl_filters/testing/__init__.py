"""The law kit."""
