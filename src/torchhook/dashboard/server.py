"""The web server of the dashboard."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from werkzeug.serving import make_server

from torchhook.core.errors import RunError
from torchhook.dashboard.app import create_app
from torchhook.dashboard.guard import Guard
from torchhook.dashboard.library import Library
from torchhook.dashboard.pages import flow, layers, overview

_QUIET = 0.3  # seconds without a request, after which there is time to read ahead


class Server:
    """Serves runs until it is closed. Port 0 picks a free port."""

    def __init__(
        self, path: str | os.PathLike[str], host: str = "127.0.0.1", port: int = 8787, token: str | None = None
    ) -> None:
        guard, library = Guard.for_host(host, token), Library(path)
        app = create_app(library, guard)
        app.server.before_request(self._note)
        self._note()
        threading.Thread(target=self._read_ahead, args=(library,), name="torchhook-ahead", daemon=True).start()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line per request
        try:
            self._server: Any = make_server(host, port, app.server, threaded=True)
        except SystemExit:  # werkzeug has printed the reason
            raise RunError(f"cannot listen on port {port} of {host}: --port 0 picks a free one") from None
        name = socket.gethostname() if host in ("0.0.0.0", "::") else host
        shown = f"[{name}]" if ":" in name else name
        self.address = f"http://{shown}:{self._server.server_port}/" + (f"?token={guard.token}" if guard.token else "")

    def serve(self) -> None:
        """Serve until it is closed or interrupted."""
        self._server.serve_forever()

    def close(self) -> None:
        """Make `serve` return."""
        self._server.shutdown()

    def _note(self) -> None:
        self._asked = time.monotonic()

    def _read_ahead(self, library: Library) -> None:
        """Make pages of the newest run while nothing is asked for: importing plotly and reading a run take a while."""
        for page in (overview, layers, flow):
            while time.monotonic() < self._asked + _QUIET:
                time.sleep(0.1)
            with suppress(Exception):  # the page will show what is wrong with the run
                page.page(library.book(next(iter(library.files()))))
