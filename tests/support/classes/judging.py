"""One pipeline class: made, called by diffusers, served by the dit, and compared."""

import re
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import diffusers
import torch

from quartet.v1 import dit_pb2
from services.common.errors import StageError
from services.diffusion import found
from services.diffusion.pipelines import explain
from services.diffusion.request import OutputSpec
from services.dit import engine
from services.dit.output import Done, Failed, read
from tests.support.classes.makers import Maker, import_from
from tests.support.classes.requests import small_requests
from tests.support.classes.standins import agree, nothing_is_fetched, publish, rouse
from tests.support.stage.dit_engine import Bench, bench, fresh

Result = Literal["served", "one at a time", "needs", "fails", "not tried"]
_MOST_CHARACTERS = 160  # of a reason


@dataclass
class Verdict:
    """What became of a class.

    Attributes:
        makes, needs: as the table's columns say.
        why: of any result but "served".
        denoisers: what is called at each step.
    """

    name: str
    makes: str = ""
    needs: str = ""
    result: Result = "not tried"
    why: str = ""
    denoisers: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class _Failure(Exception):
    """Says what failed, of what."""


@contextmanager
def _step(what: str) -> Iterator[None]:
    try:
        yield
    except _Failure:
        raise
    except Exception as error:
        raise _Failure(f"{what}: {brief(error)}") from error


def brief(error: BaseException) -> str:
    """An error in a line."""
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    text = re.sub(r"(/[\w.+-]+){2,}/|\btmp\w{8}: ", "", text)  # folders
    text = re.sub(r"\d{12,}", "...", text)  # addresses of objects
    text = text if isinstance(error, (ValueError, _Failure)) else f"{type(error).__name__}: {text}"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def described(name: str, reason: str | None) -> Verdict:
    """A class as its code says; `reason` as `makers.classes` has it."""
    cls = getattr(diffusers, name)
    result = found.result_of(cls)
    makes = found.RESULTS[result] if result else "-"
    makes += " and sound" if found.soundtrack_of(cls) else ""
    if reason is not None:
        return Verdict(name, makes, result="needs", why=reason)
    needs = ["a class" if found.takes_labels(cls) else "a prompt"]
    if found.needs_picture(cls):
        needs.append("an image")
    elif found.picture_of(cls):
        needs.append("an image if there is one")
    if found.mask_of(cls):
        needs.append("a mask")
    if found.control_of(cls):
        needs.append("a control image")
    if found.needs_video(cls):
        needs.append("a video")
    elif found.video_of(cls):
        needs.append("a video if there is one")
    if found.control_video_of(cls):
        needs.append("a control video")
    return Verdict(name, makes, ", ".join(needs))


def judge(verdict: Verdict, makers: Sequence[Maker], checkout: Path) -> Verdict:
    """Tries the first of `makers` that can be made, and fills in `verdict`. In a process of its own: it changes the
    libraries' classes."""
    import_from(checkout)
    reasons: list[str] = []
    for maker in makers:
        with tempfile.TemporaryDirectory() as folder:
            try:
                with _step("diffusers' test makes none here"):
                    inputs = _make(maker, Path(folder))
            except _Failure as error:
                traceback.print_exc()
                reasons.append(str(error))
                continue
            return judge_checkpoint(verdict, Path(folder), inputs)
    verdict.why = reasons[0] if reasons else "diffusers has no test that makes it"
    return verdict


def _make(maker: Maker, folder: Path) -> dict[str, Any]:
    with nothing_is_fetched(), torch.no_grad():
        torch.manual_seed(0)
        pipeline, inputs = maker.make()
        agree(pipeline)
        rouse(pipeline)
        publish(pipeline)
        pipeline.save_pretrained(folder)
    return inputs


def judge_checkpoint(verdict: Verdict, folder: Path, inputs: dict[str, Any]) -> Verdict:
    """Fills in `verdict`.

    Args:
        inputs: arguments of a small call.
    """
    try:
        with _step("does not start"), _served(folder) as dit:
            _judge_served(verdict, dit, folder, inputs)
    except _Failure as error:
        traceback.print_exc()
        verdict.result, verdict.why = "fails", str(error)
    return verdict


@contextmanager
def _served(folder: Path) -> Iterator[Bench]:
    """With batches of one: larger ones are not bit-equal. Some tiny models cannot have the default size."""
    with ExitStack() as stack:
        try:
            dit = stack.enter_context(bench(folder, default_size=None, max_batch=1))
        except ValueError as error:
            if not str(error).startswith("default_size"):
                raise
            dit = stack.enter_context(bench(folder, max_batch=1))
        yield dit


def _judge_served(verdict: Verdict, dit: Bench, folder: Path, inputs: dict[str, Any]) -> None:
    verdict.denoisers = list(dit.info.denoisers)
    with _step("refuses the request"):
        requests = small_requests(dit.engine.models, dit.info, inputs)
        orders = [dit.orders(dit_pb2.DitStart(**fields), *files)[0] for fields, *files in requests]
    with _step("plain diffusers fails with the tiny checkpoint"):
        theirs = [plain(folder, order) for order in orders]
    if _equal(*theirs):
        raise _Failure("plain diffusers makes the same of any prompt and seed with the tiny checkpoint")
    with _step("fails in the stage"):
        alone = [_made(dit, order) for order in orders]
    if not all(map(_equal, alone, theirs)):
        again = [plain(folder, order) for order in orders]
        if all(map(_equal, again, theirs)):
            raise _Failure("it is not what diffusers makes")
        raise _Failure("plain diffusers makes another output of the same seed")
    with _step("fails in turns"):
        verdict.why = dit.engine.check_turns(orders)
    verdict.result = "one at a time" if verdict.why else "served"


def plain(folder: Path, order: OutputSpec) -> tuple[torch.Tensor, ...]:
    """What diffusers makes of `order`, as `services.dit.output.Done` has it."""
    pipeline = fresh(folder)
    pipeline.set_progress_bar_config(disable=True)
    torch.manual_seed(order.seed)  # of the global state, which some draw from beside
    generator = torch.Generator("cpu").manual_seed(order.seed)
    output_type = "pt" if order.media == "sound" else "np"
    made, sound = read(order, pipeline(**order.arguments, generator=generator, output_type=output_type))
    return (made,) if sound is None else (made, sound)


def _made(dit: Bench, order: OutputSpec) -> tuple[torch.Tensor, ...]:
    """Raises what the pipeline raised."""
    errors: list[Exception] = []

    def remember(error: Exception) -> StageError:
        errors.append(error)
        return explain(error)

    with patch.object(engine, "explain", remember):
        watched = dit.submit(order)
        dit.wait(lambda: bool(watched.events) and isinstance(watched.events[-1], (Done, Failed)))
    if errors:
        raise errors[0]
    return (watched.data,) if watched.soundtrack is None else (watched.data, watched.soundtrack)


def _equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
