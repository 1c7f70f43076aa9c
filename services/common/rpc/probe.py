"""Asks a process whether it serves: `python -m services.common.rpc.probe --address 127.0.0.1:50052 --service NAME`.

For people and scripts; the images' own health checks start no Python (deploy/docker/healthy). Exit status 0: it serves;
1: it does not, with the reason on stderr; 2: wrong flags. `--service` left out asks for liveness, the full name of the
stage's service for readiness. `--url` asks the gateway. Where the environment has QUARTET_TLS_CERT, _KEY and _CA, as
the stage's own has, it asks by TLS.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, cast

import httpx

TLS_FLAGS = ("--tls-cert", "--tls-key", "--tls-ca")


def grpc_state(address: str, service: str, timeout_s: float, tls: list[Path], server_name: str = "") -> str:
    """What `grpc.health.v1` at `address` ("host:port") answers for `service`, e.g. "SERVING"; without answer, why.

    Args:
        tls: files of the certificate, its key and the CA; none: in the clear.
        server_name: that the certificate there must have; "": the first name of our own, as it is our own process.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    if tls:
        from services.common.rpc.channels import name_options
        from services.common.rpc.tls import TlsError, read_identity

        try:
            identity = read_identity(*tls)
        except TlsError as error:
            return str(error)
        options = name_options(server_name or next(iter(identity.names), ""))
        opened = grpc.secure_channel(address, identity.channel_credentials(), options=options)
    else:
        opened = grpc.insecure_channel(address)
    with opened as channel:
        check = cast("Any", health_pb2_grpc.HealthStub(channel)).Check  # pyright: ignore[reportAttributeAccessIssue]
        try:
            answer = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"  # pyright: ignore[reportAttributeAccessIssue]
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def http_state(url: str, timeout_s: float) -> str:
    """ "SERVING" if `url` answers 200 within `timeout_s` seconds, else what came of it."""
    try:
        answer = httpx.get(url, timeout=timeout_s)
    except httpx.HTTPError as error:
        return str(error)
    return "SERVING" if answer.status_code == 200 else f"HTTP {answer.status_code}: {answer.text[:500]}"


def main(arguments: list[str] | None = None) -> int:
    """Reads flags, asks, returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.common.rpc.probe", description="Ask whether a process serves."
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
    parser.add_argument(
        "--tls-server-name", default="", help="name of the certificate there; default: the first of our own"
    )
    flags = parser.parse_args(arguments)
    tls = [file for file in (flags.tls_cert, flags.tls_key, flags.tls_ca) if file is not None]
    if len(tls) not in (0, len(TLS_FLAGS)):
        parser.error(f"TLS needs {', '.join(TLS_FLAGS)}: all or none")
    if flags.url:
        state = http_state(flags.url, flags.timeout)
    else:
        state = grpc_state(flags.address, flags.service, flags.timeout, tls, flags.tls_server_name)
    if state == "SERVING":
        return 0
    print(f"{flags.url or flags.address}: {state}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
