"""`quartet database`: what gateways keep."""

from pathlib import Path
from typing import Annotated

import typer

from cli.terminal import CommandError, bar

app = typer.Typer(no_args_is_help=True, help="What gateways keep: responses, voices, videos, files.")
_URL = "QUARTET_GATEWAY_DATABASE_URL"


@app.callback()
def group() -> None:
    """What gateways keep."""


@app.command()
def move(
    database_url: Annotated[
        str | None,
        typer.Option(envvar=_URL, help="postgresql://USER:PASSWORD@HOST/NAME of an empty PostgreSQL database"),
    ] = None,
    responses_dir: Annotated[Path | None, typer.Option(help="directory of responses.sqlite")] = None,
    voices_dir: Annotated[Path | None, typer.Option(help="directory of voices.sqlite")] = None,
    jobs_dir: Annotated[
        Path | None, typer.Option(help="directory of videos.sqlite; the videos themselves stay")
    ] = None,
    files_dir: Annotated[Path | None, typer.Option(help="directory of files.sqlite; the files themselves stay")] = None,
) -> None:
    """Copy a stopped gateway's SQLite files, of 0.2.0 or later, to PostgreSQL. The files stay as they are."""
    from gateway.answers.files.store import FileStore
    from gateway.answers.video_store import VideoStore
    from gateway.answers.voice_store import VoiceStore
    from gateway.dialects.responses.store import ResponseStore
    from gateway.store.errors import StoreError
    from gateway.store.moving import copy
    from gateway.store.postgres import PostgresDatabase
    from gateway.store.sqlite import SqliteDatabase, file_of

    if database_url is None:
        raise CommandError(f"--database-url: name the PostgreSQL database, or set {_URL}")
    places = {ResponseStore: responses_dir, VoiceStore: voices_dir, VideoStore: jobs_dir, FileStore: files_dir}
    if not (named := {kind: place for kind, place in places.items() if place is not None}):
        raise CommandError("name what to move: --responses-dir, --voices-dir, --jobs-dir, --files-dir")
    for kind, place in named.items():
        if not (file := file_of(place, kind.name)).is_file():
            raise CommandError(f"--{kind.setting.replace('_', '-')}: there is no file {file}")
    try:
        target = PostgresDatabase(database_url)
        for kind, place in named.items():
            source = SqliteDatabase(place, kind.name, kind.setting, kind.pragmas)
            with bar(f"moving {kind.name}") as report:
                moved = copy(kind, source, target, lambda table, done, total: report(table, done / max(1, total)))
            source.close()
            typer.echo(f"moved {kind.name}: {', '.join(f'{rows} {table}' for table, rows in moved.items())}")
        target.close()
    except StoreError as error:
        raise CommandError(str(error)) from None
