"""What becomes of pictures in transformers' processors: their size and number of tokens. Known before they are decoded,
and scaled one at a time."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from services.thinker.family import ThinkerCheckpoint

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGE = (1920, 1088)  # pixels


class Scaler:
    """Scales as the checkpoint's processor does, which leaves what has its size as it is. Where the processor does not
    say what becomes of a picture, it is not scaled here, and is one token at least."""

    def __init__(self, checkpoint: ThinkerCheckpoint) -> None:
        processor: Any = checkpoint.processor
        self._images = _with(processor, "image_processor", "get_number_of_image_patches")
        self._videos = _with(processor, "video_processor", "get_num_of_video_patches")
        self._sound_tokens_per_s = checkpoint.sound_tokens_per_s
        if self._images is None:
            return
        # What the processor of all media gives the two goes before their own.
        given: dict[str, dict[str, Any]] = processor._merge_kwargs(processor.valid_processor_kwargs, {})
        self._image_size = dict(given["images_kwargs"].get("size") or self._images.size)
        if self._videos is not None:
            self._video_size = dict(given["videos_kwargs"].get("size") or self._videos.size)
            if self._depends_on_frames():
                self._videos = None

    def image_tokens(self, width: int, height: int) -> int:
        if self._images is None:
            return 1
        size = self._image_size
        options = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        return self._images.get_number_of_image_patches(height, width, options) // self._images.merge_size**2

    def _depends_on_frames(self) -> bool:
        """Whether the processor makes the frames of a long video smaller: then none can be scaled by itself."""
        few, many = (self.video_tokens(frames, *_LARGE) / frames for frames in (2, 2000))
        return few != many

    def video_tokens(self, frames: int, width: int, height: int) -> int:
        if self._videos is None:
            return 1
        options = {"size": self._video_size}
        return self._videos.get_num_of_video_patches(frames, height, width, options) // self._videos.merge_size**2

    def least_sound_tokens(self, seconds: float) -> int:
        return int(int(seconds) * self._sound_tokens_per_s)

    def image(self, pixels: np.ndarray) -> "Image":
        """Of (height, width, 3) uint8."""
        from PIL import Image

        height, width = pixels.shape[:2]
        if self._images is not None and _shrinks(self._images, width, height, self.image_tokens):
            pixels = _scaled(self._images, self._image_size, pixels, self.image_tokens)
        return Image.fromarray(pixels)

    def frame(self, pixels: np.ndarray) -> np.ndarray:
        """Of a video: (height, width, 3) uint8."""
        height, width = pixels.shape[:2]
        tokens = partial(self.video_tokens, 1)
        if self._videos is None or not _shrinks(self._videos, width, height, tokens):
            return pixels
        return _scaled(self._videos, self._video_size, pixels, tokens)


def _with(processor: Any, name: str, method: str) -> Any:
    """The part `name` of a processor; None: it has none with this method, by patches that are merged."""
    part = getattr(processor, name, None)
    return part if hasattr(part, method) and hasattr(part, "merge_size") else None


def _shrinks(processor: Any, width: int, height: int, tokens: Callable[[int, int], int]) -> bool:
    return tokens(width, height) * _side(processor) ** 2 < width * height


def _side(processor: Any) -> int:
    """Pixels of the side of a token."""
    return processor.patch_size * processor.merge_size


def _scaled(processor: Any, size: dict[str, Any], pixels: np.ndarray, tokens: Callable[[int, int], int]) -> np.ndarray:
    """`pixels` themselves if the processor would scale the result again, as it does with the narrowest."""
    import torch
    from transformers.image_utils import SizeDict

    height, width = pixels.shape[:2]
    channels = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    options = {"resample": processor.resample, "factor": _side(processor)}
    scaled = processor.resize(channels[None, None], size=SizeDict(**size), **options)[0, 0]
    if tokens(scaled.shape[-1], scaled.shape[-2]) != tokens(width, height):
        return pixels
    return np.ascontiguousarray(scaled.permute(1, 2, 0).numpy())
