"""What becomes of pictures in transformers' processors: their size and number of tokens. Known before they are decoded,
and scaled one at a time."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from services.thinker.family import ThinkerCheckpoint

if TYPE_CHECKING:
    from PIL.Image import Image


class Scaler:
    """Scales as the checkpoint's processor does, which leaves what has its size as it is."""

    def __init__(self, checkpoint: ThinkerCheckpoint) -> None:
        processor: Any = checkpoint.processor
        self._images: Any = processor.image_processor
        self._videos: Any = processor.video_processor
        # What the processor of all media gives the two goes before their own.
        given: dict[str, dict[str, Any]] = processor._merge_kwargs(processor.valid_processor_kwargs, {})
        self._image_size = dict(given["images_kwargs"].get("size") or self._images.size)
        self._video_size = dict(given["videos_kwargs"].get("size") or self._videos.size)
        self._sound_tokens_per_s = checkpoint.sound_tokens_per_s

    def image_tokens(self, width: int, height: int) -> int:
        size = self._image_size
        options = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        return self._images.get_number_of_image_patches(height, width, options) // self._images.merge_size**2

    def video_tokens(self, frames: int, width: int, height: int) -> int:
        options = {"size": self._video_size}
        return self._videos.get_num_of_video_patches(frames, height, width, options) // self._videos.merge_size**2

    def least_sound_tokens(self, seconds: float) -> int:
        return int(int(seconds) * self._sound_tokens_per_s)

    def image(self, image: "Image") -> "Image":
        from PIL import Image

        if not _shrinks(self._images, image.width, image.height, self.image_tokens):
            return image
        pixels = np.array(image)
        del image  # it may be large
        return Image.fromarray(_scaled(self._images, self._image_size, pixels, self.image_tokens))

    def frame(self, pixels: np.ndarray) -> np.ndarray:
        """Of a video: (height, width, 3) uint8."""
        height, width = pixels.shape[:2]
        tokens = partial(self.video_tokens, 1)
        if not _shrinks(self._videos, width, height, tokens):
            return pixels
        return _scaled(self._videos, self._video_size, pixels, tokens)


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
