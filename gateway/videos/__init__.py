"""Video jobs: kept in a directory, run in the background. Knows nothing of HTTP."""
