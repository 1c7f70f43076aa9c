"""Qwen2.5-Omni: a dense thinker, a talker of one codebook that reads all its states, a vocoder by flow matching."""

from services.registry import has_speech as has_speech
