"""`GET /v1/models`."""

import json
import time
from typing import Any

from fastapi import APIRouter, Request
from google.protobuf.json_format import MessageToDict

from gateway.answers.gateway import Gateway
from gateway.answers.transcription.sound_transcripts import hears
from gateway.pipeline.kinds import KINDS
from gateway.pipeline.stage import Stage
from quartet.v1 import dit_pb2, server_info_pb2

router = APIRouter(tags=["models"])
_STARTED = int(time.time())
_OFTEN_0 = {"max_images", "default_guidance_scale"}  # fields whose 0 is a value
_T = dit_pb2.DitTask
_MAKES = {
    _T.DIT_TASK_TEXT_TO_IMAGE: "image",
    _T.DIT_TASK_IMAGE_EDIT: "image",
    _T.DIT_TASK_TEXT_TO_VIDEO: "video",
    _T.DIT_TASK_IMAGE_TO_VIDEO: "video",
    _T.DIT_TASK_VIDEO_TO_VIDEO: "video",
    _T.DIT_TASK_TEXT_TO_AUDIO: "audio",
}


def _model(gateway: Gateway, name: str, stage: Stage) -> dict[str, Any]:
    if KINDS[stage.kind].is_diffusion:
        facts = _dit_facts(stage.info)
    elif stage.kind == "embedder":
        facts = _embedder_facts(stage.info)
    else:
        facts = _answer_facts(gateway, stage)
        image = gateway.pipeline.output("image")
        if image is not None and gateway.catalog.also_makes_images(name):
            facts["output_modalities"].append("image")
            facts["dit"] = _dit_facts(image.info)
    parent = gateway.catalog.parent_of(name)
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "quartet",
        "root": parent or name,
        "parent": parent,
        "max_model_len": facts.get("max_context_tokens"),
        "quartet": facts,
    }


def _answer_facts(gateway: Gateway, stage: Stage) -> dict[str, Any]:
    pipeline, modalities = gateway.pipeline, {"text": "text", "speech": "audio"}
    thinker, talker, code2wav = map(pipeline.info, ("thinker", "talker", "code2wav"))
    made, reads = pipeline.config.made, ["text"]
    if stage.kind == "talker":  # it writes nothing itself
        thinker, made = None, ["speech"]
    elif stage in pipeline.transcript and stage not in pipeline.answer:
        thinker, talker, code2wav = stage.info and stage.info.thinker, None, None
        made, reads = ["text"], []
    elif not hears(gateway):  # it reads what another model hears
        reads = ["text", "audio"]
    return {
        "input_modalities": [*reads, *(thinker.input_modalities if thinker else ())],
        "output_modalities": [modalities[output] for output in made if output in modalities],
        "max_context_tokens": thinker.max_context_tokens if thinker else None,
        "voices": pipeline.voices,
        "voice_cloning": bool(talker and talker.voice_sample_rate_hz),
        "languages": list(talker.languages) if talker else [],
        "max_speech_characters": gateway.settings.max_speech_characters if talker and talker.reads_text else None,
        "webrtc": gateway.settings.webrtc is not None,
        **{name: getattr(code2wav, name, None) for name in ("sample_rate_hz", "samples_per_frame", "trimmed_samples")},
    }


def _dit_facts(info: server_info_pb2.GetServerInfoResponse | None) -> dict[str, Any]:
    """DitInfo without numbers that this kind of model lacks; tasks as "text_to_image"."""
    if info is None:
        return {}
    dit = info.dit
    facts = MessageToDict(dit, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    facts = {name: value for name, value in facts.items() if value != 0 or isinstance(value, bool) or name in _OFTEN_0}
    if dit.max_pixels:
        facts["max_pixels"] = dit.max_pixels  # MessageToDict makes 64-bit numbers texts
    facts["arguments"] = {
        each.name: {"type": each.type, "default": json.loads(each.default or "null")} for each in dit.arguments
    }
    facts["tasks"] = [_T.Name(task).removeprefix("DIT_TASK_").lower() for task in dit.tasks]
    takes_video = dit.control_video or _T.DIT_TASK_VIDEO_TO_VIDEO in dit.tasks
    taken = {"text": True, "image": bool(dit.max_images or dit.control_images), "video": takes_video}
    return {
        "input_modalities": [kind for kind, is_taken in taken.items() if is_taken],
        "output_modalities": list(dict.fromkeys(_MAKES[task] for task in dit.tasks if task in _MAKES)),
        **facts,
    }


def _embedder_facts(info: server_info_pb2.GetServerInfoResponse | None) -> dict[str, Any]:
    """EmbedderInfo; its longest input is what `max_model_len` says of others."""
    if info is None:
        return {}
    embedder = info.embedder
    facts = MessageToDict(embedder, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {
        "input_modalities": ["text"],
        "output_modalities": ["embedding" if embedder.embeds else "scores"],
        "max_context_tokens": embedder.max_input_tokens,
        **facts,
    }


@router.get("/v1/models")
async def list_models(http: Request) -> dict[str, Any]:
    """The served models whose names are known."""
    gateway: Gateway = http.app.state.gateway
    return {"object": "list", "data": [_model(gateway, name, stage) for name, stage in gateway.catalog.models.items()]}


@router.get("/v1/models/{name:path}")
async def get_model(http: Request, name: str) -> dict[str, Any]:
    """One model."""
    if not name:
        return await list_models(http)
    gateway: Gateway = http.app.state.gateway
    name = gateway.catalog.meant(name) or name
    return _model(gateway, name, gateway.catalog.model_stage(name))
