"""Rank 0: its models, and the processes of the other ranks, which it starts, calls, watches and ends."""

import atexit
import contextlib
import multiprocessing
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import connection as connections
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import distributed
from torch.distributed.distributed_c10d import _abort_process_group

from services.common.engine.device import engine_device
from services.diffusion.families import DENOISERS
from services.diffusion.pipelines import find_checkpoint
from services.dit.batching import Arguments
from services.dit.config import DitSettings
from services.dit.context_parallel.ranks import check, join
from services.dit.context_parallel.worker import pack_call, send_call, work
from services.dit.coroutine import BatchPoint
from services.dit.models import Loras, Models, ModelsLost

START_TIMEOUT_S = 900.0  # loading a checkpoint takes minutes
REPLY_TIMEOUT_S = 20.0  # ranks end a call at about the same time
STOP_TIMEOUT_S = 5.0

log = structlog.get_logger()


class GroupFailed(ModelsLost):
    """A process of the group is gone, or no longer where the others are."""


class Group:
    """Ranks 1 and up, on this machine. A process can be in one group at a time.

    Through its pipe a rank sends None when it has loaded, when it has joined and after each call, or what went wrong.
    Rank 0 sends it calls (`worker.send_call`), and None to end it.

    Raises:
        ValueError: the settings do not fit the checkpoint or the machine.
    """

    def __init__(self, settings: DitSettings) -> None:
        check(settings, find_checkpoint(settings.model))
        self._settings, self._device = settings, engine_device(settings.device)
        self._failure: GroupFailed | None = None
        self._failed: Callable[[Exception], object] = lambda error: None
        self._give_up: Callable[[Exception], object] = lambda error: None
        self._replies: queue.SimpleQueue[str | GroupFailed | None] = queue.SimpleQueue()
        self._between_calls, self._closing, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="quartet-dit-"))
        self._store = self._folder / "store"
        self._pipes: list[Connection] = []
        self.processes = []
        atexit.register(self.close)
        for rank in range(1, settings.parallel_devices):
            self._start(rank)
        threading.Thread(target=self._listen, name="dit-group", daemon=True).start()

    def _start(self, rank: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        pipe, theirs = spawn.Pipe()
        device = "cpu" if self._device.type == "cpu" else f"cuda:{rank}"
        arguments = (rank, self._settings.model_dump() | {"device": device}, self._store, theirs)
        process = spawn.Process(target=work, args=arguments, name=f"dit-{rank}", daemon=True)
        process.start()
        theirs.close()  # so that its end shows here
        self.processes.append(process)
        self._pipes.append(pipe)

    def join(self, denoisers: list[Any]) -> None:
        """Makes `denoisers` parts of all ranks'. Blocks; raises GroupFailed if a rank could not start."""
        self._agree()
        join(self._settings, 0, self._store, denoisers)
        self._agree()
        self._between_calls.set()

    def watch(self, failed: Callable[[Exception], object], give_up: Callable[[Exception], object]) -> None:
        """See `Models.watch`."""
        with self._lock:
            self._failed, self._give_up = failed, give_up
            failure = self._failure
        if failure is not None:
            failed(failure)

    def run(self, name: str, arguments: dict[str, Any], loras: Any, forward: Callable[[], Any]) -> Any:
        """`forward()`, while the other ranks call the denoiser `name` with `arguments` and the adapters `loras`.

        Raises:
            GroupFailed: now or before.
            ValueError: diffusers cannot share such a sequence.
            Exception: what `forward` raised, when all ranks did.
        """
        if self._failure is not None:
            raise self._failure
        packed = pack_call((name, arguments, loras))
        result, error = None, None
        self._between_calls.clear()
        try:
            send_call(packed, self._pipes)
            result = forward()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # now, to know that it is no result of half a group
        except Exception as raised:
            error = raised
        finally:
            self._between_calls.set()
        replies = self._collect(REPLY_TIMEOUT_S, error)
        if error is None and not any(replies):
            return result
        if error is None or not all(replies):
            raise self._fail(f"ranks disagree about a call: rank 0 has {error!r}, the others {replies}")
        if isinstance(error, AssertionError):  # how diffusers refuses a sequence that is too short for all ranks
            raise ValueError(str(error)) from error
        raise error

    def close(self) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        atexit.unregister(self.close)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(STOP_TIMEOUT_S if self._between_calls.is_set() else 0)  # else it does not listen
            process.kill()
            process.join()
        # a thread that is in a call may still use it; then the process is about to end anyway
        if self._between_calls.is_set() and distributed.is_initialized():
            with contextlib.suppress(RuntimeError):
                distributed.destroy_process_group()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _agree(self) -> None:
        failed = [reply for reply in self._collect(START_TIMEOUT_S) if reply]
        if failed:
            raise self._fail(f"could not start: {failed[0]}")

    def _collect(self, timeout_s: float, error: Exception | None = None) -> list[str | None]:
        replies = []
        while len(replies) < len(self.processes):
            try:
                reply = self._replies.get(timeout=timeout_s)
            except queue.Empty:
                raise self._fail(f"a process did not answer within {timeout_s:g} s; rank 0 has {error!r}") from error
            if isinstance(reply, GroupFailed):
                raise reply from error
            replies.append(reply)
        return replies

    def _listen(self) -> None:
        """In a thread of its own, as an engine that waits for a rank's part does not see the rank's error."""
        open_pipes = list(self._pipes)
        while open_pipes:
            for pipe in connections.wait(open_pipes):
                assert isinstance(pipe, Connection)
                try:
                    reply = pipe.recv()
                except (EOFError, OSError):
                    open_pipes.remove(pipe)
                    self._lost(self._pipes.index(pipe))
                    continue
                self._replies.put(reply)
                if reply is not None and not self._between_calls.wait(STOP_TIMEOUT_S):
                    self._fail(f"rank {self._pipes.index(pipe) + 1} failed in a call that rank 0 waits in: {reply}")

    def _lost(self, index: int) -> None:
        if self._closing.is_set():
            return
        process = self.processes[index]
        process.join(STOP_TIMEOUT_S)
        self._fail(f"the process of rank {index + 1} ended with exit status {process.exitcode}")

    def _fail(self, reason: str) -> GroupFailed:
        """Notes the first failure and ends the others' processes, which also ends what rank 0 waits for."""
        with self._lock:
            if self._failure is not None:
                return self._failure
            self._failure = failure = GroupFailed(f"context parallelism: {reason}")
            if self._closing.is_set():
                return failure
        log.error("the context-parallel group failed", reason=reason)
        for process in self.processes:
            process.kill()
        self._replies.put(failure)
        self._failed(failure)
        if self._device.type == "cuda" and distributed.is_initialized():
            with contextlib.suppress(Exception):
                _abort_process_group()
        threading.Thread(target=self._insist, args=(failure,), daemon=True).start()
        return failure

    def _insist(self, failure: GroupFailed) -> None:
        if not self._closing.wait(STOP_TIMEOUT_S):
            self._give_up(failure)


class ParallelModels(Models):
    """Models whose denoisers are called on all devices.

    Raises:
        ValueError: as `Models`, and as `Group`.
        GroupFailed: another device's process could not start.
    """

    def __init__(self, settings: DitSettings) -> None:
        self.group = Group(settings)
        try:
            super().__init__(settings)
            if settings.context_parallel.get("ring", 1) > 1 and self.family.batching.padded:
                self.info.not_batched = "prompts of several lengths need a mask, and a ring takes none"
                self.info.batched = False
            self.group.join(self.denoisers)
        except BaseException:
            self.close()
            raise

    def watch(self, failed: Callable[[Exception], object], give_up: Callable[[Exception], object]) -> None:
        self.group.watch(failed, give_up)

    def close(self) -> None:
        self.group.close()

    def run(self, point: BatchPoint, arguments: Arguments, loras: Loras) -> Any:
        if point.name not in DENOISERS:
            return point.run(arguments)
        return self.group.run(point.name, arguments, loras, lambda: point.run(arguments))
