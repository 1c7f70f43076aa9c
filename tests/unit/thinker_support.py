"""Media and the reference implementation for the thinker's tests."""

import io
import wave
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image


def png(width: int = 96, height: int = 64, seed: int = 0) -> bytes:
    """A PNG file of coloured noise blocks."""
    blocks = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def tone(seconds: float, rate_hz: int, frequency_hz: float = 330.0) -> np.ndarray:
    """(samples) int16: a tone that grows louder."""
    t = np.arange(int(seconds * rate_hz)) / rate_hz
    return (np.sin(2 * np.pi * frequency_hz * t) * np.linspace(0.1, 0.9, len(t)) * 32767).astype(np.int16)


def wav(seconds: float = 1.0, rate_hz: int = 16000, frequency_hz: float = 330.0) -> bytes:
    """A mono WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate_hz)
        out.writeframes(tone(seconds, rate_hz, frequency_hz).tobytes())
    return file.getvalue()


def mp4(seconds: float = 2.0, sound: bool = True, fps: int = 8, size: tuple[int, int] = (64, 64)) -> bytes:
    """An MP4 file (MPEG-4 video, AAC sound): a block that moves, and a tone."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        video = container.add_stream("mpeg4", rate=fps)
        video.width, video.height = size
        video.pix_fmt = "yuv420p"
        audio = container.add_stream("aac", rate=24000, layout="mono") if sound else None
        for i in range(int(seconds * fps)):
            picture = np.full((size[1], size[0], 3), 40, dtype=np.uint8)
            at = i * 4 % (size[0] - 16)
            picture[8:24, at : at + 16] = (230, 60, 60 + i * 8 % 190)
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(video.encode())
        if audio:
            frame = av.AudioFrame.from_ndarray(tone(seconds, 24000)[None], format="s16", layout="mono")
            frame.rate, frame.time_base, frame.pts = 24000, Fraction(1, 24000), 0
            container.mux(audio.encode(frame))
            container.mux(audio.encode())
    return file.getvalue()


@dataclass
class Answer:
    """The reference's answer: all token ids, and the states of every position by layer ((n, hidden))."""

    prompt_ids: list[int]
    output_ids: list[int]
    hidden_states: list[torch.Tensor]
    rope_positions: torch.Tensor


class Reference:
    """transformers' thinker in float32, greedy, past any end of sequence."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoProcessor, Qwen3OmniMoeThinkerForConditionalGeneration

        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.thinker = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        self.thinker.eval()
        self.thinker.generation_config.eos_token_id = None  # answers of a given length are compared

    @torch.inference_mode()
    def answer(self, conversation: list[dict[str, Any]], max_tokens: int, **media: Any) -> Answer:
        """What the model answers to `conversation` (as the chat template takes it) with decoded `media`
        (`images`, `audio`, `videos` and options of the processor)."""
        text = self.processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        inputs = self.processor(text=text, return_tensors="pt", **media)
        prompt = inputs["input_ids"]
        options = {"use_audio_in_video": media.get("use_audio_in_video", False)}
        sequence = self.thinker.generate(**inputs, **options, max_new_tokens=max_tokens, do_sample=False, num_beams=1)
        inputs["input_ids"] = sequence
        inputs["attention_mask"] = torch.ones_like(sequence)
        positions, _ = self.thinker.get_rope_index(
            prompt,
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            attention_mask=torch.ones_like(prompt),
            use_audio_in_video=options["use_audio_in_video"],
            audio_seqlens=inputs["feature_attention_mask"].sum(-1) if "feature_attention_mask" in inputs else None,
            second_per_grids=inputs.get("video_second_per_grid"),
        )
        output = self.thinker(**inputs, **options, output_hidden_states=True)
        return Answer(
            prompt[0].tolist(),
            sequence[0, prompt.shape[1] :].tolist(),
            [states[0] for states in output.hidden_states],
            positions[:, 0].T.to(torch.int32),
        )
