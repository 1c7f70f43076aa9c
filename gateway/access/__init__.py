"""API keys, client secrets, and state that all workers share."""
