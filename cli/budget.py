"""`quartet budget`: how thinker, talker and code2wav share one GPU, computed from the checkpoint, or why they cannot.

Weights are the checkpoint's own sizes; key-value memory follows from its config. What cannot be read from a checkpoint
(CUDA contexts, activations, graphs) is allowed for by the constants below: estimates, on the safe side.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1024**3
STAGES = ("thinker", "talker", "code2wav")
CONTEXT_BYTES = 3 * GIB // 4  # a process on the GPU: CUDA context, kernels, the allocator's rounding
WORKING_BYTES = {"thinker": 4 * GIB, "talker": GIB, "code2wav": GIB}  # activations and CUDA graphs
CODE2WAV_STREAM_BYTES = 8 * 1024**2  # convolutions' and attention's past of one stream
FREE_SHARE = 0.03  # of the GPU, for nobody
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class BudgetError(Exception):
    """The model does not fit, or its sizes cannot be read; the message says what to change."""


@dataclass(frozen=True)
class Sizes:
    """What a checkpoint's stages need. Bytes.

    Attributes:
        weights: of each stage.
        kv_per_token: key-value memory of a token of the thinker's context.
        states_per_token: hidden states that the thinker keeps of each token of its key-value cache.
        talker_kv_per_position: key-value memory of a prompt position or frame of the talker.
    """

    weights: Mapping[str, int]
    kv_per_token: int
    states_per_token: int
    talker_kv_per_position: int


@dataclass(frozen=True)
class Share:
    """What one stage gets. Bytes."""

    stage: str
    weights: int
    working: int
    requests: int
    note: str

    @property
    def total(self) -> int:
        return self.weights + self.working + self.requests


@dataclass(frozen=True)
class Budget:
    """Who gets what of `gpu_bytes`, and the settings that make it so, as lines of .env."""

    gpu_bytes: int
    shares: tuple[Share, ...]
    context_tokens: int
    settings: Mapping[str, str]


def read_sizes(model: str) -> Sizes:
    """Sizes of the checkpoint directory or hub id `model`; of one on the hub, only headers are fetched.

    Raises:
        BudgetError: no such checkpoint, or not a Qwen3-Omni one.
    """
    folder = Path(model)
    try:
        if folder.is_dir():
            config = json.loads((folder / "config.json").read_text())
            tensors = _local_tensors(folder)
        else:
            config, tensors = _hub(model)
        weights: dict[str, int] = dict.fromkeys(STAGES, 0)
        for name, size in tensors:
            stage = name.split(".", 1)[0]
            if stage in weights:
                weights[stage] += size
        thinker, talker = config["thinker_config"]["text_config"], config["talker_config"]["text_config"]
        element = DTYPE_BYTES[config.get("dtype") or config.get("torch_dtype") or "bfloat16"]
    except KeyError as error:
        raise BudgetError(f"{model}: config.json has no {error}; budgets are made for Qwen3-Omni checkpoints") from None
    except (OSError, ValueError) as error:
        raise BudgetError(f"--model {model}: {error}") from None
    if missing := [stage for stage, size in weights.items() if not size]:
        raise BudgetError(f"{model}: has no weights of {', '.join(missing)}")
    return Sizes(
        weights=weights,
        kv_per_token=_kv_bytes(thinker, element),
        states_per_token=2 * thinker["hidden_size"] * element,
        talker_kv_per_position=_kv_bytes(talker, element),
    )


def share_out(sizes: Sizes, gpu_bytes: int, streams: int, context_tokens: int, talker_positions: int) -> Budget:
    """Gives talker and code2wav what `streams` at a time need, and the thinker the rest.

    Args:
        sizes: of the checkpoint.
        gpu_bytes: memory of the GPU.
        streams: spoken answers at a time.
        context_tokens: longest prompt plus output; the thinker must hold at least one such request.
        talker_positions: longest prompt plus frames of a spoken answer.

    Raises:
        BudgetError: it does not fit.
    """
    talker_kv = streams * talker_positions * sizes.talker_kv_per_position
    code2wav_streams = streams * CODE2WAV_STREAM_BYTES
    free = int(gpu_bytes * FREE_SHARE)
    kept = {stage: sizes.weights[stage] + WORKING_BYTES[stage] + CONTEXT_BYTES for stage in STAGES}
    left = gpu_bytes - free - sum(kept.values()) - talker_kv - code2wav_streams
    per_token = sizes.kv_per_token + sizes.states_per_token
    if left < context_tokens * per_token:
        short = (context_tokens * per_token - left) / GIB
        raise BudgetError(
            f"{gpu_bytes / GIB:.1f} GiB are {short:.1f} GiB too few for "
            f"{', '.join(f'{stage} {kept[stage] / GIB:.1f} GiB' for stage in STAGES)} before any request, {streams} "
            f"spoken answers at a time ({(talker_kv + code2wav_streams) / GIB:.1f} GiB) and one context of "
            f"{context_tokens} tokens ({context_tokens * per_token / GIB:.1f} GiB): give the thinker a GPU of its "
            "own, or lower --streams, --talker-positions or --context-tokens"
        )
    tokens = left // per_token
    kv, states = tokens * sizes.kv_per_token, tokens * sizes.states_per_token
    # vLLM's share covers weights, activations and KV cache; the kept states come on top of it.
    utilization = int((kept["thinker"] + kv) / gpu_bytes * 1000) / 1000
    shares = (
        _share(sizes, "thinker", kv + states, f"KV cache and states of {tokens} tokens"),
        _share(sizes, "talker", talker_kv, f"KV cache of {streams} answers of {talker_positions} positions"),
        _share(sizes, "code2wav", code2wav_streams, f"the past of {streams} streams"),
    )
    settings = {
        "THINKER_GPU_MEMORY_UTILIZATION": f"{utilization:.3f}",
        "THINKER_MAX_CONTEXT_TOKENS": str(context_tokens),
        "TALKER_MAX_RUNNING_REQUESTS": str(streams),
        "TALKER_MAX_CONTEXT_POSITIONS": str(talker_positions),
        "CODE2WAV_MAX_RUNNING_REQUESTS": str(streams),
    }
    return Budget(gpu_bytes, shares, tokens, settings)


def lines(budget: Budget) -> Iterator[str]:
    """The budget for people, in GiB, then the lines for .env."""
    yield f"{'stage':<10}{'weights':>9}{'working':>9}{'requests':>10}{'total':>8}  GiB"
    for share in budget.shares:
        parts = (share.weights, share.working, share.requests, share.total)
        weights, working, requests, total = (f"{part / GIB:.1f}" for part in parts)
        yield f"{share.stage:<10}{weights:>9}{working:>9}{requests:>10}{total:>8}  {share.note}"
    free = budget.gpu_bytes - sum(share.total for share in budget.shares)
    yield f"{'free':<10}{free / GIB:>36.1f}  of {budget.gpu_bytes / GIB:.1f}"
    yield ""
    yield "# for .env"
    for name, value in budget.settings.items():
        yield f"{name}={value}"


def _share(sizes: Sizes, stage: str, requests: int, note: str) -> Share:
    return Share(stage, sizes.weights[stage], WORKING_BYTES[stage] + CONTEXT_BYTES, requests, note)


def _kv_bytes(config: Mapping[str, Any], element: int) -> int:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * element


def _local_tensors(folder: Path) -> Iterator[tuple[str, int]]:
    """(name, bytes) of every tensor of the safetensors files in `folder`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("there are no safetensors files in it")
    for path in files:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield name, end - begin


def _hub(model: str) -> tuple[dict[str, Any], Iterator[tuple[str, int]]]:
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    config = json.loads(Path(hf_hub_download(model, "config.json")).read_text())
    files = get_safetensors_metadata(model).files_metadata.values()
    tensors = (
        (name, tensor.data_offsets[1] - tensor.data_offsets[0])
        for file in files
        for name, tensor in file.tensors.items()
    )
    return config, tensors
