"""The tests of diffusers that make a tiny pipeline of a class, found in a checkout of its repository."""

import importlib
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

import tests
from services.diffusion.families import FAMILIES
from services.diffusion.found import why_not

_PIPELINES = "tests/pipelines"
_MAKES = "get_dummy_components"
_SLOW = re.compile(r"Slow|Nightly|Integration")
_ONLY_DECORATE = ("parameterized", "requests_mock")
_SUFFIX = "Pipeline"
_ONNX = "onnx"
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Maker:
    """A class of a test: `module` is relative to the folder of pipelines' tests. `made`: the pipeline's class."""

    module: str
    name: str
    made: str

    def make(self) -> tuple[Any, dict[str, Any]]:
        """A pipeline, and arguments of a small call. It may raise anything."""
        test = getattr(importlib.import_module(f"tests.pipelines.{self.module}"), self.name)()
        components = getattr(test, _MAKES)()
        cls = getattr(diffusers, self.made)
        wanted = set(inspect.signature(cls.__init__).parameters)
        pipeline = cls(**{name: part for name, part in components.items() if name in wanted})
        for model in pipeline.components.values():
            if isinstance(model, torch.nn.Module):
                model.eval()
        return pipeline, _arguments(test)


def _arguments(test: Any) -> dict[str, Any]:
    """Those of the test's own call; none, if they want something that is not here."""
    inputs = test.get_dummy_inputs
    given = {"device": "cpu"} if "device" in inspect.signature(inputs).parameters else {}
    with suppress(Exception):
        return inputs(**given)
    return {}


def classes() -> dict[str, str | None]:
    """Name of each pipeline class that diffusers exports -> why no request can ask for it; None: one can."""
    found: dict[str, str | None] = {}
    for name in sorted(dir(diffusers)):
        cls = getattr(diffusers, name, None)
        if inspect.isclass(cls) and issubclass(cls, DiffusionPipeline) and cls is not DiffusionPipeline:
            runs_elsewhere = _ONNX in name.lower()
            found[name] = "runs in ONNX, not in torch" if runs_elsewhere else why_not(cls)
    return found


def is_listed(name: str) -> bool:
    """Whether the dit's table has a row for the class."""
    return name in FAMILIES


def import_from(checkout: Path) -> None:
    """Lets this process import the tests of `checkout` beside Quartet's: both are called `tests`.

    Raises:
        ValueError: there are none, as in a source package.
    """
    if not (checkout / _PIPELINES).is_dir():
        raise ValueError(f"{checkout} has no {_PIPELINES}: give a checkout of diffusers' repository")
    if str(checkout / "tests") not in tests.__path__:
        tests.__path__.append(str(checkout / "tests"))
        for name in _ONLY_DECORATE:
            if importlib.util.find_spec(name) is None:
                sys.modules[name] = _decorators(name)


def _decorators(name: str) -> Any:
    """In the place of a package of which the tests use decorators: what they decorate is not run here."""
    module: Any = types.ModuleType(name)
    decorate: Any = lambda *_, **__: lambda test: test  # noqa: E731
    decorate.expand = decorate
    module.__getattr__ = lambda attribute: decorate
    return module


def makers(checkout: Path, names: frozenset[str]) -> dict[str, list[Maker]]:
    """Class of `names` -> the tests that make it, else those that make a class whose name its own begins with, as
    Chroma of ChromaInpaint: often it has the same models. It imports all files that name one of them."""
    import_from(checkout)
    found: dict[str, list[Maker]] = {}
    folder = checkout / _PIPELINES
    lenders = names | {lender for name in names for lender in _lenders(name)}
    for file in sorted(folder.rglob("test_*.py")):
        if lenders.isdisjoint(_WORD.findall(file.read_text())):
            continue
        module = ".".join(file.relative_to(folder).with_suffix("").parts)
        for test in _tests(module):
            made = getattr(test, "pipeline_class", None)
            if inspect.isclass(made) and hasattr(test, _MAKES) and not _SLOW.search(test.__name__):
                cls = next((each for each in made.__mro__ if hasattr(diffusers, each.__name__)), made)
                found.setdefault(cls.__name__, []).append(Maker(module, test.__name__, cls.__name__))
    return {name: _own_or_lent(name, found) for name in names}


def _lenders(name: str) -> list[str]:
    """Classes whose names `name` begins with, the longest first."""
    stem = name.removesuffix(_SUFFIX)
    shorter = (f"{stem[:end]}{_SUFFIX}" for end in range(len(stem) - 1, 0, -1))
    return [each for each in shorter if hasattr(diffusers, each)]


def _own_or_lent(name: str, found: Mapping[str, list[Maker]]) -> list[Maker]:
    if name in found:
        return found[name]
    lent = next((found[lender] for lender in _lenders(name) if lender in found), [])
    return [replace(maker, made=name) for maker in lent]


def _tests(module: str) -> Iterator[type]:
    try:
        imported = importlib.import_module(f"tests.pipelines.{module}")
    except (Exception, SystemExit) as error:  # it may want a package that is not here
        print(f"{module} cannot be imported: {error!r}", flush=True)
        return
    for _, test in inspect.getmembers(imported, inspect.isclass):
        if test.__module__ == imported.__name__:
            yield test
