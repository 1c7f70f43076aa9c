"""The commands that have a running server make an image, a video or a sound."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cli.generation import AUDIO_FORMATS, IMAGE_FORMATS, VIDEO_FORMATS, Image, client_with_bar, make_images, make_video
from cli.http import check, connect, data_url, files, given, model_that, written

Prompt = Annotated[str, typer.Argument(help="what to make")]
Url = Annotated[str, typer.Option(help="address of the gateway")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=["QUARTET_API_KEY", "OPENAI_API_KEY"],
        show_default=False,
        help="if the gateway asks for one; others on this machine can read flags, but not the environment",
    ),
]
Size = Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels; default: the model's")]
Steps = Annotated[int | None, typer.Option(help="denoising steps; default: the model's")]
Guidance = Annotated[float | None, typer.Option(help="how strictly the prompt is followed; default: the model's")]
Negative = Annotated[str | None, typer.Option(help="what to keep out")]
Seed = Annotated[int | None, typer.Option(help="default: random")]
Lora = Annotated[list[str] | None, typer.Option(help="NAME=WEIGHT of a loaded adapter; may be repeated")]
Seconds = Annotated[float | None, typer.Option(help="length; default: the model's")]
LOCAL = "http://127.0.0.1:8000"
# Flags that are members of a request's body, and the body's names for some of them.
_MEMBERS = ("prompt", "n", "size", "seconds", "steps", "guidance", "negative", "seed")
_RENAMED = {"steps": "num_inference_steps", "guidance": "guidance_scale", "negative": "negative_prompt"}


def file_option(help: str, *names: str) -> Any:
    return typer.Option(*names, exists=True, dir_okay=False, help=help)


def image(
    ctx: typer.Context,
    prompt: Prompt,
    out: Annotated[Path, typer.Option(help="file: .png, .jpg or .webp; several become -1, -2, ...")],
    url: Url = LOCAL,
    n: Annotated[int, typer.Option("--n", min=1, help="how many, each with a seed of its own")] = 1,
    size: Size = None,
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    seed: Seed = None,
    image: Annotated[list[Path] | None, file_option("to start from; may be repeated")] = None,
    mask: Annotated[Path | None, file_option("transparent where --image is drawn anew")] = None,
    control_image: Annotated[list[Path] | None, file_option("for a model with a ControlNet; may be repeated")] = None,
    lora: Lora = None,
    api_key: ApiKey = None,
) -> None:
    """Have a running server make images from a prompt, or from other images."""
    file_format = format_by_suffix(out, IMAGE_FORMATS)
    if mask and not image:
        raise typer.BadParameter("needs --image, the image it is a mask of", param_hint="--mask")
    body = _body(ctx.params, output_format=file_format)
    made: dict[int, Image] = {}
    try:
        with client_with_bar("waiting", url, api_key) as (client, report):
            uploads = files("image[]", image or ()) + files("mask", [mask] if mask else ())
            if uploads:
                uploads += files("control_image[]", control_image or ())
            elif control_image:
                body["quartet"] = {"dit": {"control_images": [data_url(file, "image") for file in control_image]}}
            for result in make_images(client, body, uploads, report):
                _numbered(out, result.output, n).write_bytes(result.content)
                made[result.output] = result
    finally:
        for output, result in sorted(made.items()):  # also those of a request that failed or was given up
            typer.echo(f"wrote {_numbered(out, output, n)}: {result.size}, seed {result.seed}")
    last = max(made.values(), key=lambda result: result.total_ms)
    typer.echo(f"{last.num_inference_steps} steps, {last.total_ms / 1000:.1f} s", err=True)


def video(
    ctx: typer.Context,
    prompt: Prompt,
    out: Annotated[Path, typer.Option(help=".mp4 file")],
    url: Url = LOCAL,
    image: Annotated[Path | None, file_option("the first frame")] = None,
    video: Annotated[Path | None, file_option("to start from")] = None,
    control_video: Annotated[Path | None, file_option("for a model that needs one, such as of edges or poses")] = None,
    seconds: Seconds = None,
    frames: Annotated[int | None, typer.Option(help="length in frames, instead of --seconds")] = None,
    size: Size = None,
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    seed: Seed = None,
    lora: Lora = None,
    api_key: ApiKey = None,
) -> None:
    """Have a running server make a video. Ctrl-C gives it up there, too."""
    format_by_suffix(out, VIDEO_FORMATS)
    if seconds is not None and frames is not None:
        raise typer.BadParameter("says the same as --seconds; give one of the two", param_hint="--frames")
    body = _body(ctx.params, num_frames=frames)
    with client_with_bar("sending", url, api_key) as (client, report):
        sent = {"input_reference": image, "video": video, "control_video": control_video}
        uploads = [each for name, file in sent.items() if file for each in files(name, [file])]
        finished = make_video(client, body, uploads, report, out)
    how = finished["quartet"]
    length = f"{how['num_frames']} frames, {how['frames_per_second']:g} a second"
    typer.echo(f"wrote {out}: {finished['size']}, {length}, seed {how['seed']}")


def sound(
    ctx: typer.Context,
    prompt: Prompt,
    out: Annotated[Path, typer.Option(help="file: .wav, .flac, .mp3, .opus or .aac")],
    url: Url = LOCAL,
    seconds: Seconds = None,
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    seed: Seed = None,
    lora: Lora = None,
    api_key: ApiKey = None,
) -> None:
    """Have a running server make a sound."""
    response_format = format_by_suffix(out, AUDIO_FORMATS)
    body = _body(ctx.params, response_format=response_format)
    with client_with_bar("making the sound", url, api_key) as (client, _):
        response = check(client.post("/v1/audio/generations", json=body))
        out.write_bytes(response.content)
    typer.echo(f"wrote {out}: seed {response.headers['x-quartet-seed']}")


def say(
    text: Annotated[str, typer.Argument(help="what to say; -: standard input, as it is typed")],
    out: Annotated[
        Path | None, typer.Option(help="file: .wav, .flac, .mp3, .opus or .aac; default: WAV to stdout, for a player")
    ] = None,
    url: Url = LOCAL,
    voice: Annotated[str | None, typer.Option(help="one of those that `quartet voice list` shows")] = None,
    language: Annotated[str | None, typer.Option(help="of the text; default: detected")] = None,
    instructions: Annotated[str | None, typer.Option(help="how to say it")] = None,
    speed: Annotated[float, typer.Option(min=0.25, max=4, help="the pitch stays")] = 1.0,
    seed: Seed = None,
    api_key: ApiKey = None,
) -> None:
    """Have a running server speak a text."""
    from cli import say as spoken

    if out is None and sys.stdout.isatty():
        reason = "is missing: a terminal plays no sound. Name a file, or pipe it into a player"
        raise typer.BadParameter(reason, param_hint="--out")
    settings = given(voice=voice, language=language, instructions=instructions, seed=seed, speed=speed)
    settings["response_format"] = "wav" if out is None else format_by_suffix(out, AUDIO_FORMATS)
    if text == "-":  # no bar: somebody may be typing on that terminal
        with connect(url, api_key) as client:
            spoken.say_typed(client, settings, spoken.typed(sys.stdin.fileno()), out)
    else:
        with client_with_bar("waiting", url, api_key) as (client, report):
            spoken.say(client, {"input": text, **settings}, report, out)
    if out is not None:
        typer.echo(f"wrote {out}")


def transcribe(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="sound or video")],
    url: Url = LOCAL,
    format: Annotated[
        Literal["text", "json", "verbose_json", "srt", "vtt"], typer.Option(help="of what comes")
    ] = "text",
    out: Annotated[Path | None, typer.Option(help="file; default: stdout")] = None,
    language: Annotated[str | None, typer.Option(help="spoken: en, de, zh, ...; default: the model finds it")] = None,
    prompt: Annotated[str | None, typer.Option(help="names and terms that may be said")] = None,
    translate: Annotated[bool, typer.Option("--translate", help="into English")] = False,
    api_key: ApiKey = None,
) -> None:
    """Have a running server transcribe speech, with times if the format has them."""
    path = f"/v1/audio/{'translations' if translate else 'transcriptions'}"
    form = given(response_format=format, language=language, prompt=prompt)
    with client_with_bar("sending", url, api_key) as (client, report):
        form["model"] = model_that(client, "hears", lambda facts: "audio" in facts["input_modalities"])
        report("listening", None)
        response = check(client.post(path, data=form, files=files("file", [file])))
    with written(out) as text:
        text.write(response.content)
    if out is not None:
        typer.echo(f"wrote {out}")


def _body(flags: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    members = {_RENAMED.get(flag, flag): flags.get(flag) for flag in _MEMBERS}
    return given(**members, lora=_weights(flags["lora"]), **own)


def format_by_suffix(out: Path, formats: dict[str, Any]) -> str:
    """Raises BadParameter: --out cannot be written."""
    if out.suffix.lower() not in formats:
        raise typer.BadParameter(f"{out.name!r} must end in one of {' '.join(formats)}", param_hint="--out")
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {out.parent}", param_hint="--out")
    return formats[out.suffix.lower()]


def _numbered(file: Path, output: int, count: int) -> Path:
    """a.png; of several outputs a-1.png, a-2.png and so on."""
    return file if count == 1 else file.with_name(f"{file.stem}-{output + 1}{file.suffix}")


def _weights(loras: Iterable[str] | None) -> dict[str, float] | None:
    """Parses NAME=WEIGHT; a name alone has weight 1."""
    weights: dict[str, float] = {}
    for lora in loras or ():
        name, _, weight = lora.partition("=")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            raise typer.BadParameter(f"{lora!r} is not NAME=WEIGHT, e.g. film=0.8", param_hint="--lora") from None
    return weights or None
