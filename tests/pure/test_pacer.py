"""Sound that leaves in real time: when its frames leave, what is cut, and what a listener lacks."""

import asyncio

import pytest

from gateway.pacing.pacer import SILENCE, CutItem, Pacer

RATE_HZ, FRAME_MS = 16_000, 20
FRAME = RATE_HZ * FRAME_MS // 1000 * 2  # bytes


class Listener:
    """A pacer, a clock that stands still between `wait`s, and what left: (seconds, item, PCM16)."""

    def __init__(self, **rules) -> None:
        self.now, self.left = 100.0, list[tuple[float, str, bytes]]()
        self.pacer = Pacer(self._take, RATE_HZ, FRAME_MS, now=lambda: self.now, **rules)

    def _take(self, item_id: str, pcm16: bytes) -> None:
        self.left.append((round(self.now - 100, 3), item_id, pcm16))

    def wait(self, seconds: float) -> int:
        """Lets time pass. Returns the frames that left."""
        before, end = len(self.left), self.now + seconds
        while (due_s := self.pacer._release()) is not None and self.now + due_s <= end:
            self.now += due_s
        self.now = end
        self.pacer._release()
        return len(self.left) - before


def sound(frames: float, value: int = 1) -> bytes:
    return bytes([value]) * int(frames * FRAME)


def test_no_frame_ends_more_than_the_lead_after_now() -> None:
    listener = Listener()
    listener.pacer.add("a", sound(50))
    assert listener.wait(0) == 10  # 200 ms
    assert listener.wait(0.1) == 5
    assert listener.wait(0.7) == 35
    assert [at for at, *_ in listener.left[10:13]] == [0.02, 0.04, 0.06]
    assert listener.wait(5) == 0


def test_the_lead_is_not_saved_up_in_silence() -> None:
    listener = Listener()
    listener.pacer.add("a", sound(5))
    listener.pacer.end("a")
    listener.wait(3)
    listener.pacer.add("b", sound(50))
    assert listener.wait(0) == 10


def test_frames_are_whole_and_only_the_last_is_filled_up() -> None:
    listener = Listener()
    listener.pacer.add("a", sound(1.5))
    assert listener.wait(0.1) == 1
    listener.pacer.add("a", sound(1.25))
    assert listener.wait(0.1) == 1
    listener.pacer.end("a")
    assert listener.wait(0.1) == 1
    assert listener.left[-1][2] == sound(0.75) + bytes(FRAME // 4)
    assert all(len(pcm16) == FRAME for _, _, pcm16 in listener.left)


def test_what_is_cut_and_how_much_of_it_was_played() -> None:
    listener = Listener()
    listener.pacer.add("a", sound(50))
    listener.pacer.end("a")
    listener.pacer.add("b", sound(50))
    listener.wait(0.3)
    assert listener.pacer.queued_ms == (100 - 25) * FRAME_MS
    assert listener.pacer.clear() == [CutItem("a", 500), CutItem("b", 0)]
    assert (listener.pacer.queued_ms, listener.pacer.clear(), listener.wait(5)) == (0, [], 0)


def test_what_left_whole_is_not_cut() -> None:
    listener = Listener()
    listener.pacer.add("a", sound(3))
    listener.pacer.end("a")
    listener.wait(0)
    assert listener.pacer.is_playing  # it is heard still
    assert listener.pacer.clear() == []
    listener.wait(0.1)
    assert not listener.pacer.is_playing


def test_an_item_that_goes_on_is_cut_where_its_sound_ends() -> None:
    listener = Listener()
    listener.pacer.add("a", sound(3))
    listener.wait(1)
    assert listener.pacer.is_playing
    assert listener.pacer.clear() == [CutItem("a", 60)]


def test_marks_stay_at_their_places_and_leave_with_what_is_cut() -> None:
    listener, reached = Listener(), list[float]()

    def mark() -> None:
        listener.pacer.mark(lambda: reached.append(round(listener.now - 100, 3)))

    mark()
    listener.pacer.add("a", sound(12.5))
    mark()
    listener.pacer.add("a", sound(12.5))
    mark()
    listener.wait(0.05)
    assert reached == [0, 0.04]
    assert listener.pacer.clear() == [CutItem("a", 240)]
    listener.wait(5)
    assert reached == [0, 0.04]


def test_late_sound_is_counted() -> None:
    listener = Listener()
    listener.pacer.add("a", sound(5))
    listener.wait(0.35)
    listener.pacer.add("a", sound(5))
    listener.pacer.end("a")
    listener.wait(5)
    assert (listener.pacer.gaps, round(listener.pacer.late_ms)) == (1, 250)
    assert not any(item_id == SILENCE for _, item_id, _ in listener.left)


def test_gaps_are_filled_with_silence_and_counted() -> None:
    listener = Listener(fills_gaps=True)
    listener.pacer.add("a", sound(5))
    listener.wait(0.2)
    assert [at for at, item_id, _ in listener.left if item_id == SILENCE] == [0.1, 0.12, 0.14, 0.16, 0.18, 0.2]
    listener.pacer.add("a", sound(5))
    listener.pacer.end("a")
    assert listener.wait(5) == 5
    assert (listener.pacer.gaps, round(listener.pacer.late_ms)) == (1, 120)


@pytest.mark.asyncio
async def test_it_wakes_by_itself() -> None:
    left = asyncio.Queue[str]()
    pacer = Pacer(lambda item_id, _: left.put_nowait(item_id), RATE_HZ, FRAME_MS, ahead_ms=40)
    running = asyncio.create_task(pacer.run())
    await asyncio.sleep(0)
    pacer.add("a", sound(5))
    for _ in range(5):
        assert await left.get() == "a"
    running.cancel()


def test_silence_gives_way_to_sound_and_nobody_plays_in_it() -> None:
    listener = Listener()
    listener.pacer.add("a", sound(10))
    listener.pacer.end("a")
    listener.pacer.add(SILENCE, bytes(50 * FRAME))
    listener.pacer.end(SILENCE)
    listener.wait(0.1)
    assert listener.pacer.is_playing
    assert listener.wait(0.2) == 10
    assert (listener.pacer.is_playing, listener.pacer.queued_ms) == (False, 35 * FRAME_MS)
    listener.pacer.add("b", sound(20))
    assert (listener.pacer.is_playing, listener.pacer.queued_ms) == (True, 20 * FRAME_MS)
    listener.wait(0.02)
    assert listener.left[-1][1] == "b"
    assert listener.pacer.clear() == [CutItem("b", FRAME_MS)]
