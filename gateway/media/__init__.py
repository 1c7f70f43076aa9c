"""Fetching, checking and encoding of media files."""
