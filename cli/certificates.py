"""`quartet tls`: makes a CA and a certificate for each process."""

import datetime
import inspect
import ipaddress
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gateway.pipeline.kinds import KINDS

PROCESSES = ("gateway", *KINDS)
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
CA_VALID_FOR = datetime.timedelta(days=3650)
# A new certificate is valid on a machine whose clock is behind, too.
_CLOCK_SKEW = datetime.timedelta(minutes=5)


class Authority:
    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key

    @classmethod
    def create(cls) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Quartet CA")])
        usage = _key_usage("key_cert_sign", "crl_sign")
        certificate = (
            _builder(name, name, key.public_key(), CA_VALID_FOR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, certificate_file: Path, key_file: Path) -> "Authority":
        """Reads a CA from its files. Raises OSError or ValueError."""
        key = load_pem_private_key(key_file.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key_file} is no key that `quartet tls` made")
        return cls(x509.load_pem_x509_certificate(certificate_file.read_bytes()), key)

    @property
    def certificate_pem(self) -> bytes:
        return self._certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return _key_pem(self._key)

    def issue(self, hosts: Sequence[str], valid_for: datetime.timedelta) -> tuple[bytes, bytes]:
        """Returns (certificate, key) in PEM for a process at `hosts`, names or addresses. Raises ValueError."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            _builder(subject, self._certificate.subject, key.public_key(), valid_for)
            .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage("digital_signature"), critical=True)
            .add_extension(usage, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(Encoding.PEM), _key_pem(key)


def make_certificates(directory: Path, hosts: Iterable[str], days: int, processes: Sequence[str] = PROCESSES) -> bool:
    """Writes a CA, unless it is there, and each process's certificate, key and CA into `directory`.

    Args:
        hosts: names and addresses of every certificate, beside its process's name and this machine.

    Returns:
        Whether the CA is new.

    Raises:
        OSError, ValueError: a file or a host is at fault.
    """
    files = directory / "ca.crt", directory / "ca.key"
    is_new = not files[1].exists()
    authority = Authority.create() if is_new else Authority.load(*files)
    if is_new:
        _write(files[1], authority.key_pem, 0o600)
        _write(files[0], authority.certificate_pem, 0o644)
    for process in processes:
        names = dict.fromkeys((process, *LOCAL_HOSTS, *hosts))
        certificate, key = authority.issue(list(names), datetime.timedelta(days=days))
        _write(directory / process / "ca.crt", authority.certificate_pem, 0o644)
        _write(directory / process / "tls.key", key, 0o600)
        _write(directory / process / "tls.crt", certificate, 0o644)
    return is_new


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid_for: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + min(valid_for, datetime.timedelta()) - _CLOCK_SKEW)
        .not_valid_after(now + valid_for)
    )


def _key_usage(*granted: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in granted for usage in inspect.signature(x509.KeyUsage).parameters})


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(file: Path, content: bytes, mode: int) -> None:
    """Replaces the file at once: a process that reads it never sees a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(content)
    part.replace(file)
