"""Responses and their events."""
