"""Files that are read in rounds: more than there are processes, each as if it were read alone."""

import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from gateway.media import long_sounds
from gateway.media.long_sounds import SoundFile, SoundFiles
from services.common.errors import RequestCancelled
from services.common.media.decoders import Decoders
from services.common.media.sound import read_sound
from tests.support.samples.media import wav
from tests.support.scripted.preprocessing import SOON_S, gone, processes

RATE_HZ = 16_000
KEPT = 2
LENGTHS_S = (60.0, 75.0, 90.0, 61.5, 44.0)  # more than what a connection holds


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[SoundFiles]:
    monkeypatch.setattr(long_sounds, "_MOST_KEPT", KEPT)
    own = Decoders(64 << 20, 30.0)
    yield SoundFiles(own)
    own.close()


def opened(files: SoundFiles, length_s: float) -> SoundFile:
    return SoundFile(files, wav(length_s), RATE_HZ, 100.0)


def some(file: SoundFile, seconds: float) -> list[np.ndarray]:
    """A round."""
    found, end = list[np.ndarray](), file.position + seconds * RATE_HZ
    with closing(file.pieces()) as pieces:
        for piece in pieces:
            found.append(piece)
            if file.position >= end:
                break
    return found


def no_more_than(most: int, files: SoundFiles) -> bool:
    """Soon, so many processes."""
    until = time.monotonic() + SOON_S
    while len(processes(files.decoders)) > most and time.monotonic() < until:
        time.sleep(0.005)
    return time.monotonic() < until


def test_each_is_as_if_read_alone_whoever_has_a_process(files: SoundFiles) -> None:
    reading = [opened(files, length_s) for length_s in LENGTHS_S]
    found: list[list[np.ndarray]] = [[] for _ in reading]
    ends = [round(length_s * RATE_HZ) for length_s in LENGTHS_S]
    while [file.position for file in reading] != ends:
        for number, file in enumerate(reading):
            if file.position < ends[number]:
                found[number] += some(file, 7 + 5 * number)
                assert no_more_than(KEPT + 1, files)
    for pieces, length_s in zip(found, LENGTHS_S, strict=True):
        np.testing.assert_array_equal(np.concatenate(pieces), np.concatenate(list(read_sound(wav(length_s), RATE_HZ))))


def test_who_leaves_between_rounds_or_in_one_ends_the_process(files: SoundFiles) -> None:
    between, within = opened(files, 60.0), opened(files, 60.0)
    some(between, 1)
    (first,) = processes(files.decoders)
    between.close()
    assert gone(first)
    pieces = within.pieces()
    next(pieces)
    (second,) = processes(files.decoders)
    within.close()
    with pytest.raises(RequestCancelled):
        list(pieces)
    assert gone(second)


def test_of_those_that_left_none_is_kept(files: SoundFiles) -> None:
    file = opened(files, 60.0)
    pieces = file.pieces()
    next(pieces)
    (process,) = processes(files.decoders)
    file.close()
    pieces.close()
    assert gone(process)
