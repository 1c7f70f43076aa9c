"""Asks every endpoint of a gateway what its OpenAPI document allows and does not: no answer may be a 5xx.

The gateway is before scripted stages, a thinker, a talker, code2wav and a dit. Whatever it was asked, it must still
answer a chat at the end, with nothing under way. Needs schemathesis: pip install 'quartet[fuzz]'.
"""

import argparse
import asyncio
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import structlog

from quartet.v1 import server_info_pb2
from tests.support.gateway_stack import Running, running

PIPELINE = Path("gateway/pipelines/qwen3-omni-dit.yaml")
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}
HOOKS = Path(__file__).with_name("fuzz_hooks.py")


async def fuzz(flags: argparse.Namespace, directory: Path) -> int:
    """Exit status of schemathesis, or 1 where the gateway is not as before."""
    keep = {
        "jobs_dir": directory / "jobs",
        "voices_dir": directory / "voices",
        "responses_dir": directory / "responses",
    }
    limits = {"request_timeout_s": 20.0, "anonymous_admin": True, "max_queued_videos": 1000}
    talker = server_info_pb2.TalkerInfo(
        speakers=["chelsie"],
        reads_text=True,
        takes_instructions=True,
        max_context_positions=4096,
        voice_sample_rate_hz=24000,
    )
    async with running(PIPELINE, talker, **keep, **limits) as gateway:
        command = [
            "run",
            f"{gateway.url}/openapi.json",
            "--checks=not_a_server_error",
            f"--max-examples={flags.examples}",
            f"--seed={flags.seed}",
            "--phases=examples,coverage,fuzzing",
            "--continue-on-failure",
            "--request-timeout=60",
            *(f"--include-path={path}" for path in flags.path),
        ]
        environment = os.environ | {"SCHEMATHESIS_HOOKS": str(HOOKS)}
        process = await asyncio.create_subprocess_exec(flags.schemathesis, *command, env=environment)
        status = await process.wait()
        return await is_well(gateway) or status


async def is_well(gateway: Running) -> int:
    """0 if nothing is under way and a chat is answered."""
    await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)
    answer = await gateway.chat(CHAT)
    running_calls = {stage: script.running for stage, script in gateway.scripts.items() if script.running}
    print(f"a chat afterwards: {answer.status_code}; calls under way in stages: {running_calls or 'none'}")
    return 0 if answer.status_code == 200 and not running_calls else 1


def main() -> None:
    """Ends with schemathesis' exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=3000, help="generated requests for each operation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--schemathesis", default=shutil.which("schemathesis") or "schemathesis", help="the command")
    flags = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory(prefix="quartet-fuzz-") as directory:
        sys.exit(asyncio.run(fuzz(flags, Path(directory))))


if __name__ == "__main__":
    main()
