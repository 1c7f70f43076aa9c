"""`quartet demo`: asks the shipped models aloud, about an image and in writing, generates an image, and has one drawn
in the course of an answer, which is then spoken of."""

import base64
import contextlib
import io
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from cli.chat import ChatAnswer, ask, part, write_wav
from cli.generation import Image as MadeImage
from cli.generation import make_images
from cli.http import check, connect, files
from cli.plan import demo_options
from cli.ports import free_ports
from cli.run_files import temporary
from cli.terminal import CommandError, bar
from cli.up import running

ASSETS = Path(__file__).parent / "assets"
SPEECH, SHAPES = ASSETS / "sum.wav", ASSETS / "shapes.png"
PHASES = ("queue_ms", "prefill_ms", "first_output_ms", "decode_ms", "total_ms")
IMAGE_PROMPT = "a yellow cross on a blue ground"
IMAGE_COLOURS = ((240, 210, 30), (31, 80, 200))  # the shades of the model's yellow and blue
IMAGE_STEPS = 8
# Turns of one conversation, and what is right: the first answer has an image, made by the tool, and text about it.
DRAWN = (
    ("Draw a yellow cross on a blue ground.", "I see a yellow cross."),
    ("What shape is it?", "It is a cross."),
    ("What colour is the ground?", "It is blue."),
)
_NEAR = 60  # of red, green and blue, 0 to 255: as far as a pixel may be from its colour
VOICE = "ada"
STOP_GRACE_S = 3.0  # nobody else's requests are under way, and whoever presses ctrl-C waits

console = Console()


@dataclass(frozen=True)
class Question:
    """A question and its right answer; `follows`: it continues the previous conversation."""

    text: str
    answer: str
    follows: bool = False
    image: Path | None = None
    recording: Path | None = None

    @property
    def shown(self) -> str:
        if self.recording is not None:
            return f"aloud, {self.recording}"
        return self.text if self.image is None else f"{self.text} ({self.image})"

    @property
    def content(self) -> list[dict[str, Any]]:
        if self.recording is not None:
            return [part("audio", self.recording)]
        text = {"type": "text", "text": self.text}
        return [text] if self.image is None else [part("image", self.image), text]


QUESTIONS = (
    Question("What is seven plus five?", "Seven plus five is twelve.", recording=SPEECH),
    Question("And minus four?", "Twelve minus four is eight.", follows=True),
    Question("What do you see?", "I see two blue circles and a yellow star.", image=SHAPES),
    Question("What is the capital of Italy?", "The capital of Italy is Rome."),
)


