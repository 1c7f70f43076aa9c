"""The `quartet` command: make a small checkpoint, serve, chat, show."""
