"""One language: a class name stands once in the product, and words that were dropped stay away."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("services", "gateway", "cli", "quartet")
# Names that stand more than once, each with its reason.
TWICE = {
    "Answer": "the gateway's, and that of the Python API",
    "AudioDelta": "the pipeline's event, and that of the Python API",
    "TextDelta": "the pipeline's event, and that of the Python API",
    "AnswerInput": "one for each family of talkers: the same role",
    "PromptSpec": "one for each family of talkers: the same role",
    "RecordingThinker": "one for each family of thinkers: the same role",
    "SnakeBeta": "two decoders of two publishers, which round differently",
    "Conversation": "a realtime session's, and what a thinker reads",
    "FunctionCall": "OpenAI's word in chat and in Responses",
    "InputAudio": "OpenAI's word in chat and in Responses",
    "Message": "OpenAI's item in Responses, and what a thinker reads",
    "StreamOptions": "OpenAI's word in chat and in Responses",
    "TextFormat": "OpenAI's word in chat and in Responses",
    "ToolCall": "OpenAI's word in a conversation, and a call in the answer loop",
    "Prompt": "what a thinker, a talker and a realtime response each begin with",
    "Delivery": "rows that leave a thinker, and rows that reach a talker",
    "Family": "of models, and of diffusion pipelines",
    "Generation": "one of the thinker, and vLLM's endpoint for one",
    "MediaFile": "a file before and after it reaches the thinker",
    "Span": "a phase of a request, and OpenTelemetry's",
    "Stage": "the gateway's view of a stage, and the shell that every stage has",
}
# Words of an older private language; in names of classes, functions and arguments.
DROPPED = re.compile(r"(^|_)(told|telling|conversing|painting|painted|write_down|asking)(_|$)", re.IGNORECASE)


def trees() -> list[tuple[Path, ast.Module]]:
    files = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py") if "quartet/v1" not in str(file)]
    return [(file.relative_to(ROOT), ast.parse(file.read_text())) for file in files]


def test_a_class_name_stands_once() -> None:
    places = defaultdict[str, list[str]](list)
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(file))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in TWICE} == {}
    assert sorted(TWICE) == sorted(twice), "an exception that is not needed any more"


def test_dropped_words_name_nothing() -> None:
    found = []
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name)
                found += [f"{file}:{node.lineno}: {node.name}"] if DROPPED.search(words) else []
    assert found == []
