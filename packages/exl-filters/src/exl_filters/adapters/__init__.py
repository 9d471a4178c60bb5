"""The same filters in other engines. Each module imports its engine only when needed."""
