"""Conversations of all kinds, as transformers' processor takes them."""

from pathlib import Path

import numpy as np
from PIL import Image

from services.families.qwen3_omni.talker_prompt import PromptSpec


def image(size: int) -> Image.Image:
    """Noise of `size` by `size + 20` pixels."""
    noise = np.random.default_rng(size).integers(0, 256, (size, size + 20, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def sound(seconds: float) -> np.ndarray:
    """A tone that rises, (samples,) float32 at 16 kHz."""
    t = np.arange(int(16000 * seconds)) / 16000
    return (0.3 * np.sin(2 * np.pi * 440 * t * (1 + t))).astype(np.float32)


def video() -> np.ndarray:
    """Four frames of noise, (frames, height, width, 3) uint8."""
    return np.random.default_rng(5).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)


def turn(role: str, *parts: object) -> dict:
    """A message of these parts, as transformers takes it: text, pictures, sounds (n,), videos (n, h, w, 3)."""
    content = []
    for part in parts:
        kind = "text" if isinstance(part, str) else "image" if isinstance(part, Image.Image) else "audio"
        kind = "video" if isinstance(part, np.ndarray) and part.ndim == 4 else kind
        content.append({"type": kind, kind: part})
    return {"role": role, "content": content}


CONVERSATIONS = {
    "text": [turn("user", "Tell me about the sea.")],
    "system": [turn("system", "You are brief."), turn("user", "Why is the sky blue?")],
    "chinese": [turn("user", "你好，请介绍一下你自己。")],
    "image": [turn("user", image(60), "What is this?")],
    "audio": [turn("user", sound(1.0), "What do you hear?")],
    "video": [turn("user", video(), "What happens?")],
    "image and audio": [turn("user", image(90), sound(0.7), "Do they fit?")],
    "turns with media": [
        turn("system", "You are kind."),
        turn("user", image(60), "What is this?"),
        turn("assistant", "A picture of noise."),
        turn("user", sound(0.5), image(110), "And these?"),
    ],
}


def read_prompt_spec(checkpoint: Path) -> PromptSpec:
    """What the talker's prompts of a checkpoint are made of."""
    from transformers import Qwen3OmniMoeConfig

    return PromptSpec(Qwen3OmniMoeConfig.from_pretrained(checkpoint))
