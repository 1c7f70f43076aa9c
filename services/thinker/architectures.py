"""Which architectures the thinker's engine has, by its source: nothing of it is imported, and no torch."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_REGISTRY = "model_executor/models/registry.py"
_WRITE = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
_EMBED = "_EMBEDDING_MODELS"
_SCORE = "_SEQUENCE_CLASSIFICATION_MODELS"
_OTHERS = {  # vLLM's tables of models that no stage can be, and what these do
    "_LATE_INTERACTION_MODELS": "makes embeddings to search by",
    "_REWARD_MODELS": "judges answers",
    "_TOKEN_CLASSIFICATION_MODELS": "sorts words into classes",
    _SCORE: "sorts texts into classes",
    "_SPECULATIVE_DECODING_MODELS": "drafts tokens for another model",
}
_AUTO = "models/auto/modeling_auto.py"
_AUTO_WRITES = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
TRANSCRIBES = "writes down speech, and answers nothing"
_AUTO_OTHERS = {  # transformers' tables: all others are named as they are
    "TEXT_TO_WAVEFORM": "speaks texts",
    "TEXT_TO_SPECTROGRAM": "speaks texts",
    "SPEECH_SEQ_2_SEQ": TRANSCRIBES,
    "CTC": TRANSCRIBES,
    "RNNT": TRANSCRIBES,
    "TDT": TRANSCRIBES,
    "SEQ_TO_SEQ_CAUSAL_LM": "has an encoder and a decoder of texts, which vLLM does not run any more",
    "MASKED_LM": "fills gaps in texts",
}

Classes = Mapping[str, Sequence[str]]
"""(module, class) by architecture."""


def refusal(architectures: Sequence[str], own_code: bool = False) -> str | None:
    """Why the first of `architectures` can be neither a thinker nor an embedder, and what could; None: nothing is known
    against it.

    `own_code`: the checkpoint comes with code.
    """
    tables = _tables()
    if tables is None or not architectures:
        return None
    name = architectures[0]
    written = _written(tables)
    if embeds(name) or (name in written and not _needs_tekken(*written[name])):
        return None
    of_others = (does for table, does in _OTHERS.items() if name in tables.get(table, {}))
    does = _TEKKEN if name in written else next(of_others, None) or _unlisted(name)
    if does is None:
        return None
    if does == _UNKNOWN and own_code:
        does = "comes with code of its own, which is not run"
    instead = f"give a model that answers in text: vLLM here has {len(written)} architectures of these"
    if does == _OTHERS[_SCORE]:
        instead += "; of those that sort, one with a single class scores pairs of texts"
    return f"config.json's architecture is {name}, which {does}; {instead}"


def embeds(architecture: str) -> bool:
    """Whether vLLM has the class to make embeddings, and for nothing else; False if that is not known."""
    tables = _tables() or {}
    return architecture not in _written(tables) and architecture in tables.get(_EMBED, {})


def scores(architecture: str, classes: int) -> bool:
    """Whether vLLM has the class to score pairs of texts, if it sorts into so many `classes`; False if that is not
    known."""
    tables, suffix = _tables() or {}, "ForSequenceClassification"
    known = architecture in tables.get(_SCORE, {})
    base = architecture.removesuffix(suffix)
    return classes == 1 and (known or (base != architecture and f"{base}ForCausalLM" in _written(tables)))


def writes(architecture: str) -> bool:
    """Whether vLLM's class answers in text, or writes down speech; False if that is not known."""
    return architecture in _written(_tables() or {})


def transcribes(architecture: str) -> bool:
    """Whether vLLM's class makes prompts for speech that is to be written down; False if that is not known."""
    return _is_a(architecture, "SupportsTranscription")


def only_transcribes(architecture: str) -> bool:
    """Whether vLLM's class writes down speech, and does nothing else; False if that is not known."""
    where = _written(_tables() or {}).get(architecture)
    return where is not None and _only_transcribes(*where)


def takes_media(architecture: str) -> bool:
    """Whether vLLM's class may read more than text; True if that is not known."""
    tables = _tables() or {}
    return architecture not in tables.get("_TEXT_GENERATION_MODELS", {})


def keeps_state(architecture: str) -> bool:
    """Whether the class keeps a state beside keys and values, as Mamba does; False if that is not known."""
    return _is_a(architecture, "HasInnerState", "IsHybrid", "IsAttentionFree")


