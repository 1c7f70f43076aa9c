"""Where a stage's replicas are: what a pipeline file says."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

_ADDRESS = re.compile(r"(?:dns:///)?(\[[0-9a-fA-F:]+\]|[^\s:/,]+):([0-9]{1,5})")
_HOW = "write host:port, dns:///name:port or a list of these"
_SCHEMA = {
    "description": _HOW,
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
}


def _check(value: Any) -> str | list[str]:
    for address in value if isinstance(value, list) and value else [value]:
        match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if match is None or not 0 < int(match[2]) < 65536:
            raise PydanticCustomError("address", "{given} is no address; {how}", {"given": repr(address), "how": _HOW})
    if isinstance(value, list) and len(set(value)) < len(value):
        raise PydanticCustomError("address", "an address is there twice: remove one")
    return value


# "host:port", "dns:///name:port", or a list of these.
Addresses = Annotated[str | list[str], PlainValidator(_check), WithJsonSchema(_SCHEMA)]


@dataclass(frozen=True)
class Endpoint:
    """One of a stage's addresses. `host` has no brackets."""

    host: str
    port: int

    @property
    def is_literal(self) -> bool:
        """Whether `host` is an IP address and not a name."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


def endpoints(addresses: str | list[str]) -> list[Endpoint]:
    """The endpoints behind a stage's `address`, in their order."""
    found = []
    for address in [addresses] if isinstance(addresses, str) else addresses:
        host, _, port = address.removeprefix("dns:///").rpartition(":")
        found.append(Endpoint(host.strip("[]"), int(port)))
    return found


def join(ip: str, port: int) -> str:
    """ "ip:port", as gRPC takes it."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
