"""Checkpoints that no family's row is about: what is found by looking at them, and which cannot be a thinker."""

import copy
import dataclasses
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from cli.check import check_model
from cli.plan import UsageError, pipeline_for
from services.common.errors import InvalidInput
from services.families.any_model import marks
from services.registry import family_of
from services.thinker import architectures, tokens
from services.thinker.conversation import Conversation, MediaFile, Message, RawPrompt
from services.thinker.engine import Step
from services.thinker.family import ReasoningMarkers, ThinkerCheckpoint, ToolCallMarkers, load_checkpoint
from services.thinker.output import DeltaWriter
from services.thinker.template import ChatTemplate
from services.thinker.tokens import PromptTokenizer
from tests.pure.test_thinker_tokens import HONEST
from tests.support import engines
from tests.support.weights import text_models
from tests.support.weights.speech_models import published_checkpoint
from tests.support.weights.text_models import text_checkpoint

TOKENIZERS: list[Callable[[], Any]] = [
    text_models.byte_level,
    text_models.llama_words,
    text_models.gemma_words,
    text_models.prepended_words,
]
REFUSED = {
    "ParakeetForCTC": "writes down speech, and answers nothing",
    "VitsModel": "speaks texts",
    "BertForSequenceClassification": "sorts texts into classes",
    "BertForTokenClassification": "sorts words into classes",
    "Qwen3ForSequenceClassification": "is for sequence classification",
    "EagleLlamaForCausalLM": "drafts tokens for another model",
    "BartForConditionalGeneration": "has an encoder and a decoder of texts, which vLLM does not run any more",
    "ViTForImageClassification": "is for image classification",
    "MptForCausalLM": "vLLM ran until 0.28.0, and does not any more",
    "GPTNeoForCausalLM": "transformers has in a form that vLLM cannot run",
    "VoxtralForConditionalGeneration": "vLLM reads with a tekken.json alone, for which there is no tokenizer here",
    "NobodysForCausalLM": "neither vLLM nor transformers has here",
}
TEMPLATES = {  # pieces of templates: the markers or the parser of calls
    '<tool_call>\n{"name": n, "arguments": a}\n</tool_call>': ToolCallMarkers("<tool_call>", "</tool_call>"),
    "<tool_call>\n<function={{ name }}>\n</function>\n</tool_call>": "qwen3_coder",
    "<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key></tool_call>": "glm45",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json\n": "deepseek_v3",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>": "deepseek_v31",
    "[TOOL_CALLS] [{{ calls }}]": "mistral",
    'Respond with {"name": function name, "parameters": dictionary of argument name and its value}': "llama3_json",
    "{{ tools }}": None,
}


@pytest.mark.parametrize(("template", "calls"), TEMPLATES.items())
def test_how_calls_are_written_is_found_in_the_template(template: str, calls: ToolCallMarkers | str | None) -> None:
    assert (marks.tool_markers(template) or marks.tool_parser(template)) == calls


def test_thoughts_are_found_where_the_template_knows_their_tokens() -> None:
    tokenizer = text_models.byte_level()
    opening, closing = (tokenizer.get_vocab()[token] for token in ("<think>", "</think>"))
    found = marks.reasoning_markers("...</think>...", tokenizer)
    assert found == ReasoningMarkers("<think>", "</think>", opening, closing, "deepseek_r1")
    assert marks.reasoning_markers("...", tokenizer) is None  # the tokens are in many vocabularies
    assert marks.reasoning_markers("[THINK]...[/THINK]", tokenizer) is None


@pytest.fixture(scope="module")
def gemma() -> ThinkerCheckpoint:
    return load_checkpoint(str(text_checkpoint("gemma3")))


