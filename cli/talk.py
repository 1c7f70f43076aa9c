"""`quartet talk`: a spoken conversation with a running server."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.create import LOCAL, ApiKey, Url, format_by_suffix

if TYPE_CHECKING:
    from cli.talking.conversation import Beside
    from cli.talking.dialogue import Dialogue
    from cli.talking.playback import Playback

Device = Annotated[str | None, typer.Option(help="name or number; default: the system's")]


def talk(
    url: Url = LOCAL,
    in_: Annotated[
        Path | None,
        typer.Option("--in", exists=True, dir_okay=False, help="sound or film to send instead of the microphone"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help=".wav file of what is heard; default: the speakers")] = None,
    voice: Annotated[str | None, typer.Option(help="one of those that `quartet voice list` shows")] = None,
    instructions: Annotated[str | None, typer.Option(help="how the model is to answer")] = None,
    text: Annotated[bool, typer.Option("--text", help="answers are written, not spoken")] = False,
    vad: Annotated[
        Literal["server", "semantic", "manual"],
        typer.Option(help="what ends your turn: a silence; a silence that adapts to you; space (of --in: its end)"),
    ] = "server",
    headphones: Annotated[
        bool,
        typer.Option(
            "--headphones",
            help="you may interrupt the model by speaking. Without it the microphone is off while the model speaks, as "
            "nothing here removes the echo of speakers, and --in waits",
        ),
    ] = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="send --in as fast as it is heard; default: in real time")
    ] = False,
    no_transcript: Annotated[
        bool, typer.Option("--no-transcript", help="what you say is not written down: a request less each turn")
    ] = False,
    microphone: Device = None,
    speakers: Device = None,
    api_key: ApiKey = None,
) -> None:
    """Talk with a running server, until ctrl-C or the end of --in. Space or Enter silences the model."""
    from cli.http import connect
    from cli.talking.connection import model_that_converses
    from cli.talking.conversation import Conversation, session
    from cli.talking.playback import Playback
    from cli.terminal import CommandError

    _check(in_, out, text, vad, fast)
    playback, failure = Playback(), None
    with connect(url, api_key) as client, ExitStack() as in_use:
        model = model_that_converses(client, speaks=not text)
        settings = session(
            voice=voice,
            instructions=instructions,
            is_written=text,
            vad=vad,
            transcription=None if no_transcript else {"model": model},
        )
        conversation = Conversation(settings, vad, headphones, playback)
        pieces = _spoken(in_use, in_, microphone, conversation.hear)
        beside = [] if text else _heard(in_use, out, speakers, playback)
        try:
            with suppress(KeyboardInterrupt):
                asyncio.run(conversation.run(client, model, pieces, not fast, *beside))
        except CommandError as error:
            if conversation.dialogue is None:
                raise
            failure = error  # told last, below what was talked
    if conversation.dialogue is not None:
        _sum_up(conversation.dialogue, out)
    if failure is not None:
        raise failure


def _check(in_: Path | None, out: Path | None, text: bool, vad: str, fast: bool) -> None:
    """Raises typer.BadParameter: the flags do not fit together."""
    if out is not None and text:
        raise typer.BadParameter("has no effect with --text: nothing is heard", param_hint="--out")
    if out is not None:
        format_by_suffix(out, {".wav": "wav"})
    if fast and in_ is None:
        raise typer.BadParameter("is of --in", param_hint="--fast")
    if vad == "manual" and in_ is None and not sys.stdin.isatty():
        raise typer.BadParameter("manual needs a keyboard: stdin is no terminal", param_hint="--vad")


def _spoken(
    in_use: ExitStack, file: Path | None, microphone: str | None, hear: Callable[[bytes], None]
) -> Iterator[bytes] | None:
    """The file's sound; None: `hear` gets the microphone's. Raises CommandError."""
    from cli.talking import devices, recording

    if file is not None:
        return recording.pieces(file)
    in_use.enter_context(devices.microphone(microphone, hear))
    return None


def _heard(in_use: ExitStack, out: Path | None, speakers: str | None, playback: "Playback") -> "list[Beside]":
    """Has the speakers play, or the file written by what runs beside the conversation. Raises CommandError."""
    from cli.talking import devices, recording

    if out is not None:
        return [in_use.enter_context(recording.recorder(playback, out))]
    in_use.enter_context(devices.speakers(speakers, playback))
    return []


def _sum_up(dialogue: "Dialogue", out: Path | None) -> None:
    from cli.talking import screen, summary

    dialogue.close()
    for line in summary.lines(dialogue):
        screen.say(screen.NOTE, line)
    if out is not None:
        typer.echo(f"wrote {out}")
