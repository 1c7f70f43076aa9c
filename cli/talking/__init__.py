"""Parts of `quartet talk`."""
