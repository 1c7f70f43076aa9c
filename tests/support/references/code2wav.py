"""transformers' code2wav alone, on the weights of a checkpoint."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav


def load_reference(folder: Path, attention: str = "eager") -> Qwen3OmniMoeCode2Wav:
    """The reference in float32, with the attention implementation of that name."""
    config = AutoConfig.from_pretrained(folder).code2wav_config
    config._attn_implementation = attention
    reference = Qwen3OmniMoeCode2Wav(config).eval()
    tensors = load_file(folder / "model.safetensors")
    wanted = {n.removeprefix("code2wav."): t for n, t in tensors.items() if n.startswith("code2wav.")}
    reference.load_state_dict(wanted)
    return reference


@torch.inference_mode()
def whole_decode(reference: Qwen3OmniMoeCode2Wav, codes: torch.Tensor) -> torch.Tensor:
    """Samples of codes (frames, groups) in one pass, (n,)."""
    return reference(codes.T[None])[0, 0]
