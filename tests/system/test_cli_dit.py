"""`quartet image`, `video` and `sound` as users run them, against real stages with small checkpoints."""

import os
import signal
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from PIL import Image

from tests.support.systems.command import in_this_process, on_terminal, quartet, start
from tests.support.systems.stack import HANG_GUARD_S, Stack, free_port, until, wait_until_ready

pytestmark = pytest.mark.e2e

SLOW = ("--size", "512x512", "--steps", "200")  # a minute or more, unless it is given up


@pytest.fixture
def painter(dit_systems) -> Stack:
    return dit_systems.get("sd3")


# `make test` asks the painter alone: a system takes half a minute to start.


@pytest.fixture
def film_maker(dit_systems) -> Stack:
    return dit_systems.get("wan")


@pytest.fixture
def foley(dit_systems) -> Stack:
    return dit_systems.get("stable-audio")


@pytest.fixture
def animator(dit_systems) -> Stack:
    return dit_systems.get("wan-i2v")


def followed(system: Stack) -> int:
    """How often a client has asked how far a video is."""
    return int(system.metric("gateway", "quartet_gateway_requests_total", path="/v1/videos/{video_id}"))


def pixels(file: Path) -> np.ndarray:
    return np.asarray(Image.open(file).convert("RGB"), np.int16)


