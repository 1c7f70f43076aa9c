"""`quartet demo`: a small model, the whole system, one spoken question about a picture, and where the time went."""

import tempfile
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from cli.chat import Answer, ask, part, write_wav
from cli.supervisor import Options
from cli.up import running

ASSETS = Path(__file__).parent / "assets"
PHASES = ("queue_ms", "prefill_ms", "first_output_ms", "decode_ms", "total_ms")

console = Console()


class DemoError(Exception):
    """The demo ran, but what came out is not what it must be."""


def run(seed: int, port: int, out: Path) -> None:
    """Runs the demo and writes the speech to `out`.

    Raises:
        StartError, ChatError: the system did not start, or did not answer.
        DemoError: the speech is silent or of the wrong length.
    """
    from cli.tiny import make_checkpoint

    with tempfile.TemporaryDirectory(prefix="quartet-demo-") as scratch:
        with console.status("making a small random Qwen3-Omni checkpoint"):
            checkpoint = make_checkpoint(Path(scratch) / "quartet-tiny", seed=seed, size="tiny")
        console.print(f"made a small random Qwen3-Omni checkpoint (seed {seed})")
        options = Options(str(checkpoint), port=port, run_directory=Path(scratch) / "run")
        console.print("starting thinker, talker, code2wav and gateway, each a process of its own")
        with running(options) as stack:
            console.print("\n[bold]a picture and a spoken question[/bold] (a random model answers in babble):")
            content = [part("image", ASSETS / "picture.png"), part("audio", ASSETS / "question.wav")]
            settings = {
                "modalities": ["text", "audio"],
                "audio": {"format": "pcm16"},
                "max_tokens": 32,
                "seed": seed,
                "quartet": {"talker": {"max_frames": 64, "seed": seed}},
            }
            answer = ask(stack.url, content, settings, on_text=lambda text: console.out(text, end="", highlight=False))
            facts = httpx.get(f"{stack.url}/v1/models").json()["data"][0]["quartet"]
    console.print("\n")
    write_wav(answer, out)
    _check(answer, facts)
    console.print(_table(answer))
    console.print(
        f"wrote {out}: {answer.audio_s:.2f} s of speech at {answer.sample_rate_hz} Hz, {answer.frames} frames"
    )


def _check(answer: Answer, facts: dict[str, int]) -> None:
    samples = np.frombuffer(answer.pcm, np.int16)
    expected = answer.frames * facts["samples_per_frame"] - facts["trimmed_samples"]
    if len(samples) != expected:
        raise DemoError(f"{answer.frames} frames came to {len(samples)} samples; {expected} were expected")
    if np.abs(samples.astype(np.int32)).max() < 100:
        raise DemoError("the speech is silent")


def _table(answer: Answer) -> Table:
    table = Table(title="where the time went (ms)", title_justify="left")
    table.add_column("stage")
    for phase in PHASES:
        table.add_column(phase.removesuffix("_ms").replace("_", " "), justify="right")
    for stage, timings in answer.timings.items():
        table.add_row(stage, *(f"{timings[p]:.1f}" if timings.get(p) is not None else "-" for p in PHASES))
    table.add_section()
    first_audio = f"{answer.ttfa_ms:.1f}" if answer.ttfa_ms else "-"
    table.add_row("client", "TTFT", f"{answer.ttft_ms or 0:.1f}", f"TTFA {first_audio}", "", f"{answer.total_ms:.1f}")
    table.caption = f"RTF {answer.total_ms / 1000 / answer.audio_s:.2f} (time to the last audio over seconds of audio)"
    return table
