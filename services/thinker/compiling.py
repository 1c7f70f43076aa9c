"""Grammars are compiled in processes, which end with the request, or after a while, before the engine is given one."""

import asyncio
import contextlib
import hashlib
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.engine.forking import HELLO, ForkServer
from services.common.errors import InternalError, InvalidInput
from services.thinker.schemas import Schema, standalone
from services.thinker.structure import MOST_BYTES, check_size

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams

SHORT_S, LONG_S = 1.0, 5.0
"""Time of a short compilation, and of any. One that proves longer begins again, and waits for others that did."""

_WARM_S = 60.0
"""After the thinker's start, whose processors are busy, the process starts, unless a request needed it before."""
_START_S = 300.0
"""It has a low priority: 6 s of a processor are minutes where others want it."""
_MOST_KNOWN = 1024


class GrammarChecks:
    """Compiles grammars elsewhere, to see whether it can be done. For one event loop.

    vLLM's engine compiles them again, and some at a time: so long ones come to it one after the other.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        module = "services.thinker.grammar_process"
        self._server = ForkServer([sys.executable, "-m", module, str(folder), str(vocab_size)])
        self._warming: asyncio.TimerHandle | None = None
        self._short = asyncio.Semaphore(max(1, (os.cpu_count() or 1) // 4))
        self._long = asyncio.Semaphore(1)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # those that compile in a short time

    def start_later(self) -> None:
        """Starts the process that compiles a while from now: that takes seconds of a processor."""
        self._warming = asyncio.get_running_loop().call_later(_WARM_S, self._server.start)

    def close(self) -> None:
        if self._warming is not None:
            self._warming.cancel()
        self._server.close()

    async def check(self, params: "StructuredOutputsParams", field: str, schemas: Mapping[str, Schema]) -> None:
        """Cancelling kills the compilation.

        Args:
            field: of what is structured.
            schemas: those that the structure is made of, by their fields.

        Raises:
            InvalidInput: names one of these fields: it is too large, takes too long, cannot be compiled, or no text
                fits it.
        """
        kind, text = spec(params)
        if kind == "json_object":
            return
        check_size(field, text, MOST_BYTES)
        digest = hashlib.sha256(f"{kind}\n{text}".encode()).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
            return
        _check_sound(params, field)
        parts = {name: standalone(schema, name) for name, schema in schemas.items()}
        job = json.dumps({"kind": kind, "text": text, "field": field, "schemas": parts}).encode() + b"\n"
        refusal, is_short = await self._compile(job, field)
        if refusal is not None:
            raise InvalidInput(*refusal)
        if is_short:
            self._known[digest] = None
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    async def _compile(self, job: bytes, field: str) -> tuple[list[str] | None, bool]:
        """[field, reason] of a job that is refused; and whether it was a short one."""
        async with self._short:
            with contextlib.suppress(TimeoutError):
                return await self._run(job, field, SHORT_S), True
        loop, held_s = asyncio.get_running_loop(), 0.0
        await self._long.acquire()
        try:
            begun = loop.time()
            refusal = await self._run(job, field, LONG_S)
            held_s = loop.time() - begun  # as long as the engine takes
            return refusal, False
        except TimeoutError:
            raise InvalidInput(field, f"takes longer than {LONG_S:g} s to compile: make it smaller") from None
        finally:
            loop.call_later(held_s, self._long.release)

    async def _run(self, job: bytes, field: str, limit_s: float) -> list[str] | None:
        """[field, reason] of a job that is refused. Raises TimeoutError."""
        reader, writer = await self._connect()
        with contextlib.closing(writer):  # which ends the compilation
            async with asyncio.timeout(limit_s):
                writer.write(job)
                if answer := await reader.readline():
                    return json.loads(answer)
        return [field, "takes more memory to compile than there is for it: make it smaller"]

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(sock=self._server.connect())
        try:
            async with asyncio.timeout(_START_S):
                await reader.readexactly(len(HELLO))
        except BaseException as error:
            writer.close()
            if isinstance(error, TimeoutError | EOFError | OSError):
                raise InternalError("the process that compiles grammars does not start") from None
            raise
        return reader, writer


def spec(params: "StructuredOutputsParams") -> tuple[str, str]:
    """(vLLM's name of its kind in lower case, or "lark", its text)."""
    from vllm.v1.structured_output.request import get_structured_output_key
    from vllm.v1.structured_output.utils import grammar_is_likely_lark

    option, text = get_structured_output_key(params)
    kind = option.name.lower()
    return "lark" if kind == "grammar" and grammar_is_likely_lark(text) else kind, text


def _check_sound(params: "StructuredOutputsParams", field: str) -> None:
    """What vLLM looks at before it compiles. Raises InvalidInput."""
    from vllm.sampling_params import check_json_nesting
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    try:
        check_json_nesting(params.json)
        check_json_nesting(params.structural_tag, structural_tag=True)
    except Exception as error:  # vLLM's own kinds
        raise InvalidInput(field, str(error)) from error
    if isinstance(params.json, str) and has_xgrammar_unsupported_json_features(json.loads(params.json)):
        raise InvalidInput(field, "The provided JSON schema contains features not supported by xgrammar.")
    if params.regex and "\0" in params.regex:
        raise InvalidInput(field, "must not contain a NUL character")
    if params.grammar is not None and not params.grammar.strip():
        raise InvalidInput(field, "must not be empty")
