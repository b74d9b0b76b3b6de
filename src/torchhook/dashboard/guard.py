"""Access control: only this machine, or everyone with the token; the only files served are images of the runs."""

from __future__ import annotations

import hmac
import re
import secrets
from typing import Any
from urllib.parse import urlencode

from flask import Flask, Response, abort, redirect, request, send_file

from torchhook.core.errors import RunError
from torchhook.dashboard.library import Library

HERE = ("127.0.0.1", "localhost", "[::1]", "::1")
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data: blob:; font-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'"
)
_PICTURE = re.compile(r"\d{8,}-\d+\.png")


class Guard:
    """Requires the `token`, if there is one; otherwise answers only requests to a local host name.

    Checking the host name prevents DNS rebinding: a web page whose domain resolves to this machine must not read runs.
    """

    def __init__(self, token: str | None = None) -> None:
        self.token = token

    @staticmethod
    def for_host(host: str, token: str | None = None) -> Guard:
        """The guard of a server on `host`; if that is not this machine, there is always a token."""
        return Guard(token if host in HERE else token or secrets.token_urlsafe(24))

    def protect(self, server: Flask, library: Library) -> None:
        """Install the checks and the route for images in a server."""
        server.before_request(self._check)
        server.after_request(_with_headers)
        server.register_error_handler(RecursionError, lambda error: ("This request is nested too deeply.", 400))

        @server.get("/run/<name>/samples/<file>")
        def _(name: str, file: str) -> Response:
            try:
                samples = {sample.file.name: sample.file for sample in library.book(name).run.samples}
            except RunError:
                abort(404)
            picture = samples.get(file) if _PICTURE.fullmatch(file) else None
            if picture is None or picture.resolve() != picture or not picture.is_file():  # no symbolic links
                abort(404)
            return send_file(picture, mimetype="image/png", max_age=3600)

    def _check(self) -> Any:
        if request.method not in ("GET", "HEAD", "OPTIONS") and not _is_own():
            return "Requests of other pages are refused.", 403
        if self.token is None:
            name = request.host.rpartition(":")[0] if re.search(r":\d+$", request.host) else request.host
            return None if name in HERE else ("This page is only available on this machine; see --host.", 403)
        given = request.args.get("token")
        if given is not None and hmac.compare_digest(given.encode(), self.token.encode()):
            rest = urlencode([(key, value) for key, value in request.args.items(multi=True) if key != "token"])
            answer = redirect(f"{request.path}?{rest}" if rest else request.path)
            answer.set_cookie(_cookie(), self.token, httponly=True, samesite="Strict")
            return answer
        known = request.cookies.get(_cookie(), "")
        return (
            None
            if hmac.compare_digest(known.encode(), self.token.encode())
            else ("This page requires a token: open the address that torchhook dashboard printed.", 403)
        )


def _is_own() -> bool:
    """Whether a request comes from a page of this server, or from a program, which a page cannot control.

    The browser says so. An older one, or one that sees no secure address, names the page's origin instead: that must
    be the host that was asked. (Behind a proxy, that may have another name than here.)
    """
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or origin.partition("://")[2] == request.host


def _cookie() -> str:
    """One cookie per port: browsers send the cookies of a host to all its ports."""
    return f"torchhook-token-{request.host.rpartition(':')[2]}"


def _with_headers(response: Response) -> Response:
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    return response
