"""Texts, pictures and thoughts behind each other, as the published program reads them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from services.families.bagel.files import END, START
from services.families.bagel.latents import PATCH
from services.families.bagel.pictures import for_latents, for_patches, pixels_of
from services.families.bagel.reader import BagelReader
from services.families.bagel.sizes import PIXELS_A_LATENT

THINK_FIRST = (
    "You should first think about the planning process in the mind and then generate the image. \n"
    "The planning process is enclosed within <think> </think> tags, i.e. <think> planning process here </think> "
    "image here"
)
"""The published program's text before all else, for a model that thinks before it draws."""
_NO_CHARACTER = "\ufffd"  # stands for bytes that are none, or not all of one


@dataclass(frozen=True)
class Context:
    """What has been read. `states`: (1, length, context_width). `position`: of rope, the next one. `parts`: by their
    content."""

    states: Tensor
    position: int
    parts: tuple[Any, ...] = ()


class Keeps(Protocol):
    """See `OwnPipeline.kept`."""

    def __call__(self, name: str, key: Any, compute: Callable[[], Any]) -> Any: ...


class Contexts:
    """Reads by `reader`, which is called once for a text, twice for a picture, and for each token of a thought.

    What a part adds to the parts before it is kept by `kept`: so a conversation that goes on is not read anew.
    """

    def __init__(self, reader: BagelReader, tokenizer: Any, kept: Keeps) -> None:
        self._reader, self._tokenizer, self._kept = reader, tokenizer, kept
        self._start, self._end = tokenizer.convert_tokens_to_ids([START, END])

    def new(self) -> Context:
        return Context(self._reader.empty(), 0)

    def text(self, context: Context, text: str) -> Context:
        """With a text behind it, between the marks of a turn."""
        ids = [self._start, *self._tokenizer.encode(text), self._end]
        return self._with(context, text, lambda: self._ids(context, ids)[0])

    def picture(self, context: Context, image: Image.Image) -> Context:
        """With a picture behind it: as latents, and then as patches."""
        pixels = image.convert("RGB")
        part = pixels.size, hashlib.blake2b(pixels.tobytes()).hexdigest()
        return self._with(context, part, lambda: self._picture(context, image))

    def _with(self, context: Context, part: Any, read: Callable[[], Context]) -> Context:
        """`context` with a part behind it, which `read` reads."""
        parts, length, made = (*context.parts, part), context.states.shape[1], list[Context]()

        def own() -> tuple[Tensor, int]:
            made.append(read())
            return made[0].states[0, length:], made[0].position

        states, position = self._kept("encode_part", parts, own)
        whole = made[0].states if made else torch.cat([context.states, states[None]], dim=1)
        return Context(whole, position, parts)

    def _picture(self, context: Context, image: Image.Image) -> Context:
        sizes, device = self._reader.sizes, self._reader.device
        latents = sizes.latent_side, PIXELS_A_LATENT * PATCH
        read = for_latents(image, *latents)
        pixels = pixels_of(for_latents(read, *latents), device)
        states, _ = self._reader(context.states, context.position, pixels=pixels, as_latents=True)
        pixels = pixels_of(for_patches(read, sizes.vision_side, sizes.vision.patch_size), device)
        states, _ = self._reader(states, context.position + 1, pixels=pixels)
        return Context(states, context.position + 2)

    def write(self, context: Context, max_tokens: int, wrote: Callable[[str], None]) -> str:
        """What the model writes behind a context, greedily, up to the end of its turn.

        Args:
            max_tokens: most tokens, with the mark that begins the turn.
            wrote: is called after each token with the text so far, but for a last character that is not whole.
        """

        def written() -> str:
            return self._write(context, max_tokens, wrote)

        return self._kept("write", (context.parts, max_tokens), written)

    def _write(self, context: Context, max_tokens: int, wrote: Callable[[str], None]) -> str:
        ids, token = list[int](), self._start
        while token != self._end and len(ids) < max_tokens:
            ids.append(token)
            context, logits = self._ids(context, [token])
            token = int(logits.argmax())
            wrote(self._written(ids).rstrip(_NO_CHARACTER))
        return self._written(ids)

    def _written(self, ids: list[int]) -> str:
        """The text of a turn, without its marks."""
        text: str = self._tokenizer.decode(ids)
        return text.split(END)[0].split(START)[1]

    def _ids(self, context: Context, ids: list[int]) -> tuple[Context, Tensor]:
        tensor = torch.tensor(ids, device=self._reader.device)
        states, logits = self._reader(context.states, context.position, ids=tensor)
        return Context(states, context.position + len(ids)), logits
