"""Reads a voice sample for Qwen3-TTS: the speaker's vector and the codec frames."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from services.common.engine.ecapa import SpeakerEncoder
from services.common.engine.weights import Checkpoint
from services.families.qwen3_tts.code2wav import FOLDER
from services.families.qwen3_tts.codec_encoder import CodecEncoder, new_codec_encoder
from services.families.qwen3_tts.speaker_encoder import mel_spectrogram, new_speaker_encoder
from services.registry import read_config
from services.talker.inputs import Voice

SPEAKER_PREFIX = "speaker_encoder."
_CODEC_PREFIX = "encoder."


def load_sample_reader(
    config: dict[str, Any], folder: Path, device: torch.device, dtype: torch.dtype
) -> "VoiceSampleReader":
    """Loads the encoders of a `services.talker.inputs.SampleReader`.

    Args:
        folder: of the checkpoint. For a hub id it is the commit in the cache, and missing files are fetched.

    Raises:
        ValueError: there are none, or missing, unknown or misshaped tensors.
    """
    codec_config = read_config(folder / FOLDER)
    speaker_config: dict[str, Any] = config.get("speaker_encoder_config") or {}
    rate_hz, codec_rate_hz = speaker_config.get("sample_rate"), codec_config.get("input_sample_rate")
    if rate_hz is None or rate_hz != codec_rate_hz:
        raise ValueError(f"speaker_encoder_config.sample_rate {rate_hz} must be the codec's, {codec_rate_hz}")
    speaker, codec = new_speaker_encoder(speaker_config), new_codec_encoder(codec_config.get("encoder_config") or {})
    parts: list[tuple[nn.Module, str, str]] = [(speaker, SPEAKER_PREFIX, ""), (codec, _CODEC_PREFIX, FOLDER)]
    for module, prefix, subfolder in parts:
        _load(module, folder, prefix, subfolder)
        module.to(device=device, dtype=dtype).requires_grad_(False).eval()
    if dtype == torch.float32:
        torch.backends.cudnn.allow_tf32 = False  # on by default, and 1e-3 off
    return VoiceSampleReader(speaker, codec, codec_config)


def _load(module: nn.Module, folder: Path, prefix: str, subfolder: str) -> None:
    checkpoint = Checkpoint(str(folder))
    try:
        checkpoint.select(lambda name: name.startswith(prefix), subfolder)
        module.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in checkpoint.tensors()})
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{folder / subfolder}, {prefix}* (hears voice samples): {error}") from None


class VoiceSampleReader:
    def __init__(self, speaker: SpeakerEncoder, codec: CodecEncoder, codec_config: dict[str, Any]) -> None:
        self._speaker, self._codec = speaker, codec
        self._groups: int = codec_config["encoder_valid_num_quantizers"]
        self._samples_per_frame: int = codec_config["encode_downsample_rate"]
        self._sample_rate_hz: int = codec_config["input_sample_rate"]

    @property
    def sample_rate_hz(self) -> int:
        return self._sample_rate_hz

    @torch.inference_mode()
    def read(self, samples: torch.Tensor) -> Voice:
        """The voice of a mono sample (samples,) float32 in -1 to 1 on the CPU. Blocks."""
        parameter = next(self._speaker.parameters())
        sound = samples.to(parameter.device)
        mels = mel_spectrogram(sound, self._sample_rate_hz, self._speaker.mel_bins)
        vector = self._speaker(mels.to(parameter.dtype)[None])[0]
        codes = self._codec(sound.to(parameter.dtype)[None, None], self._groups)
        frames = -(-len(samples) // self._samples_per_frame)  # the encoder pads the last frame
        return Voice(vector, codes[0, :, :frames].T.to("cpu", torch.int64).contiguous())
