"""Asks a process whether it serves: `python -m services.common.rpc.probe --address 127.0.0.1:50052 --service NAME`.

Exit status 0: it serves; 1: it does not, with the reason on stderr; 2: wrong flags. `--service` left out asks for
liveness, `--url` asks the gateway. With QUARTET_TLS_CERT, _KEY and _CA in the environment it asks by TLS.
"""

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

TLS_FLAGS = ("--tls-cert", "--tls-key", "--tls-ca")


class StageProbe:
    """Asks one stage for its health, by one connection.

    Args:
        address: "host:port".
        service: full name of a service; "": liveness.
        tls: files of the certificate, its key and the CA; none: in the clear.
        server_name: that the certificate there must have; "": the first name in our own.
    """

    def __init__(self, address: str, service: str, tls: Sequence[Path] = (), server_name: str = "") -> None:
        self._address, self._service, self._tls, self._server_name = address, service, tls, server_name
        self._channel: Any = None

    def state(self, timeout_s: float) -> str:
        """The answer of `grpc.health.v1`, e.g. "SERVING", or why there is none. Blocks."""
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        from services.common.rpc.tls import TlsError

        if self._channel is None:
            try:
                self._channel = self._open()
            except TlsError as error:
                return str(error)
        stub = health_pb2_grpc.HealthStub(self._channel)
        check = cast("Any", stub).Check  # pyright: ignore[reportAttributeAccessIssue]
        try:
            answer = check(health_pb2.HealthCheckRequest(service=self._service), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"  # pyright: ignore[reportAttributeAccessIssue]
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _open(self) -> Any:
        import grpc

        from services.common.rpc.channels import CLIENT_OPTIONS, name_options
        from services.common.rpc.tls import read_identity

        if not self._tls:
            return grpc.insecure_channel(self._address, options=CLIENT_OPTIONS)
        identity = read_identity(*self._tls)
        options = [*CLIENT_OPTIONS, *name_options(self._server_name or next(iter(identity.names), ""))]
        return grpc.secure_channel(self._address, identity.channel_credentials(), options=options)


def listens(host: str, port: int, timeout_s: float) -> bool:
    """Whether anything takes connections there."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError:
        return False
    return True


def http_state(url: str, timeout_s: float) -> str:
    """ "SERVING" if `url` answers 200, else what came of it. Not by httpx, whose clients each read all CAs: 30 ms."""
    try:
        parts = urlsplit(url)
        connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        with contextlib.closing(connect(parts.hostname or "", parts.port, timeout=timeout_s)) as connection:
            connection.request(
                "GET", parts._replace(scheme="", netloc="", path=parts.path or "/", fragment="").geturl()
            )
            answer = connection.getresponse()
            text = answer.read(500).decode(errors="replace")
    except (OSError, HTTPException, ValueError) as error:
        return str(error) or type(error).__name__
    return "SERVING" if answer.status == 200 else f"HTTP {answer.status}: {text}"


def main(arguments: list[str] | None = None) -> int:
    """Reads flags, asks, returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.common.rpc.probe", description="Ask a process for health."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--address", help="HOST:PORT of a stage")
    what.add_argument("--url", help="URL of the gateway that answers 200 when it is well")
    parser.add_argument("--service", default="", help="gRPC service that must serve; default: the process lives")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="longest wait for the answer")
    for flag in TLS_FLAGS:
        variable = f"QUARTET_{flag.strip('-').replace('-', '_').upper()}"
        default = os.environ.get(variable) or None
        parser.add_argument(flag, type=Path, default=default, metavar="FILE", help=f"as of the stages; ${variable}")
    parser.add_argument("--tls-server-name", default="", help="name in the certificate there; default: our own first")
    flags = parser.parse_args(arguments)
    tls = [file for file in (flags.tls_cert, flags.tls_key, flags.tls_ca) if file is not None]
    if len(tls) not in (0, len(TLS_FLAGS)):
        parser.error(f"TLS needs {', '.join(TLS_FLAGS)}: all or none")
    if flags.url:
        state = http_state(flags.url, flags.timeout)
    else:
        with contextlib.closing(StageProbe(flags.address, flags.service, tls, flags.tls_server_name)) as probe:
            state = probe.state(flags.timeout)
    if state == "SERVING":
        return 0
    print(f"{flags.url or flags.address}: {state}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
