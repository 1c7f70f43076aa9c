"""The command `quartet wyoming`."""

import asyncio
from typing import Annotated

import typer

from cli.create import LOCAL, ApiKey, Url

Uri = Annotated[
    str,
    typer.Option(
        help="where to listen: tcp://HOST:PORT, or unix://PATH. Clients need no password: tcp://0.0.0.0:10300 lets in "
        "all who reach this machine"
    ),
]
Languages = Annotated[
    list[str] | None,
    typer.Option(
        "--language",
        help="ISO 639-1 code of one that Home Assistant may choose, such as en; may be repeated; default: all that "
        "the model names, else all that the gateway knows",
    ),
]


def wyoming(
    url: Url = LOCAL, uri: Uri = "tcp://127.0.0.1:10300", language: Languages = None, api_key: ApiKey = None
) -> None:
    """Let Home Assistant hear and speak by a running server: the Wyoming protocol, until ctrl-C."""
    from cli.wyoming.server import check, serve
    from gateway.answers.transcription.languages import code_of, language_of

    try:
        check(uri)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--uri") from None
    try:
        languages = [code_of(language_of(each)) for each in language or ()]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--language") from None
    asyncio.run(serve(url, uri, languages, api_key))
