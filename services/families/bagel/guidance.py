"""Guidance by three velocities: of all, without the text, and without the pictures."""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from services.common.errors import require

Renorm = Literal["global", "channel", "text_channel"]
"""How a guided velocity is made no longer than the unguided one: as a whole, a token at a time, or a token at a time
before the pictures guide it."""


@dataclass(frozen=True)
class Guidance:
    """The rule of the published program (`generate_image`), without its cache.

    Attributes:
        text, image: scales; a text scale of 1 or less is no guidance at all, an image scale so none by pictures.
        interval: over the first and up to the second of these times, 0 to 1, velocities are guided.
        renorm: see `Renorm`.
        renorm_min: the least part of its length that a guided velocity keeps, 0 to 1.

    Raises:
        InvalidInput: names the further argument of a request.
    """

    text: float
    image: float
    interval: tuple[float, float]
    renorm: str
    renorm_min: float

    def __post_init__(self) -> None:
        low, high = self.interval
        require(0 <= low <= high <= 1, "arguments.guidance_interval", "must be two times from 0 to 1, the lower first")
        known = get_args(Renorm)
        require(self.renorm in known, "arguments.guidance_renorm", f"must be one of {', '.join(known)}")
        require(0 <= self.renorm_min <= 1, "arguments.guidance_renorm_min", "must be 0 to 1")

    def is_on(self, time: float) -> bool:
        """Whether the step that begins at `time` is guided."""
        return self.text > 1 and self.interval[0] < time <= self.interval[1]

    def combine(self, whole: Tensor, no_text: Tensor, no_image: Tensor) -> Tensor:
        """The guided velocity of one picture, of three, each (tokens, channels), float32."""
        by_text = no_text + self.text * (whole - no_text)
        if self.renorm == "text_channel":
            by_text = by_text * self._kept(whole, by_text)
        made = no_image + self.image * (by_text - no_image) if self.image > 1 else by_text
        return made if self.renorm == "text_channel" else made * self._kept(whole, made)

    def _kept(self, whole: Tensor, made: Tensor) -> Tensor:
        """The part of its length that `made` keeps."""
        of = (0, 1) if self.renorm == "global" else (1,)
        before, after = (each.square().sum(of, keepdim=True).sqrt() for each in (whole, made))
        return (before / (after + 1e-8)).clamp(self.renorm_min, 1.0)
