"""Worker processes that serve one port."""
