"""How an answer's text follows its sound."""

from itertools import pairwise

import pytest

from gateway.dialects.live.caption import Caption

STEP_MS, MOST_SILENT_MS = 100, 500
TEXT = "The boats are out, and nobody waits for them at the harbor this evening."


def spoken(caption: Caption, from_ms: int, to_ms: int) -> list[tuple[int, str]]:
    """(when, what) was told."""
    told = [(at, caption.heard(at)) for at in range(from_ms + STEP_MS, to_ms + 1, STEP_MS)]
    return [each for each in told if each[1]]


def gaps(told: list[tuple[int, str]]) -> list[int]:
    times = [0, *(at for at, _ in told)]
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize("sound_ms", [3000, 5000, 9000])
@pytest.mark.parametrize("whole_from_ms", [0, 1000, 2500])
def test_text_never_stops_while_there_is_sound(sound_ms: int, whole_from_ms: int) -> None:
    """Whether speech is faster or slower than was expected before all of it was there."""
    caption = Caption()
    caption.add(TEXT)
    caption.sound_ms = whole_from_ms + 500
    told = spoken(caption, 0, whole_from_ms)
    caption.sound_ms, caption.is_complete = sound_ms, True
    told += spoken(caption, whole_from_ms, sound_ms)
    assert "".join(delta for _, delta in told) == TEXT
    assert max(gaps(told)) <= MOST_SILENT_MS
    assert sound_ms - told[-1][0] <= MOST_SILENT_MS


def test_words_are_whole_but_for_those_that_take_long() -> None:
    caption = Caption()
    caption.add("It is an electroencephalographically unremarkable day")
    caption.sound_ms, caption.is_complete = 4000, True
    told = spoken(caption, 0, 4000)
    assert told[0][1] in ("It", "It is")
    assert all(delta.startswith(" ") or at > 500 for at, delta in told[1:])
    assert max(gaps(told)) <= MOST_SILENT_MS


def test_text_that_comes_late_is_told_when_it_is_spoken() -> None:
    caption = Caption()
    caption.sound_ms = 2000
    assert spoken(caption, 0, 1000) == []
    caption.add("Late words")
    told = spoken(caption, 1000, 2000)
    assert len(told) > 1  # not all at once
    assert "".join(delta for _, delta in told) + caption.rest() == "Late words"
    assert caption.rest() == ""


def test_ideographs_take_longer_than_letters() -> None:
    slow, fast = Caption(), Caption()
    slow.add("\u4f60\u597d" * 20)
    fast.add("ab" * 20)
    slow.sound_ms = fast.sound_ms = 9000
    for caption in (slow, fast):
        spoken(caption, 0, 2000)
    assert 2 * slow.told < fast.told
