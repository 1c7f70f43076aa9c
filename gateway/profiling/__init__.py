"""Profiles of all stages at once, and where a request's time went."""
