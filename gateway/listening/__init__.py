"""Detection of speech and of ended turns."""
