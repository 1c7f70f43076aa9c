"""The benchmarks' commands on a running system, and the sizes they take for the published ones."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.systems.stack import Stack, running

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 540


@pytest.fixture(scope="module")
def open_stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A whole system that is open to all: the benchmarks send no keys."""
    with running(tiny_checkpoint, tmp_path_factory.mktemp("open")) as started:
        yield started


def _run(name: str, *flags: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.{name}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _of(stack: Stack, checkpoint: Path) -> tuple[str, ...]:
    """Flags of a benchmark of `stack`, with short answers."""
    answers = ("--tokens", "8", "--frames", "10")
    return ("--run-dir", str(stack.run_directory), "--model", str(checkpoint), *answers)


@pytest.mark.e2e
@pytest.mark.weekly
def test_speech_beside_transformers(open_stack: Stack, tiny_checkpoint: Path, tmp_path: Path):
    loads = ["--concurrency", "2", "--requests", "4", "--rate", "4", "--arrivals", "4", "--peer-requests", "2"]
    output = _run("speech", *_of(open_stack, tiny_checkpoint), *loads, "--json", str(tmp_path / "figures.json"))
    assert "TTFA ms" in output
    closed, arriving = json.loads((tmp_path / "figures.json").read_text())["loads"]
    assert (closed["concurrency"], arriving["concurrency"], arriving["rate_per_s"]) == (2, None, 4.0)
    for figures in (closed["quartet"], arriving["quartet"], closed["peer"]):
        assert figures["failed"] == 0
        # a client that stood still reads both at once
        assert 0 < figures["spreads"]["ttft_ms"]["p50"] <= figures["spreads"]["ttfa_ms"]["p50"]
        assert figures["audio_s_per_s"] > 0
    assert min(closed["quartet"]["cpu_s_per_request"].values()) >= 0
    assert set(closed["quartet"]["cpu_s_per_request"]) == {"thinker", "talker", "code2wav", "gateway"}
    assert closed["quartet"]["memory_mib"]["thinker"] > 100
    answers = closed["answers"]
    assert len(answers) == 4
    assert all(sum(samples for _, samples in answer["audio_ms_samples"]) for answer in answers)


@pytest.mark.e2e
@pytest.mark.weekly
def test_speech_of_another_family_beside_transformers(tmp_path: Path):
    """It starts a system of its own, and ends with figures only if both sides said the same."""
    loads = ["--concurrency", "2", "--requests", "4", "--load", "0", "--peer-requests", "2"]
    answers = ["--tokens", "8", "--frames", "10", "--json", str(tmp_path / "figures.json")]
    assert "vLLM-Omni" not in _run("speech", "--arch", "qwen2.5-omni", *loads, *answers)
    (closed,) = json.loads((tmp_path / "figures.json").read_text())["loads"]
    for figures in (closed["quartet"], closed["peer"]):
        assert (figures["failed"], figures["silent"]) == (0, 0)
        assert figures["audio_s_per_s"] > 0


@pytest.mark.e2e
@pytest.mark.weekly
def test_the_simulation_beside_the_real_thing(tmp_path: Path):
    figures = tmp_path / "figures.json"
    output = _run("simulation.agreement", "--streams", "1", "2", "--requests", "4", "--json", str(figures))
    assert "of 6 figures within 15%" in output
    assert all(row["simulated"] > 0 for row in json.loads(figures.read_text())["rows"])


@pytest.mark.weekly
def test_what_the_gateway_costs():
    """It ends with an error if an answer broke off."""
    load = ["--rounds", "1", "--requests", "4", "--concurrency", "2", "--rate", "4", "--rate-s", "2", "--idle-s", "1"]
    answers = ["--tokens", "4", "--sound-s", "2", "--microphones", "1", "--microphone-s", "1"]
    output = _run("gateway_cost", *load, *answers, "--flag=--workers=2", "--cores", "2")
    for figure in ("idle", "spoken", "text answer", "microphone", "TTFT ms p50"):
        assert figure in output


@pytest.mark.e2e
@pytest.mark.weekly
def test_many_gateways():
    """It ends with an error if a request failed, or a batch whose gateways were killed is not whole."""
    costs = ["--rounds", "1", "--requests", "16", "--concurrency", "2", "--idle-s", "1", "--tokens", "4"]
    speech = ["--spoken", "4", "--rate", "2", "--text-tokens", "8", "--frames", "10", "--lines", "100"]
    output = _run("many_gateways", *costs, *speech)
    for figure in ("plain chat", "chained response", "TTFA ms p50", "TTFA ms p95"):
        assert figure in output
    assert "2 gateways killed: completed, {'total': 100, 'completed': 100, 'failed': 0}" in output


@pytest.mark.e2e
@pytest.mark.weekly
@pytest.mark.parametrize("arch", ["qwen3-omni", "qwen2.5-omni"])
def test_soak(arch: str):
    """It ends with an error if anything was lost, wrong or left."""
    output = _run("soak", "--arch", arch, "--requests", "60", "--kills", "1")
    assert "1 kills; 0 faults" in output
    assert "nothing is lost, wrong or left" in output


@pytest.mark.e2e
@pytest.mark.weekly
def test_a_text_spoken_beside_transformers(open_stack: Stack, tiny_checkpoint: Path, tmp_path: Path):
    """It ends with figures only if all samples are equal, the batch's too."""
    where = ["--run-dir", str(open_stack.run_directory), "--model", str(tiny_checkpoint), "--frames", "10"]
    loads = ["--concurrency", "1", "3", "--requests", "8", "--peer-requests", "2"]
    output = _run("speak", *where, *loads, "--json", str(tmp_path / "figures.json"))
    assert "TTFT" not in output
    alone, three = json.loads((tmp_path / "figures.json").read_text())["loads"]
    assert (alone["concurrency"], three["concurrency"], alone["third"]) == (1, 3, {})
    for figures in (alone["quartet"], alone["peer"], three["quartet"], three["peer"]):
        assert (figures["failed"], figures["silent"]) == (0, 0)
        assert 0 < figures["spreads"]["ttfa_ms"]["p50"] <= figures["spreads"]["total_ms"]["p50"]
        assert figures["audio_s_per_s"] > 0 < figures["cpu_s_per_request"].popitem()[1]
    assert three["third_name"] == "transformers, one call for 3"
    assert min(three["third"][figure] for figure in ("ttfa_ms", "total_ms", "audio_s_per_s", "cpu_s")) > 0


@pytest.mark.e2e
@pytest.mark.weekly
def test_spoken_conversations_beside_chats(open_stack: Stack, tmp_path: Path):
    loads = ["--sessions", "2", "--turns", "4", "--rounds", "1", "--barging", "2", "--barge-ins", "2"]
    short = ["--listening", "4", "--seconds", "2", "--tokens", "8", "--frames", "10"]
    where = ["--run-dir", str(open_stack.run_directory), "--json", str(tmp_path / "figures.json")]
    assert "from the user's last sample" in _run("realtime", *where, *loads, *short)
    figures = json.loads((tmp_path / "figures.json").read_text())
    for side, turns in figures["turns"]["2"].items():
        assert len(turns) == 4, side
        assert all(turn["error"] is None and 0 < turn["stopped_s"] < turn["first_audio_s"] for turn in turns), side
    assert figures["speculations"]["2"]["used"] > 0
    assert len(figures["silences"]["sound_s"]) == 2 * 2 + 2
    assert figures["cost"]["cpu_s"] > 0 < figures["detector_ms"]


@pytest.mark.e2e
@pytest.mark.weekly
@pytest.mark.parametrize(("transport", "speaking"), [("websocket", 30), ("live", 8)])
def test_users_speak_in_a_crowd_of_200_sessions(open_stack: Stack, tmp_path: Path, transport: str, speaking: int):
    """Nobody is lost, and everybody is answered."""
    where = ["--run-dir", str(open_stack.run_directory), "--json", str(tmp_path / "figures.json")]
    crowd = ["--sessions", "--barging", "0", "--listening", "0", "--open", "200", "--speaking", str(speaking)]
    short = ["--user-turns", "2", "--transport", transport, "--tokens", "8", "--frames", "10"]
    assert "the gateway's metrics say" in _run("realtime", *where, *crowd, *short)
    figures = json.loads((tmp_path / "figures.json").read_text())["crowds"][transport]
    assert (figures["sessions"], figures["lost"]) == (200, 0)
    assert [len(waits) for waits in figures["users"]] == speaking * [2]
    waits = [wait for user in figures["users"] for wait in user]
    assert all(wait["error"] is None and wait["first_sound_s"] > 0.5 for wait in waits)
    assert figures["told_s"][0] > 0.5
    assert 0 < figures["session_kib"] < 1500  # a session that waits has no model of its own


@pytest.mark.e2e
@pytest.mark.weekly
def test_split_and_fused_say_the_same(open_stack: Stack, tiny_checkpoint: Path, tmp_path: Path):
    loads = ["--concurrency", "2", "--requests", "2", "--rounds", "1", "--threads", "1"]
    assert "both said the same" in _run(
        "split_vs_fused", *_of(open_stack, tiny_checkpoint), *loads, "--json", str(tmp_path / "figures.json")
    )
    sides = json.loads((tmp_path / "figures.json").read_text())["2"]
    assert sides["split"][0]["frames_per_s"] > 0 < sides["fused"][0]["frames_per_s"]


@pytest.mark.weekly
def test_transports_beside_a_socket_and_memcpy():
    output = _run("transports", "--rounds", "1", "--size", "64 KiB", "--size", "8 MiB")
    assert "of memcpy's rate" in output
    rates = {line.split(" | ")[0]: line for line in output.splitlines() if "GB/s" in line}
    assert set(rates) == {"| memcpy", "| Unix socket", "| inline", "| shared_memory", "| ucx"}
    assert all(line.count("GB/s") == 2 for line in rates.values())


@pytest.mark.e2e
@pytest.mark.weekly
def test_the_dit_beside_diffusers(tmp_path: Path):
    load = ["--families", "wan", "--requests", "2", "--steps", "2", "--rounds", "1", "--threads", "1"]
    video = ["--video-size", "64x64", "--video-frames", "5", "--video-steps", "5"]
    output = _run("dit", *load, *video, "--json", str(tmp_path / "figures.json"))
    assert "a picture during a video" in output
    (report,) = json.loads((tmp_path / "figures.json").read_text())["checkpoints"]
    assert report["pipeline"] == "WanPipeline"
    rows = {row["title"]: row for row in report["rows"]}
    assert list(rows) == [
        "diffusers, one after another",
        "diffusers, one call for 2",
        "Quartet, one after another",
        "Quartet, 2 at once",
    ]
    assert rows["diffusers, one after another"]["ratio"] == 1
    for title, row in rows.items():
        figures = row["medians"]
        assert 0 < figures["first_s"] <= figures["seconds"], title
        assert figures["step_ms"] > 0, title
        assert figures["cpu_s"] > 0, title
        assert row["apart"] <= 1, title
    assert rows["Quartet, one after another"]["medians"]["mean_batch"] == 1
    assert 1 <= rows["Quartet, 2 at once"]["medians"]["mean_batch"] <= 2
    during = report["video"]["medians"]
    assert 0 < during["first_step"] < during["end"]
    assert during["apart"] <= 1


@pytest.mark.e2e
@pytest.mark.weekly
def test_variants_of_the_dit_say_how_far_they_are_off(tmp_path: Path):
    load = ["--families", "flux", "--requests", "1", "--steps", "6", "--rounds", "1", "--threads", "1"]
    variants = ["--variant", "plain:", "--variant", "cached:cache=first-block:100"]
    assert "NOT EXACT" in _run("dit", *load, *variants, "--json", str(tmp_path / "figures.json"))
    (report,) = json.loads((tmp_path / "figures.json").read_text())["checkpoints"]
    apart = {row["title"]: row["apart"] for row in report["rows"]}
    assert apart["Quartet plain, one after another"] <= 1 < apart["Quartet cached, one after another"]


def test_how_far_outputs_are_apart():
    import numpy as np

    from benchmarks.diffusion.work import apart

    outputs = [np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 255, np.uint8)]
    assert apart(outputs, outputs) == 0
    assert apart(outputs, [outputs[0], outputs[1] - 3]) == 3
    assert apart(outputs, outputs[::-1]) == 255
    with pytest.raises(ValueError, match="other shapes"):
        apart(outputs, [outputs[0], outputs[1][:2]])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--variant", "compile=on"], "must be NAME:SETTING=VALUE"),
        (["--variant", "compile:compile"], "must be SETTING=VALUE"),
        (["--dit-flag", "max_batch"], "must be SETTING=VALUE"),
        (["--size", "64"], "must be WIDTHxHEIGHT"),
        (["--families", "sd3,wan-i2v"], "there is no 'wan-i2v'"),
        (["--requests", "0"], "--requests: must be 1 or more"),
        (["--video-steps", "3"], "--video-steps: must be over 3"),
        (["--repeated", "--variant", "plain:"], "--repeated: has variants of its own"),
    ],
)
def test_flags_of_the_dits_benchmark_that_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    from benchmarks.dit import parse

    with pytest.raises(SystemExit):
        parse(flags)
    assert message in capsys.readouterr().err


