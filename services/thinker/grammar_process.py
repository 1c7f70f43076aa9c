"""python -m services.thinker.grammar_process FOLDER VOCAB_SIZE: compiles grammars, each in a process of its own.

XGrammar can neither be stopped nor limited.
"""

import json
import resource
import socket
import sys
from functools import partial
from typing import Any

from services.common.engine.forking import limit_memory, serve
from services.common.engine.process import lower_priority
from services.common.telemetry import logs
from services.thinker.grammar import check_allows_text, find_fault, reason

_MEMORY_BYTES = 2 * 1024**3  # of a job
_CPU_S = 120  # of a job, should nobody kill it
_THREADS = 2


def _work(tokenizer_info: Any, connection: socket.socket) -> None:
    """Answers the one job of `connection`."""
    with connection, connection.makefile("rb") as jobs:
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
        if line := jobs.readline():
            limit_memory(_MEMORY_BYTES)
            connection.sendall(json.dumps(_refusal(json.loads(line), tokenizer_info)).encode() + b"\n")


def _refusal(job: dict[str, Any], tokenizer_info: Any) -> list[str] | None:
    """[field, reason] of a job that is refused; None: it compiles, and there are texts that it allows."""
    import xgrammar

    kind, text = job["kind"], job["text"]
    try:
        compiler = xgrammar.GrammarCompiler(tokenizer_info, max_threads=_THREADS, cache_enabled=False)
        check_allows_text(kind, text)
        match kind:
            case "json":  # as vLLM does it
                compiler.compile_json_schema(text, any_whitespace=False, separators=(",", ":"))
            case "structural_tag":
                _compile_tag(compiler, text)
            case "regex":
                compiler.compile_regex(text)
            case "lark":
                compiler.compile_lark(text)
            case _:
                compiler.compile_grammar(text)
    except MemoryError:
        return [job["field"], "takes more memory to compile than there is for it: make it smaller"]
    except Exception as error:  # XGrammar raises what it likes
        return list(find_fault(job["schemas"]) or (job["field"], reason(error)))
    return None


def _compile_tag(compiler: Any, text: str) -> None:
    """As vLLM does it."""
    import xgrammar

    tag = json.loads(text)
    if "structures" not in tag:
        compiler.compile_structural_tag(text)
        return
    tags = [
        xgrammar.StructuralTagItem(begin=each["begin"], schema=json.dumps(each["schema"]), end=each["end"])
        for each in tag["structures"]
    ]
    compiler.compile_structural_tag(tags, tag["triggers"])


def main() -> None:
    folder, vocab_size = sys.argv[1:]
    logs.configure("error", "thinker")  # what transformers warns of, the thinker has said
    lower_priority()
    import xgrammar
    from transformers import AutoTokenizer

    logs.adopt("transformers")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=int(vocab_size))
    serve(partial(_work, info))


if __name__ == "__main__":
    main()
