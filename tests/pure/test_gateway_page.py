"""The files of the page at `/`, who gets them, and whose pages may use a server without keys."""

import base64
import hashlib
import re

import httpx
import pytest

from gateway.access.api_keys import digest
from gateway.app import create_app
from gateway.page.files import PATHS
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from tests.support.systems.gateway import SPEECH

IMPORT = re.compile(r'(?:from|import|src=|href=|addModule\() ?"((?:\./|/page/)[^"]+)"')


def client(**settings) -> httpx.AsyncClient:
    """Of a gateway that has not started: its stages are not reached."""
    loaded = GatewaySettings(pipeline=SPEECH, **settings)
    transport = httpx.ASGITransport(create_app(loaded, load_pipeline(SPEECH)))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


async def test_every_file_that_the_page_names_is_there_without_a_key(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(f'keys:\n  - name: ann\n    sha256: "{digest("sk-quartet-x")}"\n')
    async with client(api_keys_file=file) as http:
        named = {"/"}
        for path in PATHS:
            response = await http.get(path)
            assert response.status_code == 200
            found = IMPORT.findall(response.text)
            named |= {name.replace("./", "/page/", 1) if name.startswith("./") else name for name in found}
        assert named == PATHS
        assert (await http.get("/page/other.js")).status_code == 401
        assert (await http.get("/v1/models")).status_code == 401


async def test_the_api_s_description_runs_nothing_and_asks_no_other_server():
    async with client() as http:
        docs = await http.get("/docs")
        assert docs.status_code == 200
        assert "POST /v1/chat/completions" in docs.text
        policy = docs.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src" not in policy
        assert not re.search(r"<script|<link|(src|href)=.?(https?:)?//", docs.text)
        style = re.search("<style>(.*?)</style>", docs.text, re.DOTALL)
        assert style
        assert base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode() in policy
        assert (await http.get("/redoc")).status_code == 404


async def test_no_browser_guesses_what_an_answer_is():
    async with client() as http:
        for path in ("/health", "/docs", "/openapi.json", "/v1/nothing", "/", *PATHS):
            assert (await http.get(path)).headers["x-content-type-options"] == "nosniff", path
        refused = await http.post("/v1/responses", headers={"origin": "https://other.example"})
        assert (refused.status_code, refused.headers["x-content-type-options"]) == (403, "nosniff")


async def test_a_file_is_sent_again_only_when_it_has_changed():
    async with client() as http:
        response = await http.get("/page/app.js")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["content-type"].startswith("text/javascript")
        etag = response.headers["etag"]
        again = await http.get("/page/app.js", headers={"if-none-match": f'"old", W/{etag}'})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
        changed = await http.get("/page/app.js", headers={"if-none-match": '"old"'})
        assert changed.content == response.content
        head = await http.head("/")
        assert (head.status_code, head.content) == (200, b"")
        assert (await http.get("/page/../app.py")).status_code == 404


async def test_the_page_can_be_turned_off():
    async with client(page=False) as http:
        for path in ("/", "/page/app.js"):
            assert (await http.get(path)).status_code == 404


FOREIGN = [
    {"origin": "http://elsewhere.example", "sec-fetch-site": "cross-site"},
    {"origin": "http://127.0.0.1:3000", "sec-fetch-site": "same-site"},
    {"origin": "http://elsewhere.example"},
    {"origin": "null"},
]
OWN = [
    {},
    {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"},
    {"origin": "http://127.0.0.1:8000"},
    {"sec-fetch-site": "none"},
]


@pytest.mark.parametrize("headers", FOREIGN)
async def test_pages_of_other_sites_may_not_use_a_server_without_keys(headers):
    async with client() as http:
        refused = await http.post("/v1/chat/completions", content="{}", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_origin")
        assert (await http.get("/health", headers=headers)).status_code == 200


@pytest.mark.parametrize("headers", OWN)
async def test_its_own_page_and_programs_may(headers):
    async with client() as http:
        assert (await http.post("/health", content="{}", headers=headers)).status_code == 405  # it came there