def test_variants_of_the_dit_have_the_flags_of_all():
    from benchmarks.dit import Variant, parse

    anew = "--encoding-cache-mib=0"  # diffusers encodes a prompt each time
    options = parse(["--dit-flag", "max_batch=4", "--variant", "plain:", "--variant", "fast:compile=on,cache=x"])
    assert options.variants == [
        Variant("plain", ("--max-batch=4", anew)),
        Variant("fast", ("--max-batch=4", "--compile=on", "--cache=x", anew)),
    ]
    assert parse([]).variants == [Variant("", (anew,))]
    (kept,) = parse(["--variant", "kept:encoding_cache_mib=64"]).variants
    assert kept.flags == ("--encoding-cache-mib=64",)
    assert parse(["--repeated"]).variants == [Variant("kept", kept.flags), Variant("anew", (anew,))]


def test_a_stage_flag_without_a_stage_is_refused():
    from benchmarks.speech import stage_arguments

    assert stage_arguments(["talker.max_running_requests=4", "thinker.dtype=float32"]) == {
        "talker": ["--max-running-requests=4"],
        "thinker": ["--dtype=float32"],
    }
    for wrong in ("max_running_requests=4", "talker.max_running_requests", "dit.steps=4"):
        with pytest.raises(SystemExit, match=r"STAGE\.SETTING=VALUE"):
            stage_arguments([wrong])


