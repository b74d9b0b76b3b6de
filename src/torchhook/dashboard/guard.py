"""Who may look, and at what: this machine alone, or who has the token; and no files but the pictures of the runs."""

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
    """Asks everybody for the `token`, if there is one; without it, answers only who came by a name of this machine.

    (Else a page from elsewhere, whose name is made to lead here, could read what is shown.)
    """

    def __init__(self, token: str | None = None) -> None:
        self.token = token

    @staticmethod
    def for_host(host: str, token: str | None = None) -> Guard:
        """Beyond this machine there has to be a token."""
        return Guard(token if host in HERE else token or secrets.token_urlsafe(24))

    def protect(self, server: Flask, library: Library) -> None:
        """Put it before a server."""
        server.before_request(self._check)
        server.after_request(_with_headers)

        @server.get("/run/<name>/samples/<file>")
        def _(name: str, file: str) -> Response:
            try:
                samples = {sample.file.name: sample.file for sample in library.book(name).run.samples}
            except RunError:
                abort(404)
            picture = samples.get(file) if _PICTURE.fullmatch(file) else None
            if picture is None or picture.resolve() != picture or not picture.is_file():  # links lead elsewhere
                abort(404)
            return send_file(picture, mimetype="image/png", max_age=3600)

    def _check(self) -> Any:
        if self.token is None:
            name = request.host.rpartition(":")[0] if re.search(r":\d+$", request.host) else request.host
            return None if name in HERE else ("This page is for this machine alone; see --host.", 403)
        given = request.args.get("token")
        if given is not None and hmac.compare_digest(given.encode(), self.token.encode()):
            rest = urlencode([(key, value) for key, value in request.args.items(multi=True) if key != "token"])
            answer = redirect(f"{request.path}?{rest}" if rest else request.path)
            answer.set_cookie(_cookie(), self.token, httponly=True, samesite="Strict")
            return answer
        known = request.cookies.get(_cookie(), "")
        return None if hmac.compare_digest(known.encode(), self.token.encode()) else ("This page needs its token.", 403)


def _cookie() -> str:
    """One for each port: browsers give those of a machine to all its servers."""
    return f"torchhook-token-{request.host.rpartition(':')[2]}"


def _with_headers(response: Response) -> Response:
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    return response
