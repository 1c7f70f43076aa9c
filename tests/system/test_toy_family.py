"""A family of somebody else's speaks through the real gateway, talker and code2wav, which know nothing of it.

It is made and installed as docs/tutorials/own-family.md says, line by line.
"""

import base64
import io
import json
import os
import shlex
from pathlib import Path

import numpy as np
import openai
import pytest
import soundfile
from safetensors.numpy import load_file

from tests.support.documents import ROOT, URL, blocks
from tests.support.systems.stack import running
from tests.support.systems.terminal import Terminal, lines
from tests.support.toy_family.code2wav import SAMPLE_RATE_HZ
from tests.support.toy_family.reference import reference_codes

pytestmark = pytest.mark.e2e
FRAMES = 30


@pytest.mark.long
def test_the_toy_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"  # what is installed is for this test alone, and no index is asked
    # the last of these is pip's way to say that what the build needs is here
    pip = {"PIP_TARGET": str(site), "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(site), str(ROOT))))
    terminal = Terminal(tmp_path, {}, {**pip, "PYTHONPATH": os.environ["PYTHONPATH"]})
    make, copy, rename, install, tiny, up, say, models = lines("docs/tutorials/own-family.md")
    for line in (make, copy, rename):
        terminal.type(line)
    (project,) = [block.text for block in blocks("toml", pages=[ROOT / "docs/tutorials/own-family.md"])]
    (tmp_path / "my-family" / "pyproject.toml").write_text(project)
    for line in (install, tiny):
        terminal.type(line)
    checkpoint = tmp_path / "toy"
    program, *words = shlex.split(up)
    assert (program, words[:4]) == (".venv/bin/quartet", ["up", "--model", "toy", "--pipeline"])
    with running(checkpoint, tmp_path / "run", "--pipeline", str(tmp_path / words[4])) as stack:
        terminal.type(f"{say} --url {stack.url}")
        assert soundfile.info(tmp_path / "evening.wav").frames > 0
        (served,) = json.loads(terminal.type(models.replace(URL, stack.url)))["data"]
        assert served["quartet"]["voices"] == ["low", "high"]
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60)
        assert [model.id for model in client.models.list()] == ["toy"]
        answer = client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "Good evening"}],
            modalities=["audio"],
            audio={"voice": "high", "format": "wav"},
            extra_body={"quartet": {"talker": {"temperature": 0, "max_frames": FRAMES}}},
        )
    audio = answer.choices[0].message.audio
    assert audio is not None
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(audio.data)), dtype="float32")
    codes = reference_codes(checkpoint, "Good evening", "high", FRAMES)
    waves = load_file(checkpoint / "model.safetensors")["waves"]
    assert len(codes) > 5
    assert (rate, len(samples)) == (SAMPLE_RATE_HZ, SAMPLE_RATE_HZ * len(codes) // 25)
    np.testing.assert_allclose(samples, waves[codes].flatten(), atol=1 / 2**14)
