"""Several processes that serve one port."""