class TestPublishedSizes:
    """Parameters are counted on the meta device: nothing of their size is allocated."""

    def test_talker(self):
        import torch
        from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeTalkerForConditionalGeneration

        from benchmarks.stages.real_sizes import TALKER
        from services.talker.model import TalkerModel

        config: Any = Qwen3OmniMoeConfig(enable_audio_output=True).talker_config
        assert TALKER.moe
        config.num_code_groups = config.code_predictor_config.num_code_groups = TALKER.num_code_groups
        config.text_config.num_experts_per_tok = TALKER.moe.experts_per_token
        config.text_config.head_dim = TALKER.talker.head_dim
        config.text_config.shared_expert_intermediate_size = TALKER.moe.shared_intermediate
        config.speaker_id, config.spatial_merge_size = dict.fromkeys(TALKER.speakers, 0), 2
        with torch.device("meta"):
            ours, reference = TalkerModel(TALKER), Qwen3OmniMoeTalkerForConditionalGeneration(config)
        assert _parameters(ours) == _parameters(reference)

    def test_code2wav(self):
        import torch
        from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

        from benchmarks.stages.real_sizes import CODE2WAV
        from services.families.qwen3_omni.code2wav import Qwen3OmniDecoder

        with torch.device("meta"):
            ours, reference = Qwen3OmniDecoder(CODE2WAV), Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig())
        assert _parameters(ours) == _parameters(reference)


