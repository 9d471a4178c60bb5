"""Running a step: from a batch of tokens to kernel launches."""
