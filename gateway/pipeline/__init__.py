"""The stages of a pipeline and how one request runs through them. Knows nothing of HTTP."""
