"""How codes are drawn: each request by its own rules and noise, whatever else is in the batch."""

import secrets
from dataclasses import dataclass
from typing import NamedTuple

import torch

from services.common import sampling_limits as limits
from services.common.errors import InvalidInput
from services.talker.family import SamplingDefaults

# SplitMix64's increment and finaliser (Steele, Lea and Flood, 2014), as signed 64-bit integers.
GAMMA = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


# fields of Sampling, which of their values are valid, and that in words
_RANGES = (
    (("temperature", "predictor_temperature"), limits.TEMPERATURE.__contains__, f"{limits.TEMPERATURE}; 0 is greedy"),
    (("top_k", "predictor_top_k"), lambda v: v >= 0, "at least 0; 0 keeps all codes"),
    (("top_p", "predictor_top_p"), limits.TOP_P.__contains__, str(limits.TOP_P)),
    (("repetition_penalty",), limits.REPETITION_PENALTY.__contains__, f"{limits.REPETITION_PENALTY}; 1 means none"),
    (("max_frames",), lambda v: v >= 1, "at least 1"),
)


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingDefaults):
    """Rules of one request. Temperature 0 is greedy, top_k 0 keeps all codes."""

    seed: int


def resolve(defaults: SamplingDefaults, **requested: float | int | None) -> Sampling:
    """The rules of a request that sets `requested`, fields of Sampling; None or absent means the default.

    Raises InvalidInput, which names the field that is out of range.
    """
    values = {name: value for name, value in requested.items() if value is not None}
    if "predictor_temperature" not in values and values.get("temperature") == 0:
        values["predictor_temperature"] = 0.0
    values.setdefault("seed", secrets.randbits(63))
    sampling = Sampling(**{**vars(defaults), **values})
    for names, is_valid, rule in _RANGES:
        for name in names:
            if not is_valid(value := getattr(sampling, name)):
                raise InvalidInput(f"sampling.{name}", f"must be {rule}; it is {value:g}")
    return sampling


class SamplingRows:
    """Rules for drawing from one vocabulary: (slots,) each, on the device. At first all are greedy."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.temperature = torch.zeros(slots, device=device)
        self.top_k = torch.ones(slots, dtype=torch.long, device=device)
        self.top_p = torch.ones(slots, device=device)

    def set(self, slot: int, temperature: float, top_k: int, top_p: float) -> None:
        self.temperature[slot].fill_(temperature)  # `=` would copy the number, which waits for a GPU
        self.top_k[slot].fill_(top_k or torch.iinfo(torch.long).max)
        self.top_p[slot].fill_(top_p)

    def first(self, rows: int, width: int) -> "DrawRules":
        """The rules of the first `rows` slots, none of which keeps more than `width` codes."""
        temperature = self.temperature[:rows, None]
        greedy = temperature == 0
        ranks = torch.arange(width, device=temperature.device)
        kept = torch.where(greedy, 1, self.top_k[:rows, None])
        return DrawRules(width, torch.where(greedy, 1.0, temperature), ranks >= kept, self.top_p[:rows, None])


class DrawRules(NamedTuple):
    """The rules of some rows, made once for all draws of a step.

    Attributes:
        width: most codes that a row keeps; 0: all are greedy.
        temperature: (rows, 1) float32; 1 for greedy rows, which keep one code.
        cut: (rows, width) bool, true for ranks beyond a row's top-k.
        top_p: (rows, 1) float32.
    """

    width: int
    temperature: torch.Tensor
    cut: torch.Tensor
    top_p: torch.Tensor


USUAL_WIDTH = 64
"""Most codes that rows keep, but for few requests: steps are captured and compiled for it."""

# What the code predictor is compiled for: all rows greedy, or as many codes kept as is usual.
PREPARED_WIDTHS = (0, USUAL_WIDTH)


def prepared_width(width: int) -> int | None:
    """The least of PREPARED_WIDTHS that is at least `width`, if any. A larger width draws the same codes."""
    return next((prepared for prepared in PREPARED_WIDTHS if prepared >= width), None)


def draw(logits: torch.Tensor, rules: DrawRules, noise: torch.Tensor | None) -> torch.Tensor:
    """Draws a code a row, (rows,) int64: temperature, then top-k, then top-p, as transformers' logits warpers do.

    Args:
        logits: (rows, codes), compared as float32.
        noise: uniform in [0, 1), (rows,) float32. Unused if all rows are greedy.
    """
    logits, width = logits.float(), min(rules.width, logits.shape[-1])
    if not width or noise is None:
        return logits.argmax(dim=-1)
    values, codes = logits.topk(width, dim=-1)
    # Less the best one: however small the temperature, nothing overflows.
    scaled = ((values - values[:, :1]) / rules.temperature).masked_fill(rules.cut[:, :width], -torch.inf)
    shares = scaled.softmax(dim=-1)
    sums = shares.cumsum(dim=-1)
    kept = sums - shares < rules.top_p  # share of the codes ranked above
    mass = (shares * kept).sum(dim=-1, keepdim=True)
    picked = (sums <= noise.unsqueeze(-1) * mass).sum(dim=-1)
    # Rounding must not pick a code that was cut off, nor a row whose logits are not numbers fail the whole batch.
    picked = torch.minimum(picked, (kept & (shares > 0)).sum(dim=-1) - 1).clamp_min(0)
    drawn = codes.gather(-1, picked.unsqueeze(-1)).squeeze(-1)
    # Of equal logits topk puts any first. A row that keeps one code gets the one that it gets among greedy rows only.
    return torch.where(rules.cut[:, 1], logits.argmax(dim=-1), drawn) if width > 1 else logits.argmax(dim=-1)


def penalize(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Repetition penalty (Keskar et al., 2019) of the codes `seen` (rows, codes). Stays finite."""
    penalty = penalty.unsqueeze(-1)
    most = torch.finfo(logits.dtype).max
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty).clamp(-most, most)
    return torch.where(seen, penalized, logits)


def uniform(seeds: torch.Tensor, frames: torch.Tensor, groups: int) -> torch.Tensor:
    """Noise in [0, 1), (groups, rows) float32, of `seeds` and `frames` (rows,) int64.

    SplitMix64 as a counter-based generator: noise depends on seed, frame and group only.
    """
    counter = frames * groups + torch.arange(groups, device=seeds.device).unsqueeze(-1)
    mixed = _mix(_mix(seeds + GAMMA) + (counter + 1) * GAMMA)
    return _shift_right(mixed, 40).float() * 2.0**-24


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift_right(z, 30)) * MIX_1
    z = (z ^ _shift_right(z, 27)) * MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's is arithmetic."""
    return (z >> bits) & (2 ** (64 - bits) - 1)
