"""The stages of a pipeline, and requests through them. Knows no HTTP."""
