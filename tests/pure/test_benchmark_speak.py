"""The bookkeeping of the benchmark of /v1/audio/speech: plain samples in any pieces, and who said the same."""

import numpy as np
import pytest

from benchmarks.peers.speak import Call
from benchmarks.speak import parse, require_same, spoken
from benchmarks.traffic.client import Exchange

TEXT = "The boats are out."
SOUND = np.arange(-4, 5, dtype="<i2")  # 18 bytes


def exchange(*pieces: bytes, status: int = 200, error: str | None = None) -> Exchange:
    timed = [(float(i), piece) for i, piece in enumerate(pieces, start=1)]
    return Exchange(TEXT, sent_s=0.5, done_s=9.0, status=status, pieces=timed, error=error)


def test_a_sample_counts_when_its_last_byte_came():
    sounds: dict = {}
    body = SOUND.tobytes()
    answer = spoken(exchange(body[:5], body[5:6], body[6:]), sounds)
    assert answer.audio == [(1.0, 2), (2.0, 1), (3.0, 6)]
    np.testing.assert_array_equal(sounds[TEXT], [SOUND])


def test_what_failed_is_an_error_and_no_sound():
    sounds: dict = {}
    assert spoken(exchange(b'{"error": {}}', status=400), sounds).error == '400: {"error": {}}'
    assert spoken(exchange(SOUND.tobytes(), error="RemoteProtocolError: cut"), sounds).error is not None
    assert not sounds


@pytest.mark.parametrize("theirs", [SOUND[:-1], SOUND + 3])
def test_no_figures_unless_both_sound_alike(theirs: np.ndarray):
    require_same({TEXT: [SOUND]}, [Call([TEXT], 0, 1, 1, [SOUND + 2])])
    with pytest.raises(SystemExit, match=r"said 'The boats are out\.' differently"):
        require_same({TEXT: [SOUND]}, [Call([TEXT, TEXT], 0, 1, 1, [SOUND, theirs])])


def test_concurrency_below_one_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(["--concurrency", "1", "0"])
    assert "must be 1 or more" in capsys.readouterr().err
