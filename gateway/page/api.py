"""`GET /docs`: the API's description as a page without scripts, and with nothing from other servers."""

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; }
pre { overflow: auto; max-height: 30rem; padding: 0.5rem; border: 1px solid; }
summary { cursor: pointer; }
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}
_PLACES = ("requestBody", "parameters", "responses")

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(http: Request) -> HTMLResponse:
    description = http.app.openapi()
    title = escape(description["info"]["title"])
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    whole = '<p>For programs: <a href="/openapi.json">openapi.json</a></p>'
    body = "".join(_endpoints(description["paths"]))
    page = f'<!DOCTYPE html><html lang="en"><head>{head}</head><body><h1>{title}</h1>{whole}{body}</body></html>'
    return HTMLResponse(page, headers=_HEADERS)


def _endpoints(paths: dict[str, dict[str, Any]]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, endpoint in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            yield f"<p>{escape(endpoint.get('description', ''))}</p>"
            for place in filter(endpoint.get, _PLACES):
                text = escape(json.dumps(endpoint[place], indent=2, ensure_ascii=False))
                yield f"<details><summary>{place}</summary><pre>{text}</pre></details>"
