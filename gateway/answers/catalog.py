"""Names that clients use: of models, adapters and voices."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from gateway.answers.names import OUTPUTS, Purpose, is_foreign_model, is_openai_voice, own_voice
from gateway.errors import ApiError, from_error, invalid
from gateway.pipeline.kinds import Output
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.stage import Stage


class Catalog:
    """The models of a pipeline by name, each with its stage.

    Args:
        model_name: of the main stage's model; None: the pipeline file's, or the stage's own.
        aliases: "GLOB=MODEL" each; the first that fits counts.
    """

    def __init__(self, pipeline: Pipeline, model_name: str | None, aliases: Sequence[str] = ()) -> None:
        self._pipeline, self._model_name = pipeline, model_name
        self._aliases = [alias.partition("=")[::2] for alias in aliases]

    def model_of(self, stage: Stage) -> str | None:
        """The name that clients have for the stage's model; None: only the stage knows it, and was never reached.

        The name in the settings, or else in the pipeline file, is that of the main stage.
        """
        name = self._model_name or self._pipeline.config.model
        if name is not None and stage is self._pipeline.main:
            return name
        return stage.info.model if stage.info else None

    @property
    def models(self) -> dict[str, Stage]:
        """The models that clients can ask for, the thinker's adapters last; of two with one name the first."""
        models: dict[str, Stage] = {}
        for stage in self._pipeline.with_models:
            if (name := self.model_of(stage)) is not None:
                models.setdefault(name, stage)
        if (writer := self._pipeline.output("text")) is not None:
            for name in writer.loras:
                models.setdefault(name, writer)
        return models

    def meant(self, name: str | None, purpose: Purpose = "answers") -> str | None:
        """The model that a request calls `name`; None: the one for `purpose`, whose name is not known yet.

        Raises:
            ApiError: 404, the name is an alias of a model that does not exist.
        """
        models = self.models
        if name in models:
            return name
        alias = next((model for pattern, model in self._aliases if name and fnmatchcase(name, pattern)), None)
        if alias is not None:
            if models and alias not in models:
                raise _no_model(f"{name!r} is an alias of {alias!r}, which does not exist here", models)
            return alias
        if purpose in OUTPUTS and (not name or is_foreign_model(name, purpose)):
            stage = self.transcriber if purpose == "transcription" else self._pipeline.output(OUTPUTS[purpose])
            return stage and self.model_of(stage)
        if not name:
            return self.model_of(self._pipeline.output("text") or self._pipeline.main)
        return name

    def also_makes_images(self, model: str | None) -> bool:
        """Whether the answers of `model` are one stage's, and its images another's."""
        image = self._pipeline.output("image")
        stage = self.models.get(model or "")
        return image is not None and stage is not None and stage is not image and model == self.model_of(image)

    def parent_of(self, model: str) -> str | None:
        """The model that `model` is an adapter of, if it is one."""
        stage = self.models.get(model)
        base = self.model_of(stage) if stage else None
        return base if base != model else None

    def lora_of(self, model: str | None, lora: str | None = None) -> str:
        """The adapter that a request asks for, as `model` or by `lora`; "" for none.

        Raises:
            ApiError: 404, there is no adapter `lora`; 400, `model` is another one.
        """
        named = model if model is not None and self.parent_of(model) else ""
        if lora is None:
            return named
        if self.parent_of(lora) is None:
            known = ", ".join(name for name in self.models if self.parent_of(name)) or "none"
            message = f"lora: there is no adapter {lora!r}; loaded are: {known}"
            raise ApiError(404, message, "lora", "model_not_found")
        if named not in ("", lora):
            raise invalid("lora", f"the model asked for is another adapter, {named!r}; leave one of them out")
        return lora

    def stage_for(self, output: Output, model: str | None, takes_loras: bool = False) -> Stage:
        """The stage that makes `output`, for a request that means `model`, or none.

        Args:
            takes_loras: whether `model` may be an adapter of the thinker.

        Raises:
            ApiError: 400, nothing here makes it, or another stage has that model; 404 and 503 as require_model.
        """
        stage = self._pipeline.output(output)
        if stage is None:
            made = ", ".join(self._pipeline.config.made)
            raise invalid("model", f"nothing here makes {output}; this server makes: {made}", "unsupported_model")
        if model is not None and not (takes_loras and self.parent_of(model)):
            self.require_model(model, stage)
        return stage

    @property
    def transcriber(self) -> Stage | None:
        """The stage that writes down speech: that which does only that, else that which answers."""
        return self._pipeline.output("transcript") or self._pipeline.output("text")

    def answerer(self, model: str) -> Stage:
        """The stage that answers as `model`, or as an adapter of it. Raises ApiError."""
        outputs = self._pipeline.config.outputs
        output: Output = "speech" if outputs.text is None and outputs.speech is not None else "text"
        return self.stage_for(output, model, takes_loras=True)

    def require_model(self, name: str, stage: Stage) -> None:
        """Raises ApiError: 404, not the stage's model; 503, that is not known yet."""
        served = self.model_of(stage)
        if served is None:
            raise not_reached(stage)
        if name != served:
            self.model_stage(name)
            raise invalid("model", f"{name!r} does not do this; {served!r} does", "unsupported_model")

    def speaker(self, voice: str | None, param: str) -> str:
        """The voice as the talker spells it; "": its default. Raises ApiError: 400 for `param`."""
        voices = self._pipeline.voices
        if voice is None or not voices:
            return "" if voice is None or is_openai_voice(voice) else voice
        match = own_voice(voice, voices)
        if match is None:
            raise invalid(param, f"no voice {voice!r}; use one of {', '.join(voices)}")
        return match

    def info(self, kind: str) -> Any:
        """Info of the answer's stage of `kind`, e.g. TalkerInfo. Raises ApiError: 503, it was never reached."""
        if (info := self._pipeline.info(kind)) is None:
            raise not_reached(next(stage for stage in self._pipeline.answer if stage.kind == kind))
        return info

    def model_stage(self, name: str) -> Stage:
        """Raises ApiError: 404, there is no such model; 503, no name is known yet."""
        models = self.models
        if not models:
            raise not_reached(self._pipeline.main)
        if name not in models:
            raise _no_model(f"{name!r} does not exist here", models)
        return models[name]


def _no_model(reason: str, models: Iterable[str]) -> ApiError:
    message = f"model: {reason}; this server has {' and '.join(map(repr, models))}"
    return ApiError(404, message, "model", "model_not_found")


def not_reached(stage: Stage) -> ApiError:
    """The 503 for a stage that must be known first."""
    return from_error(stage.kind, stage.unavailable())
