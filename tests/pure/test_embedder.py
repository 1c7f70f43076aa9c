"""Which checkpoints are an embedder's, and what their tokenizers make of texts and pairs."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers

from cli.check import check_model
from cli.gpu_plan import share_gpus
from cli.plan import LaunchOptions, UsageError, pipeline_for, stages_to_start
from services.common.errors import ContextTooLong, InvalidInput, RequestCancelled
from services.embedder.checkpoint import load_checkpoint
from services.embedder.config import EmbedderSettings
from services.embedder.texts import InputCut, Prompt, Tokenizer, longest_first, read_all
from tests.pure.test_gpu_plan import gpus
from tests.support import engines
from tests.support.weights import embedding_models
from tests.support.weights.embedding_models import EMBEDDING, SCORING, embedding_checkpoint

GIB = 1024**3
TEXTS = ["The old king likes the boat.", "", "x", "it's  12,345\n caf\u00e9 \u4f60\u597d", "the boats " * 50]
QUERY = "Where is the old king, and where are the boats?"


def folder(directory: Path, architecture: str, modules: bool = False, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "x", **config}))
    if modules:
        (directory / "modules.json").write_text("[]")
    return directory


FOUND: list[tuple[str, dict[str, Any], str]] = [
    ("BertModel", {}, "embeddings.yaml"),
    ("XLMRobertaModel", {}, "embeddings.yaml"),
    ("Qwen3ForCausalLM", {"modules": True}, "embeddings.yaml"),
    ("Qwen3ForCausalLM", {}, "text.yaml"),
    ("BertForSequenceClassification", {"id2label": {"0": "LABEL_0"}}, "rerank.yaml"),
    ("Qwen3ForSequenceClassification", {"num_labels": 1}, "rerank.yaml"),
]


@pytest.mark.parametrize(("architecture", "more", "pipeline"), FOUND)
def test_the_pipeline_of_a_checkpoint_is_found(
    tmp_path: Path, architecture: str, more: dict[str, Any], pipeline: str
) -> None:
    engines.require("vllm")  # whose tables of architectures are read
    checkpoint = str(folder(tmp_path, architecture, **more))
    assert pipeline_for(checkpoint).name == pipeline
    (stage,) = stages_to_start(LaunchOptions(checkpoint, pipeline=pipeline_for(checkpoint)))
    check_model("--model", checkpoint, stage.kind)
    assert stage.kind == ("thinker" if pipeline == "text.yaml" else "embedder")


def test_a_stage_of_the_wrong_kind_is_refused_with_what_works(tmp_path: Path) -> None:
    engines.require("vllm")  # whose tables of architectures are read
    with pytest.raises(UsageError, match="this checkpoint has no thinker: give --pipeline embeddings"):
        check_model("--model", str(folder(tmp_path, "BertModel")), "thinker")
    with pytest.raises(UsageError, match="this checkpoint has no thinker: give --pipeline rerank"):
        check_model("--model", str(folder(tmp_path, "BertForSequenceClassification", num_labels=1)), "thinker")
    with pytest.raises(UsageError, match="this checkpoint has no embedder: give --pipeline text"):
        check_model("--model", str(folder(tmp_path, "LlamaForCausalLM")), "embedder")
    with pytest.raises(UsageError, match=r"sorts texts into classes; .* one with a single class scores pairs"):
        check_model("--model", str(embedding_checkpoint("bert_classes")), "embedder")


@pytest.mark.parametrize("name", [*EMBEDDING, *SCORING])
def test_small_checkpoints_are_what_they_are(name: str) -> None:
    engines.require("vllm")  # whose tables of architectures are read
    found = load_checkpoint(EmbedderSettings(model=str(embedding_checkpoint(name))))
    assert (found.scores, found.dtype) == (name in SCORING, "float32")
    pipeline = "rerank.yaml" if name in SCORING else "embeddings.yaml"
    assert pipeline_for(str(found.folder)).name == pipeline


def test_states_that_no_file_says_how_to_pool_need_a_setting(tmp_path: Path) -> None:
    checkpoint = tmp_path / "llama"
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(checkpoint)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM, and no modules.json says how .*; give --pooling"):
        load_checkpoint(EmbedderSettings(model=str(checkpoint)))


def test_a_gpu_is_not_shared_out_with_an_embedder(tmp_path: Path) -> None:
    checkpoint = str(folder(tmp_path, "BertModel"))
    alone = stages_to_start(LaunchOptions(checkpoint, pipeline=pipeline_for(checkpoint)))
    assert share_gpus(alone, gpus(1, 24 * GIB)).stages == alone


@pytest.fixture(params=[embedding_models.word_pieces, embedding_models.pieces, embedding_models.ended_bytes])
def made(request: pytest.FixtureRequest) -> tuple[Any, Tokenizer]:
    """(the reference, ours)."""
    reference = request.param()
    return reference, Tokenizer(copy.deepcopy(reference), 32, len(reference))


def test_ids_are_those_of_the_reference(made: tuple[Any, Tokenizer]) -> None:
    reference, ours = made
    for text in TEXTS:
        for most in (-1, 7, 3):
            kept = 32 if most == -1 else most
            for special in (True, False):
                expected = reference(text, add_special_tokens=special, truncation=True, max_length=kept)["input_ids"]
                if not expected:
                    with pytest.raises(InvalidInput, match="input: has no tokens; send a text that is not empty"):
                        ours.text(text, "input", InputCut(most), special)
                else:
                    assert list(ours.text(text, "input", InputCut(most), special).token_ids) == expected


def test_the_left_side_is_cut_off(made: tuple[Any, Tokenizer]) -> None:
    reference, ours = made
    reference.truncation_side = "left"
    expected = reference(TEXTS[4], truncation=True, max_length=9)["input_ids"]
    assert list(ours.text(TEXTS[4], "input", InputCut(9, "left")).token_ids) == expected


def test_pairs_are_those_of_the_reference(made: tuple[Any, Tokenizer]) -> None:
    reference, ours = made
    for query, document in ((QUERY, TEXTS[0]), (QUERY, TEXTS[4]), (TEXTS[4], QUERY), (TEXTS[4], TEXTS[4])):
        expected = reference(query, document, truncation=True, max_length=32)
        prompt = ours.pair(query, document, "documents[0]", InputCut(-1))
        assert list(prompt.token_ids) == expected["input_ids"]
        segments = expected.get("token_type_ids")
        assert prompt.second_at == (segments.index(1) if segments and 1 in segments else None)
    whole = reference(QUERY, "a b c d", add_special_tokens=True)["input_ids"]
    cut = ours.pair("x", TEXTS[4], "documents[0]", InputCut(most_of_document=2))
    assert len(cut.token_ids) < len(whole)


def test_what_is_spelled_in_a_text_is_no_control_token(made: tuple[Any, Tokenizer]) -> None:
    reference, ours = made
    for token in {reference.eos_token, reference.sep_token} - {None}:
        (token_id,) = reference.convert_tokens_to_ids([token])
        honest = list(ours.pair("a", "b c", "d", InputCut()).token_ids).count(token_id)
        assert list(ours.pair("a", f"b {token} c", "d", InputCut()).token_ids).count(token_id) == honest


def test_long_texts_are_refused_by_the_models_limit(made: tuple[Any, Tokenizer]) -> None:
    _, ours = made
    with pytest.raises(ContextTooLong, match=r"^input\[3\]: has \d+ tokens; this model takes 32: shorten it"):
        ours.text(TEXTS[4], "input[3]", InputCut())
    with pytest.raises(ContextTooLong, match=r"^documents\[0\]: has \d+ tokens; this model takes 32"):
        ours.pair(QUERY, TEXTS[4], "documents[0]", InputCut())
    with pytest.raises(ContextTooLong, match=r"^input: has 33 tokens"):
        ours.ids([1] * 33, "input", InputCut())
    assert list(ours.ids(range(40), "input", InputCut(-1)).token_ids) == list(range(32))
    assert list(ours.ids(range(40), "input", InputCut(3, "left")).token_ids) == [37, 38, 39]


def test_ids_must_be_in_the_vocabulary(made: tuple[Any, Tokenizer]) -> None:
    reference, ours = made
    for wrong in (len(reference), -1):
        with pytest.raises(
            InvalidInput, match=rf"^input\[1\]: {wrong} is not in the vocabulary, which has the ids 0 to"
        ):
            ours.ids([0, wrong], "input", InputCut())


@pytest.mark.parametrize("room", [0, 1, 6, 7, 20])
def test_the_longer_text_is_cut_first(room: int) -> None:
    for first in range(0, 12, 3):
        for second in range(0, 12, 2):
            kept = longest_first(first, second, room)
            assert sum(kept) == min(room, first + second)
            assert kept[0] <= first
            assert kept[1] <= second


def test_reading_ends_at_the_tokens_of_a_request_and_with_its_client() -> None:
    reads = [partial(Prompt, [1] * 10) for _ in range(5)]
    assert len(read_all(reads, 50, "inputs", lambda: False)) == 5
    with pytest.raises(ContextTooLong, match=r"^inputs: have more than 49 tokens together; send them in several"):
        read_all(reads, 49, "inputs", lambda: False)
    with pytest.raises(RequestCancelled):
        read_all(reads, 50, "inputs", lambda: True)
