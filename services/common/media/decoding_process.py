"""python -m services.common.media.decoding_process MEMORY_BYTES: decodes files, with a memory limit.

It imports no torch. Each connection's process keeps the files that it is sent until it has to forget them.
"""

import contextlib
import gc
import socket
import sys
from functools import partial
from typing import Any

import numpy as np

from services.common.engine.forking import limit_memory, serve
from services.common.engine.process import lower_priority
from services.common.media import TOO_LARGE, MediaError
from services.common.media.calls import read
from services.common.media.wire import Wire


def work(memory_bytes: int, connection: socket.socket) -> None:
    limit_memory(memory_bytes)
    wire, files = Wire(connection), list[bytes]()
    with contextlib.suppress(EOFError):
        while True:
            job, payload = wire.receive()
            if not job:
                files.clear()
                continue
            name, index, *arguments = job
            if index == len(files):
                files.append(payload.tobytes())
            del payload
            _answer(wire, name, files[index], arguments)


def _answer(wire: Wire, name: str, data: bytes, arguments: list[Any]) -> None:
    """Sends the results, each as {"value"} or, of an array, {"type", "shape"}; then {}, or {"error"} of the file, or
    {"fault"} of the program."""
    try:
        for result in read(name, data, *arguments):
            if isinstance(result, np.ndarray):
                wire.send({"type": str(result.dtype), "shape": result.shape}, np.ascontiguousarray(result).data)
            else:
                wire.send({"value": result})
        end = {}
    except EOFError:
        raise
    except MediaError as error:
        end = {"error": str(error)}
    except MemoryError:
        end = {"error": TOO_LARGE}
    except Exception as error:
        end = {"fault": f"{type(error).__name__}: {error}"}
    wire.send(end)


def main() -> None:
    lower_priority()
    from PIL import Image

    import services.common.media.frames
    import services.common.media.sound  # noqa: F401

    Image.init()
    gc.collect()
    gc.freeze()
    serve(partial(work, int(sys.argv[1])))


if __name__ == "__main__":
    main()
