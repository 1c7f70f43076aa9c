"""Qwen2.5-Omni's vocoder: a flow-matching transformer from codes to a mel spectrogram, BigVGAN from there to sound."""
