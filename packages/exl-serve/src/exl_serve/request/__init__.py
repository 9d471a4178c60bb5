"""From a public request to the engine's: schema, validation, rendering, tokenizing."""
