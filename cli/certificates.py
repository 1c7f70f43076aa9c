"""`quartet tls`: makes a CA and a certificate for each process."""

import datetime
import inspect
import ipaddress
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cli.plan import ASR
from gateway.pipeline.kinds import KINDS

PROCESSES = ("gateway", *KINDS, ASR)
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
CA_VALID_FOR = datetime.timedelta(days=3650)
# A new certificate is valid on a machine whose clock is behind, too.
_CLOCK_SKEW = datetime.timedelta(minutes=5)


class Authority:
    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key
        self.certificate_pem, self.key_pem = certificate.public_bytes(Encoding.PEM), _key_pem(key)

    @classmethod
    def create(cls) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("Quartet CA")
        extensions = {
            x509.BasicConstraints(ca=True, path_length=0): True,
            _key_usage("key_cert_sign", "crl_sign"): True,
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()): False,
        }
        return cls(_signed(name, key.public_key(), CA_VALID_FOR, extensions, name, key), key)

    @classmethod
    def load(cls, certificate_file: Path, key_file: Path) -> "Authority":
        """Raises OSError or ValueError."""
        key = load_pem_private_key(key_file.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key_file} is no key that `quartet tls` made")
        return cls(x509.load_pem_x509_certificate(certificate_file.read_bytes()), key)

    def issue(self, hosts: Sequence[str], valid_for: datetime.timedelta) -> tuple[bytes, bytes]:
        """Returns (certificate, key) in PEM. `hosts` are names or addresses. Raises ValueError."""
        key = ec.generate_private_key(ec.SECP256R1())
        extensions = {
            x509.SubjectAlternativeName([_general_name(host) for host in hosts]): False,
            x509.BasicConstraints(ca=False, path_length=None): True,
            _key_usage("digital_signature"): True,
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]): False,
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()): False,
        }
        issuer = self._certificate.subject
        certificate = _signed(_name(hosts[0]), key.public_key(), valid_for, extensions, issuer, self._key)
        return certificate.public_bytes(Encoding.PEM), _key_pem(key)


def make_certificates(directory: Path, hosts: Iterable[str], days: int, processes: Sequence[str] = PROCESSES) -> bool:
    """Writes each process's certificate, key and CA into `directory`. A CA that is there is kept.

    Args:
        hosts: names and addresses of every certificate, beside its process's name and this machine.

    Returns whether the CA is new. Raises OSError, ValueError.
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


def _signed(
    subject: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    valid_for: datetime.timedelta,
    extensions: Mapping[x509.ExtensionType, bool],
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """`extensions`: each with whether it is critical."""
    now = datetime.datetime.now(datetime.UTC)
    begin = now + min(valid_for, datetime.timedelta()) - _CLOCK_SKEW
    builder = x509.CertificateBuilder(issuer, subject, public_key, x509.random_serial_number())
    builder = builder.not_valid_before(begin).not_valid_after(now + valid_for)
    for extension, is_critical in extensions.items():
        builder = builder.add_extension(extension, is_critical)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


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
    """Replaces the file at once: no process reads a part of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(content)
    part.replace(file)
