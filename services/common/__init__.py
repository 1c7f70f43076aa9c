"""The shell every stage shares: settings, server, health, drain, streams of tensors, errors, logs and metrics."""
