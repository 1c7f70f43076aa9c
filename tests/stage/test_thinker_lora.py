"""Adapters of the thinker against transformers with the adapters' change in its weights."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.common.errors import InvalidInput, NotFound
from services.thinker.conversation import Conversation, Message
from tests.stage.test_thinker_engine import KV_BLOCK_TOKENS, Thinker, conversations, start
from tests.support.clock import until
from tests.support.references.thinker_engine import Reference
from tests.support.weights.lora import adapter, merged

# long: an engine of their own; tests/system asks the shared one for adapters
pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
MAX_LORAS = 2


@pytest.fixture(scope="module")
def adapters(tiny_checkpoint: Path) -> dict[str, Path]:
    """Two ranks, and both ways in which peft spells the layers."""
    return {"sea": adapter(tiny_checkpoint, 1), "hill": adapter(tiny_checkpoint, 2, rank=8, prefix="")}


@pytest.fixture(scope="module")
def references(tiny_checkpoint: Path, adapters: dict[str, Path]) -> dict[str, Reference]:
    return {"": Reference(tiny_checkpoint)} | {
        name: Reference(merged(tiny_checkpoint, folder)) for name, folder in adapters.items()
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, adapters: dict[str, Path]) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    shutil.copytree(adapters["hill"], root / "hill")
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinker(
    tiny_checkpoint: Path, references: dict[str, Reference], adapters: dict[str, Path], root: Path
) -> AsyncIterator[Thinker]:
    thinker = await start(
        tiny_checkpoint,
        references[""],
        max_batched_tokens=64,
        lora={"sea": str(adapters["sea"])},
        lora_root=root,
        max_loras=MAX_LORAS,
        max_cpu_loras=MAX_LORAS,
    )
    assert await thinker.engine.adapters.load("hill", "hill")
    yield thinker
    await thinker.engine.close()
    thinker.preprocessor.close()


def expected(thinker: Thinker, reference: Reference, conversation: Conversation):
    return Thinker(thinker.settings, thinker.engine, thinker.preprocessor, reference).expected(conversation)


async def test_answers_and_states_of_a_mixed_batch_equal_those_of_merged_weights(
    thinker: Thinker, references: dict[str, Reference]
) -> None:
    """Every request has a neighbour of another adapter, or none, in every step; cold, then from the prefix cache."""
    cases = {name: conversations()[name] for name in ("text", "image and audio")}
    asked = [(name, case) for case in cases for name in references]
    answers = {(name, case): expected(thinker, references[name], cases[case]) for name, case in asked}
    assert len({str(answers[name, "text"].output_ids) for name in references}) == len(references)  # they do change it
    for warm in (False, True):
        results = await asyncio.gather(
            *(thinker.run(cases[case], f"{name}-{case}-{warm}", lora=name) for name, case in asked)
        )
        for key, result in zip(asked, results, strict=True):
            thinker.assert_equal(result, answers[key])
            assert (result.cached_tokens > 0) == (warm and len(result.prompt_ids) > KV_BLOCK_TOKENS)


async def test_a_request_alone_has_its_adapter_and_one_without_has_none(
    thinker: Thinker, references: dict[str, Reference]
) -> None:
    conversation = conversations()["chinese"]
    for name in ("hill", "", "sea", ""):
        thinker.assert_equal(
            await thinker.run(conversation, lora=name), expected(thinker, references[name], conversation)
        )


async def test_a_running_request_keeps_the_adapter_that_is_unloaded(
    thinker: Thinker, references: dict[str, Reference], root: Path
) -> None:
    loaded, conversation = thinker.engine.adapters, conversations()["text"]
    with loaded.use("hill"):
        loaded.unload("hill")
        with pytest.raises(InvalidInput, match="no adapter 'hill'; loaded are: sea"):
            await thinker.run(conversation, lora="hill")
        with pytest.raises(NotFound):
            loaded.unload("hill")
        with pytest.raises(InvalidInput, match="2 adapters are loaded"):  # its place is not free yet
            await loaded.load("other", "hill")
        assert len(await thinker.engine._llm.list_loras()) == 2
    await until(lambda: not loaded._leaving)
    assert len(await thinker.engine._llm.list_loras()) == 1
    assert await loaded.load("hill", str(root / "hill"))
    assert not await loaded.load("hill", "hill")  # the same
    thinker.assert_equal(
        await thinker.run(conversation, lora="hill"), expected(thinker, references["hill"], conversation)
    )


async def test_another_adapter_under_an_old_name_does_not_find_its_prompts(
    thinker: Thinker, references: dict[str, Reference], adapters: dict[str, Path], root: Path
) -> None:
    """vLLM's prefix cache knows adapters by name and path, which both stay."""
    loaded, conversation = thinker.engine.adapters, conversations()["text"]
    await thinker.run(conversation, lora="hill")
    shutil.copytree(adapters["sea"], root / "hill", dirs_exist_ok=True)
    with pytest.raises(InvalidInput, match="another adapter is loaded as 'hill'"):
        await loaded.load("hill", "hill")
    loaded.unload("hill")
    await until(lambda: not loaded._leaving)
    await loaded.load("hill", "hill")
    result = await thinker.run(conversation, lora="hill")
    thinker.assert_equal(result, expected(thinker, references["sea"], conversation))
    assert result.cached_tokens == 0
    loaded.unload("hill")
    await until(lambda: not loaded._leaving)


async def test_what_cannot_be_applied_whole_is_refused_and_harms_nothing(
    thinker: Thinker, references: dict[str, Reference], small_checkpoint: Path, tiny_checkpoint: Path, root: Path
) -> None:
    others = {
        "larger": (adapter(small_checkpoint, 1), "it is of another model"),
        "experts": (adapter(tiny_checkpoint, 1, targets=("mlp.experts.0.up_proj",)), "on a GPU only"),
        "high": (adapter(tiny_checkpoint, 1, rank=32), "rank 32"),
    }
    for name, (folder, _) in others.items():
        shutil.copytree(folder, root / name)
    shutil.copytree(root / "high", root / "understated")
    config = json.loads((root / "high" / "adapter_config.json").read_text())
    (root / "understated" / "adapter_config.json").write_text(json.dumps(config | {"r": 8}))
    messages = {name: message for name, (_, message) in others.items()} | {"understated": "rank 32"}
    for name, message in messages.items():
        with pytest.raises(InvalidInput, match=message):
            await thinker.engine.adapters.load(name, name)
    conversation = Conversation([Message("user", ["still here"])])
    thinker.assert_equal(await thinker.run(conversation), expected(thinker, references[""], conversation))
