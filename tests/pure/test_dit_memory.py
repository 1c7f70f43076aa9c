"""GPU memory of models that both understand and make pictures: parts by stage, contexts, and how many outputs fit."""

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from cli.budget import GIB, MIB, Gpus
from cli.dit_memory import dit_need, encoder_need
from cli.gpu_plan import share_gpus
from cli.main import app
from cli.pipeline_sizes import read_pipeline
from cli.plan import LaunchError, PlannedStage
from services.dit.config import DitSettings
from services.encoder.config import EncoderSettings
from services.families.any_model import generating as any_model
from services.families.bagel import budget as bagel
from services.families.bagel.budget import pipeline

HIDDEN, LAYERS, INNER, VOCABULARY = 3584, 28, 18_944, 152_064
# Of BAGEL-7B-MoT's llm_config.json, as far as sizes depend on it.
LLM = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}


def bagel_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of the published file, without norms and biases."""
    for layer in range(LAYERS):
        for kind in ("", "_moe_gen"):
            begin = f"language_model.model.layers.{layer}"
            for name, width in (("q", HIDDEN), ("k", 512), ("v", 512), ("o", HIDDEN)):
                yield f"{begin}.self_attn.{name}_proj{kind}.weight", (width, HIDDEN)
            for name in ("gate", "up", "down"):
                yield f"{begin}.mlp{kind}.{name}_proj.weight", (INNER, HIDDEN)
    yield "language_model.model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "language_model.lm_head.weight", (VOCABULARY, HIDDEN)
    yield "vit_model.vision_model.encoder.layers.0.mlp.fc1.weight", (430_000, 1000)
    yield "connector.fc2.weight", (HIDDEN, HIDDEN)
    yield "vit_pos_embed.pos_embed", (70**2, HIDDEN)
    yield "latent_pos_embed.pos_embed", (64**2, HIDDEN)
    yield "llm2vae.weight", (64, HIDDEN)
    yield "vae2llm.weight", (HIDDEN, 64)


VAE = {"encoder.conv_in.weight": (34_000, 1000), "decoder.conv_in.weight": (50_000, 1000)}
BAGEL = pipeline(LLM, dict(bagel_shapes()), VAE, 2)


def dit(**settings: object) -> DitSettings:
    return DitSettings(model="m", **settings)  # type: ignore[arg-type]


def test_bagels_contexts_are_those_of_its_config():
    context = BAGEL.context
    assert context is not None
    assert context.per_token == 56 * 1024
    assert context.tokens == pytest.approx(9000, rel=0.02)
    assert context.tokens * context.per_token / GIB == pytest.approx(0.5, abs=0.02), "of a branch of an output"
    wide = pipeline(LLM | {"num_key_value_heads": 8}, dict(bagel_shapes()), VAE, 4).context
    assert wide is not None
    assert wide.per_token == 4 * context.per_token


def test_outputs_and_kept_encodings_take_memory():
    one, two, eight = (dit_need(BAGEL, dit(max_running_outputs=count)) for count in (1, 2, 8))
    context = BAGEL.context
    assert context is not None
    assert one.requests - 64 * MIB == context.of_output >= 3 * context.tokens * context.per_token
    assert eight.requests - one.requests == 7 * context.of_output
    assert one.working < two.working < eight.working, "contexts of a step are joined"
    assert dit_need(BAGEL, dit(max_running_outputs=64)).working == eight.working, "of at most max_batch outputs"
    assert "8 outputs at a time (--max-running-outputs)" in eight.note
    kept = dit_need(BAGEL, dit(encoding_cache_mib=4096))
    assert kept.requests - eight.requests == (4096 - 64) * MIB


def test_the_reader_has_parts_of_its_own():
    alone, beside = (dit_need(BAGEL, dit(encoders=each)).weights for each in ("own", "stream"))
    apart = encoder_need(BAGEL, EncoderSettings(model="m")).weights
    assert alone == sum(BAGEL.weights.values())
    assert alone < beside + apart, "both have the transformer"
    assert alone - beside == BAGEL.weights["reader"] > VOCABULARY * HIDDEN * 2
    assert alone / 1e9 == pytest.approx(29.3, rel=0.03), "bytes of the published file"


def test_a_plan_says_what_limits_outputs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cli.gpu_plan.read_pipeline", lambda model, dtype: BAGEL)

    def planned(gib: int, *flags: str) -> tuple[str, list[str]]:
        launch = share_gpus([PlannedStage("dit", "dit", "m", flags)], Gpus.alike(gib * GIB))
        return "\n".join(launch.lines), list(launch.stages[0].flags)

    lines, flags = planned(140)
    assert "contexts of 8 outputs at a time (--max-running-outputs), 1.9 GiB each" in lines
    assert not flags, "the default"
    lines, flags = planned(48)
    assert flags == ["--max-running-outputs=2"]
    assert "contexts of 2 outputs at a time" in lines
    with pytest.raises(LaunchError, match="this fits: --dit-arg=--max-running-outputs=2"):
        planned(48, "--max-running-outputs=8")
    with pytest.raises(LaunchError, match="it fits on a GPU of 48 GB"):
        planned(24)


def test_a_checkpoint_of_diffusers_is_read_by_its_index(tmp_path):
    """Cosmos 3 has a vision encoder beside the pipeline, which is the thinker's."""
    for folder, rows in (("transformer", 512), ("vae", 256), ("vision_encoder", 1024)):
        (tmp_path / folder).mkdir()
        save_file({"weight": torch.zeros(rows, 512)}, tmp_path / folder / "model.safetensors")
    assert set(read_pipeline(str(tmp_path)).weights) == {"transformer", "vae", "vision_encoder"}
    (tmp_path / "model_index.json").write_text('{"transformer": ["diffusers", "X"], "vae": ["diffusers", "Y"]}')
    sizes = read_pipeline(str(tmp_path))
    assert set(sizes.weights) == {"transformer", "vae"}
    assert sizes.context is None
    shown = CliRunner().invoke(app, ["budget", "--dit-model", str(tmp_path), "--gpu-memory-gib", "24"]).output
    assert shown.splitlines()[1].startswith("dit       0 ")
    assert "encodings that are kept, 64 MiB" in shown


@pytest.mark.parametrize(
    ("architecture", "read", "skipped"),
    [
        (
            "Cosmos3ForConditionalGeneration",
            ["transformer/layers.0.self_attn.to_q.weight", "vision_encoder/patch_embed.proj.weight", "lm_head.weight"],
            ["vae/encoder.weight", "transformer/layers.0.mlp_moe_gen.up_proj.weight", "transformer/proj_in.weight"],
        ),
        (
            "BagelForConditionalGeneration",
            ["language_model.model.layers.0.mlp.up_proj.weight", "vit_model.vision_model.encoder.layers.0.w"],
            ["language_model.model.layers.0.mlp_moe_gen.up_proj.weight", "encoder.conv_in.weight", "llm2vae.weight"],
        ),
        ("LlamaForCausalLM", ["encoder.weight", "vae/weight"], []),
    ],
)
def test_a_thinker_takes_what_vllm_loads(architecture: str, read: list[str], skipped: list[str]):
    of_any = any_model.read_by_thinker({"architectures": [architecture]})
    reads = bagel.read_by_thinker if architecture.startswith("Bagel") else of_any
    assert all(map(reads, read))
    assert not any(map(reads, skipped))
