"""The plan of the house: who may import whom. An import circle or an arrow upwards is a wall in the wrong place."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import quartet

ROOT = Path(__file__).parents[2]
Imports = Mapping[str, frozenset[str]]
"""Module -> modules of this repository that it imports, in functions too."""

# Room -> rooms that it may import from, besides itself. A room is the longest prefix of a module's name.
STAGE = ("services.common", "services.registry", "services.sizes")
GATEWAY = (
    *("gateway.errors", "gateway.json_bounds", "gateway.metrics", "gateway.pipelines", "gateway.settings"),
    *("gateway.store", "gateway.tasks", "gateway.validation", "gateway.yaml_source", "services.common"),
)
ANSWERS = (
    *GATEWAY,
    *("gateway.access", "gateway.listening", "gateway.media", "gateway.pipeline", "gateway.profiling"),
    "gateway.workers",
)
PLAN: dict[str, tuple[str, ...]] = {
    "services.common.telemetry": (),
    "services.demo_models": (),
    # Settings know models by name.
    "services.common.rpc": (
        "services.common.revisions",
        "services.common.telemetry",
        "services.common.errors",
        "services.demo_models",
    ),
    "services.common.engine": ("services.common.revisions", "services.common.telemetry", "services.common.errors"),
    "services.common.stream": ("services.common.telemetry", "services.common.errors", "services.common.rpc"),
    "services.common": ("services.common",),
    "services.registry": (),
    "services.sizes": ("services.registry",),
    # A family is written against the contracts of the engines that run it; engines know the registry only.
    "services.families": (
        *STAGE,
        *("services.thinker", "services.talker", "services.code2wav", "services.diffusion", "services.aligner"),
    ),
    "services.thinker": STAGE,
    "services.talker": STAGE,
    "services.code2wav": STAGE,
    "services.diffusion": (*STAGE, "services.demo_models"),  # settings know the size that the painter has learnt
    "services.dit": (*STAGE, "services.diffusion"),
    # Its engine is vLLM's, too: what vLLM's processes need is the thinker's.
    "services.embedder": (*STAGE, "services.thinker"),
    "services.encoder": (*STAGE, "services.diffusion"),
    "services.aligner": STAGE,
    "gateway.pipeline": GATEWAY,
    "gateway.media": GATEWAY,
    "gateway.page": (),
    "gateway.access": GATEWAY,
    "gateway.listening": (*GATEWAY, "gateway.media"),
    "gateway.workers": GATEWAY,
    "gateway.profiling": (*GATEWAY, "gateway.pipeline", "gateway.workers"),
    "gateway.http": (*GATEWAY, "gateway.access", "gateway.page", "gateway.workers"),
    "gateway.answers": ANSWERS,
    # Each parses requests and renders answers; none imports another.
    "gateway.dialects.anthropic": (*ANSWERS, "gateway.answers", "gateway.http"),
    "gateway.dialects.openai": (*ANSWERS, "gateway.answers", "gateway.http"),
    "gateway.dialects.operators": (*ANSWERS, "gateway.answers", "gateway.http"),
    "gateway.dialects.realtime": (*ANSWERS, "gateway.answers", "gateway.http"),
    "gateway.dialects.responses": (*ANSWERS, "gateway.answers", "gateway.http"),
    "gateway.dialects.vllm": (*ANSWERS, "gateway.answers", "gateway.http"),
    "gateway": ("services.common",),
    "cli": ("services", "gateway"),
    # Generated: what stages and gateway say to each other. The package around it is the Python API, above all others.
    "quartet.v1": (),
    "quartet": ("cli", "gateway", "services"),
}
STUBS = "quartet.v1"  # anyone may


def imports_of(root: Path, packages: Iterable[str]) -> Imports:
    """What each module of `packages` imports, type checking apart."""
    files = {_module(file.relative_to(root)): file for name in packages for file in (root / name).rglob("*.py")}
    return {
        module: frozenset(found for name in _imported(ast.parse(file.read_text())) if (found := _known(name, files)))
        - {module}
        for module, file in files.items()
    }


def _module(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def _known(name: str, modules: Iterable[str]) -> str:
    """The module that `name` is, or is defined in; "" if it is not one of ours."""
    return name if name in modules else (parent if (parent := name.rpartition(".")[0]) in modules else "")


def _imported(tree: ast.AST, at_start: bool = False) -> Iterator[str]:
    """What a module imports; `at_start`: when it is imported itself."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        return
    if at_start and isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    for child in ast.iter_child_nodes(tree):
        yield from _imported(child, at_start)


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def arrows_upwards(imports: Imports) -> list[str]:
    """Each import that the plan does not allow."""
    found = []
    for module, others in imports.items():
        room = max((room for room in PLAN if within(module, room)), key=len, default="")
        for other in sorted(others):
            allowed = any(within(other, prefix) for prefix in (room, *PLAN.get(room, ()), STUBS))
            if room and not allowed:
                found.append(f"{module} imports {other}")
    return found


