"""Profiles of all stages, and clock differences between hosts."""
