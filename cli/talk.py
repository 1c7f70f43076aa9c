"""`quartet talk`: a spoken conversation with a running server."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.create import LOCAL, ApiKey, Url, file_option, format_by_suffix
from cli.http import connect

if TYPE_CHECKING:
    from cli.talking.session import BackgroundTask
    from cli.talking.sound import PlaybackBuffer

Vad = Literal["server", "semantic", "manual"]
In = Annotated[Path | None, file_option("sound or video to send instead of the microphone", "--in")]
Headphones = Annotated[
    bool,
    typer.Option(
        "--headphones",
        help="you may interrupt the model by speaking. Without it the microphone is off while the model speaks, as "
        "nothing here removes the echo of speakers, and --in waits",
    ),
]
Device = Annotated[str | None, typer.Option(help="name or number; default: the system's")]


def talk(
    url: Url = LOCAL,
    in_: In = None,
    out: Annotated[Path | None, typer.Option(help=".wav file of the model's speech; default: the speakers")] = None,
    voice: Annotated[str | None, typer.Option(help="one of those that `quartet voice list` shows")] = None,
    instructions: Annotated[str | None, typer.Option(help="how the model is to answer")] = None,
    text: Annotated[bool, typer.Option("--text", help="answers are written, not spoken")] = False,
    vad: Annotated[
        Vad, typer.Option(help="what ends your turn: a silence; a silence that adapts to you; space (of --in: its end)")
    ] = "server",
    headphones: Headphones = False,
    fast: Annotated[bool, typer.Option("--fast", help="send --in at once; default: in real time")] = False,
    no_transcript: Annotated[
        bool, typer.Option("--no-transcript", help="your speech is not transcribed: a request less each turn")
    ] = False,
    microphone: Device = None,
    speakers: Device = None,
    api_key: ApiKey = None,
) -> None:
    """Talk with a running server, until ctrl-C or the end of --in. Space or Enter silences the model."""
    from cli.talking import screen
    from cli.talking.connection import model_that_converses
    from cli.talking.session import TalkSession, session_settings
    from cli.talking.sound import PlaybackBuffer

    _check(in_, out, text, vad, fast)
    playback = PlaybackBuffer()
    with connect(url, api_key) as client, ExitStack() as devices:
        model = model_that_converses(client, speaks=not text)
        transcription = None if no_transcript else {"model": model}
        settings = session_settings(voice, instructions, transcription, is_written=text, vad=vad)
        session = TalkSession(settings, vad, headphones, playback)
        pieces = _input(devices, in_, microphone, session.add_microphone)
        beside = [] if text else _output(devices, out, speakers, playback)
        try:
            with suppress(KeyboardInterrupt):
                asyncio.run(session.run(client, model, pieces, not fast, *beside))
        finally:  # an error of the session is printed below its summary
            if session.dialogue is not None:
                devices.close()
                session.dialogue.close()
                for line in session.dialogue.summary():
                    screen.say(screen.NOTE, line)
                if out is not None:
                    typer.echo(f"wrote {out}")


def _check(in_: Path | None, out: Path | None, text: bool, vad: str, fast: bool) -> None:
    """Raises typer.BadParameter: the flags do not fit together."""
    if out is not None and text:
        raise typer.BadParameter("has no effect with --text: nothing is spoken", param_hint="--out")
    if out is not None:
        format_by_suffix(out, {".wav": "wav"})
    if fast and in_ is None:
        raise typer.BadParameter("is of --in", param_hint="--fast")
    if vad == "manual" and in_ is None and not sys.stdin.isatty():
        raise typer.BadParameter("manual needs a keyboard: stdin is no terminal", param_hint="--vad")


def _input(
    devices_in_use: ExitStack, file: Path | None, microphone: str | None, add: Callable[[bytes], None]
) -> Iterator[bytes] | None:
    """None: `add` gets the microphone's sound. Raises CommandError."""
    from cli.talking import devices, recording

    if file is not None:
        return recording.pieces(file)
    devices_in_use.enter_context(devices.microphone(microphone, add))
    return None


def _output(
    devices_in_use: ExitStack, out: Path | None, speakers: str | None, playback: "PlaybackBuffer"
) -> "list[BackgroundTask]":
    """Starts the speakers, or returns what writes the file. Raises CommandError."""
    from cli.talking import devices, recording

    if out is not None:
        return [devices_in_use.enter_context(recording.recorder(playback, out))]
    devices_in_use.enter_context(devices.speakers(speakers, playback))
    return []
