"""`quartet profile` and `quartet trace`."""

import tempfile
import time
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import httpx
import typer

from cli.create import LOCAL, ApiKey, Url
from cli.http import check, connect, given
from cli.terminal import Report, bar

TRACE = "trace.json.gz"
_TICK_S = 0.1


def profile(
    out: Annotated[Path, typer.Option(file_okay=False, help=f"directory for {TRACE}; created if needed")],
    seconds: Annotated[float, typer.Option(min=0.1, help="how long is recorded; ctrl-C ends it sooner")] = 5.0,
    stage: Annotated[
        list[str] | None, typer.Option(help="of these stages alone; may be repeated; default: all")
    ] = None,
    url: Url = LOCAL,
    api_key: ApiKey = None,
) -> None:
    """Record what all stages of a running server do, as one trace for Perfetto. For administrators; it slows them."""
    from cli.trace_file import merge

    out.mkdir(parents=True, exist_ok=True)
    body = given(seconds=seconds, stages=stage or None)
    with tempfile.TemporaryDirectory() as directory, connect(url, api_key) as client, bar("starting") as report:
        started = check(client.post("/start_profile", json=body)).json()["stages"]
        for name, replicas in started.items():
            for address, state in replicas.items():
                if state != "recording":
                    typer.echo(f"{name} {address}: {state}", err=True)
        _wait(seconds, report)
        archive = Path(directory) / "profile.tar"
        _fetch(client, archive, report)
        report("merging", None)
        merged = merge(archive, out / TRACE)
    for fault in merged.faults:
        typer.echo(f"missing: {fault}", err=True)
    contents = f"{len(merged.processes)} processes, {merged.operations} operations, {len(merged.requests)} requests"
    typer.echo(f"wrote {out / TRACE}: {contents}; open it in https://ui.perfetto.dev")


def _wait(seconds: float, report: Report) -> None:
    begun_s = time.monotonic()
    try:
        while (gone_s := time.monotonic() - begun_s) < seconds:
            report("recording", gone_s / seconds)
            time.sleep(min(_TICK_S, seconds - gone_s))
    except KeyboardInterrupt:
        report("stopping", None)


def _fetch(client: httpx.Client, archive: Path, report: Report) -> None:
    report("stopping", None)
    with client.stream("POST", "/stop_profile") as response, archive.open("wb") as file:
        for piece in check(response).iter_bytes():
            file.write(piece)
            report(f"fetching, {file.tell() / 2**20:.1f} MiB", None)


def trace(
    request_id: Annotated[str, typer.Argument(help="of a response: its x-request-id header, or the completion's id")],
    url: Url = LOCAL,
    api_key: ApiKey = None,
) -> None:
    """Print where the time of a request went, stage by stage: one of the last 1,000 of a running server."""
    from rich.console import Console

    from cli.request_table import trace_table

    with connect(url, api_key) as client:
        answer = check(client.get(f"/v1/quartet/trace/{quote(request_id, safe='')}")).json()
    console = Console()
    console.print(trace_table(answer, console.width))
    for lost in answer["unreachable"]:
        typer.echo(f"not reached: {lost['stage']} {lost['address']}: {lost['reason']}", err=True)
