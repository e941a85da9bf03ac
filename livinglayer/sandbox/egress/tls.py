"""TLS towards boxes: an authority of this state directory's own, and leaf certificates minted for the hosts they ask for."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import ipaddress
import os
import ssl
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from livinglayer.errors import Corrupt, Invalid
from livinglayer.sandbox.egress import names

_DAY = datetime.timedelta(days=1)
_RENEW = 30 * 86400.0  # seconds, of the 90 days a leaf is valid
_KEPT = 512  # contexts; a box that asks for more names pays with time


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class Context(ssl.SSLContext):
    """A context that knows whose certificate it holds: after a handshake, the name the client asked for."""

    host: str
    made: float


class Authority:
    """Signs leaf certificates; `certificate` is the file boxes trust, the key beside it is for this user alone."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.certificate = directory / "ca.pem"
        self._key_file = directory / "ca.key"
        with open(directory / "ca.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.certificate.exists() or not self._key_file.exists():
                self._make()
        try:
            self._authority = x509.load_pem_x509_certificate(self.certificate.read_bytes())
            key = serialization.load_pem_private_key(self._key_file.read_bytes(), None)
        except ValueError:
            raise Corrupt(f"{directory} holds no certificate authority", hint="remove ca.pem and ca.key") from None
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())  # one for all leaves: it never leaves this process
        self._contexts: OrderedDict[str, Context] = OrderedDict()

    def _make(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        name = _name(f"Living Layer boxes {os.urandom(4).hex()}")
        made = (
            x509.CertificateBuilder(
                name, name, key.public_key(), x509.random_serial_number(), now - _DAY, now + 3650 * _DAY
            )
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        self._write(self._key_file, _private(key), 0o600)
        self._write(self.certificate, made.public_bytes(serialization.Encoding.PEM), 0o644)

    @staticmethod
    def _write(path: Path, data: bytes, mode: int) -> None:
        fresh = path.with_name(path.name + ".new")
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(fd, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(fd)
        os.replace(fresh, path)

    def leaf(self, host: str) -> bytes:
        """A certificate for a name or an address, in PEM."""
        now = datetime.datetime.now(datetime.UTC)
        alternative: x509.GeneralName = x509.DNSName(host)
        if names.is_address(host):
            alternative = x509.IPAddress(ipaddress.IPv4Address(host))
        public = self._leaf_key.public_key()
        made = (
            x509.CertificateBuilder(
                self._authority.subject, _name(host), public, x509.random_serial_number(), now - _DAY, now + 90 * _DAY
            )
            .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)

    def server(self, host: str) -> Context:
        """The context for a connection towards `host`; during the handshake it gives way to that of the name asked for.

        A name the client asks for gets its certificate even if the connection is refused: the refusal can be read then.
        """
        found = self._contexts.get(host)
        if found is not None and time.monotonic() - found.made < _RENEW:
            self._contexts.move_to_end(host)
            return found
        context = Context(ssl.PROTOCOL_TLS_SERVER)
        context.host, context.made = host, time.monotonic()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2", "http/1.1"])
        with tempfile.NamedTemporaryFile(dir=self.certificate.parent, prefix="leaf-") as pem:  # mode 0600
            pem.write(_private(self._leaf_key) + self.leaf(host))
            pem.flush()
            context.load_cert_chain(pem.name)
        context.sni_callback = self._asked
        self._contexts[host] = context
        if len(self._contexts) > _KEPT:
            self._contexts.popitem(last=False)
        return context

    def _asked(self, sock: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        try:
            if name:
                sock.context = self.server(names.host(name.encode()))
        except (Invalid, ValueError, UnicodeError):
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        return None


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def client(alpn: list[str]) -> ssl.SSLContext:
    """Towards servers: certificates are verified against the host's trust (SSL_CERT_FILE adds to it)."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(alpn)
    return context


def server_name(hello: bytes) -> tuple[bool, str | None]:
    """Whether a ClientHello is whole, and the host its SNI names; Invalid if it is none."""
    body = b""
    at = 0
    while at + 5 <= len(hello):  # a hello may be spread over records
        kind, size = hello[at], int.from_bytes(hello[at + 3 : at + 5])
        if kind != 22 or size == 0 or size > 16640:
            raise Invalid("this is no TLS hello")
        part = hello[at + 5 : at + 5 + size]
        body += part
        if len(body) >= 4 and len(body) >= 4 + int.from_bytes(body[1:4]):
            return True, _sni(body[: 4 + int.from_bytes(body[1:4])])
        at += 5 + size
    return False, None


def _sni(body: bytes) -> str | None:
    def vector(at: int, width: int) -> tuple[bytes, int]:
        size = int.from_bytes(body[at : at + width])
        if at + width + size > len(body):
            raise Invalid("this is no TLS hello")
        return body[at + width : at + width + size], at + width + size

    if body[0] != 1 or len(body) < 38:
        raise Invalid("this is no TLS hello")
    at = 4 + 2 + 32
    for width in (1, 2, 1):  # session, cipher suites, compression
        _, at = vector(at, width)
    if at == len(body):
        return None
    extensions, _ = vector(at, 2)
    at, found = 0, None
    while at + 4 <= len(extensions):
        kind, size = int.from_bytes(extensions[at : at + 2]), int.from_bytes(extensions[at + 2 : at + 4])
        data = extensions[at + 4 : at + 4 + size]
        if kind == 0:
            # exactly one name of kind host_name, and exactly one such extension
            if found is not None or len(data) < 5 or data[2] != 0 or len(data) != 5 + int.from_bytes(data[3:5]):
                raise Invalid("the TLS hello names its server in an odd way")
            found = names.host(data[5:])
        at += 4 + size
    return found
