"""Certificates for tests: those of `quartet tls`, and such as nobody should accept."""

import datetime
import socket
import ssl
from pathlib import Path

from cryptography import x509

from cli.certificates import Authority, make_certificates
from services.common.rpc.tls import Credentials


def make(directory: Path, *processes: str) -> Path:
    """A CA, if there is none, and new certificates of `processes` in `directory`, which is returned."""
    make_certificates(directory, [], 1, processes)
    return directory


def credentials(directory: Path, process: str, **options) -> Credentials:
    """Those of a process whose certificate is in `directory`."""
    home = directory / process
    return Credentials(home / "tls.crt", home / "tls.key", home / "ca.crt", **options)


def flags(directory: Path, process: str) -> list[str]:
    """The settings of a process whose certificate is in `directory`."""
    home = directory / process
    return [f"--tls-cert={home}/tls.crt", f"--tls-key={home}/tls.key", f"--tls-ca={home}/ca.crt"]


def issue(directory: Path, process: str, valid_for: datetime.timedelta) -> None:
    """Replaces a process's certificate by one of the same CA with another end."""
    authority = Authority.load(directory / "ca.crt", directory / "ca.key")
    certificate, key = authority.issue([process, "localhost", "127.0.0.1"], valid_for)
    (directory / process / "tls.crt").write_bytes(certificate)
    (directory / process / "tls.key").write_bytes(key)


def shown(address: str, directory: Path, process: str) -> int:
    """Serial number of the certificate that the server at `address` shows a new connection of `process`."""
    context = ssl.create_default_context(cafile=str(directory / process / "ca.crt"))
    context.load_cert_chain(directory / process / "tls.crt", directory / process / "tls.key")
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=60) as connection,
        context.wrap_socket(connection, server_hostname=host) as secure,
    ):
        return x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"").serial_number


def serial(directory: Path, process: str) -> int:
    """Serial number of the certificate in the file."""
    return x509.load_pem_x509_certificate((directory / process / "tls.crt").read_bytes()).serial_number
