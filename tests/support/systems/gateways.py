"""Several gateways, each a process of its own, that share a database; before scripted stages of the test's process."""

import asyncio
import contextlib
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import httpx

from cli.ports import free_ports

START_GUARD_S = 120.0
_PROGRAMS = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
_NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_max_body_size 100m;
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b;
  fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
  upstream gateways {{ {servers} }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://gateways; proxy_http_version 1.1; proxy_buffering off; proxy_request_buffering off;
      proxy_set_header Host $host; proxy_set_header Upgrade $http_upgrade;
      proxy_set_header Connection $connection_upgrade; proxy_read_timeout 600s; proxy_connect_timeout 2s;
    }}
  }}
}}
"""


class Gateways:
    """`count` gateways at fixed ports.

    Args:
        stages: address of each stage of the pipeline.
        settings: flags of all; a list has one of each.
    """

    def __init__(self, count: int, pipeline: Path, stages: Mapping[str, str], folder: Path, **settings: object) -> None:
        self._folder, self._ports = folder, free_ports(count)
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count
        flags = {"pipeline": pipeline, "request_timeout_s": 60, "drain_timeout_s": 10, "own_url": self.urls, **settings}
        of_each = {name: value if isinstance(value, list) else [value] * count for name, value in flags.items()}
        self._flags = [
            [f"--{name.replace('_', '-')}={values[number]}" for name, values in of_each.items()]
            + [f"--stage={name}={address}" for name, address in stages.items()]
            for number in range(count)
        ]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    async def start(self, number: int) -> None:
        """Returns when it is ready."""
        own = [f"--port={self._ports[number]}", f"--jobs-dir={self.jobs_dir(number)}"]
        command = [sys.executable, "-m", "gateway", *own, *self._flags[number]]
        with (self._folder / f"gateway-{number}.log").open("ab") as log:
            process = self._processes[number] = subprocess.Popen(command, stdout=log, stderr=log)
        async with asyncio.timeout(START_GUARD_S), httpx.AsyncClient(verify=False) as http:
            while True:
                assert process.poll() is None, self.log(number)
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{self.urls[number]}/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.1)

    async def kill(self, number: int) -> None:
        process = self._processes[number]
        assert process is not None
        process.kill()
        await asyncio.to_thread(process.wait)

    def jobs_dir(self, number: int) -> Path:
        """Its own."""
        return self._folder / f"jobs-{number}"

    def pid(self, number: int) -> int:
        process = self._processes[number]
        assert process is not None
        return process.pid

    def log(self, number: int) -> str:
        return (self._folder / f"gateway-{number}.log").read_text()

    @contextlib.contextmanager
    def behind_nginx(self) -> Iterator[list[str]]:
        """URL of an nginx that sends each request to the next gateway."""
        (port,) = free_ports(1)
        servers = " ".join(f"server 127.0.0.1:{each} max_fails=0;" for each in self._ports)
        configuration = self._folder / "nginx.conf"
        configuration.write_text(_NGINX.format(folder=self._folder, servers=servers, port=port))
        program = shutil.which("nginx", path=_PROGRAMS)
        assert program is not None, "nginx is not installed"
        process = subprocess.Popen([program, "-p", str(self._folder), "-c", str(configuration)])
        try:
            yield [f"http://127.0.0.1:{port}"]
        finally:
            process.terminate()
            process.wait()

    async def stop(self) -> None:
        """Kills all."""
        for process in filter(None, self._processes):
            process.kill()
            await asyncio.to_thread(process.wait)


@contextlib.asynccontextmanager
async def gateways(
    count: int, pipeline: Path, stages: Mapping[str, str], folder: Path, **settings: object
) -> AsyncIterator[Gateways]:
    """That are ready."""
    started = Gateways(count, pipeline, stages, folder, **settings)
    try:
        for number in range(count):
            await started.start(number)
        yield started
    finally:
        await started.stop()


def has_nginx() -> bool:
    return shutil.which("nginx", path=_PROGRAMS) is not None
