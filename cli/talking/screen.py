"""The terminal of a conversation: lines on stdout, a bar with level and speaker, and keys as they are pressed."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cli.talking.dialogue import ERROR, MODEL, NOTE, USER, Dialogue
from cli.talking.sound import InputMeter
from cli.terminal import console

_TURN_KEYS = {" ", "\n", "\r"}
_STYLES = {USER: "bold cyan", MODEL: "bold green", NOTE: "dim", ERROR: "bold red"}
_BAR_CELLS, _QUIETEST_DB, _TOO_LOUD_DB = 24, -60.0, -3.0


def say(who: str, what: str) -> None:
    """Prints a line of a speaker; NOTE names none."""
    line = Text.assemble((f"{who}: ", _STYLES[who]), what) if who else Text(what, _STYLES[NOTE])
    # Where both are the terminal, the bar's console has to know of the line: it would wipe it out.
    of = console if console.is_terminal and sys.stdout.isatty() else Console()
    of.print(line, highlight=False, soft_wrap=True)


def bar(level_db: float) -> Text:
    """Draws a level from -60 dB to 0."""
    share = min(1.0, max(0.0, 1 - level_db / _QUIETEST_DB))
    cells = round(share * _BAR_CELLS)
    style = "red" if level_db > _TOO_LOUD_DB else "cyan"
    return Text.assemble(("█" * cells, style), ("░" * (_BAR_CELLS - cells), "dim"))


@contextlib.contextmanager
def shown(dialogue: Dialogue, sent: InputMeter, now_s: Callable[[], float], hint: str) -> Iterator[Callable[[], None]]:
    """Shows the state below the lines, on a terminal only. Yields a function that renews it.

    Args:
        hint: the available keys.
    """
    if not console.is_terminal:
        yield lambda: None
        return

    def state() -> Text:
        muted = dialogue.is_muted(now_s())
        who = "model" if muted else "you" if dialogue.user_speaks else "..." if dialogue.is_answering else "listening"
        head = Text.assemble(bar(sent.level_db), f" {sent.level_db:4.0f} dB  ", (who, "bold"), (f"  {hint}", "dim"))
        head.truncate(console.width)
        return Text("\n").join([*_unfinished(dialogue), head])

    # stdout may be a file: the bar is no part of it
    with Live(
        state(), console=console, auto_refresh=False, transient=True, redirect_stdout=sys.stdout.isatty()
    ) as live:
        yield lambda: live.update(state(), refresh=True)


def _unfinished(dialogue: Dialogue) -> Iterator[Text]:
    """The end of each unfinished text, one line each."""
    answer = dialogue.answer
    for who, text in ((USER, dialogue.user_text), (MODEL, answer.text if answer else "")):
        if text:
            room = max(1, console.width - len(who) - 2)
            yield Text.assemble((f"{who}: ", _STYLES[who]), " ".join(text.split())[-room:])


@contextlib.contextmanager
def turn_key(pressed: Callable[[], object]) -> Iterator[bool]:
    """Calls `pressed` on space and Enter. Yields whether there is a keyboard."""
    if not sys.stdin.isatty() or os.name != "posix":
        yield False
        return
    import termios
    import tty

    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        if _TURN_KEYS & set(os.read(descriptor, 64).decode(errors="replace")):
            pressed()

    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # ctrl-C stays a signal
        loop.add_reader(descriptor, read)
        yield True
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
