"""Output formats of model families: where reasoning and tool calls begin and end, and what is inside."""
