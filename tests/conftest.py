"""Checkpoints and processes that the tests share."""

import os
import signal
import tempfile
from pathlib import Path

# Oversubscribed OpenMP can be a hundred times slower than one thread; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Videos of a gateway that is told no other place: not the user's own.
os.environ["QUARTET_GATEWAY_JOBS_DIR"] = tempfile.mkdtemp(prefix="quartet-jobs-")

import pytest
from pytest_asyncio import is_async_test

# Started in the background of a shell, this process ignores ctrl-C, and so would those that are tested with it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file share engines and gateways: with --dist loadgroup they go to one worker."""
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if item.path.parent.name in ("system", "long") and is_async_test(item):
            # they call a system that they share, by channels that stay open
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def own_jobs_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A test's gateway shares no videos with another test's: a directory belongs to one gateway at a time."""
    monkeypatch.setenv("QUARTET_GATEWAY_JOBS_DIR", str(tmp_path / "jobs"))


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """A random Qwen3-Omni checkpoint of about 3 M parameters."""
    from tests.support.checkpoints import omni_checkpoint

    return omni_checkpoint("tiny", seed=0)


@pytest.fixture(scope="session")
def small_checkpoint() -> Path:
    """Another one, of other sizes, ids and seed: what works with one only is hard-coded somewhere."""
    from tests.support.checkpoints import omni_checkpoint

    return omni_checkpoint("small", seed=1)


@pytest.fixture(scope="session")
def published_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny one in the shape that Qwen3-Omni was published in: old keys, shards of bfloat16, no tokenizer.json."""
    from tests.support.published import publish

    return publish(tiny_checkpoint, tmp_path_factory.mktemp("checkpoints") / "published")


@pytest.fixture(scope="session")
def media():
    """Encoded media files: image, audio, video."""
    from tests.support.media import make

    return make()


@pytest.fixture(scope="session")
def stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    """The whole system on the tiny checkpoint, started once."""
    from tests.support.stack import running

    with running(tiny_checkpoint, tmp_path_factory.mktemp("run")) as started:
        yield started


@pytest.fixture(scope="session")
def prompt_ids(tiny_checkpoint: Path) -> list[int]:
    """Token ids of a short prompt with the checkpoint's chat template."""
    from transformers import AutoTokenizer

    conversation = [{"role": "user", "content": "What is the sea?"}]
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    return tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)["input_ids"]
