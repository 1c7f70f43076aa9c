"""Gateways that share a database: what the second one brings, and a batch beside live speech."""
