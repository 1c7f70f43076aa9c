"""`quartet talk` as users run it, with scripted stages."""

import asyncio
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.support.samples.espeak import sentences
from tests.support.scripted.thinker import PIECES
from tests.support.systems.command import quartet, start
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANSWER = "".join(PIECES)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a file of two turns."""
    sentences(tmp_path / "two.wav", ["The boats are out.", "Seven old doors."], pause_s=1.5)
    return tmp_path


async def talk(gateway: Running, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(quartet, "talk", "--url", gateway.url, *arguments, cwd=home)


def without_times(text: str) -> list[str]:
    return re.sub(r"\d+\.\d\d", "N", text).splitlines()


async def test_two_turns_of_a_file_in_real_time(speech_gateway: Running, home: Path) -> None:
    done = await talk(speech_gateway, home, "--in", "two.wav", "--out", "heard.wav", "--instructions", "Be kind.")
    assert done.returncode == 0, done.stderr
    told = without_times(done.stdout)
    assert (told.count(f"you: {ANSWER}"), told.count(f"model: {ANSWER}")) == (2, 2)
    assert [line for line in told if line.startswith("turn")] == [f"turn {n}: first audio after N s" for n in (1, 2)]
    assert told[-4:-2] == ["2 turns", "first audio after N s (median; N to N s)"]
    assert told[-1] == "wrote heard.wav"
    heard, rate_hz = soundfile.read(home / "heard.wav", dtype="int16")
    assert rate_hz == 24_000
    assert np.abs(heard).max() > 0
    systems = [asked.messages[0].content[0].text for asked in speech_gateway.scripts["thinker"].requests]
    assert "Be kind." in systems


@pytest.mark.parametrize(
    ("flags", "turns"), [(["--vad", "manual"], "1 turn"), (["--vad", "semantic"], "2 turns"), ([], "2 turns")]
)
async def test_written_answers_of_a_file_that_is_sent_fast(
    speech_gateway: Running, home: Path, flags: list[str], turns: str
) -> None:
    done = await talk(speech_gateway, home, "--in", "two.wav", "--text", "--fast", "--no-transcript", *flags)
    assert done.returncode == 0, done.stderr
    told = without_times(done.stdout)
    assert told.count(f"model: {ANSWER}") == int(turns[0])
    assert told[-3:-1] == [turns, "first text after N s (median; N to N s)"]
    assert "you" not in done.stdout


async def test_ctrl_c_ends_it_with_the_summary(speech_gateway: Running, home: Path) -> None:
    thinker = speech_gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 1
    options = ("--url", speech_gateway.url, "--in", "two.wav", "--out", "heard.wav", "--no-transcript")
    process = start("talk", *options, cwd=home, stdout=subprocess.PIPE)
    try:
        await asyncio.wait_for(thinker.holding.wait(), 60)
        process.send_signal(signal.SIGINT)
        told, failed = await asyncio.to_thread(process.communicate, timeout=60)
    finally:
        process.kill()
    assert (process.returncode, failed) == (0, "")
    assert told.endswith("wrote heard.wav\n")
    assert soundfile.info(home / "heard.wav").samplerate == 24_000
    await speech_gateway.until(lambda: speech_gateway.app.state.gateway.realtime_sessions == 0)


async def test_a_session_that_the_server_ends_is_an_error_after_the_summary(home: Path) -> None:
    async with running(realtime_session_s=0.5) as gateway:
        done = await talk(gateway, home, "--in", "two.wav", "--out", "heard.wav")
    assert done.returncode == 1
    assert "connect again" in done.stderr


@pytest.mark.parametrize(
    ("flags", "status", "reason"),
    [
        (["--in", "two.wav", "--out", "a.wav", "--voice", "nobody"], 1, "session.audio.output.voice"),
        (["--in", "none.wav", "--out", "a.wav"], 1, "--in: none.wav cannot be read"),
        (["--in", "two.wav", "--speakers", "none of that name"], 1, "--out FILE"),
        (["--text", "--microphone", "none of that name"], 1, "--in FILE"),
        (["--out", "a.mp3"], 2, ".wav"),
        (["--out", "a.wav", "--text"], 2, "--text"),
        (["--fast"], 2, "--in"),
        (["--vad", "manual"], 2, "keyboard"),
    ],
)
async def test_what_cannot_be_is_one_line(
    speech_gateway: Running, home: Path, flags: list[str], status: int, reason: str
) -> None:
    (home / "none.wav").write_text("no sound")
    done = await talk(speech_gateway, home, *flags)
    assert (done.returncode, done.stdout) == (status, "")
    assert reason in done.stderr
    assert not (home / "a.wav").exists()


async def test_a_server_that_makes_pictures_has_nobody_to_talk_with(picture_gateway: Running, home: Path) -> None:
    done = await talk(picture_gateway, home, "--in", "two.wav", "--out", "a.wav")
    assert done.returncode == 1
    assert "no model that hears and speaks" in done.stderr
