"""The page, which needs no API key: it has no secrets."""

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

_STATIC = Path(__file__).parent / "static"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Nothing but the page's own files runs, and it talks to its own server alone. `blob:` and `data:` are for what was
# made here, and for the user's own files.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "cache-control": "no-cache",  # kept, but asked for again each time: a new version is one as a whole
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "microphone=(self), camera=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def _read(path: Path) -> Response:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Response(content, media_type=_MEDIA_TYPES[path.suffix], headers={**_HEADERS, "etag": etag})


_FILES = {path.name: _read(path) for path in sorted(_STATIC.iterdir()) if path.suffix in _MEDIA_TYPES}
_INDEX = _FILES.pop("index.html")
PATHS = frozenset({"/", *(f"/page/{name}" for name in _FILES)})

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
async def index(http: Request) -> Response:
    return _response(http, _INDEX)


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
async def file(http: Request, name: str) -> Response:
    if name not in _FILES:
        raise HTTPException(404)
    return _response(http, _FILES[name])


def _response(http: Request, file: Response) -> Response:
    known = (tag.strip().removeprefix("W/") for tag in http.headers.get("if-none-match", "").split(","))
    if file.headers["etag"] in known:
        return Response(status_code=304, headers={name: file.headers[name] for name in ("etag", "cache-control")})
    return file
