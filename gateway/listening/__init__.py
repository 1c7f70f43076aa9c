"""Detectors of speech and of ended turns."""
