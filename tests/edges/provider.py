"""An OpenID provider for tests: discovery, keys that change, codes with PKCE, ID tokens; and all that one can do wrong."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import secrets
import threading
import time
from collections import Counter
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

CLIENT, SECRET = "layer", "it's a secret & more"


class Provider:
    """Signs in whoever `claims` says it is; `token` makes the ID token of a code."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.rotate("one")
        self.claims: dict[str, Any] = {"sub": "subject-7", "email": "ann@example.org", "email_verified": True}
        self.codes: dict[str, dict[str, str]] = {}
        self.asked: Counter[str] = Counter()
        self.token: Any = self.honest
        self.document: dict[str, Any] = {}
        provider = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                provider.answer(self, None)

            def do_POST(self) -> None:
                provider.answer(self, parse_qs(self.rfile.read(int(self.headers["content-length"])).decode()))

            def log_message(self, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def rotate(self, name: str, kind: str = "RS256") -> None:
        """Another key, which alone is published from now on."""
        key: Any = rsa.generate_private_key(65537, 2048) if kind == "RS256" else ec.generate_private_key(ec.SECP256R1())
        self.keys, self.kid, self.kind = {name: key}, name, kind

    def published(self) -> list[dict[str, Any]]:
        found = []
        for name, key in self.keys.items():
            of = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
            found.append(json.loads(of.to_jwk(key.public_key())) | {"kid": name, "use": "sig"})  # type: ignore[attr-defined]
        return found

    def honest(self, nonce: str, /, key: Any = None, algorithm: str | None = None, **more: Any) -> str:
        """An ID token, with what is given instead of the truth."""
        now, head = int(time.time()), {"kid": more.pop("kid", self.kid)}
        claims = {"iss": self.url, "aud": CLIENT, "iat": now, "exp": now + 60, "nonce": nonce, **self.claims, **more}
        said = {name: value for name, value in claims.items() if value is not ...}
        return jwt.encode(said, key or self.keys[self.kid], algorithm or self.kind, headers=head)

    def answer(self, handler: Any, form: dict[str, list[str]] | None) -> None:
        path = urlsplit(handler.path).path
        self.asked[path] += 1
        if path == "/authorize":
            given = {name: values[0] for name, values in parse_qs(urlsplit(handler.path).query).items()}
            code = secrets.token_urlsafe(8)
            self.codes[code] = given
            handler.send_response(302)
            back = urlencode({"code": code, "state": given["state"], "iss": self.url})
            handler.send_header("location", f"{given['redirect_uri']}?{back}")
            handler.send_header("content-length", "0")
            return handler.end_headers()  # type: ignore[no-any-return]
        status, found = 200, {}
        if path == "/.well-known/openid-configuration":
            found = {"issuer": self.url, "authorization_endpoint": f"{self.url}/authorize", "token_endpoint": f"{self.url}/token", "jwks_uri": f"{self.url}/keys"} | self.document  # fmt: skip
        elif path == "/keys":
            found = {"keys": self.published()}
        elif path == "/token" and form is not None:
            status, found = self.redeem({name: values[0] for name, values in form.items()}, handler.headers)
        else:
            status = 404
        data = json.dumps(found).encode()
        handler.send_response(status)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def redeem(self, form: dict[str, str], headers: Any) -> tuple[int, dict[str, Any]]:
        asked = self.codes.pop(form["code"], None)
        made = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).decode().rstrip("=")
        pair = base64.b64decode(headers.get("authorization", "")[6:]).decode()
        if asked is None or asked["code_challenge"] != made or asked["redirect_uri"] != form["redirect_uri"] or pair != f"{CLIENT}:it%27s%20a%20secret%20%26%20more":  # fmt: skip
            return 400, {"error": "invalid_grant"}
        return 200, {"access_token": "x", "token_type": "Bearer", "id_token": self.token(asked["nonce"])}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