def _parameters(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_stage_alone_is_measured_against_what_it_reads():
    import torch

    from benchmarks.stages.timing import Stage, measure

    sleeps: list[float] = []
    timing = measure(Stage(lambda: sleeps.append(0), 4, lambda: 2_000_000), 3, steps=5, seconds=3600, bytes_per_s=1e9)
    assert len(sleeps) == 3 + 5
    assert timing.limit_ms == pytest.approx(2.0)
    assert timing.frame_ms == pytest.approx(timing.step_ms / 4)
    assert timing.frames_per_s == pytest.approx(3 * 4 / (timing.step_ms / 1000))
    from benchmarks.stages.real_sizes import fill

    layer = torch.nn.Linear(512, 4096, bias=False)
    fill(layer)
    assert layer.weight.std().item() == pytest.approx(512**-0.5, rel=0.02)
    assert len(layer.weight.unique(dim=0)) == 4096


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["talker", "code2wav"])
def test_a_stage_alone_on_a_gpu(stage: str, tmp_path: Path):
    flags = ["--device", "cuda", "--batch", "1", "8", "--steps", "10", "--json", str(tmp_path / "figures.json")]
    _run("stage_alone", stage, *flags)
    timings = json.loads((tmp_path / "figures.json").read_text())["timings"]
    assert [timing["batch"] for timing in timings] == [1, 8]
    assert all(timing["step_ms"] > timing["limit_ms"] > 0 for timing in timings)
