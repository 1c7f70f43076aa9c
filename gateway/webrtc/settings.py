"""Settings of the process that has the calls."""

import ipaddress
import socket
from typing import Annotated, Literal

import ifaddr
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from gateway.webrtc.port import Address
from services.common.rpc.settings import Settings, words


def _address(value: str) -> Address:
    """Port 0: that of `bind`. Raises ValueError: no IP address, with or without a port."""
    host, colon, number = value.rpartition(":") if value.count(":") == 1 or value.startswith("[") else (value, "", "")
    if value.endswith("]"):
        host, colon, number = value, "", ""
    return str(ipaddress.ip_address(host.strip("[]"))), int(number) if colon else 0


def _addresses(values: list[str]) -> list[str]:
    for value in values:
        try:
            _address(value)
        except ValueError:
            raise ValueError(f"{value!r} is no IP address: write it as 203.0.113.7 or 203.0.113.7:3478") from None
    return values


class WebRtcSettings(Settings):
    """WebRTC for the realtime sessions of a gateway."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_WEBRTC_")

    gateway: str = Field(
        default="http://127.0.0.1:8000", description="URL of the gateway, whose sessions the calls are"
    )
    host: str = Field(default="127.0.0.1", description="address to listen on for the gateway, which asks for calls")
    port: int = Field(default=8090, ge=0, le=65535, description="port to listen on for the gateway; 0 takes a free one")
    udp_host: str = Field(default="0.0.0.0", description="address of the UDP port that clients send to")
    udp_port: int = Field(
        default=3478, ge=0, le=65535, description="that UDP port, one for all calls; 0 takes a free one"
    )
    addresses: Annotated[list[str], NoDecode, BeforeValidator(words), AfterValidator(_addresses)] = Field(
        default=[],
        description="IP addresses at which clients reach the UDP port, commas between them: 203.0.113.7, or "
        "203.0.113.7:30478 if the port is another there; default: those of this machine",
    )
    max_calls: int = Field(
        default=32, ge=0, description="calls at a time; each takes 2 % of a core, 4 % while the model speaks"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level logged")

    @property
    def announced(self) -> list[Address]:
        """What clients are told; port 0: that of `udp_port`."""
        if self.addresses:
            return [_address(each) for each in self.addresses]
        if self.udp_host not in ("0.0.0.0", "::"):
            return [(self.udp_host, 0)]
        family = socket.AF_INET if self.udp_host == "0.0.0.0" else socket.AF_INET6
        return [(each, 0) for each in _own_addresses(family)]


def _own_addresses(family: socket.AddressFamily) -> list[str]:
    """This machine's, loopback last: a browser on this machine has no other if there is no network."""
    found = [
        ipaddress.ip_address(each.ip if isinstance(each.ip, str) else each.ip[0])
        for adapter in ifaddr.get_adapters()
        for each in adapter.ips
    ]
    version = 4 if family == socket.AF_INET else 6
    usable = [each for each in found if each.version == version and not each.is_link_local]
    return [str(each) for each in sorted(usable, key=lambda each: each.is_loopback)]
