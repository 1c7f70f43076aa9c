"""Times computed from recorded kernels and bytes: what a GPU would need if nothing but these took time.

A kernel of a CUDA graph takes 2.2 us, a small matrix product 5 us, attention 6 us. Bytes take their time at the
memory's bandwidth, added to the kernels' (in truth they overlap in part). An eager kernel takes its launch: 9 us.
"""

import json
from typing import Any

from tests.rehearsal.support.goldens import FILE

H100_BYTES_PER_S = 3.35e12
SMALL_S, PRODUCT_S, ATTENTION_S, LAUNCH_S = 2.2e-6, 5e-6, 6e-6, 9e-6
_PRODUCTS = ("linear", "mm", "addmm", "bmm", "conv1d", "conv_transpose1d", "convolution", "_grouped_mm")


def recorded(name: str) -> dict[str, Any]:
    """Raises KeyError: nothing is recorded under this name."""
    return json.loads(FILE.read_text())[name]


def graph_ms(step: dict[str, Any]) -> float:
    operators = step["operators"]
    products = sum(operators.get(each, 0) for each in _PRODUCTS)
    attention = operators.get("scaled_dot_product_attention", 0) + operators.get("look_in_place", 0) // 2
    small = step["kernels"] - products - attention
    return 1e3 * (small * SMALL_S + products * PRODUCT_S + attention * ATTENTION_S) + _bytes_ms(step)


def eager_ms(step: dict[str, Any]) -> float:
    """The longer of launching and of reading memory: they overlap."""
    return max(1e3 * step["kernels"] * LAUNCH_S, _bytes_ms(step))


def _bytes_ms(step: dict[str, Any]) -> float:
    return 1e3 * step["megabytes"] * 1e6 / H100_BYTES_PER_S


def table() -> list[str]:
    """The rows of the table in docs/gpus.md."""
    rows = ["| step | kernels | GB | ms, computed |", "|---|---|---|---|"]
    for shown, name, way in _STEPS:
        step = recorded(name)
        rows.append(f"| {shown} | {step['kernels']:,} | {step['megabytes'] / 1e3:.1f} | {way(step):.1f} |")
    return rows


_FRAME, _CODES = "fused, 1 row of 8192 positions", "fused, 8 rows of 8192 positions and all codes"
_OMNI, _STATIC = "qwen3-omni-30b talker, bfloat16, grouped_experts", "bfloat16, static_experts"
_STEPS = (
    ("Qwen3-Omni: a frame of one long answer", f"{_OMNI}, {_FRAME}", graph_ms),
    ("Qwen3-Omni: a frame of 8 long answers", f"{_OMNI}, {_CODES}", graph_ms),
    ("Qwen3-Omni: 512 positions of a prompt, eager", f"{_OMNI}, fused, 512 positions of 1 longer prompts", eager_ms),
    ("Qwen2.5-Omni-7B: a frame of one long answer", f"qwen2.5-omni-7b talker, {_STATIC}, {_FRAME}", graph_ms),
    ("Qwen3-TTS 1.7B: a frame of one long answer", f"qwen3-tts-1.7b talker, {_STATIC}, {_FRAME}", graph_ms),
    ("Qwen3-Omni code2wav: a frame of one stream", "qwen3-omni-30b code2wav, bfloat16, 1 stream of 1 frame", graph_ms),
    (
        "Qwen3-Omni code2wav: 16 frames of 8 streams",
        "qwen3-omni-30b code2wav, bfloat16, 8 streams of 16 frames",
        graph_ms,
    ),
    ("Qwen2.5-Omni token2wav: one of 9 steps, bfloat16 layers", "qwen2.5-omni token2wav, bfloat16, 1 block", graph_ms),
    ("Qwen2.5-Omni BigVGAN: 12 codes of one stream", "qwen2.5-omni bigvgan, 1 piece within a signal", graph_ms),
)
