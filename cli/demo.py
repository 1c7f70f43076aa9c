"""`quartet demo`: small models, the whole system, a spoken question about a picture, a picture, where the time went."""

import io
import tempfile
from pathlib import Path

import httpx
import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from cli.chat import Answer, ask, part, write_wav
from cli.generation import Image as MadeImage
from cli.generation import make_images
from cli.http import connect
from cli.plan import OMNI_DIT_PIPELINE, Options
from cli.terminal import CommandError, bar
from cli.tiny import make_checkpoint
from cli.up import running

ASSETS = Path(__file__).parent / "assets"
PHASES = ("queue_ms", "prefill_ms", "first_output_ms", "decode_ms", "total_ms")
PICTURE_PROMPT = "a red ball on a blue table"
PICTURE_SIDE, PICTURE_STEPS = 128, 8  # pixels

console = Console()


class DemoError(CommandError):
    """The demo ran, but what came out is not what it must be."""


def run(seed: int, port: int, out: Path, picture_file: Path) -> None:
    """Runs the demo and writes the speech to `out`, the picture to `picture_file`.

    Raises:
        StartError, ApiError: the system did not start, or did not answer.
        DemoError: the speech is silent or of the wrong length, or the picture is empty or of the wrong size.
    """
    with tempfile.TemporaryDirectory(prefix="quartet-demo-") as scratch:
        with console.status("making small random checkpoints"):
            omni = make_checkpoint(Path(scratch) / "quartet-tiny", seed, "tiny")
            diffusion = make_checkpoint(Path(scratch) / "z-image-tiny", seed, "tiny", "z-image")
        console.print(f"made small random checkpoints: Qwen3-Omni and Z-Image (seed {seed})")
        options = Options(
            str(omni),
            port=port,
            pipeline=OMNI_DIT_PIPELINE,
            run_directory=Path(scratch) / "run",
            stage_arguments={"gateway": [f"--jobs-dir={scratch}/jobs"]},
            dit_model=str(diffusion),
        )
        with running(options) as stack, connect(stack.url) as client:
            answer = _ask(client, seed)
            picture = _make_picture(client, seed)
    write_wav(answer, out)
    picture_file.write_bytes(picture.content)
    _check_speech(answer)
    _check_picture(picture)
    console.print(_table(answer, picture))
    console.print(
        f"wrote {out}: {answer.audio_s:.2f} s of speech at {answer.facts['sample_rate_hz']} Hz, {answer.frames} frames"
    )
    console.print(f"wrote {picture_file}: {picture.size}, {picture.num_inference_steps} steps")


def _ask(client: httpx.Client, seed: int) -> Answer:
    console.print("\n[bold]a picture and a spoken question[/bold] (a random model answers in babble):")
    content = [part("image", ASSETS / "picture.png"), part("audio", ASSETS / "question.wav")]
    settings = {
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        "max_tokens": 32,
        "seed": seed,
        "quartet": {"talker": {"max_frames": 64, "seed": seed}},
    }
    answer = ask(client, content, settings, on_text=lambda text: console.out(text, end="", highlight=False))
    console.print("\n")
    return answer


def _make_picture(client: httpx.Client, seed: int) -> MadeImage:
    console.print(f"[bold]a picture of {PICTURE_PROMPT!r}[/bold] (a random model paints noise)\n")
    body = {
        "prompt": PICTURE_PROMPT,
        "size": f"{PICTURE_SIDE}x{PICTURE_SIDE}",
        "num_inference_steps": PICTURE_STEPS,
        "seed": seed,
    }
    with bar("waiting") as report:
        (picture,) = make_images(client, body, (), report)
    return picture


def _check_speech(answer: Answer) -> None:
    samples = np.frombuffer(answer.pcm, np.int16)
    expected = answer.frames * answer.facts["samples_per_frame"] - answer.facts["trimmed_samples"]
    if len(samples) != expected:
        raise DemoError(f"{answer.frames} frames came to {len(samples)} samples; {expected} were expected")
    if np.abs(samples.astype(np.int32)).max() < 100:
        raise DemoError("the speech is silent")


def _check_picture(picture: MadeImage) -> None:
    try:
        pixels = np.asarray(Image.open(io.BytesIO(picture.content)).convert("RGB"))
    except OSError as error:
        raise DemoError(f"the picture's file is broken: {error}") from None
    if pixels.shape != (PICTURE_SIDE, PICTURE_SIDE, 3):
        raise DemoError(f"{PICTURE_SIDE} x {PICTURE_SIDE} pixels were asked for; it has {pixels.shape}")
    if pixels.std() < 1:
        raise DemoError("the picture is all of one colour")


def _table(answer: Answer, picture: MadeImage) -> Table:
    table = Table(title="where the time went (ms)", title_justify="left")
    table.add_column("stage")
    for phase in PHASES:
        table.add_column(phase.removesuffix("_ms").replace("_", " "), justify="right")
    for stage, timings in (answer.timings | {"dit": picture.timings}).items():
        table.add_row(stage, *(f"{timings[p]:.1f}" if timings.get(p) is not None else "-" for p in PHASES))
    table.add_section()
    first_audio = f"{answer.ttfa_ms:.1f}" if answer.ttfa_ms else "-"
    table.add_row(
        "client: answer", "TTFT", f"{answer.ttft_ms or 0:.1f}", f"TTFA {first_audio}", "", f"{answer.total_ms:.1f}"
    )
    table.add_row("client: picture", "", "", "", "", f"{picture.total_ms:.1f}")
    table.caption = f"RTF {answer.total_ms / 1000 / answer.audio_s:.2f} (time to the last audio over seconds of audio)"
    return table
