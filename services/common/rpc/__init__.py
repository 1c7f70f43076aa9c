"""The gRPC side of a stage: server, calls, admission, errors, TLS, settings. Knows no tensors."""
