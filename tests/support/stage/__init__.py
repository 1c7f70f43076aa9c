"""One stage in a test's own process: its engine, its servicer, and streams of tensors."""
