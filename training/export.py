"""Writes the trained models as checkpoints of the published formats, in bfloat16."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from services.families.qwen3_omni.tiny.model import generation_config
from services.families.qwen3_omni.tiny.processor import save_processor
from training import codec, conversations, hearing, loop, paintings, seeing, talker, thinker, tools
from training.seeing import PIXELS
from training.shape import config, tokenizer

MODELS = Path(__file__).parents[1] / "services" / "demo_models"
OMNI, PAINTER, ALIGNER = "quartet-demo", "quartet-demo-painter", "quartet-demo-aligner"
# Answers that are right are likely by far: sampling is for the small rest.
TEMPERATURE, TOP_K = 0.2, 20


def omni(out: Path = MODELS / OMNI) -> None:
    """Writes the Qwen3-Omni to `out`. Replaces its files but for the model card."""
    model: Any = transformers.Qwen3OmniMoeForConditionalGeneration(config())
    mind: Any = loop.load("conversations", thinker.LanguageModel())
    model.thinker.audio_tower.load_state_dict(hearing.load().audio_tower.state_dict())
    model.thinker.visual.load_state_dict(seeing.load().visual.state_dict())
    model.thinker.model.load_state_dict(mind.model.state_dict())
    model.thinker.lm_head.load_state_dict(mind.lm_head.state_dict())
    model.talker.load_state_dict(talker.load().state_dict())
    model.code2wav.load_state_dict(codec.load().state_dict())
    settings: Any = generation_config(tokenizer())
    settings.temperature, settings.top_k = TEMPERATURE, TOP_K
    settings.talker_temperature, settings.talker_top_k, settings.talker_repetition_penalty = TEMPERATURE, TOP_K, 1.0
    model.generation_config = settings
    clear(out)
    model.to(torch.bfloat16).save_pretrained(out)
    save_processor(out, tokenizer(), pixels=PIXELS)
    _compute_in_float32(out / "config.json")
    _readable(out)


def painter(out: Path = MODELS / PAINTER) -> None:
    """Writes the Z-Image to `out`, as `omni` does."""
    import diffusers

    from training import painter as trained

    vae, deviation, mean = trained.statistics()
    vae.register_to_config(scaling_factor=1 / deviation, shift_factor=mean)
    model: Any = loop.load("painter", trained.Painter())
    pipeline: Any = diffusers.ZImagePipeline(  # pyright: ignore[reportPrivateImportUsage]
        transformer=model.transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=trained.SHIFT),  # pyright: ignore[reportPrivateImportUsage]
        vae=vae,
        text_encoder=trained.text_encoder(),
        tokenizer=trained.tokenizer(),
    )
    clear(out)
    pipeline.to(torch.bfloat16).save_pretrained(out)
    _readable(out)


def aligner(out: Path = MODELS / ALIGNER) -> None:
    """Writes the aligner to `out`, as `omni` does."""
    from training import aligner as trained

    net = loop.load(trained.NAME, trained.LetterNet(**trained.SHAPE))
    clear(out)
    weights = {name: tensor.to(torch.float16).contiguous() for name, tensor in net.state_dict().items()}
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    settings = {"model_type": "quartet_ctc_aligner", **trained.SHAPE, "languages": ["en"]}
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    _readable(out)


def restore() -> None:
    """Takes the shipped weights for every part of the Qwen3-Omni that has no state, to train one part again.

    Talker and code2wav share codes that do not ship: these two are trained together.
    """
    model: Any = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(MODELS / OMNI, dtype=torch.float32)
    vision = {"visual": model.thinker.visual}
    mind = {"model": model.thinker.model, "lm_head": model.thinker.lm_head}
    parts: dict[str, tuple[int, dict[str, Any]]] = {
        "hearing": (hearing.STEPS, {"audio_tower": model.thinker.audio_tower}),
        "seeing": (seeing.STEPS, vision),
        "paintings": (paintings.STEPS, vision),
        "conversations": (conversations.STEPS, mind),
        "tools": (tools.STEPS, mind),
        "thinker": (thinker.STEPS, mind),
        "talker": (talker.STEPS, {"talker": model.talker}),
        "code2wav": (codec.STEPS, {"": model.code2wav}),
    }
    for name, later in (("seeing", "paintings"), ("thinker", "tools"), ("tools", "conversations")):
        if name not in parts or (loop.OUT / f"{name}.pt").exists():
            del parts[later]  # it goes on with a part, and that is another one now
    for name, (steps, modules) in parts.items():
        if not (loop.OUT / f"{name}.pt").exists():
            weights = {
                f"{prefix}.{key}".lstrip("."): value
                for prefix, module in modules.items()
                for key, value in module.state_dict().items()
            }
            loop.save(name, weights, [], steps, 0.0)
            print(f"{name}: as it ships")


def clear(out: Path) -> None:
    """Empties the directory `out` but for the model card."""
    out.mkdir(parents=True, exist_ok=True)
    for path in out.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "README.md":
            path.unlink()


def _compute_in_float32(file: Path) -> None:
    """Sets float32 in config.json: bfloat16 suffices to store these weights, but not to compare sums of them."""

    def spell(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: "float32" if key == "dtype" and each else spell(each) for key, each in value.items()}
        return value

    file.write_text(json.dumps(spell(json.loads(file.read_text())), indent=2) + "\n")


def _readable(out: Path) -> None:
    for path in out.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
