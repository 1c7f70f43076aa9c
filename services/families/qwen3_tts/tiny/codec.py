"""Random codec and speaker encoder with published names. Every code and sample matters, and codes vary."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import nn

from services.families.qwen3_tts.code2wav import FOLDER, MODEL_TYPE, Qwen3TtsDecoder, new_decoder
from services.families.qwen3_tts.codec_encoder import new_codec_encoder
from services.families.qwen3_tts.speaker_encoder import new_speaker_encoder
from services.families.tiny_parts import CALIBRATION_FRAMES, fill, set_loudness

SAMPLE_RATE_HZ = 24_000
SAMPLES_PER_FRAME = 1920
CODE_GROUPS = 16
ENCODED_GROUPS = 32  # of the encoder; only the first CODE_GROUPS are used


@dataclass(frozen=True)
class CodecSizes:
    """A codec's dimensions, in channels unless said otherwise."""

    codebook: int  # codes of a group: a power of 2
    codebook_dim: int
    latent: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    intermediate: int
    window: int  # frames
    decoder_dim: int
    encoder_hidden: int
    encoder_filters: int
    encoder_codebook_dim: int
    speaker_channels: tuple[int, ...]
    speaker_kernels: tuple[int, ...]
    speaker_dilations: tuple[int, ...]
    speaker_groups: int
    speaker_inner: int


# They share no dimension, so that a test with both finds hard-coded ones.
SIZES = {
    "tiny": CodecSizes(
        codebook=256,
        codebook_dim=48,
        latent=40,
        hidden=64,
        layers=2,
        heads=4,
        head_dim=16,
        intermediate=128,
        window=72,
        decoder_dim=96,
        encoder_hidden=32,
        encoder_filters=8,
        encoder_codebook_dim=16,
        speaker_channels=(32, 32, 32, 32, 96),
        speaker_kernels=(5, 3, 3, 3, 1),
        speaker_dilations=(1, 2, 3, 4, 1),
        speaker_groups=4,
        speaker_inner=16,
    ),
    "small": CodecSizes(
        codebook=128,
        codebook_dim=36,
        latent=56,
        hidden=48,
        layers=3,
        heads=2,
        head_dim=20,
        intermediate=96,
        window=20,
        decoder_dim=64,
        encoder_hidden=48,
        encoder_filters=6,
        encoder_codebook_dim=12,
        speaker_channels=(40, 40, 40, 80),
        speaker_kernels=(3, 5, 3, 1),
        speaker_dilations=(1, 1, 2, 1),
        speaker_groups=5,
        speaker_inner=24,
    ),
}


