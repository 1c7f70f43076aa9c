"""code2wav alone: one step decodes the next frames of every stream."""

import torch

from benchmarks.stages.real_sizes import CODE2WAV
from benchmarks.stages.timing import Stage, parameter_bytes
from services.code2wav.causal import DecodeGraphs
from services.common.engine.device import CudaGraphs
from services.families.qwen3_omni.code2wav import Qwen3OmniDecoder


def code2wav_stage(decoder: Qwen3OmniDecoder, batch: int, frames: int) -> Stage:
    """`batch` streams that decode `frames` frames each in a step; on CUDA a captured graph, as in the service."""
    states = decoder.new_states(batch)
    slots = [slot for slot in (states.acquire() for _ in range(batch)) if slot is not None]
    device = decoder.device
    codes = torch.randint(CODE2WAV.codebook_size, (batch, frames, CODE2WAV.num_code_groups), device=device)

    decode = decoder.step
    if device.type == "cuda":
        decode = DecodeGraphs(CudaGraphs(device), decoder, states, frames).step

    def step() -> list[torch.Tensor]:
        return [piece.float().cpu() for piece in decode(codes, states.batch(slots))]

    state_bytes = states.slot_bytes * batch
    # A frame looks up one row of each codebook; the state is read and written.
    weight_bytes = parameter_bytes(decoder) - parameter_bytes(decoder.code_embedding)
    return Stage(
        step, frames, lambda: weight_bytes + 2 * state_bytes, lambda: f"{state_bytes / 2**20:.0f} MiB of state"
    )
