"""Qwen2.5-Omni's way from codes to sound: flow matching by a transformer makes a mel spectrogram, BigVGAN the sound."""
