"""Trains the shipped models: a small Qwen3-Omni that knows a closed world, and a small Z-Image.

Not part of the installed package. README.md has the parts, their data, order and times.
"""
