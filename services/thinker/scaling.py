"""What becomes of pictures in transformers' processors: their size and number of tokens. Known before they are decoded,
and scaled one at a time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from services.thinker.family import ThinkerCheckpoint

if TYPE_CHECKING:
    from PIL.Image import Image


class Scaler:
    """Scales as the checkpoint's processor does, which leaves what has its size as it is."""

    def __init__(self, checkpoint: ThinkerCheckpoint) -> None:
        self._images: Any = checkpoint.processor.image_processor
        self._videos: Any = checkpoint.processor.video_processor
        self._sound_tokens_per_s = checkpoint.sound_tokens_per_s

    def image_tokens(self, width: int, height: int) -> int:
        return self._images.get_number_of_image_patches(height, width, {}) // self._images.merge_size**2

    def video_tokens(self, frames: int, width: int, height: int) -> int:
        return self._videos.get_num_of_video_patches(frames, height, width, {}) // self._videos.merge_size**2

    def least_sound_tokens(self, seconds: float) -> int:
        return int(int(seconds) * self._sound_tokens_per_s)

    def image(self, image: "Image") -> "Image":
        from PIL import Image

        pixels = np.asarray(image)
        scaled = _scaled(self._images, pixels, self.image_tokens)
        return image if scaled is pixels else Image.fromarray(scaled)

    def frame(self, pixels: np.ndarray) -> np.ndarray:
        """Of a video: (height, width, 3) uint8."""
        return _scaled(self._videos, pixels, lambda width, height: self.video_tokens(1, width, height))


def _scaled(processor: Any, pixels: np.ndarray, tokens: Callable[[int, int], int]) -> np.ndarray:
    """`pixels` themselves if they would not become fewer, or if the processor would scale them again."""
    import torch
    from transformers.image_utils import SizeDict

    height, width = pixels.shape[:2]
    channels = torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous()
    options = {"resample": processor.resample, "factor": processor.patch_size * processor.merge_size}
    scaled = processor.resize(channels[None, None], size=SizeDict(**dict(processor.size)), **options)[0, 0]
    new_height, new_width = scaled.shape[-2:]
    if new_height * new_width >= height * width or tokens(new_width, new_height) != tokens(width, height):
        return pixels
    return np.ascontiguousarray(scaled.permute(1, 2, 0).numpy())
