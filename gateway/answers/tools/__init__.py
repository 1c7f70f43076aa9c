"""Tools that run in the gateway."""
