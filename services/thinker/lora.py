"""The adapters (LoRA) of the thinker: which are loaded, and which are in use."""

import asyncio
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from services.common.errors import InvalidInput, NotFound, require
from services.thinker.config import ThinkerSettings
from services.thinker.lora_files import adapter_digest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")

log = structlog.get_logger()


@dataclass(eq=False)
class Adapter:
    """A loaded adapter, which `users` requests run with. vLLM knows it by `request`."""

    name: str
    digest: str
    request: "LoRARequest"
    users: int = 0


class Adapters:
    """The adapters of one engine, for the checkpoint in `base`.

    vLLM reads an adapter that it has let go from its files again, in the step that needs it; without them the engine
    would die. So vLLM never has more than it keeps (`max_cpu_loras`), and keeps one until the last request with it has
    ended.
    """

    def __init__(self, llm: "AsyncLLM", settings: ThinkerSettings, base: Path) -> None:
        self._llm, self._settings, self._base = llm, settings, base
        config = llm.vllm_config.lora_config
        self._layers = frozenset((config and config.target_modules) or ())
        self._loaded: dict[str, Adapter] = {}
        self._leaving: set[Adapter] = set()
        self._numbers = itertools.count(1)
        self._lock = asyncio.Lock()
        self._removals: set[asyncio.Task[None]] = set()

    @property
    def digests(self) -> dict[str, str]:
        """Digest of each adapter that requests can ask for, by name."""
        return {name: self._loaded[name].digest for name in sorted(self._loaded)}

    async def load_named(self) -> None:
        """Loads those of the settings. Raises ValueError: one cannot be loaded."""
        for name, path in self._settings.lora.items():
            try:
                await self._load(name, Path(path))
            except InvalidInput as error:
                raise ValueError(f"lora {name}: {error.reason}") from error

    async def load(self, name: str, path: str) -> bool:
        """Loads the adapter in the directory `path` within `lora_root` as `name`; whether it was not there yet.

        Raises InvalidInput, which names the field.
        """
        root = self._settings.lora_root
        if root is None:
            raise InvalidInput("path", "this thinker loads no adapters at run time; start it with --lora-root")
        try:
            folder = (root / path).resolve()  # an absolute path stays one
        except (OSError, ValueError, RuntimeError) as error:  # a zero byte, links in a circle
            raise InvalidInput("path", f"is no path: {error}") from None
        require(folder.is_relative_to(root.resolve()), "path", "is not in the directory that --lora-root names")
        return await self._load(name, folder)

    async def _load(self, name: str, folder: Path) -> bool:
        if not _NAME.fullmatch(name):
            raise InvalidInput("name", "must be 1 to 128 letters, digits or . _ : / -, the first a letter or digit")
        require(name != self._settings.model_name, "name", f"{name!r} is the model's own")
        async with self._lock:
            try:
                digest = await asyncio.to_thread(adapter_digest, folder, self._base, self._layers)
            except (OSError, ValueError) as error:
                raise InvalidInput("path", str(error)) from error
            if (known := self._loaded.get(name)) is not None:
                if known.digest == digest:
                    return False
                raise InvalidInput("name", f"another adapter is loaded as {name!r}; unload that first")
            self._loaded[name] = self._returning(name, digest) or await self._add(name, digest, folder)
        log.info("adapter loaded", lora=name, digest=digest)
        return True

    def _returning(self, name: str, digest: str) -> Adapter | None:
        """The same adapter, if it was unloaded and requests still run with it."""
        for adapter in self._leaving:
            if (adapter.name, adapter.digest) == (name, digest):
                self._leaving.remove(adapter)
                return adapter
        return None

    async def _add(self, name: str, digest: str, folder: Path) -> Adapter:
        from vllm.lora.request import LoRARequest

        most = max(self._settings.max_cpu_loras, self._settings.max_loras)
        if len(self._loaded) + len(self._leaving) >= most:
            raise InvalidInput("name", f"{most} adapters are loaded; unload one, or raise --max-cpu-loras")
        # vLLM's prefix cache goes by this name: with the digest it never takes one adapter's keys for another's.
        request = LoRARequest(f"{name}@{digest}", next(self._numbers), str(folder))
        try:
            await self._llm.add_lora(request)
        except BaseException as error:  # vLLM raises what it likes: a rank that is too high, a DoRA
            # It may have a place already, and would keep it: see `execution.engine_args` of the one that stays empty.
            await asyncio.shield(self._llm.remove_lora(request.lora_int_id))
            if isinstance(error, Exception):
                raise InvalidInput("path", f"vLLM cannot load it: {error}") from error
            raise
        return Adapter(name, digest, request)

    def unload(self, name: str) -> None:
        """Takes no more requests for `name`; running ones go on. Raises NotFound."""
        adapter = self._loaded.pop(name, None)
        if adapter is None:
            raise NotFound(f"there is no adapter {name!r}")
        self._leaving.add(adapter)
        self._let_go(adapter)
        log.info("adapter unloaded", lora=name, running=adapter.users)

    @contextmanager
    def use(self, name: str) -> "Iterator[LoRARequest | None]":
        """The adapter `name` while a request runs; None for "", the model as it is. Raises InvalidInput."""
        if not name:
            yield None
            return
        if (adapter := self._loaded.get(name)) is None:
            raise InvalidInput("lora", f"there is no adapter {name!r}; loaded are: {', '.join(self.digests) or 'none'}")
        adapter.users += 1
        try:
            yield adapter.request
        finally:
            adapter.users -= 1
            self._let_go(adapter)

    def _let_go(self, adapter: Adapter) -> None:
        if adapter in self._leaving and not adapter.users:
            removal = asyncio.create_task(self._remove(adapter))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)

    async def _remove(self, adapter: Adapter) -> None:
        async with self._lock:
            if adapter in self._leaving and not adapter.users:  # nobody has loaded it again meanwhile
                await self._llm.remove_lora(adapter.request.lora_int_id)
                self._leaving.discard(adapter)
