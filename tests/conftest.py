"""Checkpoints and processes that the tests share."""

import gc
import itertools
import os
import signal
import sys
import tempfile
from pathlib import Path

# Oversubscribed OpenMP can be a hundred times slower than one thread; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Two hundred processes start in the tests. Without its cache each compiles anew what it imports: half of all CPU more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from pytest_asyncio import is_async_test

from services.common.engine.process import freeze_heap

sys.dont_write_bytecode = False

# Started in the background of a shell, this process ignores ctrl-C, and so would those that are tested with it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Videos, voices and files of a gateway that is told no other place: not the user's own. Removed when this process ends.
JOBS_DIR = tempfile.TemporaryDirectory(prefix="quartet-jobs-")
os.environ["QUARTET_GATEWAY_JOBS_DIR"] = JOBS_DIR.name
os.environ["QUARTET_GATEWAY_VOICES_DIR"] = f"{JOBS_DIR.name}/voices"
os.environ["QUARTET_GATEWAY_FILES_DIR"] = f"{JOBS_DIR.name}/files"
NUMBERS = itertools.count()


pytest_plugins = ["tests.support.engines", "tests.support.systems.postgres"]

gc.disable()  # until the modules are collected: what they import stays, and is looked at again and again

# What runs first is what takes longest, so that no worker has it alone at the end.
ORDER = (
    "speech",
    "diffusion",
    "tests/system/",
    "tests/long/",
    "tests/rehearsal/",
    "tests/stage/",
    "hostile",
    "tests/pure/",
)
ALONE = ("test_supervisor.py", "test_shm_faults.py", "test_toy_family.py")  # in tests/system: they ask no shared system


def group(nodeid: str) -> str:
    """What one worker runs: the tests of a module, or all that ask the same system, which takes a minute to start."""
    file = nodeid.partition("::")[0]
    if file.startswith("tests/hostile/"):
        return "hostile"
    if not file.startswith("tests/system/") or file.endswith(ALONE):
        return file
    return "diffusion" if "_dit" in file else "speech"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    # pytest-xdist's own `loadgroup` marks groups in ids of tests, which pytest 9.2 has made read-only
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return ByGroup(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ("system", "long", "hostile") and is_async_test(item):
            # they call a system that they share, by channels that stay open
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)

    items.sort(key=_rank)


def pytest_collection_finish() -> None:
    """A million objects of libraries are taken out of all later collections: a twentieth of what tests compute."""
    gc.enable()
    freeze_heap()


def _rank(item: pytest.Item) -> int:
    of = group(item.nodeid)
    return next((rank for rank, start in enumerate(ORDER) if of.startswith(start)), len(ORDER))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def made_first(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The folder of all temporary ones: an engine in this process has others made in a folder that ends with it."""
    tmp_path_factory.getbasetemp()


@pytest.fixture(autouse=True)
def own_jobs_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's gateway shares no videos with another test's: a directory belongs to one gateway at a time. It is not
    made for the thousands of tests that need none."""
    number = next(NUMBERS)
    monkeypatch.setenv("QUARTET_GATEWAY_JOBS_DIR", f"{JOBS_DIR.name}/jobs-{number}")
    monkeypatch.setenv("QUARTET_GATEWAY_VOICES_DIR", f"{JOBS_DIR.name}/voices-{number}")
    monkeypatch.setenv("QUARTET_GATEWAY_FILES_DIR", f"{JOBS_DIR.name}/files-{number}")


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """A random Qwen3-Omni checkpoint of about 3 M parameters."""
    from tests.support.weights.checkpoints import omni_checkpoint

    return omni_checkpoint("tiny", seed=0)


@pytest.fixture(scope="session")
def small_checkpoint() -> Path:
    """Another one, of other sizes, ids and seed: what works with one only is hard-coded somewhere."""
    from tests.support.weights.checkpoints import omni_checkpoint

    return omni_checkpoint("small", seed=1)


@pytest.fixture(scope="session")
def published_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny one in the shape that Qwen3-Omni was published in: old keys, shards of bfloat16, no tokenizer.json."""
    from tests.support.weights.published import publish

    return publish(tiny_checkpoint, tmp_path_factory.mktemp("checkpoints") / "published")


@pytest.fixture(scope="session")
def media():
    """Encoded media files: image, audio, video."""
    from tests.support.samples.media import make

    return make()


@pytest.fixture(scope="session")
def stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    """The whole system on the tiny checkpoint, with API keys and mutual TLS, started once."""
    from tests.support.systems.stack import Access, brief_pipeline, running

    home = tmp_path_factory.mktemp("system")
    pipeline = ("--pipeline", str(brief_pipeline(home)))
    with running(tiny_checkpoint, home / "run", *pipeline, access=Access(home)) as started:
        yield started


@pytest.fixture(scope="session")
def prompt_ids(tiny_checkpoint: Path) -> list[int]:
    """Token ids of a short prompt with the checkpoint's chat template."""
    from transformers import AutoTokenizer

    conversation = [{"role": "user", "content": "What is the sea?"}]
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    return tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)["input_ids"]
