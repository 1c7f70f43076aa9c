"""Looks at the headers of media files, so that a broken or endless one is refused before any stage sees it."""

import io
import warnings

import av
import av.error
from av.container import InputContainer
from PIL import Image

from gateway.media.fetch import MediaError
from gateway.settings import GatewaySettings
from services.common.rpc.messages import claimed_wav_s

# Containers of one file each. Playlists (HLS, DASH, concat) are not among them: reading one opens what it names.
_CONTAINERS = (
    "wav,w64,aiff,au,caf,mp3,flac,ogg,aac,ac3,amr,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,mpegts,mpeg,asf,gif"
)
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def check(kind: str, content: bytes, settings: GatewaySettings) -> None:
    """Checks a file's header. Blocking: call it in a thread.

    Args:
        kind: "image", "audio" or "video".
        content: the whole file.
        settings: the limits.

    Raises:
        MediaError: empty, broken, of another kind, too large, too long.
    """
    if not content:
        raise MediaError("the file is empty")
    if kind == "image":
        _check_image(content, settings)
    else:
        _check_stream(kind, content, settings)


def _check_image(content: bytes, settings: GatewaySettings) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is ours
            with Image.open(io.BytesIO(content), formats=_IMAGE_FORMATS) as image:
                _check_pixels(image.width, image.height, settings)
                least = settings.media_min_image_side_pixels
                if min(image.size) < least:
                    raise MediaError(
                        f"the image is {image.width} x {image.height} pixels; each side must be at least {least}"
                    )
                image.verify()
    except MediaError:
        raise
    except Exception:  # Pillow's readers raise whatever their parsing runs into
        formats = ", ".join(_IMAGE_FORMATS)
        raise MediaError(f"the file is corrupt, or is no image of these formats: {formats}") from None


def image_pixels(content: bytes) -> int:
    """Width x height of an image that `check` let pass, by its header. Blocking: call it in a thread."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(io.BytesIO(content), formats=_IMAGE_FORMATS) as image:
            return image.width * image.height


def _check_pixels(width: int, height: int, settings: GatewaySettings) -> None:
    if width * height > settings.media_max_image_pixels:
        most = settings.media_max_image_pixels
        raise MediaError(f"{width} x {height} pixels are more than the {most} allowed")


def _check_stream(kind: str, content: bytes, settings: GatewaySettings) -> None:
    max_s = settings.media_max_audio_s if kind == "audio" else settings.media_max_video_s
    try:
        with av.open(io.BytesIO(content), mode="r", options={"format_whitelist": _CONTAINERS}) as container:
            streams = container.streams.audio if kind == "audio" else container.streams.video
            if not streams:
                raise MediaError(f"the file has no {kind} track")
            stream = streams[0]
            if kind == "video":
                context = container.streams.video[0].codec_context
                _check_pixels(context.width, context.height, settings)
            duration_s = max(_duration_s(container, stream), claimed_wav_s(content))
            if duration_s > max_s:
                raise MediaError(f"the {kind} is {duration_s:.0f} s long; at most {max_s:g} s are allowed")
            if not any(packet.size for packet in container.demux(stream)):
                raise MediaError(f"the {kind} has no content: its length is zero")
    except (av.error.FFmpegError, ValueError, OverflowError):
        raise MediaError(f"the file is corrupt, or is no {kind} that FFmpeg reads") from None


def _duration_s(container: InputContainer, stream: av.AudioStream | av.VideoStream) -> float:
    """Longest duration that the container's headers claim; 0 where they claim none."""
    claims = [0.0]
    if container.duration is not None:
        claims.append(container.duration / av.time_base)
    if stream.duration is not None and stream.time_base is not None:
        claims.append(float(stream.duration * stream.time_base))
    return max(claims)
