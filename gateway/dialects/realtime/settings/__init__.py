"""A session's settings: parsing, defaults and limits."""