def _is_a(architecture: str, *names: str) -> bool:
    """Whether vLLM's class has a base of one of these `names`, as far as its module tells."""
    where = _written(_tables() or {}).get(architecture)
    if where is None:
        return False
    source, left, seen = _module(where[0]), [where[1]], set[str]()
    while left:
        seen.add(name := left.pop())
        header = re.search(rf"^class {name}\((.*?)\):$", source, re.M | re.S)
        bases = re.findall(r"\w+", header[1]) if header else []
        if set(names).intersection(bases):
            return True
        left += [base for base in bases if base not in seen]
    return False


_TEKKEN = "vLLM reads with a tekken.json alone, for which there is no tokenizer here"
_UNKNOWN = "neither vLLM nor transformers has here"


def _unlisted(name: str) -> str | None:
    """What an architecture does that vLLM does not list; None: it writes, and vLLM may run transformers' class."""
    before = re.search(rf'"{re.escape(name)}": "([\d.]+)"', _source("vllm", _REGISTRY))
    if before:
        return f"vLLM ran until {before[1]}, and does not any more"
    kinds = [kind for kind, names in _auto().items() if name in names]
    if not kinds:
        return _UNKNOWN
    if any(kind in _AUTO_WRITES for kind in kinds):
        # vLLM runs transformers' own class where that lets it bring its attention
        own = any("_supports_attention_backend = True" in each for each in _sources_of(name))
        return None if own else "transformers has in a form that vLLM cannot run"
    does = (does for kind, does in _AUTO_OTHERS.items() if kind in kinds)
    return next(does, f"is for {kinds[-1].lower().replace('_', ' ')}")


@cache
def _tables() -> Mapping[str, Classes] | None:
    """vLLM's tables by name; None: it is not installed, or has its models elsewhere."""
    source = _source("vllm", _REGISTRY)
    tables = {
        node.targets[0].id: _classes(node.value)
        for node in (ast.parse(source).body if source else ())
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)
    }
    return tables if all(table in tables for table in _WRITE) else None


def _written(tables: Mapping[str, Classes]) -> Classes:
    """Those that answer in text, or write down speech."""
    return {name: where for table in _WRITE for name, where in tables.get(table, {}).items()}


def _classes(table: ast.Dict) -> Classes:
    pairs = ((key, value) for key, value in zip(table.keys, table.values, strict=True) if key is not None)
    return {
        str(key.value): [str(each.value) for each in value.elts if isinstance(each, ast.Constant)]
        for key, value in pairs
        if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple)
    }


@cache
def _auto() -> Mapping[str, frozenset[str]]:
    """Names of transformers' classes by what they are for."""
    found = re.findall(
        r"^MODEL_FOR_(\w+?)(?:_MAPPING)?_NAMES = OrderedDict\((.*?)^\)", _source("transformers", _AUTO), re.M | re.S
    )
    return {kind: frozenset(re.findall(r'"(\w+)"', body)) for kind, body in found}


def _needs_tekken(module: str, _: str) -> bool:
    """Whether the class in vLLM's `module` refuses all tokenizers but Mistral's own."""
    return "requires `--tokenizer-mode mistral`" in _module(module)


def _only_transcribes(module: str, name: str) -> bool:
    found: Any = re.search(rf"^class {name}\b.*?(?=^class |\Z)", _module(module), re.M | re.S)
    return found is not None and "supports_transcription_only = True" in found[0]


def _module(name: str) -> str:
    """Source of a module that vLLM's tables name."""
    path = name.replace(".", "/").removeprefix("vllm/") + ".py"
    return _source("vllm", path if "/" in path else f"model_executor/models/{path}")


def _sources_of(name: str) -> Iterator[str]:
    """Sources of the modules of transformers that define the class `name`."""
    spec = find_spec("transformers")
    files = Path(spec.origin).parent.glob("models/*/modeling_*.py") if spec is not None and spec.origin else ()
    return (source for file in files if f"\nclass {name}(" in (source := file.read_text()))


def _source(package: str, file: str) -> str:
    """Of a module; "" if there is none."""
    spec = find_spec(package)
    path = Path(spec.origin).parent / file if spec is not None and spec.origin else None
    return path.read_text() if path is not None and path.is_file() else ""
