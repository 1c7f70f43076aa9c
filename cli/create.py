"""The commands that have a running server make a picture, a video or a sound."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.terminal import Report, bar, fail

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
Seed = Annotated[int | None, typer.Option(help="default: drawn")]
Lora = Annotated[list[str] | None, typer.Option(help="NAME=WEIGHT of a loaded adapter; may be repeated")]
Seconds = Annotated[float | None, typer.Option(help="length; default: the model's")]
LOCAL = "http://127.0.0.1:8000"


def image(
    prompt: Prompt,
    out: Annotated[Path, typer.Option(help="file: .png, .jpg or .webp; several become -1, -2, ...")],
    url: Url = LOCAL,
    n: Annotated[int, typer.Option("--n", min=1, help="how many, each with a seed of its own")] = 1,
    size: Size = None,
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    seed: Seed = None,
    image: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="to start from; may be repeated")
    ] = None,
    mask: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="transparent where --image is painted anew")
    ] = None,
    lora: Lora = None,
    api_key: ApiKey = None,
) -> None:
    """Have a running server make pictures of a prompt, or of others."""
    from cli.generation import IMAGE_FORMATS, Image, make_images

    file_format = _format(out, IMAGE_FORMATS)
    if mask and not image:
        raise typer.BadParameter("needs --image, the picture it is a mask of", param_hint="--mask")
    body = _body(prompt, steps, guidance, negative, seed, lora, n=n, size=size, output_format=file_format)
    written: dict[int, str] = {}

    def write(picture: Image) -> None:
        file = _numbered(out, picture.output, n)
        file.write_bytes(picture.content)
        written[picture.output] = f"wrote {file}: {picture.size}, seed {picture.seed}"

    try:
        with _working("waiting") as report:
            made = make_images(url, body, image or [], mask, write, report, api_key)
    finally:
        for output in sorted(written):  # also those of a request that failed or was given up
            typer.echo(written[output])
    typer.echo(f"{made.num_inference_steps} steps, {made.total_ms / 1000:.1f} s", err=True)


def video(
    prompt: Prompt,
    out: Annotated[Path, typer.Option(help=".mp4 file")],
    url: Url = LOCAL,
    image: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="the first frame")] = None,
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
    from cli.generation import VIDEO_FORMATS, make_video

    _format(out, VIDEO_FORMATS)
    if seconds is not None and frames is not None:
        raise typer.BadParameter("says the same as --seconds; give one of the two", param_hint="--frames")
    body = _body(prompt, steps, guidance, negative, seed, lora, seconds=seconds, num_frames=frames, size=size)
    with _working("sending") as report:
        made = make_video(url, body, image, out, report, api_key)
    how = made["quartet"]
    length = f"{how['num_frames']} frames, {how['frames_per_second']:g} a second"
    typer.echo(f"wrote {out}: {made['size']}, {length}, seed {how['seed']}")


def sound(
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
    from cli.generation import AUDIO_FORMATS, make_audio

    response_format = _format(out, AUDIO_FORMATS)
    body = _body(prompt, steps, guidance, negative, seed, lora, response_format=response_format, seconds=seconds)
    with _working("making the sound"):
        drawn = make_audio(url, body, out, api_key)
    typer.echo(f"wrote {out}: seed {drawn}")


@contextlib.contextmanager
def _working(what: str) -> Iterator[Report]:
    """A bar while a request is answered; the command fails where that does."""
    from cli.http import ApiError

    try:
        with bar(what) as report:
            yield report
    except (ApiError, OSError) as error:
        fail(error)


def _body(
    prompt: str,
    steps: int | None,
    guidance: float | None,
    negative: str | None,
    seed: int | None,
    lora: Iterable[str] | None,
    **own: Any,
) -> dict[str, Any]:
    """A request's members: those of every request, and the endpoint's `own`."""
    from cli.http import given

    members = {
        "prompt": prompt,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "negative_prompt": negative,
        "seed": seed,
        "lora": _weights(lora),
    }
    return given(members | own)


def _format(out: Path, formats: dict[str, Any]) -> str:
    """The format that the suffix of --out names; the work is not begun if it could not be written."""
    if out.suffix.lower() not in formats:
        raise typer.BadParameter(f"{out.name!r} must end in one of {' '.join(formats)}", param_hint="--out")
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {out.parent}", param_hint="--out")
    return formats[out.suffix.lower()]


def _numbered(file: Path, output: int, count: int) -> Path:
    """The file of one of `count` outputs: a.png, or a-1.png, a-2.png and so on."""
    return file if count == 1 else file.with_name(f"{file.stem}-{output + 1}{file.suffix}")


def _weights(loras: Iterable[str] | None) -> dict[str, float] | None:
    """NAME=WEIGHT as {name: weight}; a name alone has weight 1."""
    weights: dict[str, float] = {}
    for lora in loras or ():
        name, _, weight = lora.partition("=")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            raise typer.BadParameter(f"{lora!r} is not NAME=WEIGHT, e.g. film=0.8", param_hint="--lora") from None
    return weights or None