def test_image_writes_a_file_for_each_picture(painter: Stack, tmp_path: Path):
    options = ["--url", painter.url, "--size", "64x48", "--steps", "3"]
    done = quartet("image", "a ball", "--out", "a.png", "--n", "2", "--seed", "5", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["wrote a-1.png: 64x48, seed 5", "wrote a-2.png: 64x48, seed 6"]
    alone = quartet("image", "a ball", "--out", "b.png", "--seed", "6", *options, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a-1.png", "a-2.png", "b.png"]
    first, second = pixels(tmp_path / "a-1.png"), pixels(tmp_path / "a-2.png")
    assert first.shape == (48, 64, 3)
    assert np.abs(first - second).max() > 10
    assert np.abs(second - pixels(tmp_path / "b.png")).max() <= 1  # of 255: the seed's, alone or not


@pytest.mark.parametrize(("suffix", "kind"), [("png", "PNG"), ("jpg", "JPEG"), ("webp", "WEBP")])
def test_the_suffix_is_the_format(painter: Stack, tmp_path: Path, suffix: str, kind: str):
    options = ["--url", painter.url, "--steps", "2", "--guidance", "3.5", "--negative", "a cube"]
    done = quartet("image", "a ball", "--out", f"a.{suffix}", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Image.open(tmp_path / f"a.{suffix}").format == kind


def test_image_starts_from_a_picture_and_keeps_what_the_mask_covers(painter: Stack, tmp_path: Path):
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(tmp_path / "in.png")
    Image.new("L", (64, 64), 255).save(tmp_path / "all.png")  # white: painted anew
    Image.new("L", (64, 64), 0).save(tmp_path / "nothing.png")
    options = ["--image", "in.png", "--url", painter.url, "--steps", "4", "--seed", "1"]
    for name, mask in {"edit": [], "all": ["--mask", "all.png"], "nothing": ["--mask", "nothing.png"]}.items():
        done = quartet("image", "a ball", "--out", f"{name}-out.png", *options, *mask, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    made = {name: pixels(tmp_path / f"{name}-out.png") for name in ("edit", "all", "nothing")}
    assert made["edit"].shape == (64, 64, 3)
    assert np.abs(made["all"] - made["nothing"]).max() > 10  # the mask counts


def test_image_shows_its_steps_on_a_terminal(painter: Stack, tmp_path: Path):
    words = ("step ", " of 200", "%")
    told = on_terminal("image", "a ball", "--out", "a.png", "--url", painter.url, *SLOW, cwd=tmp_path, until=words)
    assert all(word in told for word in words), told
    until(lambda: painter.in_flight()["dit"] == 0)


def test_image_says_what_is_wrong(painter: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Image.new("L", (8, 8)).save(tmp_path / "mask.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    for flags, word in (
        (["--size", "64x63"], "size"),
        (["--size", "large"], "size"),
        (["--steps", "0"], "num_inference_steps"),
        (["--lora", "film=0.5"], "lora"),
        (["--lora", "film=strong"], "--lora"),
        (["--image", "broken.png"], "image"),
        (["--mask", "mask.png"], "--mask"),
        (["--out", "a.gif"], "--out"),
        (["--out", "no-such/a.png"], "--out"),
        (["--url", f"http://127.0.0.1:{free_port()}"], "127.0.0.1"),
    ):
        done = in_this_process("image", "a ball", "--out", "a.png", "--url", painter.url, *flags)
        assert done.exit_code > 0, flags
        assert word in done.stderr, flags
        assert "Traceback" not in done.stderr, flags
    assert {file.name for file in tmp_path.iterdir()} == {"mask.png", "broken.png"}


def test_ctrl_c_gives_a_picture_up(painter: Stack, tmp_path: Path):
    process = start("image", "a ball", "--out", "a.png", "--url", painter.url, *SLOW, cwd=tmp_path)
    until(lambda: painter.in_flight()["dit"] == 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode > 0
    assert "Traceback" not in errors
    until(lambda: painter.in_flight()["dit"] == 0)


@pytest.mark.long
def test_video_follows_its_job_and_fetches_the_file(film_maker: Stack, tmp_path: Path):
    options = ["--url", film_maker.url, "--size", "64x48", "--seed", "3", "--steps", "3"]
    done = quartet("video", "a ball", "--out", "a.mp4", "--frames", "9", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "wrote a.mp4: 64x48, 9 frames, 16 a second, seed 3\n"
    done = quartet("video", "a ball", "--out", "b.mp4", "--seconds", "1", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.mp4", "b.mp4"]
    for name, frames in (("a.mp4", 9), ("b.mp4", 17)):
        with av.open(tmp_path / name) as opened:
            stream = opened.streams.video[0]
            assert (stream.width, stream.height, stream.average_rate) == (64, 48, 16)
            assert sum(1 for _ in opened.decode(stream)) == frames


@pytest.mark.long
def test_video_shows_its_progress_on_a_terminal(film_maker: Stack, tmp_path: Path):
    words = ("making the video", "%")
    told = on_terminal("video", "a ball", "--out", "a.mp4", "--url", film_maker.url, *SLOW, cwd=tmp_path, until=words)
    assert all(word in told for word in words), told
    until(lambda: film_maker.in_flight()["dit"] == 0)


@pytest.mark.long
def test_video_says_what_is_wrong(film_maker: Stack, tmp_path: Path):
    Image.new("RGB", (64, 64)).save(tmp_path / "first.png")
    for flags, word in (
        (["--frames", "8"], "num_frames"),
        (["--frames", "9", "--seconds", "1"], "--frames"),
        (["--image", "first.png"], "input_reference"),
        (["--out", "a.avi"], "--out"),
    ):
        done = quartet("video", "a ball", "--out", "a.mp4", "--url", film_maker.url, *flags, cwd=tmp_path)
        assert done.returncode > 0, flags
        assert word in done.stderr, flags
        assert "Traceback" not in done.stderr, flags
    done = quartet("image", "a ball", "--out", "a.png", "--url", film_maker.url, cwd=tmp_path)
    assert done.returncode == 1
    assert "model" in done.stderr


@pytest.mark.long
def test_ctrl_c_deletes_a_video(film_maker: Stack, tmp_path: Path):
    before = followed(film_maker)
    process = start("video", "never", "--out", "a.mp4", "--url", film_maker.url, *SLOW, cwd=tmp_path)
    until(lambda: followed(film_maker) > before, "it follows the job")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode > 0
    assert "Traceback" not in errors
    videos = film_maker.http.get("/v1/videos").json()["data"]
    assert "never" not in [video["prompt"] for video in videos]
    until(lambda: film_maker.in_flight()["dit"] == 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_video_that_the_server_lost_has_failed(film_maker: Stack, tmp_path: Path):
    before = followed(film_maker)
    process = start("video", "lost", "--out", "a.mp4", "--url", film_maker.url, *SLOW, cwd=tmp_path)
    until(lambda: followed(film_maker) > before, "it follows the job")
    os.kill(film_maker.pid("gateway"), signal.SIGKILL)  # it is started again, and asked again
    _, errors = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 1
    assert "the server stopped before the video was finished" in errors
    assert not list(tmp_path.iterdir())
    wait_until_ready(film_maker)


@pytest.mark.long
def test_video_starts_from_a_picture(animator: Stack, tmp_path: Path):
    Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(tmp_path / "first.png")
    options = ["--url", animator.url, "--size", "64x64", "--frames", "5", "--steps", "2", "--seed", "1"]
    done = quartet("video", "a ball", "--out", "a.mp4", "--image", "first.png", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with av.open(tmp_path / "a.mp4") as opened:
        assert sum(1 for _ in opened.decode(video=0)) == 5
    done = quartet("video", "a ball", "--out", "b.mp4", *options, cwd=tmp_path)
    assert done.returncode == 1
    assert "input_reference" in done.stderr


@pytest.mark.long
def test_video_starts_from_a_video(film_maker: Stack, tmp_path: Path):
    options = ["--url", film_maker.url, "--steps", "2", "--seed", "1"]
    done = quartet("video", "a ball", "--out", "a.mp4", "--size", "64x48", "--frames", "9", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    frames = []
    for prompt, out in (("at night", "b.mp4"), ("at noon", "c.mp4")):
        done = quartet("video", prompt, "--video", "a.mp4", "--out", out, *options, "--frames", "5", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"wrote {out}: 64x48, 5 frames, 16 a second, seed 1\n"
        with av.open(tmp_path / out) as opened:
            frames.append(np.stack([frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]))
    assert not np.array_equal(*frames)
    done = quartet("video", "x", "--control-video", "a.mp4", "--out", "d.mp4", *options, cwd=tmp_path)
    assert done.returncode == 1
    assert "control_video" in done.stderr


@pytest.mark.long
def test_sound_writes_a_file(foley: Stack, tmp_path: Path):
    options = ["--url", foley.url, "--seconds", "0.25", "--steps", "3", "--seed", "4"]
    for name in ("a.wav", "a.flac"):
        done = quartet("sound", "rain", "--out", name, *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"wrote {name}: seed 4\n"
    samples, rate_hz = soundfile.read(tmp_path / "a.wav")
    assert samples.ndim == 2
    assert abs(len(samples) / rate_hz - 0.25) < 0.01
    assert np.abs(samples).max() > 0.001
    assert np.array_equal(samples, soundfile.read(tmp_path / "a.flac")[0])
    done = quartet("sound", "rain", "--out", "b.wav", "--url", foley.url, "--seconds", "1e6", cwd=tmp_path)
    assert done.returncode == 1
    assert "seconds" in done.stderr