def circle(imports: Imports) -> list[str]:
    """A circle of imports; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def rooms_of_services(imports: Imports) -> Imports:
    """Which folder or file right under services imports which other."""

    def room(module: str) -> str:
        return ".".join(module.split(".")[:2])

    rooms: dict[str, set[str]] = {}
    for module, others in imports.items():
        found = {room(other) for other in others if within(other, "services")}
        rooms.setdefault(room(module), set()).update(found - {room(module), "services"})
    return {name: frozenset(others) for name, others in rooms.items() if within(name, "services")}


@pytest.fixture(scope="module")
def imports() -> Imports:
    return imports_of(ROOT, ["services", "gateway", "cli", "quartet"])


def test_nothing_imports_what_is_above_it(imports: Imports) -> None:
    assert arrows_upwards(imports) == []


def test_nothing_imports_itself_by_way_of_others(imports: Imports) -> None:
    assert circle(imports) == []


def test_answers_know_neither_http_nor_a_dialect() -> None:
    """The Python API stands on them: it needs no web server."""
    code = "import sys, pkgutil, importlib, gateway.answers as a, quartet.async_omni\n"
    code += "[importlib.import_module(m.name) for m in pkgutil.walk_packages(a.__path__, 'gateway.answers.')]\n"
    code += "print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "gateway.answers.jobs" in loaded
    assert [
        name for name in loaded if name.startswith(("starlette", "fastapi", "gateway.dialects", "gateway.http"))
    ] == []


def test_the_rooms_of_services_have_no_circle(imports: Imports) -> None:
    assert circle(rooms_of_services(imports)) == []


def test_a_stage_that_imports_the_stubs_loads_nothing_of_the_python_api() -> None:
    code = "import sys, quartet.v1.media_pb2; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = [name for name in done.stdout.split() if name.split(".")[0] in ("quartet", "gateway", "cli", "services")]
    assert loaded == ["quartet", "quartet.v1", "quartet.v1.media_pb2"]


def test_every_name_of_the_python_api_is_there() -> None:
    assert sorted(quartet.__all__) == sorted(quartet._PLACES)
    for name in quartet.__all__:
        assert getattr(quartet, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'Omi'"):
        quartet.Omi  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_telemetry_and_rpc_know_no_tensors() -> None:
    for room in ("telemetry", "rpc"):
        for file in (ROOT / "services/common" / room).glob("*.py"):
            names = {name.partition(".")[0] for name in _imported(ast.parse(file.read_text()))}
            assert not names & {"torch", "numpy"}, file


def loaded_with(module: str, root: Path) -> dict[str, set[str]]:
    """Each module of this repository that the import of `module` runs, and the names that it imports then."""
    found: dict[str, set[str]] = {}
    left = [module]
    while left:
        name = left.pop()
        path = root.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name and name not in found and file.is_file():
            found[name] = set(_imported(ast.parse(file.read_text()), at_start=True))
            left += [name.rpartition(".")[0], *found[name], *(other.rpartition(".")[0] for other in found[name])]
    return found


def test_engines_know_no_grpc() -> None:
    for stage in ("code2wav", "talker", "dit", "encoder", "embedder", "aligner", "thinker"):
        loaded = loaded_with(f"services.{stage}.engine", ROOT)
        assert {f"services.{stage}", "services.common"} <= set(loaded)
        assert [name for name, others in loaded.items() if any(within(other, "grpc") for other in others)] == []


def test_what_takes_seconds_to_import_is_imported_where_it_is_used() -> None:
    """A talker and a code2wav are started again in half the time without them."""
    for room in ("common", "talker", "code2wav"):
        for file in (ROOT / "services" / room).rglob("*.py"):
            at_start = [
                node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            names = [name for node in at_start for name in _imported(node)]
            assert not [name for name in names if name.startswith(("transformers", "torch._dynamo", "torch._inductor"))]


def test_a_wrong_arrow_and_a_circle_are_found(tmp_path: Path) -> None:
    rpc, stream = tmp_path / "services/common/rpc", tmp_path / "services/common/stream"
    for folder in (rpc, stream):
        folder.mkdir(parents=True)
    (rpc / "server.py").write_text("def late():\n    from services.common.stream.hub import StreamHub\n")
    (stream / "hub.py").write_text("import services.common.stream.rows\n")
    (stream / "rows.py").write_text("from services.common.stream import hub\n")
    made = imports_of(tmp_path, ["services"])
    assert arrows_upwards(made) == ["services.common.rpc.server imports services.common.stream.hub"]
    assert set(circle(made)) == {"services.common.stream.hub", "services.common.stream.rows"}


def test_a_circle_of_rooms_is_found_where_no_module_is_in_one() -> None:
    made = {
        "services.talker.model": frozenset({"services.families"}),
        "services.families.mine": frozenset({"services.talker.family"}),
    }
    assert circle(made) == []
    assert set(circle(rooms_of_services(made))) == {"services.talker", "services.families"}
