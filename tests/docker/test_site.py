"""A site's package index, certificates and credentials reach pip and uv, which the build uses.

The index is a server of this test on the loopback interface, with a certificate of its own.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import ssl
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.docker.image_files import BIN, ROOT, attempt, run

USER, PASSWORD = "builder", "s3cret"


class Mirror(NamedTuple):
    """A package index of one site."""

    url: str
    certificate: Path
    requests: list[tuple[str, str]]
    """Client and path of each answered request."""


def certificates(folder: Path) -> tuple[Path, Path]:
    """Write the certificate of an authority, and one for 127.0.0.1 that it signs, with its key."""
    own, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)

    def signed(name: str, key: ec.EllipticCurvePrivateKey, *, authority: bool) -> bytes:
        builder = x509.CertificateBuilder().serial_number(x509.random_serial_number())
        builder = builder.issuer_name(common_name("site")).subject_name(common_name(name))
        builder = builder.not_valid_before(now - day).not_valid_after(now + day)
        basic = x509.BasicConstraints(ca=authority, path_length=None)
        builder = builder.public_key(key.public_key()).add_extension(basic, critical=True)
        if not authority:
            builder = builder.add_extension(address, critical=False)
        return builder.sign(own, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, chain = folder / "site.pem", folder / "server.pem"
    authority.write_bytes(signed("site", own, authority=True))
    secret = server.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    chain.write_bytes(signed("server", server, authority=False) + secret)
    return authority, chain


def common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    """Write a wheel of version 1.0."""
    path, metadata = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    files = files | {
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{metadata}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{metadata}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in (files | {f"{metadata}/RECORD": record}).items():
            archive.writestr(file, text)
    return path


def locked(path: Path) -> str:
    """Return the lock's line of a wheel."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{path.name.partition('-')[0]}==1.0 --hash=sha256:{digest}\n"


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    """Serve the wheels of `tmp_path/wheels` to those who know the password."""
    requests: list[tuple[str, str]] = []
    wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Index(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            name = self.path.strip("/").rpartition("/")[2]
            path = tmp_path / "wheels" / name
            pages = "".join(
                f'<a href="/files/{w.name}">{w.name}</a>\n'
                for w in path.parent.glob(f"{name}-*.whl")
            )
            content = path.read_bytes() if path.is_file() else pages.encode()
            authorized = self.headers.get("Authorization") == wanted
            self.send_response(401 if not authorized else 200 if content else 404)
            if not authorized:
                self.send_header("WWW-Authenticate", 'Basic realm="site"')
                content = b""
            self.send_header("Content-Type", "application/zip" if path.is_file() else "text/html")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)
            if authorized:
                requests.append((self.headers["User-Agent"].partition("/")[0], self.path))

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    authority, chain = certificates(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Mirror(f"https://127.0.0.1:{server.server_port}/simple", authority, requests)
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_pip_and_uv_use_the_sites_index_certificates_and_credentials(mirror, tmp_path):
    wheels, docker, secrets = (tmp_path / name for name in ("wheels", "docker", "secrets"))
    for folder in (wheels, docker, secrets):
        folder.mkdir()
    # The tools are a stand-in, which starts the real uv.
    uv = f"import os, sys\nos.execv({str(BIN / 'uv')!r}, ['uv', *sys.argv[1:]])\n"
    (docker / "tools.lock").write_text(locked(wheel(wheels, "uv", {"uv/__main__.py": uv})))
    (docker / "trainer.lock").write_text(locked(wheel(wheels, "sitepackage", {"here.py": ""})))
    (docker / "steps.sh").write_text((ROOT / "docker/steps.sh").read_text())
    run("python", "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    # Nothing of this machine's settings may help.
    clean = [f"--unset={name}" for name in CLIENT_SETTINGS]
    command = ["env", *clean, "bash", docker / "steps.sh"]
    variables = {
        "PYTHON": str(python),
        "UV_HOME": str(tmp_path / "uv"),
        "INDEX_URL": mirror.url,
        "SECRETS": str(secrets),
        "NO_PROXY": "127.0.0.1",
        "PIP_CONFIG_FILE": "/dev/null",
        "UV_NO_CONFIG": "1",
        "PIP_RETRIES": "0",
        "UV_HTTP_RETRIES": "0",
    }
    netrc = secrets / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login {USER} password {PASSWORD}\n")
    assert attempt(*command, "tools", **variables, seconds=100).returncode
    assert mirror.requests == []
    (secrets / "ca").write_text(mirror.certificate.read_text())
    run(*command, "tools", "trainer", **variables, seconds=100)
    files = {(client, Path(path).name) for client, path in mirror.requests if "/files/" in path}
    assert {c for c, n in files if n.startswith("uv-")} == {"pip"}
    assert {c for c, n in files if n.startswith("sitepackage-")} == {"uv"}
    run(python, "-P", "-c", "import here")
    # uv alone fails without them, too.
    run(python, "-P", "-m", "pip", "uninstall", "--quiet", "--yes", "sitepackage")
    for name, reason in (("netrc", "401"), ("ca", "certificate")):
        (secrets / name).unlink()
        refused = attempt(*command, "trainer", **variables, seconds=100)
        assert refused.returncode and reason in refused.stderr, name


CLIENT_SETTINGS = (
    "SSL_CERT_FILE", "SSL_CERT_DIR", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "UV_INDEX", "UV_DEFAULT_INDEX",
    "UV_FIND_LINKS", "UV_SYSTEM_CERTS", "NETRC",
)  # fmt: skip
"""Variables of pip and uv that this machine may set."""
