"""When a user's last word was, however late its sound comes."""

import pytest

from gateway.dialects.realtime.input import sound_clock
from gateway.dialects.realtime.input.sound_clock import SoundClock


class Wall:
    """A time that passes when the test says so."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def wall(monkeypatch) -> Wall:
    made = Wall()
    monkeypatch.setattr(sound_clock, "time", made)
    return made


def hear(clock: SoundClock, wall: Wall, *pieces: tuple[float, float]) -> None:
    """(when it comes, its end in the sound), both in seconds."""
    for at_s, end_s in pieces:
        wall.now_s = at_s
        clock.came(end_s * 1000)
        clock.ready()


def test_a_moment_is_when_its_piece_came(wall):
    clock = SoundClock()
    hear(clock, wall, (10.1, 0.1), (10.2, 0.2))
    assert clock.at(150) == pytest.approx(10.15)


def test_what_comes_late_was_said_in_time(wall):
    clock = SoundClock()
    hear(clock, wall, (10.1, 0.1), *((10.1 + 0.3 * n, 0.1 + 0.1 * n) for n in range(1, 20)))
    assert clock.at(2000) == pytest.approx(12.0, abs=0.01)  # 3.8 s before it was there


def test_less_delay_than_before_is_believed(wall):
    clock = SoundClock()
    hear(clock, wall, (10.5, 0.1), (10.6, 0.2), (10.6, 0.3), (10.6, 0.4))
    assert clock.at(400) == pytest.approx(10.6)


def test_who_was_muted_begins_anew(wall):
    clock = SoundClock()
    hear(clock, wall, (10.1, 0.1), (15.1, 0.2))
    assert clock.at(200) == pytest.approx(15.1)


def test_a_slow_clock_of_a_client_is_forgiven(wall):
    clock = SoundClock()
    hear(clock, wall, *((0.1 * n, 0.09999 * n) for n in range(1, 36_000)))
    assert 3600 - clock.at(0.09999 * 36_000 * 1000) < 0.01
