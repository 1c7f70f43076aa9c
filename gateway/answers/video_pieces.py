"""What a stage sends of a video: frames and samples."""

import numpy as np

from gateway.media.encode import LAYOUTS
from gateway.pipeline.dit import Pieces, to_numpy
from quartet.v1 import dit_pb2
from services.common.errors import InternalError


def frames_of(piece: dit_pb2.DitPiece) -> np.ndarray:
    """(n, height, width, 3) uint8, not copied. Raises InternalError: the piece has none."""
    frames = to_numpy(piece.data)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or piece.frames_per_second <= 0:
        raise InternalError(f"the stage sent {frames.shape} {frames.dtype}, not frames of 8 bit")
    return frames


def samples_of(sound: Pieces) -> np.ndarray | None:
    """(samples, channels) float32; None: the video is silent. Blocking. Raises InternalError: the stage sent something
    else."""
    if not sound.sample_rate_hz:
        return None
    samples = sound.array()
    if samples.dtype != np.float32 or samples.ndim != 2 or samples.shape[1] not in LAYOUTS:
        raise InternalError(f"the stage sent {samples.shape} {samples.dtype}, not samples of 1 or 2 channels")
    return samples
