"""The `quartet` command as users run it."""

import re
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from tests.support.samples.espeak import sentences
from tests.support.systems.command import quartet
from tests.support.systems.stack import START_TIMEOUT_S, free_port

pytestmark = pytest.mark.e2e

ASSETS = Path(__file__).parents[2] / "cli" / "assets"


def speech(file: Path) -> tuple[int, np.ndarray]:
    with wave.open(str(file)) as opened:
        assert opened.getnchannels() == 1
        return opened.getframerate(), np.frombuffer(opened.readframes(opened.getnframes()), np.int16)


def test_chat_asks_about_a_picture_and_a_sound_and_writes_speech(stack, tmp_path: Path):
    media = ["--image", str(ASSETS / "picture.png"), "--audio", str(ASSETS / "question.wav")]
    options = [
        "--url",
        stack.url,
        "--api-key",
        stack.key,
        "--max-tokens",
        "12",
        "--voice",
        "Chelsie",
        "--out",
        "answer.wav",
    ]
    done = quartet("chat", "Well?", *media, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    rate_hz, samples = speech(tmp_path / "answer.wav")
    assert rate_hz == 24000
    assert np.abs(samples.astype(int)).max() > 100


def test_chat_says_what_the_server_says(stack, tmp_path: Path):
    server = ["--url", stack.url, "--api-key", stack.key]
    done = quartet("chat", "Well?", *server, "--voice", "nobody", "--out", "a.wav", cwd=tmp_path)
    assert done.returncode == 1
    assert "audio.voice" in done.stderr
    assert not (tmp_path / "a.wav").exists()
    done = quartet("chat", "Well?", "--url", f"http://127.0.0.1:{free_port()}", cwd=tmp_path)
    assert done.returncode == 1
    assert "127.0.0.1" in done.stderr


def test_say_writes_a_text_and_what_is_typed(stack, tmp_path: Path):
    options = ["--url", stack.url, "--api-key", stack.key, "--seed", "1", "--voice", "Chelsie", "--out"]
    done = quartet("say", "The boats are out.", *options, "a.wav", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "wrote a.wav\n"
    done = quartet("say", "-", *options, "b.wav", cwd=tmp_path, stdin="The boats are out.")
    assert done.returncode == 0, done.stderr
    whole, typed = (soundfile.read(tmp_path / name, dtype="float32") for name in ("a.wav", "b.wav"))
    assert whole[1] == typed[1] == 24000
    np.testing.assert_allclose(typed[0], whole[0], rtol=0, atol=1e-4)
    assert np.abs(whole[0]).max() > 0.003

    done = quartet("say", "-", *options, "c.wav", cwd=tmp_path, stdin="?!")
    assert (done.returncode, list(tmp_path.glob("*c.wav*"))) == (1, [])
    assert "nothing to say" in done.stderr


@pytest.mark.long
def test_talk_has_two_turns_of_a_file_answered(stack, tmp_path: Path):
    sentences(tmp_path / "two.wav", ["The boats are out.", "Seven old doors, in green and yellow."], pause_s=1.5)
    options = ["--url", stack.url, "--api-key", stack.key, "--in", "two.wav", "--out", "heard.wav", "--voice", "ethan"]
    done = quartet("talk", *options, "--no-transcript", "--fast", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for turn in (1, 2):
        assert re.search(rf"^turn {turn}: first audio after \d+\.\d\d s$", done.stdout, re.M)
    assert len(re.findall(r"^model: \S", done.stdout, re.M)) == 2
    assert re.search(r"^2 turns\nfirst audio after .*\ntokens: \d+ in, .*\nwrote heard.wav\n\Z", done.stdout, re.M)
    rate_hz, samples = speech(tmp_path / "heard.wav")
    assert rate_hz == 24000
    assert np.abs(samples.astype(int)).max() > 100
    done = quartet("talk", *options, "--api-key", "wrong", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "API key" in done.stderr


@pytest.mark.long  # the random model writes until it may no more
def test_transcribe_writes_subtitles(stack, tmp_path: Path):
    options = ["--url", stack.url, "--api-key", stack.key, "--format", "srt", "--language", "en"]
    done = quartet("transcribe", str(ASSETS / "question.wav"), *options, "--out", "a.srt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "wrote a.srt\n"
    number, times, text = (tmp_path / "a.srt").read_text().split("\n", 2)
    assert number == "1"
    assert re.fullmatch(r"00:00:00,\d{3} --> 00:00:0[12],\d{3}", times)
    assert text.strip()


def test_transcribe_says_what_is_wrong(stack, tmp_path: Path):
    options = ["--url", stack.url, "--api-key", stack.key, "--format", "srt", "--language"]
    done = quartet("transcribe", str(ASSETS / "picture.png"), *options, "en", "--out", "b.srt", cwd=tmp_path)
    assert (done.returncode, list(tmp_path.glob("*b.srt*"))) == (1, [])
    assert "file" in done.stderr
    done = quartet("transcribe", str(ASSETS / "question.wav"), *options, "elvish", cwd=tmp_path)
    assert done.returncode == 1
    assert "elvish" in done.stderr or "language" in done.stderr


@pytest.mark.long  # it starts two systems
@pytest.mark.timeout(2 * START_TIMEOUT_S)
def test_demo(tmp_path: Path):
    done = quartet("demo", "--port", str(free_port()), cwd=tmp_path, timeout_s=2 * START_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("thinker", "talker", "code2wav", "dit", "TTFA", "I see a yellow cross.\n", "It is blue.\n"):
        assert word in done.stdout
    rate_hz, samples = speech(tmp_path / "demo.wav")
    frames = round(len(samples) / 1920 + 0.5)
    assert rate_hz == 24000
    assert 0 < frames * 1920 - len(samples) < 1920  # frames x 80 ms, less the decoder's tail
    assert np.abs(samples.astype(int)).max() > 100
    picture = Image.open(tmp_path / "demo.png")
    assert (picture.format, picture.size) == ("PNG", (128, 128))
    assert np.asarray(picture).std() > 1
