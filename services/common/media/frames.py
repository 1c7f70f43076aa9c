"""Video frames as players show them: upright, with square pixels, transparent parts on white."""

import av
import numpy as np

_DISPLAY_MATRIX = np.dtype("<i4")  # of nine: a b u, c d v, x y w; a to d are 16.16, (x, y) becomes (ax + cy, bx + dy)


def display_size(track: av.VideoStream) -> tuple[int, int]:
    """(width, height) of the frames with square pixels, before they are turned. The longer side of a pixel decides."""
    aspect = track.sample_aspect_ratio or 1
    if aspect >= 1:
        return round(track.width * aspect), track.height
    return track.width, round(track.height / aspect)


def shown(frame: av.VideoFrame, size: tuple[int, int]) -> np.ndarray:
    """(height, width, 3) uint8, RGB, scaled to `size` (width, height) and then turned as the file says."""
    is_transparent = frame.format.name == "pal8" or any(part.is_alpha for part in frame.format.components)
    pixels = frame.to_ndarray(format="rgba" if is_transparent else "rgb24", width=size[0], height=size[1])
    if is_transparent:
        alpha = pixels[..., 3:].astype(np.uint16)
        pixels = ((pixels[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    matrix = frame.side_data.get("DISPLAYMATRIX")
    return pixels if matrix is None else _turned(pixels, np.frombuffer(bytes(matrix), _DISPLAY_MATRIX).astype(np.int64))


def _turned(pixels: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """`pixels` after the quarter turn and the flips that come closest to `matrix`."""
    a, b, _, c, d = matrix[:5]
    if abs(b) + abs(c) > abs(a) + abs(d):
        pixels, right, down = pixels.swapaxes(0, 1), c, b
    else:
        right, down = a, d
    return np.ascontiguousarray(pixels[:: -1 if down < 0 else 1, :: -1 if right < 0 else 1])
