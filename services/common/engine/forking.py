"""Work in libraries that can neither be stopped nor limited, in processes that end with whom they work for.

A process imports the libraries once, calls `serve`, and forks one of its own for each connection. This one is killed
when the connection is closed, and all are when the process that started them is gone.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from services.common.engine.process import die_with_parent

HELLO = b"\n"
"""What the process of a connection sends first."""

_CONTROL = 0  # the descriptor by which connections come


class ForkServer:
    """Starts `command`, a process that calls `serve`, when it is needed. For any thread.

    Args:
        environment: of the process, beside this one's.
    """

    def __init__(self, command: Sequence[str], **environment: str) -> None:
        self._command, self._environment = command, environment
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int:
        """0: it was not started."""
        return self._process.pid if self._process else 0

    def runs(self, within_s: float = 0.0) -> bool:
        """Whether it does, and does not end `within_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process is not None and self._process.wait(within_s) is None
        return True

    def start(self) -> None:
        """Starts the process, unless it runs."""
        with self._lock:
            if not self.runs():
                self._let_go()
                self._control, theirs = socket.socketpair()
                with theirs:
                    # vLLM sets LD_PRELOAD for its own workers: libraries of torch, another allocator
                    environment = os.environ | {"LD_PRELOAD": ""} | self._environment
                    self._process = subprocess.Popen(self._command, stdin=theirs.fileno(), env=environment)

    def connect(self) -> socket.socket:
        """A connection to a new process, which may still have to start. It is closed if that cannot be."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            self.start()
            assert self._control is not None
            socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Ends the process, and all that it forked."""
        with self._lock:
            self._let_go()
            if self._process is not None:
                self._process.wait()

    def _let_go(self) -> None:
        if self._control is not None:
            self._control.close()


def serve(work: Callable[[socket.socket], object]) -> NoReturn:
    """Calls `work` with each connection, in a process of its own, with a handle on nothing else."""
    woken, wake = os.pipe()  # by the end of a child
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all of them
    control = socket.socket(fileno=_CONTROL)
    running: dict[int, tuple[socket.socket, int]] = {}  # by descriptor: connection and process
    poll = select.poll()
    poll.register(_CONTROL, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        for left in ready & running.keys():  # before the ended: a client often leaves as its process ends
            os.kill(running[left][1], signal.SIGKILL)
            poll.unregister(left)
        if woken in ready:
            os.read(woken, 4096)
            for ended in [key for key, (_, pid) in running.items() if os.waitpid(pid, os.WNOHANG)[0]]:
                with contextlib.suppress(KeyError):  # its client has left
                    poll.unregister(ended)
                running.pop(ended)[0].close()
        if _CONTROL in ready:
            if not (received := socket.recv_fds(control, 1, 1)[1]):
                for _, pid in running.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            connection = socket.socket(fileno=received[0])
            pid = _fork(work, connection, [_CONTROL, woken, wake, *running])
            running[connection.fileno()] = connection, pid
            poll.register(connection, select.POLLRDHUP)


def _fork(work: Callable[[socket.socket], object], connection: socket.socket, others: Sequence[int]) -> int:
    own_id = os.getpid()
    if pid := os.fork():
        return pid
    try:
        die_with_parent(own_id)
        signal.set_wakeup_fd(-1)
        for descriptor in others:
            os.close(descriptor)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries' words quote what they work on
        with contextlib.suppress(OSError):  # if memory ends in the container, this process is the first to go
            Path("/proc/self/oom_score_adj").write_text("1000")
        connection.sendall(HELLO)
        work(connection)
    finally:
        os._exit(0)


def limit_memory(size_bytes: int) -> None:
    """Lets this process take `size_bytes` more than it has; then allocations fail."""
    with open("/proc/self/statm") as file:
        own = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (own + size_bytes, own + size_bytes))
