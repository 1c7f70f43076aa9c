"""The stages of Quartet, each a gRPC service of its own: `python -m services.<stage>`."""
