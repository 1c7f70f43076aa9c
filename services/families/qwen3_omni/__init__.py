"""Qwen3-Omni: a thinker and a talker with experts, a code predictor, and a causal convolutional vocoder."""
