"""The `quartet` command. Commands import heavy modules themselves, so that `quartet --help` is quick."""

import asyncio
import contextlib
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cli.chat import ask, part, write_wav
from cli.create import LOCAL, ApiKey, Url, file_option, image, say, sound, transcribe, video
from cli.database import app as database_commands
from cli.hardware import AlignerModel, AsrModel, Revision, StageFlags, TalkerModel, at_revision, budget, doctor
from cli.http import connect, given
from cli.profile import profile, trace
from cli.talk import talk
from cli.terminal import CommandError, Commands
from cli.tiny import ARCHS, make_checkpoint
from cli.voice import app as voice_commands
from cli.wyoming.command import wyoming

Media = Annotated[list[Path] | None, file_option("may be repeated")]
Verbose = Annotated[bool, typer.Option("--verbose", help="show the end of the log of a process that cannot start")]
Pipeline = Annotated[
    Path | None, typer.Option(help="YAML file, or name of a shipped one; default: that of the model's family")
]
ShowPlan = Annotated[
    bool, typer.Option("--plan", help="print what would be started, and each stage's share of the GPUs; start nothing")
]
ApiKeysFile = Annotated[
    Path | None, typer.Option(help="YAML of API keys, as `quartet key` prints them; needed by any other --host")
]
TlsCert = Annotated[
    Path | None, typer.Option(envvar="QUARTET_TLS_CERT", help="PEM: mutual TLS between all processes; `quartet tls`")
]
TlsKey = Annotated[Path | None, typer.Option(envvar="QUARTET_TLS_KEY", help="PEM of its key")]
TlsCa = Annotated[Path | None, typer.Option(envvar="QUARTET_TLS_CA", help="PEM of the CA")]
TlsServerName = Annotated[
    str | None,
    typer.Option(envvar="QUARTET_TLS_SERVER_NAME", help="name in the certificate; default: it has 127.0.0.1"),
]
app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, help="Quartet: omni-modal models as gRPC stages."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("quartet"))
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Options of the command itself."""


def _known_arch(arch: str) -> str:
    if arch not in ARCHS:
        raise typer.BadParameter(f"{arch!r} is not one of {', '.join(ARCHS)}")
    return arch


@app.command()
def tiny(
    out: Annotated[Path, typer.Option(help="directory to write; created if needed")],
    arch: Annotated[str, typer.Option(help=f"one of {', '.join(ARCHS)}", callback=_known_arch)] = ARCHS[0],
    seed: Annotated[int, typer.Option(help="seed of the weights")] = 0,
    size: Annotated[
        Literal["tiny", "small"], typer.Option(help="small is larger and differs in every dimension")
    ] = "tiny",
) -> None:
    """Make a small random checkpoint with the real architecture, config keys, weight names and tokenizer."""
    make_checkpoint(out, seed, size, arch)
    typer.echo(f"wrote {out} ({arch}, {size}, seed {seed})")


@app.command()
def up(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="checkpoint directory or hub id; default: the small models that come with Quartet"),
    ] = None,
    revision: Revision = None,
    host: Annotated[str, typer.Option(help="address of the HTTP API")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port of the HTTP API")] = 8000,
    pipeline: Pipeline = None,
    dit_model: Annotated[str | None, typer.Option(help="the dit's checkpoint, beside stages of other kinds")] = None,
    asr_model: AsrModel = None,
    talker_model: TalkerModel = None,
    aligner_model: AlignerModel = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="directory for logs and state.json; default: a temporary one")
    ] = None,
    verbose: Verbose = False,
    plan: ShowPlan = False,
    thinker_arg: StageFlags = None,
    asr_arg: StageFlags = None,
    talker_arg: StageFlags = None,
    code2wav_arg: StageFlags = None,
    dit_arg: StageFlags = None,
    encoder_arg: StageFlags = None,
    embedder_arg: StageFlags = None,
    aligner_arg: StageFlags = None,
    gateway_arg: StageFlags = None,
    webrtc: Annotated[
        bool, typer.Option("--webrtc", help="calls by WebRTC, too, on UDP port 3478: install quartet[webrtc]")
    ] = False,
    webrtc_arg: StageFlags = None,
    api_keys_file: ApiKeysFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_server_name: TlsServerName = None,
) -> None:
    """Serve a model: every stage and the gateway as processes on this machine, until ctrl-C."""
    from cli.plan import ASR, GATEWAY, WEBRTC, LaunchOptions, Tls, demo_options, pipeline_for
    from cli.up import serve, show
    from gateway.pipeline.kinds import KINDS

    others: dict[str, Any] = {
        "host": host,
        "port": port,
        "run_directory": run_dir,
        "verbose": verbose,
        "stage_arguments": {part: ctx.params[f"{part}_arg"] or [] for part in (*KINDS, ASR, GATEWAY, WEBRTC)},
        "tls": Tls(tls_cert, tls_key, tls_ca, tls_server_name),
        "api_keys_file": api_keys_file,
        "webrtc": webrtc,
        "aligner_model": aligner_model,
    }
    if (model := at_revision(model, revision)) is None:
        for hint, given_model in (("--talker-model", talker_model), ("--asr-model", asr_model)):
            if given_model is not None:
                raise typer.BadParameter("needs --model, the checkpoint that writes", param_hint=hint)
        options = demo_options(pipeline, dit_model, **others)
    else:
        others |= {"dit_model": dit_model, "talker_model": talker_model, "asr_model": asr_model}
        options = LaunchOptions(model, pipeline=pipeline or pipeline_for(model, talker_model, asr_model), **others)
    if plan:
        show(options)
    else:
        asyncio.run(serve(options))


@app.command()
def chat(
    question: Annotated[str, typer.Argument(help="what to ask")],
    url: Url = LOCAL,
    image: Media = None,
    audio: Media = None,
    video: Media = None,
    voice: Annotated[str | None, typer.Option(help="one of the model's voices")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="most tokens of the answer")] = None,
    out: Annotated[Path | None, typer.Option(help="WAV file for the spoken answer; none: text only")] = None,
    api_key: ApiKey = None,
) -> None:
    """Ask a running server; the text streams to the terminal, the speech to --out."""
    if voice and not out:
        raise typer.BadParameter("needs --out, the file for the speech", param_hint="--voice")
    media = {"image": image, "audio": audio, "video": video}
    content = [part(kind, file) for kind, files in media.items() for file in files or ()]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
    settings = given(max_tokens=max_tokens)
    if out:
        settings |= {"modalities": ["text", "audio"], "audio": given(format="pcm16", voice=voice)}
    with connect(url, api_key) as client:
        answer = ask(
            client,
            messages,
            settings,
            on_text=lambda text: typer.echo(text, nl=False),
            on_thought=lambda text: typer.secho(text, nl=False, dim=True, err=True),
        )
    typer.echo()
    if out:
        write_wav(answer, out)
        typer.echo(f"wrote {out}: {answer.audio_s:.2f} s", err=True)


app.add_typer(voice_commands, name="voice")
app.add_typer(database_commands, name="database")
for command in (say, talk, transcribe, image, video, sound, wyoming, budget, doctor, profile, trace):
    app.command()(command)


@app.command()
def top(
    run_dir: Annotated[Path | None, typer.Option(help="the --run-dir of a running `quartet up`")] = None,
    url: Annotated[str, typer.Option(help="address of the gateway, without --run-dir")] = LOCAL,
    metrics: Annotated[
        list[str] | None, typer.Option(help="NAME=URL of a process's metrics, beside --url; may be repeated")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.2, help="seconds between two looks")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print one table and exit")] = False,
) -> None:
    """Watch the stages of a running system: state, load, step times, first outputs. Ctrl-C ends it."""
    from cli.top import System
    from cli.top import top as watch

    system = System.of_run(run_dir) if run_dir else System.at(url, metrics or [])
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(watch(system, interval, once))


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="seed of speech and image")] = 0,
    port: Annotated[int | None, typer.Option(help="port of the HTTP API while it runs; default: a free one")] = None,
    out: Annotated[Path, typer.Option(help="WAV file for the spoken answer")] = Path("demo.wav"),
    picture: Annotated[Path, typer.Option(help="PNG file for the generated image")] = Path("demo.png"),
    verbose: Verbose = False,
) -> None:
    """Everything once, on the models that come with Quartet: speech, text, an image as input, a generated image."""
    from cli.demo import run

    run(seed, port, out, picture, verbose=verbose)


@app.command()
def key(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="of who gets it; in logs and metrics")],
    max_concurrent_requests: Annotated[int | None, typer.Option(min=1, help="default: no limit")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="default: no limit")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="it may load and unload adapters and take profiles")] = False,
) -> None:
    """Make an API key: it is printed once, on stderr; what goes into the gateway's --api-keys-file, on stdout."""
    from pydantic import ValidationError

    from gateway.access.api_keys import ApiKeyEntry, digest, new_key

    secret = new_key()
    try:
        entry = ApiKeyEntry(sha256=digest(secret), **ctx.params)
    except ValidationError as error:
        fault = error.errors()[0]
        raise typer.BadParameter(fault["msg"], param_hint=str(fault["loc"][0])) from None
    typer.echo(f"the key, which is not kept anywhere: {secret}", err=True)
    typer.echo("below `keys:` in the gateway's --api-keys-file:", err=True)
    members = [f'{field}: "{value}"' if field == "sha256" else f"{field}: {value}" for field, value in entry if value]
    typer.echo("  - " + "\n    ".join(members))


@app.command()
def tls(
    directory: Annotated[Path, typer.Argument(help="where to write; a CA that is there already signs again")],
    host: Annotated[
        list[str] | None, typer.Option(help="name or address that all certificates are for as well; may be repeated")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="how long the certificates are valid")] = 365,
) -> None:
    """Make a CA, and a certificate for each process, for mutual TLS between the stages: docs/security.md."""
    from cli.certificates import PROCESSES, make_certificates

    try:
        is_new = make_certificates(directory, host or (), days)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from None
    typer.echo(f"{'made' if is_new else 'kept'} the CA {directory}/ca.crt (its key, ca.key, is for nobody else)")
    typer.echo(f"wrote tls.crt, tls.key, ca.crt for {', '.join(PROCESSES)}, valid for {days} days")


if __name__ == "__main__":
    app()