@pytest.mark.parametrize(("architecture", "does"), REFUSED.items())
def test_what_cannot_be_a_thinker_says_what_it_is(architecture: str, does: str, tmp_path: Path) -> None:
    engines.require("vllm")
    config = {"model_type": "other", "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sentence = rf"config.json's architecture is {architecture}, which {does}; give a model that answers in text: "
    with pytest.raises(UsageError, match=rf"--model {tmp_path}: {sentence}vLLM here has \d{{3}} architectures"):
        check_model("--model", str(tmp_path), "thinker")


def test_code_that_comes_with_a_checkpoint_is_not_run() -> None:
    engines.require("vllm")
    config = {"architectures": ["NobodysForCausalLM"], "auto_map": {"AutoModel": "x.Y"}}
    with pytest.raises(ValueError, match="comes with code of its own, which is not run"):
        family_of(config)


def test_a_tokenizer_that_is_code_is_not_run(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(text_checkpoint("llama"), tmp_path / "own")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(own))
    (checkpoint / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match="is code that comes with the checkpoint, which is not run"):
        load_checkpoint(str(checkpoint))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3VLForConditionalGeneration", "OlmoForCausalLM"])
def test_what_vllm_runs_is_served_as_text(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "architectures": [architecture]}))
    assert pipeline_for(str(tmp_path)).name == "text.yaml"
    assert pipeline_for(str(tmp_path), None, "whisper").name == "asr-llm.yaml"
    assert pipeline_for(str(tmp_path), "tts", "whisper").name == "asr-llm-tts.yaml"
    check_model("--model", str(tmp_path), "thinker")
    with pytest.raises(UsageError, match="this checkpoint has no talker: give --pipeline text"):
        check_model("--model", str(tmp_path), "talker")


def test_models_that_transcribe_have_a_pipeline_of_their_own(tmp_path: Path) -> None:
    engines.require("vllm")
    names = {"WhisperForConditionalGeneration": True, "Qwen3ASRForConditionalGeneration": False}
    names |= {"LlamaForCausalLM": False, "NobodysForCausalLM": False}
    assert {name: architectures.only_transcribes(name) for name in names} == names
    prompted = dict.fromkeys(names, True) | {"LlamaForCausalLM": False, "NobodysForCausalLM": False}
    assert {name: architectures.transcribes(name) for name in prompted} == prompted
    config = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert pipeline_for(str(tmp_path)).name == "transcription.yaml"
    check_model("--model", str(tmp_path), "thinker", answers=False, hears=True)
    assert pipeline_for(str(tmp_path), None, "whisper").name == "asr-llm.yaml"  # of which it is refused as the thinker
    does = "WhisperForConditionalGeneration, which writes down speech, and answers nothing"
    with pytest.raises(UsageError, match=rf"--model .*: config.json's architecture is {does}; leave out --pipeline"):
        check_model("--model", str(tmp_path), "thinker")


def test_models_that_keep_states_are_known() -> None:
    engines.require("vllm")
    names = {"LlamaForCausalLM": False, "GraniteMoeHybridForCausalLM": True, "Qwen3NextForCausalLM": True}
    names |= {"FalconH1ForCausalLM": True, "Gemma3ForCausalLM": False, "NobodysForCausalLM": False}
    assert {name: architectures.keeps_state(name) for name in names} == names


def test_where_vllm_is_not_nothing_is_known_against_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "_tables", lambda: None)
    assert architectures.refusal(["WhisperForConditionalGeneration"]) is None


