"""The same filters in other engines. Each module is imported where it is used, its engine when it must be."""
