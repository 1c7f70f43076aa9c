"""`quartet voice`: the voices that a running server imitates."""

from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from cli.create import LOCAL, ApiKey, Url
from cli.http import check, connect, files, given, payload

app = typer.Typer(no_args_is_help=True, help="Voices that a running server imitates.")
_PATH = "/v1/audio/voices"


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="what it is called in --voice of `quartet say`")],
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="sound with 1 to 30 s of it")],
    consent: Annotated[str, typer.Option(help="who agreed that this voice is imitated")],
    text: Annotated[str | None, typer.Option(help="what is said in it: the voice becomes more like it")] = None,
    url: Url = LOCAL,
    api_key: ApiKey = None,
) -> None:
    """Upload a voice."""
    body = payload(given(name=name, consent=consent, ref_text=text), files("audio_sample", [file]))
    with connect(url, api_key) as client:
        voice = check(client.post(_PATH, **body)).json()
    typer.echo(f"added {voice['name']}: {voice['seconds']:.1f} s, id {voice['id']}")


@app.command("list")
def show(url: Url = LOCAL, api_key: ApiKey = None) -> None:
    """List the model's voices and those that were uploaded."""
    with connect(url, api_key) as client:
        voices = check(client.get(_PATH)).json()["data"]
    for voice in voices:
        typer.echo(f"{voice['name']}  {voice['id']}" if "consent" in voice else voice["name"])


@app.command("rm")
def remove(voice: Annotated[str, typer.Argument(help="name or id")], url: Url = LOCAL, api_key: ApiKey = None) -> None:
    """Remove an uploaded voice."""
    with connect(url, api_key) as client:
        removed = check(client.delete(f"{_PATH}/{quote(voice, safe='')}")).json()
    typer.echo(f"removed {removed['name']}")
