"""Trains the model that the demo runs: a small Qwen3-Omni that knows a closed world, and a small Z-Image.

Not part of the installed package. README.md says what is trained on what, in which order, and how long it takes.
"""
