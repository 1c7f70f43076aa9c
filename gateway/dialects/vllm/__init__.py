"""vLLM's endpoints."""
