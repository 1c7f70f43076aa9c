"""Mutual TLS between processes: certificate, key and CAs, read from files and again when those change."""

import datetime
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
import structlog
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from services.common.telemetry import metrics

CHECK_INTERVAL_S = 1.0  # least time between two looks for changed files, which a connection makes

FileVersion = tuple[int, int, int] | None

log = structlog.get_logger()


class TlsError(Exception):
    """The files cannot be used; the message names the flag, the file and the fix."""


class Flags(Protocol):
    """Settings of a stage, and the options of `quartet up`."""

    tls_cert: Path | None
    tls_key: Path | None
    tls_ca: Path | None
    tls_server_name: str | None


@dataclass(frozen=True)
class Identity:
    """What the files held at one time, checked.

    Attributes:
        certificate: PEM, this process's chain.
        key: PEM, of its first certificate.
        authorities: PEM, which sign peers' certificates.
        names: host names and IP addresses of the certificate.
        expires_at: Unix time in seconds.
    """

    certificate: bytes
    key: bytes
    authorities: bytes
    names: tuple[str, ...]
    expires_at: float

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.certificate)

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.authorities)


class Credentials:
    """A process's identity, kept up to date. May be used from any thread.

    Args:
        certificate, key, authorities: PEM files.
        server_name: that peers' certificates must have; None: the host by which each is addressed.

    Raises:
        TlsError: the files cannot be used. If changed files cannot, that is logged, and the identity stays.
    """

    def __init__(self, certificate: Path, key: Path, authorities: Path, server_name: str | None = None) -> None:
        self.server_name = server_name
        self._files = (certificate, key, authorities)
        self._lock = threading.Lock()
        self._checked_s = time.monotonic()
        self._seen = self._file_versions()
        self._identity = self._load()

    @property
    def identity(self) -> Identity:
        """The same object until the files change."""
        with self._lock:
            if time.monotonic() - self._checked_s >= CHECK_INTERVAL_S:
                self._checked_s = time.monotonic()
                if (seen := self._file_versions()) != self._seen:
                    self._seen = seen
                    self._reload()
            return self._identity

    def for_server(self) -> grpc.ServerCredentials:
        """Asks every client for a certificate. Changed files count from the next connection on."""
        given = self.identity

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            if (newest := self.identity) is given:
                return None
            given = newest
            return newest.server_configuration()

        # grpc's types do not know that None means no change
        return grpc.dynamic_ssl_server_credentials(given.server_configuration(), changed, True)  # pyright: ignore[reportArgumentType]

    def _load(self) -> Identity:
        identity = read_identity(*self._files)
        metrics.TLS_EXPIRES.set(identity.expires_at)
        return identity

    def _reload(self) -> None:
        try:
            self._identity = self._load()
        except TlsError as error:
            log.error("changed TLS files cannot be used; those before stay in use", error=str(error))
        else:
            log.info("TLS files read again", names=self._identity.names, expires=_text(self._identity.expires_at))

    def _file_versions(self) -> list[FileVersion]:
        return [file_version(file) for file in self._files]


def load(settings: Flags) -> Credentials | None:
    """None if `settings` name no files. Raises SystemExit: the files cannot be used."""
    if settings.tls_cert is None or settings.tls_key is None or settings.tls_ca is None:
        return None
    try:
        return Credentials(settings.tls_cert, settings.tls_key, settings.tls_ca, settings.tls_server_name)
    except TlsError as error:
        raise SystemExit(str(error)) from None


def read_identity(certificate: Path, key: Path, authorities: Path) -> Identity:
    """Raises TlsError: a file is missing or no PEM, the key is another certificate's, or one is not valid now."""
    chain_pem, chain = _certificates("--tls-cert", certificate)
    key_pem = _read("--tls-key", key)
    authorities_pem, signers = _certificates("--tls-ca", authorities)
    _check_key(key, key_pem, certificate, chain[0])
    _check_time("--tls-cert", certificate, chain[:1])
    _check_time("--tls-ca", authorities, signers)
    return Identity(chain_pem, key_pem, authorities_pem, _names(chain[0]), chain[0].not_valid_after_utc.timestamp())


def _read(flag: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TlsError(f"{flag}: {file}: {error.strerror}") from None


def _certificates(flag: str, file: Path) -> tuple[bytes, list[x509.Certificate]]:
    pem = _read(flag, file)
    try:
        return pem, x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise TlsError(f"{flag}: {file} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)") from None


def _check_key(file: Path, pem: bytes, certificate_file: Path, certificate: x509.Certificate) -> None:
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:
        raise TlsError(f"--tls-key: {file} is encrypted: name one without a passphrase (openssl pkey)") from None
    except (ValueError, UnsupportedAlgorithm):
        raise TlsError(f"--tls-key: {file} holds no private key in PEM (-----BEGIN PRIVATE KEY-----)") from None
    if key.public_key() != certificate.public_key():
        raise TlsError(f"--tls-key: {file} is not the key of the first certificate in {certificate_file}")


def _check_time(flag: str, file: Path, certificates: Sequence[x509.Certificate]) -> None:
    """One valid certificate is enough: bundles keep old CAs."""
    now = datetime.datetime.now(datetime.UTC)
    newest = max(certificates, key=lambda each: each.not_valid_after_utc)
    if newest.not_valid_after_utc < now:
        raise TlsError(f"{flag}: {file} expired at {_text(newest.not_valid_after_utc.timestamp())}; renew it")
    if all(each.not_valid_before_utc > now for each in certificates):
        begin = _text(newest.not_valid_before_utc.timestamp())
        raise TlsError(f"{flag}: {file} is not valid before {begin}; is this machine's clock right?")


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    hosts = found.get_values_for_type(x509.DNSName)
    return (*hosts, *map(str, found.get_values_for_type(x509.IPAddress)))


def _text(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).isoformat(timespec="seconds")


def file_version(file: Path) -> FileVersion:
    """Inode, time of change in nanoseconds, size in bytes; None without the file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
