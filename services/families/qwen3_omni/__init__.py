"""Qwen3-Omni: a thinker and a talker with experts, a code predictor, and a causal convolutional vocoder.

Its Thinking and Captioner checkpoints have the thinker alone.
"""

from services.registry import has_speech as has_speech