def run(seed: int, port: int | None, out: Path, image_file: Path, *, verbose: bool = False) -> None:
    """Raises CommandError: the system did not start, or its output is wrong."""
    scratch = temporary("quartet-demo-")
    options = demo_options(
        port=port or free_ports(1)[0],
        run_directory=scratch / "run",
        temporary=scratch,
        stage_arguments={"gateway": [f"--jobs-dir={scratch}/jobs"]},
        verbose=verbose,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        system = stack.enter_context(running(options, STOP_GRACE_S))
        client = stack.enter_context(connect(system.url))
        text, begins = _transcript(client)
        console.print(f"heard in {SPEECH}: [bold]{text}[/bold] (words begin at {begins} s)\n")
        answers = _converse(client, seed)
        image = _make_image(client, seed)
        drawn = _draw(client)
    write_wav(answers[-1], out)
    image_file.write_bytes(image.content)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        _check_speech(answer)
        if answer.text != question.answer:
            raise CommandError(f"{question.shown}: {answer.text!r} is wrong; {question.answer!r} is right")
    _check_image(image.content)
    _check_drawn(drawn)
    answer = answers[-1]
    console.print(_table(answer, image))
    console.print(
        f"wrote {out}: {answer.text!r}, {answer.audio_s:.2f} s of speech at {answer.facts['sample_rate_hz']} Hz, "
        f"{answer.frames} frames"
    )
    console.print(f"wrote {image_file}: {IMAGE_PROMPT}, {image.size}, {image.num_inference_steps} steps")
    console.print(
        "\ntalk to it: [bold]quartet up[/bold] in one terminal; in another [bold]quartet talk[/bold], "
        '[bold]quartet chat "What is nine minus three?" --out answer.wav[/bold] or '
        f"[bold]quartet image {IMAGE_PROMPT!r} --out cross.png[/bold]"
    )


def _transcript(client: httpx.Client) -> tuple[str, str]:
    """The text, and when its words begin."""
    form = {"model": check(client.get("/v1/models")).json()["data"][0]["id"], "response_format": "verbose_json"}
    form["timestamp_granularities[]"] = "word"
    told = check(client.post("/v1/audio/transcriptions", data=form, files=files("file", [SPEECH]))).json()
    return told["text"], ", ".join(f"{word['start']:.2f}" for word in told["words"])


def _converse(client: httpx.Client, seed: int) -> list[ChatAnswer]:
    settings = {
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16", "voice": VOICE},
        "temperature": 0,
        "max_tokens": 64,
        "quartet": {"talker": {"max_frames": 200, "seed": seed}},
    }
    answers: list[ChatAnswer] = []
    before: list[dict[str, Any]] = []
    for question in QUESTIONS:
        before = before if question.follows else []
        console.print(f"[bold]{question.shown}[/bold]")
        messages = [*before, {"role": "user", "content": question.content}]
        answer = ask(client, messages, settings, lambda text: console.out(text, end="", highlight=False))
        console.print(f"   [dim]{answer.audio_s:.1f} s of speech, the first after {answer.ttfa_ms or 0:.0f} ms[/dim]\n")
        before = [*messages, {"role": "assistant", "content": answer.text}]
        answers.append(answer)
    return answers


def _make_image(client: httpx.Client, seed: int) -> MadeImage:
    console.print(f"[bold]paints {IMAGE_PROMPT}[/bold]\n")
    body = {"prompt": IMAGE_PROMPT, "num_inference_steps": IMAGE_STEPS, "seed": seed}
    with bar("waiting") as report:
        (image,) = make_images(client, body, (), report)
    return image


def _draw(client: httpx.Client) -> list[list[dict[str, Any]]]:
    """The items of each answer."""
    body = {
        "model": check(client.get("/v1/models")).json()["data"][0]["id"],
        "tools": [{"type": "image_generation"}],
        "temperature": 0,
    }
    turns: list[list[dict[str, Any]]] = []
    for question, _ in DRAWN:
        console.print(f"[bold]{question}[/bold]")
        answer = check(client.post("/v1/responses", json=body | {"input": question})).json()
        body["previous_response_id"] = answer["id"]
        for item in answer["output"]:
            console.out(_said(item) or f"({item['type']}: {item.get('revised_prompt')})", highlight=False)
        turns.append(answer["output"])
    console.print()
    return turns


def _said(item: dict[str, Any]) -> str:
    return "".join(each["text"] for each in item["content"]) if item["type"] == "message" else ""


def _check_drawn(turns: list[list[dict[str, Any]]]) -> None:
    for items, (question, right) in zip(turns, DRAWN, strict=True):
        said = "".join(map(_said, items))
        if said != right:
            raise CommandError(f"{question} {said!r} is wrong; {right!r} is right")
    results = [item["result"] for item in turns[0] if item["type"] == "image_generation_call"]
    if not results or results[0] is None:
        raise CommandError(f"{DRAWN[0][0]} no image was made")
    _check_image(base64.b64decode(results[0]))


def _check_speech(answer: ChatAnswer) -> None:
    samples = np.frombuffer(answer.pcm, np.int16)
    expected = answer.frames * answer.facts["samples_per_frame"] - answer.facts["trimmed_samples"]
    if len(samples) != expected:
        raise CommandError(f"{answer.frames} frames came to {len(samples)} samples; {expected} were expected")
    if np.abs(samples.astype(np.int32)).max() < 100:
        raise CommandError("the speech is silent")


def _check_image(file: bytes) -> None:
    """Checks for a cross of its colour, and the ground's colour at the edges."""
    try:
        pixels = np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(int)
    except OSError as error:
        raise CommandError(f"the picture's file is broken: {error}") from None
    cross, ground = (np.abs(pixels - colour).max(axis=2) < _NEAR for colour in IMAGE_COLOURS)
    edges = np.concatenate((ground[0], ground[-1], ground[:, 0], ground[:, -1]))
    if edges.mean() < 0.9 or not 0.02 < cross.mean() < 0.6:
        raise CommandError(
            f"the picture is not {IMAGE_PROMPT}: {cross.mean():.0%} of it is yellow, "
            f"{edges.mean():.0%} of its edges are blue"
        )


def _table(answer: ChatAnswer, image: MadeImage) -> Table:
    table = Table(title="where the time of the last answer and of the picture went (ms)", title_justify="left")
    table.add_column("stage")
    for phase in PHASES:
        table.add_column(phase.removesuffix("_ms").replace("_", " "), justify="right")
    for stage, timings in (answer.timings | {"dit": image.timings}).items():
        table.add_row(stage, *(f"{timings[p]:.1f}" if timings.get(p) is not None else "-" for p in PHASES))
    table.add_section()
    first_audio = f"{answer.ttfa_ms:.1f}" if answer.ttfa_ms else "-"
    table.add_row(
        "client: answer", "TTFT", f"{answer.ttft_ms or 0:.1f}", f"TTFA {first_audio}", "", f"{answer.total_ms:.1f}"
    )
    table.add_row("client: picture", "", "", "", "", f"{image.total_ms:.1f}")
    table.caption = f"RTF {answer.total_ms / 1000 / answer.audio_s:.2f} (time to the last audio over seconds of audio)"
    return table
