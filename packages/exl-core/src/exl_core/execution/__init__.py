"""How a step runs: from a batch of tokens to launches."""
