"""The gateway's process: what it loads, and when it does not start."""

import asyncio
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import httpx

from gateway.access.key_file import digest, new_key
from tests.support.certificates import flags, issue, make
from tests.support.gateway_stack import SPEECH
from tests.support.stack import free_port

COMMAND = [sys.executable, "-m", "gateway", f"--pipeline={SPEECH}"]


def refused(*flags: str) -> str:
    """What a gateway says that does not start."""
    ended = subprocess.run([*COMMAND, "--port=0", *flags], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    return ended.stderr


def test_the_gateway_needs_no_engine():
    code = "import sys, gateway.app; print(*sorted({'torch', 'vllm', 'transformers', 'openai'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_without_keys_others_are_not_let_near(tmp_path: Path):
    assert "--api-keys-file" in refused("--host=0.0.0.0")
    missing = refused("--host=0.0.0.0", f"--api-keys-file={tmp_path}/none.yaml")
    assert f"{tmp_path}/none.yaml:1: cannot be read" in missing


async def test_with_keys_it_listens_for_others(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    file.write_text(f'keys:\n  - name: alice\n    sha256: "{digest(new_key())}"\n')
    port = free_port()
    process = subprocess.Popen([*COMMAND, f"--port={port}", "--host=0.0.0.0", f"--api-keys-file={file}"])
    try:
        async with asyncio.timeout(60), httpx.AsyncClient() as client:
            while True:
                assert process.poll() is None
                try:
                    answer = await client.get(f"http://127.0.0.1:{port}/health")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
        assert answer.json() == {"status": "ok"}
    finally:
        process.terminate()
        process.wait()


def test_a_process_does_not_start_with_wrong_files(tmp_path: Path):
    directory = make(tmp_path, "gateway")
    issue(directory, "gateway", -timedelta(minutes=1))
    for given, message in (
        (flags(directory, "gateway"), f"--tls-cert: {directory}/gateway/tls.crt expired at"),
        (flags(directory, "gateway")[:1], "missing: --tls-key, --tls-ca"),
        (["--tls-server-name=talker"], "--tls-server-name is of no use without"),
    ):
        assert message in refused(*given)
