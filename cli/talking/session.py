"""Runs a spoken conversation: sends, receives, reads the keys."""

import asyncio
import base64
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import httpx

from cli.talking import screen
from cli.talking.connection import Connection, opened
from cli.talking.dialogue import MARK, Dialogue
from cli.talking.sound import PIECE_BYTES, PIECE_MS, InputMeter, PlaybackBuffer

BackgroundTask: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

_SHOW_S = 0.1
_MARK_PIECES = 5  # a file is at most this far ahead of the server
_MOST_SILENCE_S = 30.0  # after a file, for its last turn to end
_TRANSCRIPT_S = 30.0  # wait for the last transcripts


def session_settings(
    voice: str | None, instructions: str | None, transcription: dict[str, Any] | None, *, is_written: bool, vad: str
) -> dict[str, Any]:
    detection = None if vad == "manual" else {"type": f"{vad}_vad"}
    output = {} if voice is None else {"output": {"voice": voice}}
    return {
        "type": "realtime",
        "output_modalities": ["text" if is_written else "audio"],
        **({} if instructions is None else {"instructions": instructions}),
        "audio": {"input": {"turn_detection": detection, "transcription": transcription}, **output},
    }


class TalkSession:
    """A conversation.

    Args:
        settings: for session.update.
        may_interrupt: the user may speak while the model does.

    Attributes:
        dialogue: None until the session has begun.
    """

    def __init__(self, settings: dict[str, Any], vad: str, may_interrupt: bool, playback: PlaybackBuffer) -> None:
        self._settings, self._is_manual, self._may_interrupt = settings, vad == "manual", may_interrupt
        self._is_written = settings["output_modalities"] == ["text"]
        self._playback, self._sent = playback, InputMeter()
        self._microphone: asyncio.Queue[bytes] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.dialogue: Dialogue | None = None

    def add_microphone(self, piece: bytes) -> None:
        """Thread-safe."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the conversation is over
                self._loop.call_soon_threadsafe(self._microphone.put_nowait, piece)

    async def run(
        self,
        client: httpx.Client,
        model: str,
        pieces: Iterator[bytes] | None,
        in_real_time: bool,
        *beside: BackgroundTask,
    ) -> None:
        """Talks until the file is answered; from the microphone until it is cancelled. Raises CommandError.

        Args:
            pieces: of the file; None: the microphone's.
            in_real_time: the file is sent no faster than it was spoken.
            beside: tasks that run meanwhile.
        """
        async with opened(client, model) as connection:
            effective = await connection.begin(self._settings)
            dialogue = self.dialogue = Dialogue(
                self._playback,
                self._sent,
                screen.say,
                may_interrupt=self._may_interrupt,
                is_written=self._is_written,
                is_transcribed=bool(effective["audio"]["input"].get("transcription")),
            )
            self._loop = asyncio.get_running_loop()
            if pieces is None:
                sending = self._talk(connection, dialogue)
            else:
                sending = self._send_file(connection, dialogue, pieces, in_real_time)
            work = [sending, self._receive(connection, dialogue), self._show(connection, dialogue)]
            work += [run() for run in beside]
            await _until_one_ends(work)

    async def _receive(self, connection: Connection, dialogue: Dialogue) -> None:
        while True:
            for event in dialogue.take(await connection.event(), time.monotonic()):
                await connection.send(event)

    async def _show(self, connection: Connection, dialogue: Dialogue) -> None:
        def pressed() -> None:
            for event in dialogue.end_turn() if self._is_manual else dialogue.interrupt():
                task = asyncio.create_task(connection.send(event))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        with screen.turn_key(pressed) as has_keys:
            what = "space ends your turn, or the model's" if self._is_manual else "space silences the model"
            hint = f"{what}; ctrl-C ends" if has_keys else "ctrl-C ends"
            with screen.shown(dialogue, self._sent, time.monotonic, hint) as renew:
                while True:
                    dialogue.tick(time.monotonic())
                    renew()
                    await asyncio.sleep(_SHOW_S)

    async def _talk(self, connection: Connection, dialogue: Dialogue) -> None:
        """Sends silence while the microphone is muted."""
        while True:
            piece = await self._microphone.get()
            if self._is_manual and dialogue.is_answering:
                continue
            is_muted = dialogue.is_muted(time.monotonic())
            await self._append(connection, bytes(len(piece)) if is_muted else piece)

    async def _send_file(
        self, connection: Connection, dialogue: Dialogue, pieces: Iterator[bytes], in_real_time: bool
    ) -> None:
        """Returns when all of it is answered."""
        pace = _Pace(connection, dialogue, in_real_time, waits=not self._may_interrupt and not self._is_manual)
        for piece in pieces:
            await pace.next()
            await self._append(connection, piece)
        if self._is_manual:
            for event in dialogue.end_turn():
                await connection.send(event)
        else:
            await self._end_last_turn(connection, dialogue, pace)
        await _until(lambda: not dialogue.is_answering)
        with suppress(TimeoutError):
            async with asyncio.timeout(_TRANSCRIPT_S):
                await _until(lambda: not dialogue.untranscribed)

    async def _end_last_turn(self, connection: Connection, dialogue: Dialogue, pace: "_Pace") -> None:
        """Sends silence until the server has detected the last turn's end."""
        first_silent_mark = 0
        for _ in range(round(_MOST_SILENCE_S * 1000 / PIECE_MS)):
            await pace.next()
            await self._append(connection, bytes(PIECE_BYTES))
            first_silent_mark = first_silent_mark or pace.marks
            if dialogue.read > first_silent_mark + 1 and not dialogue.user_speaks:
                return

    async def _append(self, connection: Connection, piece: bytes) -> None:
        self._sent.add(piece, time.monotonic())
        await connection.send({"type": "input_audio_buffer.append", "audio": base64.b64encode(piece).decode()})


class _Pace:
    """Times the pieces of a file. Requests that the server refuses show how far it has read: refusals come in order.

    Args:
        waits: no piece is sent while the model answers, or far ahead of the server.
    """

    def __init__(self, connection: Connection, dialogue: Dialogue, in_real_time: bool, waits: bool) -> None:
        self._connection, self._dialogue = connection, dialogue
        self._in_real_time, self._waits = in_real_time, waits
        self._due_s, self._pieces, self.marks = time.monotonic(), 0, 0

    async def next(self) -> None:
        """Returns when the next piece is due."""
        if self._pieces % _MARK_PIECES == 0:
            self.marks += 1
            mark = f"{MARK}{self.marks}"
            await self._connection.send({"type": "conversation.item.retrieve", "item_id": mark, "event_id": mark})
        self._pieces += 1
        if self._waits:
            await _until(lambda: self._dialogue.read >= self.marks - 1)
            await _until(lambda: not self._dialogue.is_answering)
        if self._in_real_time:
            self._due_s = max(self._due_s + PIECE_MS / 1000, time.monotonic() - PIECE_MS / 1000)
            await asyncio.sleep(self._due_s - time.monotonic())


async def _until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(PIECE_MS / 4000)


async def _until_one_ends(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Cancels the others then. Raises its error."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
