"""Talker and code2wav of Qwen3-Omni-30B-A3B at their published sizes, with random weights.

Sizes are those of the published config.json. The defaults of transformers' configuration classes differ from it in the
talker: 8 experts a token (published: 6), no head_dim, which makes it 64 (128), 32 code groups (16), no size of the
shared expert (768). Ids, voices and positions do not change what a step costs.
"""

import torch
from torch import nn

from services.code2wav.transformer import TransformerSizes
from services.code2wav.wave import WaveSizes
from services.families.qwen3_omni.code2wav import Qwen3OmniDecoder
from services.talker.family import MoeSpec, ProjectionSpec, SamplingDefaults, TalkerSpec, TransformerSpec
from services.talker.model import TalkerModel, empty_model

# Random numbers are made once and repeated: the length shares no factor with any layer's, so that no two rows agree.
BLOCK = 1_000_003
TEXT_IDS = 4096  # rows of the text table: a step reads one a stream, so a whole vocabulary would change nothing

TALKER = TalkerSpec(
    talker=TransformerSpec(
        layers=20,
        hidden=1024,
        heads=16,
        kv_heads=2,
        head_dim=128,
        intermediate=2048,
        vocab=3072,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        activation="silu",
        rope_sections=(24, 20, 20),
        rope_interleaved=True,
    ),
    moe=MoeSpec(experts=128, experts_per_token=6, intermediate=384, shared_intermediate=768, renormalize=True),
    predictor=TransformerSpec(
        layers=5,
        hidden=1024,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=3072,
        vocab=2048,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        activation="silu",
    ),
    text_projection=ProjectionSpec(inputs=2048, inner=2048),
    state_projection=ProjectionSpec(inputs=2048, inner=2048),
    num_code_groups=16,
    max_positions=65536,
    text_vocab=TEXT_IDS,
    speakers=("ethan",),
    after_text=(6, 7),
    end_codes=frozenset({2150}),
    suppressed_codes=frozenset(range(2048, 3072)) - {2150},
    defaults=SamplingDefaults(0.9, 50, 1.0, 1.05, 4096, 1.0, 50, 0.8),
)

CODE2WAV = WaveSizes(
    codebook_size=2048,
    num_code_groups=16,
    transformer=TransformerSizes(
        hidden_size=1024,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        intermediate_size=3072,
        attention_bias=False,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        sliding_window=72,
    ),
    upsampling_ratios=(2, 2),
    upsample_rates=(8, 5, 4, 3),
    decoder_dim=1536,
)


@torch.inference_mode()
def random_code2wav(device: torch.device, dtype: torch.dtype) -> Qwen3OmniDecoder:
    """The codec decoder: 0.2 billion parameters."""
    with torch.device(device):
        decoder = Qwen3OmniDecoder(CODE2WAV, stated_sample_rate_hz=24000).to(dtype).requires_grad_(False).eval()
    fill(decoder)
    decoder.precompute()
    return decoder


@torch.inference_mode()
def random_talker(device: torch.device, dtype: torch.dtype) -> TalkerModel:
    """The talker with its code predictor: 3.2 billion parameters."""
    talker = empty_model(TALKER, device, dtype)
    fill(talker)
    talker.text_table = torch.randn(TEXT_IDS, TALKER.talker.hidden, device=device, dtype=dtype)
    talker.precompute()
    return talker


@torch.inference_mode()
def fill(model: nn.Module) -> None:
    """Random weights that keep the variance of what goes through them; vectors, which are norms and biases, are 1."""
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.fill_(1)
            continue
        fan_in = parameter.shape[-1] if parameter.dim() == 2 else parameter[0].numel() // parameter.shape[1]
        scaled = (block * fan_in**-0.5).to(parameter.device, parameter.dtype)
        repeat(scaled, parameter)


@torch.inference_mode()
def repeat(block: torch.Tensor, tensor: torch.Tensor) -> None:
    """Writes `block`, (numbers,), into `tensor` again and again."""
    flat = tensor.view(-1)
    whole = flat[: len(flat) // len(block) * len(block)].view(-1, len(block))
    whole.copy_(block.expand_as(whole))
    flat[whole.numel() :] = block[: len(flat) - whole.numel()]