def write_codec(folder: Path, size: str) -> None:
    """Writes config.json, preprocessor_config.json and random float32 weights into `folder`/speech_tokenizer.

    Raises:
        KeyError: no such size.
    """
    config = codec_config(SIZES[size])
    tensors = {f"decoder.{name}": tensor for name, tensor in _decoder_tensors(config).items()}
    tensors |= {f"encoder.{name}": tensor for name, tensor in _encoder_tensors(config["encoder_config"]).items()}
    out = folder / FOLDER
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    preprocessor = {
        "feature_extractor_type": "EncodecFeatureExtractor",
        "feature_size": 1,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "sampling_rate": SAMPLE_RATE_HZ,
    }
    for name, content in (("config.json", config), ("preprocessor_config.json", preprocessor)):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def speaker_encoder(size: str, hidden: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`speaker_encoder_config` and random float32 tensors speaker_encoder.* for a talker of width `hidden`.

    Raises:
        KeyError: no such size.
    """
    sizes = SIZES[size]
    config = {
        "enc_dim": hidden,
        "sample_rate": SAMPLE_RATE_HZ,
        "enc_channels": list(sizes.speaker_channels),
        "enc_kernel_sizes": list(sizes.speaker_kernels),
        "enc_dilations": list(sizes.speaker_dilations),
        "enc_res2net_scale": sizes.speaker_groups,
        "enc_se_channels": sizes.speaker_inner,
        "enc_attention_channels": sizes.speaker_inner,
    }
    encoder = new_speaker_encoder(config)
    _randomize(encoder)
    return config, {f"speaker_encoder.{name}": tensor for name, tensor in _tensors(encoder).items()}


def codec_config(sizes: CodecSizes) -> dict[str, Any]:
    """The codec's config.json, with published keys."""
    decoder = {
        "attention_bias": False,
        "codebook_dim": sizes.codebook_dim,
        "codebook_size": sizes.codebook,
        "decoder_dim": sizes.decoder_dim,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "latent_dim": sizes.latent,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.heads,
        "num_quantizers": CODE_GROUPS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000,
        "sliding_window": sizes.window,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }
    encoder = {
        "codebook_dim": sizes.encoder_codebook_dim,
        "codebook_size": sizes.codebook,
        "hidden_size": sizes.encoder_hidden,
        "intermediate_size": 2 * sizes.encoder_hidden,
        "num_attention_heads": sizes.heads,
        "num_filters": sizes.encoder_filters,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.heads,
        "num_quantizers": ENCODED_GROUPS,
        "sampling_rate": SAMPLE_RATE_HZ,
        "upsample_groups": sizes.encoder_hidden,
        "vector_quantization_hidden_dimension": sizes.encoder_codebook_dim,
    }
    return {
        "model_type": MODEL_TYPE,
        "encoder_valid_num_quantizers": CODE_GROUPS,
        "input_sample_rate": SAMPLE_RATE_HZ,
        "output_sample_rate": SAMPLE_RATE_HZ,
        "encode_downsample_rate": SAMPLES_PER_FRAME,
        "decode_upsample_rate": SAMPLES_PER_FRAME,
        "decoder_config": decoder,
        "encoder_config": encoder,
    }


@torch.no_grad()
def _decoder_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    decoder = new_decoder(config)
    _randomize(decoder)
    _set_loudness(decoder)
    tensors = _tensors(decoder)
    for quantizer in ("rvq_first", "rvq_rest"):  # as published; the decoder ignores it
        projection = tensors[f"quantizer.{quantizer}.output_proj.weight"]
        tensors[f"quantizer.{quantizer}.input_proj.weight"] = projection.transpose(0, 1).contiguous()
    return tensors


@torch.no_grad()
def _encoder_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    model: Any = new_codec_encoder(config)
    _randomize(model)
    for quantizer in (
        model.quantizer.semantic_residual_vector_quantizer,
        model.quantizer.acoustic_residual_vector_quantizer,
    ):
        _set_spread(model, quantizer.input_proj)
    return _tensors(model)


@torch.no_grad()
def _set_spread(encoder: Any, projection: nn.Conv1d) -> None:
    """Scales the quantizer's input to the codebooks' vectors, so that codes vary."""
    outputs: list[Any] = []
    hook = projection.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    encoder.eval()(0.3 * torch.randn(1, 1, CALIBRATION_FRAMES * SAMPLES_PER_FRAME))
    hook.remove()
    projection.weight.div_(outputs[0].std())


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in module.state_dict().items()}


@torch.no_grad()
def _randomize(module: nn.Module) -> None:
    tensors = module.state_dict()
    for name, tensor in tensors.items():
        if name.endswith("cluster_usage"):
            tensor.uniform_(0.5, 2.0)  # not 1, as sums are divided by it
            tensor[0] = 1e-7  # a rare code
        elif name.endswith(("embedding_sum", "embed_sum")):
            usage = tensors[f"{name.rpartition('.')[0]}.cluster_usage"]  # comes before its sum
            tensor.normal_().mul_(usage.clamp(min=1e-5)[:, None])
        elif name.endswith("initialized"):
            tensor.fill_(1.0)
        else:
            fill(name, tensor)


def _set_loudness(decoder: Qwen3TtsDecoder) -> None:
    last: Any = decoder.decoder[-1]
    decoder.precompute()
    codes = torch.randint(decoder.spec.codebook_sizes[0], (1, CALIBRATION_FRAMES, CODE_GROUPS))
    states = decoder.new_states(1)
    batch = states.batch([states.acquire() or 0])
    set_loudness(last.conv, lambda: decoder.step(codes, batch)[0])
