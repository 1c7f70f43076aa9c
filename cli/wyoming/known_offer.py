"""What the gateway offers, kept so that `describe` needs no request."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any

import structlog
from wyoming.info import AsrModel, AsrProgram, Attribution, Info, TtsProgram, TtsVoice
from wyoming.tts import SynthesizeVoice

from cli.wyoming.gateway_client import GatewayClient, RequestError
from gateway.answers.transcription.languages import code_of, every_code, language_of

_REFRESH_S, _RETRY_S = 10.0, 1.0
_PATIENCE_S = 10.0  # with a gateway that is reached, and says nothing
_FIRST_S = 0.5  # that `describe` waits after a start; Home Assistant waits 1 s for its answer
log = structlog.get_logger()


@dataclass(frozen=True)
class Offer:
    """Models by their names; None: none does it.

    Attributes:
        hears: the model that writes down speech.
        speaks: the model that speaks a text.
        voices: its voices. Empty: it has one, or its voices are to be uploaded yet.
        needs_voice: it speaks with uploaded voices only.
        languages: ISO 639-1 code of each that it takes by name, and that name. Empty: it knows them by the text.
    """

    hears: str | None = None
    speaks: str | None = None
    voices: tuple[str, ...] = ()
    needs_voice: bool = False
    languages: dict[str, str] = field(default_factory=dict)

    def info(self, languages: Sequence[str]) -> Info:
        """Args: languages: ISO 639-1 codes that a user may choose; none: all."""
        offered = Info()
        if self.hears is not None:
            models = [AsrModel(**_artifact(self.hears), languages=list(languages or every_code()))]
            offered.asr = [AsrProgram(**_artifact("quartet"), models=models, supports_transcript_streaming=True)]
        if self.speaks is not None and (self.voices or not self.needs_voice):
            spoken = list(languages or self.languages or every_code())
            voices = [TtsVoice(**_artifact(name), languages=spoken) for name in self.voices or (self.speaks,)]
            offered.tts = [TtsProgram(**_artifact("quartet"), voices=voices, supports_synthesize_streaming=True)]
        return offered

    def speech(self, voice: SynthesizeVoice | None) -> dict[str, str]:
        """Members of the gateway's requests for speech. Raises RequestError: no model speaks."""
        if self.speaks is None:
            raise RequestError("the server has no model that speaks a text", "unsupported")
        members = {"model": self.speaks}
        if voice and voice.name and voice.name != self.speaks:
            members["voice"] = voice.name
        if voice and voice.language and self.languages:
            code = voice.language.replace("_", "-").partition("-")[0].lower()
            members["language"] = self.languages.get(code, voice.language)
        return members


@cache
def _version() -> str:
    return version("quartet")


def _artifact(name: str) -> dict[str, Any]:
    attribution = Attribution(name="Quartet", url="")
    return {"name": name, "attribution": attribution, "installed": True, "description": name, "version": _version()}


async def ask(gateway: GatewayClient) -> Offer:
    """Raises RequestError."""
    if not await gateway.ready():
        raise RequestError(f"{gateway.url}: not all stages are ready", "unreachable")
    models: dict[str, dict[str, Any]] = {
        each["id"]: each["quartet"] for each in (await gateway.get("/v1/models"))["data"]
    }
    hears = (
        name
        for name, facts in models.items()
        if "audio" in (facts.get("input_modalities") or ()) and "text" in (facts.get("output_modalities") or ())
    )
    speaks = next((name for name, facts in models.items() if facts.get("max_speech_characters")), None)
    if speaks is None:
        return Offer(next(hears, None))
    voices = (await gateway.get("/v1/audio/voices"))["voices"]
    return Offer(
        next(hears, None),
        speaks,
        tuple(voice["name"] for voice in voices),
        bool(models[speaks].get("voice_cloning")),
        _by_code(models[speaks].get("languages") or ()),
    )


def _by_code(names: Sequence[str]) -> dict[str, str]:
    """Leaves out what is no language, such as auto, or a dialect."""
    found: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(ValueError):
            found.setdefault(code_of(language_of(name)), name)
    return found


class KnownOffer:
    """The last offer of a gateway. `keep` asks again and again."""

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self._offer: Offer | None = None
        self._error: RequestError | None = None
        self._asked = asyncio.Event()

    async def keep(self) -> None:
        """Never returns."""
        while True:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    offer = await ask(self._gateway)
            except TimeoutError:
                self._failed(RequestError(f"{self._gateway.url}: no answer in {_PATIENCE_S:g} s", "unreachable"))
            except RequestError as error:
                self._failed(error)
            except (ValueError, KeyError, TypeError, AttributeError):  # another program answers there
                self._failed(RequestError(f"{self._gateway.url}: this is no Quartet", "unreachable"))
            else:
                if offer != self._offer or self._error:
                    log.info("gateway", url=self._gateway.url, hears=offer.hears, speaks=offer.speaks)
                self._offer, self._error = offer, None
            self._asked.set()
            await asyncio.sleep(_REFRESH_S if self._offer else _RETRY_S)

    def _failed(self, error: RequestError) -> None:
        if str(error) != str(self._error or ""):
            log.warning("the gateway does not answer", reason=str(error))
        self._error = error

    async def offer(self) -> Offer:
        """What is known: at once, but for the first moment. Raises RequestError: nothing is."""
        if self._offer is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_S):
                    await self._asked.wait()
        if self._offer is None:
            raise self._error or RequestError(f"{self._gateway.url}: no answer yet", "unreachable")
        return self._offer
