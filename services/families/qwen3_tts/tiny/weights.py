"""Random talker, codec and speaker encoder with published names. Every code and sample matters, and codes vary."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import nn

from services.families.qwen3_tts import FOLDER
from services.families.qwen3_tts.code2wav import Qwen3TtsDecoder, new_decoder
from services.families.qwen3_tts.talker import WEIGHTS, read_talker
from services.families.qwen3_tts.voice_sample import SPEAKER_PREFIX, new_codec_encoder, new_speaker_encoder
from services.families.tiny_parts import CALIBRATION_FRAMES, fill, set_loudness, write_json
from services.families.tiny_sizes import read_table
from services.talker.family import TEXT_EMBEDDINGS
from services.talker.model import empty_model, published_parameters

SAMPLE_RATE_HZ = 24_000
SAMPLES_PER_FRAME = 1920
CODE_GROUPS = 16

_CODEC = read_table(__file__, "codec")
# By part of a checkpoint: keys of its config.
SIZES: dict[str, dict[str, dict[str, Any]]] = _CODEC["sizes"]


def talker_tensors(config: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the talker of `config`, float32, from torch's global generator.

    Args:
        folder: has the tokenizer.
    """
    spec = read_talker(config, folder).spec
    assert spec.text_projection is not None
    model = empty_model(spec, torch.device("meta"), torch.float32)
    shapes = {name: place.shape for name, place in published_parameters(model).items()}
    shapes[TEXT_EMBEDDINGS] = torch.Size((spec.text_vocab, spec.text_projection.inputs))
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        fill(name, tensor)
    return {WEIGHTS.tensor_of(name): tensor for name, tensor in tensors.items()}


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
    write_json(out / "config.json", config)
    write_json(out / "preprocessor_config.json", _CODEC["preprocessor"])


def speaker_encoder(size: str, hidden: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`speaker_encoder_config` and random float32 tensors speaker_encoder.* for a talker of width `hidden`.

    Raises:
        KeyError: no such size.
    """
    config = {"enc_dim": hidden, "sample_rate": SAMPLE_RATE_HZ, **SIZES[size]["speaker"]}
    encoder = new_speaker_encoder(config)
    _randomize(encoder)
    return config, {SPEAKER_PREFIX + name: tensor for name, tensor in _tensors(encoder).items()}


def codec_config(sizes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The codec's config.json, with published keys."""
    return _CODEC["config"] | {
        "decoder_config": _CODEC["decoder"] | sizes["decoder"],
        "encoder_config": _CODEC["encoder"] | sizes["encoder"],
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