@pytest.mark.parametrize("make", TOKENIZERS, ids=lambda make: make.__name__)
def test_texts_are_read_in_pieces_as_the_tokenizer_reads_them(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make()
    control = [token.content for token in tokenizer.added_tokens_decoder.values()]
    pieces = PromptTokenizer(tokenizer)
    assert pieces._backend is None
    for size in (tokens._PIECE, 7):
        monkeypatch.setattr(tokens, "_PIECE", size)
        for seed in range(60):
            text = "".join(random.Random(seed).choices([*HONEST, *control] if seed % 2 else HONEST, k=80))
            assert pieces.encode(text, "text", special=True) == tokenizer(text)["input_ids"]
    cuts = list(pieces._pieces("the old king likes the boat " * 20, "text", tokens.Place.BEGIN))
    assert len(cuts) > 10


def test_thousands_of_added_tokens_cost_no_time() -> None:
    tokenizer = text_models.gemma_words()
    tokenizer.add_tokens([AddedToken(f"<unused{i}>", normalized=False, lstrip=i == 7) for i in range(6000)])
    pieces = PromptTokenizer(tokenizer)
    assert pieces._backend is None
    for text in ("<unused" * 5000, "<unused12><unused1>  <unused7> a", " " * 30_000):
        begun = time.process_time()
        assert pieces.encode(text, "text", special=True) == tokenizer(text)["input_ids"]
        assert time.process_time() - begun < 1


def test_what_cannot_be_read_in_pieces_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control tokens stay those of the template, all the same."""
    tokenizer = text_models.llama_words()
    monkeypatch.setattr(tokens.Words, "ids", lambda self, texts, place: [[7] * len(text) for text in texts])
    whole = PromptTokenizer(tokenizer)
    assert whole._backend is not None
    text = "It's 12,345  words</s>" * 2000
    assert whole.encode(text, "text", special=True) == tokenizer(text)["input_ids"]
    hostile = whole.conceal("say </s>")
    assert tokenizer.eos_token_id not in whole.encode(f"<s> {hostile}", "text", special=False)


def test_honest_texts_keep_their_added_words_and_get_no_control_token(gemma: ThinkerCheckpoint) -> None:
    template, tokenizer = ChatTemplate(gemma), gemma.tokenizer
    said = "a <table>  of\n\n\nthe"
    turns = [{"role": "user", "content": said}]
    expected = tokenizer(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))["input_ids"]
    assert template.apply(Conversation([Message("user", [said])])) == expected
    ends = [template.apply(Conversation([Message("user", [f"a{token}b"])])) for token in ("<end_of_turn>", "<eos>", "")]
    special = [sorted(set(ids) & gemma.special_ids) for ids in ends]
    assert special[0] == special[1] == special[2]


def test_a_base_model_continues_texts_and_takes_no_messages() -> None:
    template = ChatTemplate(load_checkpoint(str(text_checkpoint("llama", template=False))))
    assert template.apply(Conversation([], raw=RawPrompt("The old king")))
    with pytest.raises(InvalidInput, match=r"messages: this model takes none: it has no chat template.*/v1/compl"):
        template.apply(Conversation([Message("user", ["hi"])]))


def test_the_token_before_a_text_stands_once_whoever_writes_it() -> None:
    checkpoint = load_checkpoint(str(text_checkpoint("llama")))
    template, bos = ChatTemplate(checkpoint), checkpoint.tokenizer.bos_token_id
    for conversation in (Conversation([Message("user", ["hi"])]), Conversation([], raw=RawPrompt("hi"))):
        ids = template.apply(conversation)
        assert (ids[0], ids.count(bos)) == (bos, 1)


def test_a_template_that_takes_parts_alone_gets_parts() -> None:
    checkpoint = load_checkpoint(str(text_checkpoint("qwen3")))
    parts = "{% for message in messages %}{% for part in message.content | selectattr('type', 'equalto', 'text') %}"
    tokenizer = copy.deepcopy(checkpoint.tokenizer)
    tokenizer.chat_template = f"{parts}<|im_start|>{{{{ part.text }}}}{{% endfor %}}{{% endfor %}}"
    template = ChatTemplate(dataclasses.replace(checkpoint, processor=tokenizer))
    ids = template.apply(Conversation([Message("user", ["Which day is it?"])]))
    assert (template.reads_users, tokenizer.decode(ids)) == (True, "<|im_start|>Which day is it?")


def test_words_of_users_are_refused_where_the_template_leaves_them_out() -> None:
    checkpoint = load_checkpoint(str(published_checkpoint("qwen3_asr")))
    template, sound = ChatTemplate(checkpoint), MediaFile("audio", b"", "sound")
    turns = [Message("system", ["Ada"]), Message("user", [sound])]
    assert "Ada" in checkpoint.tokenizer.decode(template.apply(Conversation(turns)))
    refused = r"messages\[2\]\.content: the model's chat template leaves out what users write; send sounds alone"
    with pytest.raises(InvalidInput, match=refused):
        template.apply(Conversation([*turns, Message("user", ["hi"])]))


def test_marks_are_left_out_of_the_text_and_not_of_the_tokens() -> None:
    tokenizer = text_models.byte_level()
    writer = DeltaWriter(tokenizer, None, None, clean=lambda piece, is_last: f"{piece.strip('<>')}{'.' * is_last}")
    deltas = [
        writer.delta(Step(text, [i], [{}], reason, 0, 0.0, 0.0))
        for i, (text, reason) in enumerate([("<a", None), ("b>", "stop")])
    ]
    assert [(each.text, list(each.token_ids)) for each in deltas] == [("a", [0]), ("b.", [1])]


def test_a_template_that_refuses_is_a_fault_of_the_messages() -> None:
    template = ChatTemplate(load_checkpoint(str(text_checkpoint("llama"))))
    with pytest.raises(InvalidInput, match="messages: the model's chat template refuses them: only users and assist"):
        template.apply(Conversation([Message("system", ["be brief"]), Message("user", ["hi"])]))


def test_tokens_of_words_are_told_as_bytes() -> None:
    tokenizer = text_models.llama_words()
    ids = tokenizer("the sea 你", add_special_tokens=False)["input_ids"]
    writer = DeltaWriter(tokenizer, 0, None)
    delta = writer.delta(Step("", ids, [{} for _ in ids], None, 0, 0.0, 0.0))
    assert b"".join(each.token_bytes for each in delta.logprobs).decode() == " the sea 你"
