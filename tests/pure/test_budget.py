"""`quartet budget`: the arithmetic of the published model, what fits and what does not."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration
from typer.testing import CliRunner

from cli.aligner_memory import with_aligner
from cli.budget import GIB, OTHERS, Budget, Demand, Gpus, Layout, Need, share_out
from cli.budget_report import lines, settings_by_stage, table
from cli.check import stage_settings
from cli.doctor.fit import stages_of
from cli.layouts import best, layouts
from cli.main import app
from cli.sizes import BudgetError, read_sizes
from services.families.qwen3_omni.budget import PUBLISHED, sizes
from services.registry import family_of, read_config
from services.sizes import Sizes
from services.thinker.lora_targets import EXPERTS, LINEAR
from tests.support.deployment.compose_files import rendered
from tests.support.weights.checkpoints import tts_checkpoint

ROOT = Path(__file__).parent.parent.parent
SMALL = Demand(streams=4, context_tokens=8192, talker_positions=4096)
# What the published config.json says, as far as sizes depend on it and transformers' defaults differ.
THINKER_TEXT = {
    "vocab_size": 152_064,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 65_536,
    "moe_intermediate_size": 768,
    "num_experts": 128,
}
TALKER_TEXT = {
    "vocab_size": 3072,
    "hidden_size": 1024,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "moe_intermediate_size": 384,
    "num_experts": 128,
    "shared_expert_intermediate_size": 768,
}


def gpus(gib: float, count: int = 1) -> Gpus:
    return Gpus.alike(int(gib * GIB), count)


def taken(budget: Budget, gpu: int) -> int:
    return budget.gpus.memory[gpu] - budget.free_bytes(gpu)


def test_published_sizes_are_those_of_the_architecture():
    config = Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": THINKER_TEXT,
            "vision_config": {"out_hidden_size": 2048},
            "audio_config": {"output_dim": 2048},
        },
        talker_config={
            "text_config": TALKER_TEXT,
            "code_predictor_config": {"num_code_groups": 16},
            "thinker_hidden_size": 2048,
            "num_code_groups": 16,
            "spatial_merge_size": 2,
        },
        code2wav_config={},
        enable_audio_output=True,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(config)
    # transformers from 5.21 on has the encoders inside its model; checkpoints have the names of before
    names = ((name.replace("thinker.model.audio", "thinker.audio"), each) for name, each in model.named_parameters())
    tensors = ((name.replace("thinker.model.visual", "thinker.visual"), 2 * each.numel()) for name, each in names)
    stated = {
        "dtype": "bfloat16",
        "thinker_config": {"text_config": THINKER_TEXT},
        "talker_config": {"text_config": TALKER_TEXT},
    }
    assert asdict(sizes(stated, tensors)) == asdict(PUBLISHED)


def test_kept_states_are_those_of_the_plugin():
    from services.common.stream.rows import hidden_states
    from services.thinker.plugin.rows import MROPE_POSITIONS, RowKind, row_bytes

    assert PUBLISHED.states_per_token == row_bytes((RowKind(hidden_states(24), 2048), MROPE_POSITIONS), torch.bfloat16)


def test_the_published_model_on_a_96_gb_gpu():
    budget = share_out(PUBLISHED, gpus(95), Demand())  # 96 GB as nvidia-smi gives them
    assert taken(budget, 0) <= 0.97 * 95 * GIB
    thinker, talker, code2wav = budget.shares
    assert talker.requests == 8 * 8192 * 20 * 1024
    assert talker.weights == 6_649_192_960 + 152_064 * 1024 * 2, "the text table is not in the checkpoint"
    assert code2wav.requests < 0.1 * GIB
    assert thinker.requests == budget.context_tokens * (96 * 1024 + 4 * 1024 + 12)
    cache = budget.context_tokens * 96 * 1024
    assert budget.settings["THINKER_KV_CACHE_BYTES"] == str(cache)
    # vLLM starts only if its share of the GPU is free beside all others
    share = float(budget.settings["THINKER_GPU_MEMORY_UTILIZATION"]) * 95 * GIB
    assert thinker.weights + thinker.requests < share < 95 * GIB - talker.total - code2wav.total


def test_files_have_the_budget():
    settings = share_out(PUBLISHED, gpus(95), Demand()).settings
    example = (ROOT / ".env.example").read_text().splitlines()
    gpu = (ROOT / "deploy/docker/gpu.yaml").read_text()
    overlay = (ROOT / "deploy/k8s/overlays/single-gpu/kustomization.yaml").read_text()
    for name, value in settings.items():
        assert f"{name}={value}" in example
        assert f"QUARTET_{name}: ${{QUARTET_{name}:-${{{name}:-{value}}}}}" in gpu
        assert f"- QUARTET_{name}={value}\n" in overlay


def test_what_does_not_fit_is_refused():
    with pytest.raises(BudgetError, match=r"79.6 GiB are 3.6 GiB too few: thinker.*one context of 32768 tokens.*--st"):
        share_out(PUBLISHED, gpus(79.6), Demand())
    assert share_out(PUBLISHED, gpus(79.6), SMALL).context_tokens >= 8192


def test_a_context_is_whole_kv_blocks():
    tokens = 8200
    just = 80.874  # GiB, of which 8,192 tokens would be left
    with pytest.raises(BudgetError, match="one context of 8200 tokens"):
        share_out(PUBLISHED, gpus(just), Demand(context_tokens=tokens))
    assert share_out(PUBLISHED, gpus(just + 0.01), Demand(context_tokens=tokens)).context_tokens >= tokens


def test_more_streams_take_more_than_their_cache():
    """Code2wav's activations and both engines' graphs grow with the streams of a step."""
    few, many = (share_out(PUBLISHED, gpus(140), replace(Demand(), streams=streams)).shares[2] for streams in (8, 64))
    assert many.working - few.working > 4 * GIB


def test_room_for_adapters(monkeypatch: pytest.MonkeyPatch):
    demand = Demand(max_loras=4, adapted=(*LINEAR, *EXPERTS))
    alone, beside = (share_out(PUBLISHED, gpus(140), each) for each in (Demand(), demand))
    assert beside.shares[0].working - alone.shares[0].working == 5_153_488_896
    fewer = (alone.context_tokens - beside.context_tokens) * (100 * 1024 + 12)
    assert fewer == pytest.approx(5_153_488_896, abs=4 * 1024**2)
    assert taken(beside, 0) <= 0.97 * 140 * GIB
    monkeypatch.setattr("cli.sizes.read_sizes", lambda model: PUBLISHED)
    command = ["budget", "--model", "m", "--gpu-memory-gib", "140", "--loras", "4"]
    assert "beside 0.1 GiB for adapters" in CliRunner().invoke(app, command).output
    assert "beside 19.2 GiB" in CliRunner().invoke(app, [*command, "--lora-experts", "--lora-rank=64"]).output
    assert "adapters" not in CliRunner().invoke(app, command[:-2]).output
    small = CliRunner().invoke(app, [*command, "--lora-experts", "--lora-rank=256"])
    assert "or lower --streams or --talker-positions or --context-tokens or --loras" in small.output


def test_ears_and_a_voice_are_of_other_checkpoints(monkeypatch):
    """As `quartet up` shares a GPU out for the three."""
    whisper = Sizes({"thinker": GIB}, kv_per_token=144 * 1024, max_context_tokens=448)
    by_model = {"a/llm": PUBLISHED.of(["thinker"]), "a/tts": PUBLISHED, "an/asr": whisper}
    for module in ("cli.sizes", "cli.gpu_plan"):
        monkeypatch.setattr(f"{module}.read_sizes", by_model.__getitem__)
    command = ["budget", "--model=a/llm", "--gpu-memory-gib=140"]
    alone, ears, both = (
        CliRunner().invoke(app, [*command, *more]).output
        for more in ((), ("--asr-model=an/asr",), ("--asr-model=an/asr", "--talker-model=a/tts"))
    )
    assert "ASR" not in alone
    assert "talker" not in ears
    assert re.search(r"^talker +0 ", both, re.MULTILINE)
    settings = dict(re.findall(r"^([A-Z_0-9]+)=(.*)$", both, re.MULTILINE))
    assert settings["ASR_KV_CACHE_BYTES"] == str(8 * 2048 * 144 * 1024)
    assert settings["ASR_MAX_CONTEXT_TOKENS"] == "448"
    shares = [float(settings[f"{stage}_GPU_MEMORY_UTILIZATION"]) for stage in ("THINKER", "ASR")]
    assert shares[0] > shares[1] > 0.02
    assert sum(shares) < 0.95


def test_an_aligner_is_counted(tmp_path):
    write_aligner(tmp_path, downsample_hidden_size=480, num_mel_bins=128)
    alone = share_out(PUBLISHED, gpus(140), Demand())
    beside, fewer = (
        share_out(PUBLISHED, gpus(140), with_aligner(Demand(), stage_settings("aligner", str(tmp_path), flags)))
        for flags in ((), ("--max-batch-audio-s=60",))
    )
    share, less = (found.shares[-1] for found in (beside, fewer))
    assert (alone.shares[-1].stage, share.stage, share.weights) == ("code2wav", "aligner", 4 * 2)
    measured = 6_238_157  # bytes of live tensors for a second of sound, of the published sizes in bfloat16
    assert measured < share.requests / 600 < 2 * measured
    assert less.requests * 10 == share.requests
    assert alone.context_tokens > fewer.context_tokens > beside.context_tokens
    assert "ALIGNER_MAX_BATCH_AUDIO_S" not in beside.settings
    assert "QUARTET_ALIGNER_MAX_BATCH_AUDIO_S=60" in lines(fewer)
    longer = stage_settings("aligner", str(tmp_path), ("--max-batch-audio-s=60", "--max-audio-s=120"))
    assert with_aligner(Demand(), longer).fixed["aligner"].requests == 2 * less.requests  # of one sound


def test_budget_prints_an_aligners_share():
    command = ["budget", "--model=quartet-demo", "--gpu-memory-gib=24", "--aligner-model=quartet-demo-aligner"]
    printed = CliRunner().invoke(app, [*command, "--aligner-audio-s=60"]).output
    assert re.search(r"^aligner +0 .* a step of 60 s of sound", printed, re.MULTILINE)
    assert "QUARTET_ALIGNER_MAX_BATCH_AUDIO_S=60" in printed


def write_aligner(folder: Path, **audio: int) -> None:
    """A checkpoint of one small tensor, which says that it is a Qwen3-ForcedAligner."""
    config = {"model_type": "qwen3_asr", "architectures": ["Qwen3ASRForTokenClassification"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | {"audio_config": audio}))
    save_file({"score.weight": torch.zeros(4, dtype=torch.bfloat16)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model=quartet-demo-aligner"], "is an aligner; give it by --aligner-model"),
        (["--model=quartet-demo", "--aligner-model=quartet-demo"], "is no aligner"),
        (["--model=quartet-demo", "--aligner-audio-s=60"], "name it by --aligner-model"),
    ],
)
def test_what_is_no_aligner_is_refused(flags, said):
    done = CliRunner().invoke(app, ["budget", *flags, "--gpu-memory-gib=24"])
    assert done.exit_code != 0
    assert said in " ".join(f"{done.output} {done.exception}".replace("│", " ").split())


def test_room_for_a_dit():
    alone, beside = (share_out(PUBLISHED, gpus(140), Demand(fixed={"dit": Need.whole(gib * GIB)})) for gib in (0, 20))
    assert beside.shares[-1].stage == "dit"
    assert taken(beside, 0) <= 0.97 * 140 * GIB
    fewer = (alone.context_tokens - beside.context_tokens) * (100 * 1024 + 12)
    assert fewer == pytest.approx(20 * GIB, abs=4 * 1024**2)


@pytest.mark.parametrize(("ranks", "kv_kib"), [(1, 96), (2, 48), (4, 24), (8, 24)])
def test_tensor_parallel(ranks: int, kv_kib: int):
    """The first GPU has the states besides its part of the cache; four KV heads are not split over eight GPUs."""
    budget = share_out(
        PUBLISHED, gpus(80, ranks + 1), SMALL, Layout(tuple(range(ranks)), dict.fromkeys(OTHERS, (ranks,)))
    )
    assert budget.settings["THINKER_KV_CACHE_BYTES"] == str(budget.context_tokens * kv_kib * 1024)
    assert all(taken(budget, gpu) <= 0.97 * 80 * GIB for gpu in budget.layout.used)
    assert budget.shares[0].weights > 63_438_410_976 // ranks - 1
    assert budget.shares[0].gpus == tuple(range(ranks))
    assert budget.shares[1].gpus == (ranks,)


def test_layouts_are_chosen_by_what_fits():
    assert str(best(PUBLISHED, gpus(95), Demand()).layout) == "1"
    assert str(best(PUBLISHED, gpus(95, 8), Demand()).layout) == "1 + 2"
    assert str(best(PUBLISHED, gpus(70, 2), Demand(streams=32)).layout) == "2"
    assert str(best(PUBLISHED, gpus(95, 8), Demand(), ranks=2).layout) == "2 + 2"
    with pytest.raises(BudgetError, match="--tensor-parallel-size 3: must be a power of two"):
        best(PUBLISHED, gpus(95, 8), Demand(), ranks=3)
    with pytest.raises(BudgetError, match="too few"):
        best(PUBLISHED, gpus(22, 4), Demand())


def test_stages_are_where_they_are_set_and_the_others_where_there_is_room():
    uneven = Gpus((24 * GIB, 95 * GIB, 95 * GIB), (0, 80 * GIB, 0))
    roomy = best(PUBLISHED, uneven, SMALL).layout
    assert roomy.thinker == (2,), "the one with room"
    assert roomy.others["talker"] == (0,)
    pinned = next(layouts(PUBLISHED, gpus(95, 2), SMALL, pinned={"thinker": 1}))
    assert pinned.thinker == (1,)
    assert set(pinned.others.values()) == {(0,)}
    swapped = next(layouts(PUBLISHED, gpus(95, 2), SMALL, pinned={"talker": 0, "code2wav": 0}))
    assert swapped.thinker == (1,)
    ranks = next(layouts(PUBLISHED, gpus(95, 3), Demand(fixed={"dit": Need.whole(GIB)}, dit_gpus=2)))
    assert ranks.others["dit"] == (0, 1)


def test_settings_of_several_gpus_are_flags():
    shown = "\n".join(lines(best(PUBLISHED, gpus(95, 3), Demand(), 2)))
    assert "--thinker-arg=--tensor-parallel-size=2" in shown
    assert "--thinker-arg=--kv-cache-bytes=" in shown
    assert "--talker-arg=--device=cuda:2" in shown
    assert "--code2wav-arg=--max-running-requests=8" in shown


def test_settings_of_several_gpus_arrive_in_containers():
    budget = best(PUBLISHED, gpus(95, 3), Demand(), 2)
    values = dict(line.split("=", 1) for line in lines(budget) if line.startswith("QUARTET_"))
    services = rendered(values, "gpu")["services"]
    for stage, settings in settings_by_stage(budget).items():
        given = {f"QUARTET_{stage.upper()}_{name.upper()}": value for name, value in settings.items()}
        assert given.items() <= values.items()
        assert given.items() <= services[stage]["environment"].items()
    assert values["QUARTET_THINKER_TENSOR_PARALLEL_SIZE"] == "2"
    assert values["QUARTET_TALKER_DEVICE"] == "cuda:2"


def test_the_table_in_the_docs_is_what_is_computed():
    assert "\n".join(table(PUBLISHED, [Demand()])) in (ROOT / "docs/gpus.md").read_text()


def test_sizes_are_the_checkpoints(tiny_checkpoint):
    sizes = read_sizes(str(tiny_checkpoint))
    text = json.loads((tiny_checkpoint / "config.json").read_text())["thinker_config"]["text_config"]
    assert sizes.kv_per_token == 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"] * 4
    files = sum(file.stat().st_size for file in tiny_checkpoint.glob("*.safetensors"))
    assert 0.9 * files < sum(sizes.weights.values()) <= files

    command = ["budget", "--model", str(tiny_checkpoint), "--gpu-memory-gib"]
    result = CliRunner().invoke(app, [*command, "16"])
    assert result.exit_code == 0, result.output
    assert "TALKER_MAX_RUNNING_REQUESTS=8" in result.output
    told = json.loads(CliRunner().invoke(app, [*command, "16", "--json"]).output)
    assert told["shares"][0]["stage"] == "thinker"
    assert told["settings"]["THINKER_KV_CACHE_BYTES"] in result.output
    assert CliRunner().invoke(app, [*command, "2"]).exit_code == 1
    assert CliRunner().invoke(app, ["budget"]).exit_code == 2


def test_a_model_of_the_hub_that_has_been_fetched_is_read_here(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    def reached() -> bool:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("cli.hub.fetched", lambda model, file: tiny_checkpoint / file)
    monkeypatch.setattr("cli.hub.is_reached", reached)
    assert read_sizes("some/model") == read_sizes(str(tiny_checkpoint))


def test_no_such_checkpoint(tmp_path):
    with pytest.raises(BudgetError, match="--model"):
        read_sizes(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(BudgetError, match="model_type is 'bert'"):
        read_sizes(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_omni_moe"}')
    with pytest.raises(BudgetError, match="thinker_config"):
        read_sizes(str(tmp_path))


def test_a_model_without_a_thinker() -> None:
    checkpoint = tts_checkpoint("qwen3-tts")
    assert list(stages_of(str(checkpoint))) == ["talker", "code2wav"]
    sizes = read_sizes(str(checkpoint))
    files = {file.parent.name: file.stat().st_size for file in checkpoint.rglob("*.safetensors")}
    assert 0.8 * files["speech_tokenizer"] < sizes.weights["code2wav"] <= files["speech_tokenizer"]
    budget = best(sizes, gpus(8, 2), Demand())
    assert [share.stage for share in budget.shares] == ["talker", "code2wav"]
    assert budget.shares[1].gpus == (1,)
    assert not any("THINKER" in name for name in budget.settings)


def test_a_part_of_the_config_that_is_null_is_missing(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"token2wav_config": null, "talker_config": {"width": null}}')
    config = read_config(tmp_path)
    assert config["talker_config"]["width"] is None
    with pytest.raises(ValueError, match=r"config.json: token2wav_config is missing"):
        config["token2wav_config"]


def test_a_stage_that_a_family_lacks_names_the_pipeline_without_it():
    with pytest.raises(ValueError, match="qwen3_tts models have no thinker: give --pipeline speech"):
        family_of({"model_type": "qwen3_tts"}).part("thinker")
