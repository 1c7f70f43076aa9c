"""Several processes that are one gateway: `--workers`."""
