"""python -m services.thinker.grammar_process SOCKET FOLDER VOCAB_SIZE: compiles grammars, each in a process of its own.

A process is killed when the connection that its job came by is closed. XGrammar can neither be stopped nor limited.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

from services.common.engine.process import die_with_parent, lower_engine_priority
from services.common.telemetry import logs
from services.thinker.grammar import check_allows_text, find_fault, reason

MOST_JOB_BYTES = 64 * 1024 * 1024
_MEMORY_BYTES = 2 * 1024**3  # of a job
_CPU_S = 120  # of a job, should nobody kill it
_THREADS = 2


class _Server:
    def __init__(self, tokenizer_info: Any) -> None:
        self._tokenizer_info = tokenizer_info
        self._running: dict[int, asyncio.Future[None]] = {}

    async def serve(self, path: str) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_reader(0, self._end)  # closed when the thinker is gone
        server = await asyncio.start_unix_server(self._connected, path, limit=MOST_JOB_BYTES)
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            if not (line := await reader.readline()):
                return
            own_id = os.getpid()
            pid = os.fork()
            if not pid:
                die_with_parent(own_id)
                _run(json.loads(line), writer.get_extra_info("socket").fileno(), self._tokenizer_info)
            ended = self._running[pid] = asyncio.get_running_loop().create_future()
            left = asyncio.ensure_future(reader.read())
            await asyncio.wait({ended, left}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                os.kill(pid, signal.SIGKILL)
                await ended
            left.cancel()

    def _reap(self) -> None:
        for pid in list(self._running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._running.pop(pid).set_result(None)

    def _end(self) -> None:
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _run(job: dict[str, Any], connection: int, tokenizer_info: Any) -> None:
    """In the child. Ends it."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # XGrammar's words quote the grammar
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
        limit = _data_bytes() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        with socket.socket(fileno=connection) as answer:
            answer.setblocking(True)
            answer.sendall(json.dumps(_refusal(job, tokenizer_info)).encode() + b"\n")
    finally:
        os._exit(0)


def _data_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def _refusal(job: dict[str, Any], tokenizer_info: Any) -> list[str] | None:
    """[field, reason] of a job that is refused; None: it compiles, and there are texts that it allows."""
    import xgrammar

    kind, text = job["kind"], job["text"]
    try:
        compiler = xgrammar.GrammarCompiler(tokenizer_info, max_threads=_THREADS, cache_enabled=False)
        check_allows_text(kind, text)
        match kind:
            case "json":  # as vLLM does it
                compiler.compile_json_schema(text, any_whitespace=False, separators=(",", ":"))
            case "structural_tag":
                _compile_tag(compiler, text)
            case "regex":
                compiler.compile_regex(text)
            case "lark":
                compiler.compile_lark(text)
            case _:
                compiler.compile_grammar(text)
    except MemoryError:
        return [job["field"], "takes more memory to compile than there is for it: make it smaller"]
    except Exception as error:  # XGrammar raises what it likes
        return list(find_fault(job["schemas"]) or (job["field"], reason(error)))
    return None


def _compile_tag(compiler: Any, text: str) -> None:
    """As vLLM does it."""
    import xgrammar

    tag = json.loads(text)
    if "structures" not in tag:
        compiler.compile_structural_tag(text)
        return
    tags = [
        xgrammar.StructuralTagItem(begin=each["begin"], schema=json.dumps(each["schema"]), end=each["end"])
        for each in tag["structures"]
    ]
    compiler.compile_structural_tag(tags, tag["triggers"])


def main() -> None:
    path, folder, vocab_size = sys.argv[1:]
    logs.configure("error", "thinker")  # what transformers warns of, the thinker has said
    lower_engine_priority()
    import xgrammar
    from transformers import AutoTokenizer

    logs.adopt("transformers")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=int(vocab_size))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_Server(info).serve(path))


if __name__ == "__main__":
    main()
