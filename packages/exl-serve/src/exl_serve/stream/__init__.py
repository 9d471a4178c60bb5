"""From the engine's events to the client's: channels, mailboxes, chunks."""
