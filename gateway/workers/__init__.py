"""The processes of a gateway with `--workers`."""
