"""The same model split into services, and in one process."""
