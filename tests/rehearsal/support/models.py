"""Talkers and decoders at published sizes, on a fake GPU: no file, no memory."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3OmniMoeConfig

from services.code2wav.family import Decoder
from services.code2wav.windows import WindowSettings
from services.families.qwen2_5_omni import code2wav as omni_2_5_decoder
from services.families.qwen2_5_omni import talker as omni_2_5
from services.families.qwen2_5_omni.voices import VoicePreset
from services.families.qwen3_omni import code2wav as omni_3_decoder
from services.families.qwen3_omni import talker as omni_3
from services.families.qwen3_tts import code2wav as tts_decoder
from services.families.qwen3_tts import talker as tts
from services.talker.family import TalkerSpec
from services.talker.model import TalkerModel, empty_model
from services.talker.moe import RunExperts
from tests.rehearsal.published import codec_config, config

CUDA = torch.device("cuda", 0)
NO_FILES = Path("/nonexistent")


def talker_spec(name: str) -> TalkerSpec:
    whole = config(name)
    if name.startswith("qwen3-omni"):
        return omni_3._talker_spec(Qwen3OmniMoeConfig(**whole), omni_3._sampling_defaults(NO_FILES))
    if name.startswith("qwen3-tts"):
        return tts._talker_spec(whole, tts._sampling_defaults(NO_FILES))
    return omni_2_5._talker_spec(whole, ("Chelsie",))


@torch.inference_mode()
def talker(name: str, dtype: torch.dtype, run_experts: RunExperts, device: torch.device = CUDA) -> TalkerModel:
    spec = talker_spec(name)
    model = empty_model(spec, device, dtype)
    model.precompute()
    model.use_experts(run_experts)
    model.text_table = torch.empty(spec.text_vocab, spec.talker.hidden, dtype=dtype, device=device)
    return model


@torch.inference_mode()
def decoder(name: str, dtype: torch.dtype, device: torch.device = CUDA) -> Decoder:
    """As `load_decoder` leaves it."""
    with torch.device("meta"):
        made = _new_decoder(name)
    made.cast(dtype)
    placed(made, device)
    made.requires_grad_(False).eval()
    made.precompute()
    return made


def _new_decoder(name: str) -> Decoder:
    if name.startswith("qwen3-omni"):
        return omni_3_decoder.new_decoder(config(name))
    if name.startswith("qwen3-tts"):
        return tts_decoder.new_decoder(codec_config())
    token2wav = omni_2_5_decoder.new_decoder(config(name))
    sizes, mel = token2wav.sizes, torch.zeros(300, token2wav.sizes.mel_dim, device="cpu")
    voice = VoicePreset(0, torch.zeros(sizes.enc_emb_dim, device="cpu"), mel)
    token2wav.use({"Chelsie": voice}, WindowSettings().over(token2wav._default_windows()))
    return token2wav


def placed(module: nn.Module, device: torch.device) -> None:
    """`module.to(device)`, which torch refuses for fake tensors."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty_like(buffer, device=device))


def parameter_bytes(module: nn.Module) -> int:
    tensors: list[Any] = [*module.parameters(), *module.buffers()]
    return sum(tensor.nbytes for tensor in tensors)
