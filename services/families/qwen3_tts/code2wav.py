"""Qwen3-TTS's codec decoder: a sum of residual vectors, a transformer and causal convolutions."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from services.code2wav.causal import Carry
from services.code2wav.family import DecoderSpec
from services.code2wav.layers import CausalConv
from services.code2wav.wave import WaveDecoder, WaveSizes, read_sizes
from services.families.qwen3_tts import FOLDER

MODEL_TYPE = "qwen3_tts_tokenizer_12hz"
_PREFIX = "decoder."
# Only the codec's training uses them.
_UNUSED = ("quantizer.rvq_first.input_proj.weight", "quantizer.rvq_rest.input_proj.weight")
# Least divisor of a rare code's sum of vectors.
_LEAST_USAGE = 1e-5


def parameter_of(tensor: str) -> str | None:
    name = tensor.removeprefix(_PREFIX)
    return None if name == tensor or name in _UNUSED else name


def new_decoder(config: dict[str, Any]) -> "Qwen3TtsDecoder":
    if config.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{FOLDER}/config.json: model_type {config.get('model_type')!r} is not {MODEL_TYPE}")
    part: dict[str, Any] = config.get("decoder_config") or {}
    name = f"{FOLDER}/config.json: decoder_config"
    if not config.get("output_sample_rate"):
        raise ValueError(f"{FOLDER}/config.json: output_sample_rate is missing")
    for key in ("codebook_dim", "latent_dim"):
        if not part.get(key):
            raise ValueError(f"{name}.{key} is missing")
    return Qwen3TtsDecoder(read_sizes(part, name), part["codebook_dim"], config["output_sample_rate"])


class Codebook(nn.Module):
    """Vectors of a code group, as sums and counts."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(size))
        self.embedding_sum = nn.Parameter(torch.zeros(size, width))

    def vectors(self) -> torch.Tensor:
        """(size, width) float32 or wider."""
        wide = torch.promote_types(self.embedding_sum.dtype, torch.float32)
        return self.embedding_sum.to(wide) / self.cluster_usage.to(wide).clamp(min=_LEAST_USAGE)[:, None]


class ResidualQuantizer(nn.Module):
    """Code groups with summed vectors and one projection."""

    def __init__(self, groups: int, size: int, width: int, outputs: int) -> None:
        super().__init__()
        layers = nn.ModuleList(nn.ModuleDict({"_codebook": Codebook(size, width)}) for _ in range(groups))
        self.vq = nn.ModuleDict({"layers": layers})
        self.output_proj = nn.Conv1d(width, outputs, 1, bias=False)

    def tables(self) -> Iterator[torch.Tensor]:
        """The projected vectors of each group: (size, outputs)."""
        layers: Any = self.vq["layers"]
        for layer in layers:
            vectors: torch.Tensor = layer["_codebook"].vectors()
            yield vectors @ self.output_proj.weight[..., 0].to(vectors.dtype).T


class Qwen3TtsDecoder(WaveDecoder):
    """A decoder whose transposed convolutions are trimmed on the right only.

    Args:
        codebook_dim: width of a frame's vector.
    """

    def __init__(self, sizes: WaveSizes, codebook_dim: int, sample_rate_hz: int) -> None:
        spec = DecoderSpec(sample_rate_hz, sizes.samples_per_frame, (sizes.codebook_size,) * sizes.num_code_groups)
        super().__init__(spec, sizes)
        groups = {"rvq_first": 1, "rvq_rest": sizes.num_code_groups - 1}  # semantic and acoustic
        self.quantizer = nn.ModuleDict(
            {
                name: ResidualQuantizer(count, sizes.codebook_size, codebook_dim // 2, codebook_dim)
                for name, count in groups.items()
            }
        )
        self.pre_conv = CausalConv(codebook_dim, sizes.latent, 3, self.layout)

    def precompute(self) -> None:
        """Joins all codebooks, so that a frame's vector is a sum of table rows."""
        super().precompute()
        quantizers: Any = self.quantizer.values()
        tables = [table for quantizer in quantizers for table in quantizer.tables()]
        self._table = torch.cat(tables).to(self.dtype)  # (groups x codebook size, codebook_dim)

    def embed(self, codes: torch.Tensor, carry: Carry) -> torch.Tensor:
        vectors = F.embedding(self.table_rows(codes), self._table).sum(2)
        return self.pre_conv(vectors.transpose(1, 2), carry).transpose(1, 2)
