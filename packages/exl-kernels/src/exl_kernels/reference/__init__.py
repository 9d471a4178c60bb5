"""Plain-torch twins of the operators: slow, simple, in the input's precision, so that float64 makes an oracle."""
