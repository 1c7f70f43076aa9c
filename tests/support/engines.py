"""`pytest --engines=optional`: a test that needs a package of an engine which is not installed is skipped, with its
name.

For environments that have some engines or none: another Python, or newer versions than vLLM takes. By default a package
that is missing is an error.
"""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

PACKAGES = frozenset(
    ("torch", "vllm", "transformers", "tokenizers", "huggingface_hub", "diffusers", "safetensors", "peft", "greenlet")
)
_OPTION = "--engines"


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "optional: tests are skipped that need one which is not installed"
    parser.addoption(_OPTION, choices=("required", "optional"), default="required", help=what)


def lacking(error: BaseException | None) -> str | None:
    """The engine's package for want of which `error` was raised; None: it has another cause."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in PACKAGES:
            return error.name
        error = error.__cause__ or error.__context__
    return None


def require(package: str) -> None:
    """For what is read of an engine's files without an import. Raises ModuleNotFoundError."""
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


class _Module(pytest.Module):
    """A file of tests that is skipped as a whole when its imports fail for want of an engine."""

    def _getobj(self):
        try:
            return super()._getobj()
        except self.CollectError as error:
            if name := lacking(error):
                pytest.skip(f"needs {name}", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path, parent) -> pytest.Module | None:
    if parent.config.getoption(_OPTION) != "optional":
        return None
    return _Module.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    optional = item.config.getoption(_OPTION) == "optional"
    if optional and report.failed and call.excinfo and (name := lacking(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: needs {name}")
    return report
