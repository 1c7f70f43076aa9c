"""The shell every stage shares: settings, server, health, drain, tensor streams, errors, logs, metrics, traces."""
