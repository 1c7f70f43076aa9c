"""Sends every endpoint of a gateway what its OpenAPI document allows and does not: no answer may be a 5xx.

The gateway has scripted stages: a thinker, a talker, code2wav and a dit that makes images; with `--dit video` or `--dit
sound` a dit that makes those. At the end it must still answer, with no running request. Needs schemathesis: pip install
'quartet[fuzz]'.
"""

import argparse
import asyncio
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import structlog

from quartet.v1 import server_info_pb2
from tests.support.systems.gateway import Running, running
from tests.support.systems.video import MODEL, SOUND_INFO, VIDEO_INFO, Client, gateway_before, scripted_dit

PIPELINE = Path("gateway/pipelines/qwen3-omni-dit.yaml")
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}
HOOKS = Path(__file__).with_name("fuzz_hooks.py")
CONFIG = Path(__file__).with_name("fuzz_schemathesis.toml")


async def fuzz(flags: argparse.Namespace, directory: Path) -> int:
    """Exit status of schemathesis, or 1 where the gateway is not as before."""
    limits = {"request_timeout_s": 20.0, "anonymous_admin": True, "max_queued_videos": 1000}
    if flags.dit != "pictures":
        info = {"video": VIDEO_INFO, "sound": SOUND_INFO}[flags.dit]
        async with scripted_dit(info) as stage, gateway_before(stage, directory / "jobs", **limits) as client:
            status = await schemathesis(flags, client.url, MODEL)
            return await makes_something(flags.dit, client) or status
    keep = {name: directory / name for name in ("jobs_dir", "voices_dir", "files_dir", "responses_dir")}
    talker = server_info_pb2.TalkerInfo(
        speakers=["chelsie"],
        reads_text=True,
        takes_instructions=True,
        max_context_positions=4096,
        voice_sample_rate_hz=24000,
    )
    async with running(PIPELINE, talker, **keep, **limits) as gateway:
        body = {"model": "scripted", "input": "Hello"}
        answers = [await gateway.http.post("/v1/responses", json=body) for _ in range(50)]
        status = await schemathesis(flags, gateway.url, "scripted-dit", [answer.json()["id"] for answer in answers])
        return await is_well(gateway) or status


async def schemathesis(flags: argparse.Namespace, url: str, dit_model: str, responses: Sequence[str] = ()) -> int:
    """Returns its exit status. `dit_model`: the dit's name. `responses`: ids of stored responses."""
    command = [
        f"--config-file={CONFIG}",
        "run",
        f"{url}/openapi.json",
        "--checks=not_a_server_error",
        f"--max-examples={flags.examples}",
        f"--seed={flags.seed}",
        "--phases=examples,coverage,fuzzing",
        "--continue-on-failure",
        "--request-timeout=60",
        *(f"--include-path={path}" for path in flags.path),
    ]
    variables = {"FUZZ_DIT_MODEL": dit_model, "FUZZ_RESPONSE_IDS": " ".join(responses)}
    environment = os.environ | {"SCHEMATHESIS_HOOKS": str(HOOKS)} | variables
    process = await asyncio.create_subprocess_exec(flags.schemathesis, *command, env=environment)
    return await process.wait()


async def is_well(gateway: Running) -> int:
    """0 if nothing is under way and a chat is answered."""
    await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)
    answer = await gateway.chat(CHAT)
    running_calls = {stage: script.running for stage, script in gateway.scripts.items() if script.running}
    print(f"a chat afterwards: {answer.status_code}; calls under way in stages: {running_calls or 'none'}")
    return 0 if answer.status_code == 200 and not running_calls else 1


async def makes_something(dit: str, client: Client) -> int:
    """Returns 0 if all waiting jobs and a new one end and nothing else runs."""
    path = "/v1/videos" if dit == "video" else "/v1/audio/generations"
    answer = await client.http.post(path, json={"model": MODEL, "prompt": "rain"})
    if dit == "video" and answer.status_code == 200:
        await client.reaches(answer.json()["id"], "completed")
    print(f"{path} afterwards: {answer.status_code}; calls under way: {client.stage.running}")
    return 0 if answer.status_code == 200 and not client.stage.running else 1


def main() -> None:
    """Ends with schemathesis' exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=3000, help="generated requests for each operation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--dit", choices=("pictures", "video", "sound"), default="pictures", help="what the dit makes")
    parser.add_argument("--schemathesis", default=shutil.which("schemathesis") or "schemathesis", help="the command")
    flags = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory(prefix="quartet-fuzz-") as directory:
        sys.exit(asyncio.run(fuzz(flags, Path(directory))))


if __name__ == "__main__":
    main()
