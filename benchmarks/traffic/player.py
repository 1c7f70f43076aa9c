"""A simulated listener: plays a stream in real time as it arrives, and notes where it runs dry."""

import math
from collections.abc import Iterable

AUDIBLE_GAP_MS = 100.0


def playback_gaps_ms(chunks: Iterable[tuple[float, float]]) -> list[float]:
    """Silences of a player that starts with the first chunk and keeps no reserve.

    What runs dry goes on with the next chunk, so a late chunk delays all that follows and is counted once.

    Args:
        chunks: (when it arrived, how long it plays) in milliseconds, in the order of arrival.

    Returns:
        Milliseconds of each silence before the end of the audio, none of them 0.
    """
    gaps_ms = []
    plays_until_ms = math.inf  # nothing can run dry before the first chunk
    for number, (arrived_ms, plays_ms) in enumerate(chunks):
        if arrived_ms > plays_until_ms:
            gaps_ms.append(arrived_ms - plays_until_ms)
        begins_ms = arrived_ms if number == 0 else max(arrived_ms, plays_until_ms)
        plays_until_ms = begins_ms + plays_ms
    return gaps_ms


def longest_gap_ms(chunks: Iterable[tuple[float, float]]) -> float:
    """The longest of `playback_gaps_ms`; 0 if there is none."""
    return max(playback_gaps_ms(chunks), default=0.0)
