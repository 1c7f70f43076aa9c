"""Keys of a terminal, as they are pressed."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator

_TURN = {" ", "\n", "\r"}


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
        if _TURN & set(os.read(descriptor, 64).decode(errors="replace")):
            pressed()

    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # ctrl-C stays a signal
        loop.add_reader(descriptor, read)
        yield True
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
