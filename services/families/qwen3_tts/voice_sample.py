"""Reads a voice sample for Qwen3-TTS: the speaker's vector, and the codec frames by Mimi's encoder."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import MimiConfig, MimiModel
from transformers.audio_utils import mel_filter_bank

from services.common.engine.ecapa import SpeakerEncoder
from services.common.engine.weights import Checkpoint
from services.families.qwen3_tts import FOLDER
from services.registry import read_config
from services.talker.inputs import Voice

SPEAKER_PREFIX = "speaker_encoder."
_CODEC_PREFIX = "encoder."
WINDOW, HOP = 1024, 256  # samples
# Defaults of a checkpoint's config.
_DEFAULTS: dict[str, Any] = {
    "mel_dim": 128,
    "enc_channels": [512, 512, 512, 512, 1536],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 128,
    "enc_res2net_scale": 8,
    "enc_se_channels": 128,
}


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
        _move(module, device, dtype)
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


def _move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Leaves whole numbers on the CPU: Mimi reads the sizes of its paddings from there, 30 of them a sample."""
    kept = [(part, name, each) for part in module.modules() for name, each in part.named_buffers(recurse=False)]
    module.to(device=device, dtype=dtype).requires_grad_(False).eval()
    for part, name, number in kept:
        if number.dim() == 0 and not number.is_floating_point():
            setattr(part, name, number)


class CodecEncoder(nn.Module):
    """Mimi without its decoder, with published tensor names.

    Args:
        mimi: its parts are used, not copied.
    """

    def __init__(self, mimi: MimiModel) -> None:
        super().__init__()
        whole: Any = mimi
        seanet = getattr(whole.encoder, "encoder_seanet", None)
        half: Any = whole if seanet is None else whole.encoder  # transformers 5.21 and later
        self.encoder = whole.encoder if seanet is None else seanet
        self.encoder_transformer, self.downsample = half.encoder_transformer, half.downsample
        self.quantizer = whole.quantizer

    def forward(self, sound: torch.Tensor, groups: int | None = None) -> torch.Tensor:
        """Codes (batch, groups, frames) int64 of (batch, 1, samples). The last frame is padded."""
        hidden = self.encoder_transformer(self.encoder(sound).transpose(1, 2), use_cache=False)[0]
        return self.quantizer.encode(self.downsample(hidden.transpose(1, 2)), groups).transpose(0, 1)


def new_codec_encoder(settings: dict[str, Any]) -> CodecEncoder:
    """An encoder with random weights, from `encoder_config` of the codec's config.json."""
    return CodecEncoder(MimiModel(MimiConfig(**{key: value for key, value in settings.items() if key != "model_type"})))


class VoiceSampleReader:
    def __init__(self, speaker: SpeakerEncoder, codec: CodecEncoder, codec_config: dict[str, Any]) -> None:
        self._speaker, self._codec = speaker, codec
        self._groups: int = codec_config["encoder_valid_num_quantizers"]
        self._samples_per_frame: int = codec_config["encode_downsample_rate"]
        self.sample_rate_hz: int = codec_config["input_sample_rate"]

    @torch.inference_mode()
    def read(self, samples: torch.Tensor) -> Voice:
        """The voice of a mono sample (samples,) float32 in -1 to 1 on the CPU. Blocks."""
        parameter = next(self._speaker.parameters())
        sound = samples.to(parameter.device)
        mels = mel_spectrogram(sound, self.sample_rate_hz, self._speaker.mel_bins)
        vector = self._speaker(mels.to(parameter.dtype)[None])[0]
        codes = self._codec(sound.to(parameter.dtype)[None, None], self._groups)
        frames = -(-len(samples) // self._samples_per_frame)  # the encoder pads the last frame
        return Voice(vector.cpu(), codes[0, :, :frames].T.to("cpu", torch.int64).contiguous())


def mel_spectrogram(samples: torch.Tensor, sample_rate_hz: int, bins: int) -> torch.Tensor:
    """Log mel spectrogram up to half the sample rate, (bins, mel frames) float32, of sound (samples,) float32."""
    padding = (WINDOW - HOP) // 2
    padded = F.pad(samples[None], (padding, padding), mode="reflect")[0]
    window = torch.hann_window(WINDOW, device=samples.device)
    spectrum = torch.stft(padded, WINDOW, HOP, window=window, center=False, return_complex=True)
    magnitudes = (torch.view_as_real(spectrum).square().sum(-1) + 1e-9).sqrt()
    filters = mel_filter_bank(
        WINDOW // 2 + 1, bins, 0.0, sample_rate_hz / 2, sample_rate_hz, norm="slaney", mel_scale="slaney"
    )
    mels = torch.tensor(filters.T, dtype=torch.float32, device=samples.device) @ magnitudes
    return mels.clamp(min=1e-5).log()


def new_speaker_encoder(config: dict[str, Any]) -> SpeakerEncoder:
    """The encoder of a checkpoint's `speaker_encoder_config`, without parameters.

    Raises:
        ValueError: the vector's width is missing, or widths do not fit each other.
    """
    return SpeakerEncoder({**_DEFAULTS, **config}, "speaker_encoder_config")
