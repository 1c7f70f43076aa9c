"""Asks a process whether it serves: `python -m services.common.probe --address 127.0.0.1:50052 --service NAME`.

The health command inside every image. Exit status 0: it serves; 1: it does not, with the reason on stderr; 2: wrong
flags. `--service` left out asks for liveness, the full name of the stage's service for readiness. `--url` asks the
gateway.
"""

import argparse
import sys
import urllib.error
import urllib.request


def grpc_state(address: str, service: str, timeout_s: float) -> str:
    """What `grpc.health.v1` at `address` ("host:port") answers for `service`, e.g. "SERVING"; without answer, why."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
        try:
            answer = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"  # pyright: ignore[reportAttributeAccessIssue]
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def http_state(url: str, timeout_s: float) -> str:
    """ "SERVING" if `url` answers 200 within `timeout_s` seconds, else what came of it."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return "SERVING" if answer.status == 200 else f"HTTP {answer.status}"
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {error.read(500).decode(errors='replace')}"
    except OSError as error:
        return str(error)


def main(arguments: list[str] | None = None) -> int:
    """Reads flags, asks, returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.common.probe", description="Ask whether a process serves."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--address", help="HOST:PORT of a stage")
    what.add_argument("--url", help="URL of the gateway that answers 200 when it is well")
    parser.add_argument("--service", default="", help="gRPC service that must serve; default: the process lives")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="longest wait for the answer")
    flags = parser.parse_args(arguments)
    if flags.url:
        state = http_state(flags.url, flags.timeout)
    else:
        state = grpc_state(flags.address, flags.service, flags.timeout)
    if state == "SERVING":
        return 0
    print(f"{flags.url or flags.address}: {state}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
