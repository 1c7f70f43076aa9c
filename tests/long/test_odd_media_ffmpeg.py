"""The odd files of tests/pure/test_odd_media.py: the model gets what the program ffmpeg shows of them, too."""

import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from services.common.media.sound import read_sound
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import MediaFile
from services.thinker.media import decode_video
from tests.support.samples.odd_images import on_white
from tests.support.samples.odd_sounds import SOUNDS, OddSound, of_joined
from tests.support.samples.odd_videos import VIDEOS, OddVideo

pytestmark = [pytest.mark.long, pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="ffmpeg is not installed")]
RATE_HZ = 16_000
SQUARE = "scale=trunc(iw*max(sar\\,1)):trunc(ih/min(sar\\,1))"
# ffmpeg mixes surround sound by weights, decodes unknown tracks before known ones and fails, loses samples where
# the rate changes and files of an Ogg chain with other channels, and turns by any angle. Here it is no reference.
NOT_ALIKE = ("WAVEX", ", 8 at", ", 17 at", "unknown track", "joined", "leaning")


def is_reference(name: str) -> bool:
    return not any(part in name for part in NOT_ALIKE)


def shown(data: bytes, folder: Path, *options: str) -> bytes:
    file = folder / "file"
    file.write_bytes(data)
    return subprocess.run(["ffmpeg", "-v", "fatal", "-i", file, *options, "-"], check=True, capture_output=True).stdout


@pytest.mark.parametrize("part", [part for part in SOUNDS if part is not of_joined])
def test_sounds(part: Callable[[], Iterable[OddSound]], tmp_path: Path) -> None:
    off: dict[str, float] = {}
    for sound in filter(lambda sound: is_reference(sound.name), part()):
        ours = np.concatenate(list(read_sound(sound.data, RATE_HZ)))
        raw = shown(sound.data, tmp_path, "-f", "f32le", "-ac", "1", "-ar", str(RATE_HZ))
        mixed = np.frombuffer(raw, np.float32)
        most = min(len(ours), len(mixed))
        assert most > max(len(ours), len(mixed)) - 0.02 * RATE_HZ, sound.name
        power = np.square(mixed[:most]).sum()
        # of two channels ffmpeg takes more than the mean
        off[sound.name] = min(
            float(np.square(ours[:most] - gain * mixed[:most]).sum() / power) for gain in (1.0, 0.5**0.5)
        )
    assert not {name: share for name, share in off.items() if share > 1e-3}


@pytest.mark.parametrize("part", VIDEOS)
def test_videos(part: Callable[[], Iterable[OddVideo]], tmp_path: Path) -> None:
    off: dict[str, float] = {}
    for video in filter(lambda video: is_reference(video.name), part()):
        media_file, settings = MediaFile("video", video.data, "video"), ThinkerSettings(model="unused")
        ours = decode_video(media_file, RATE_HZ, lambda total, _: np.arange(total), settings).frames
        how = ("-vf", SQUARE, "-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgba")
        theirs = np.frombuffer(shown(video.data, tmp_path, *how), np.uint8).reshape(-1, *ours.shape[1:3], 4)
        assert len(theirs) == len(ours), video.name
        on_ground = [on_white(each[..., :3].astype(float), each[..., 3] / 255) for each in theirs]
        off[video.name] = float(np.abs(ours.astype(int) - np.stack(on_ground)).mean())
    assert not {name: levels for name, levels in off.items() if levels > 3}
