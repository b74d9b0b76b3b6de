"""The command ends at once when it is told to, whatever goes on."""

import os
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from dashboard_samples import ended


@pytest.mark.parametrize("is_ignored", [False, True])
def test_it_ends_at_once_with_requests_in_flight(tmp_path, is_ignored, slowdown):
    ended(tmp_path / "runs" / "net")
    process = subprocess.Popen(
        [sys.executable, "-m", "torchhook", "dashboard", str(tmp_path / "runs"), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)) if is_ignored else None,
    )
    try:
        place = urlsplit(process.stdout.readline().strip())
        assert urlopen(place.geturl(), timeout=30).status == 200
        with socket.create_connection((place.hostname, place.port)) as asking:
            asking.sendall(b"POST /_dash-update-component HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
            with socket.create_connection((place.hostname, place.port)):  # a browser that keeps a connection
                time.sleep(0.3)
                began = time.monotonic()
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=10) == 128 + signal.SIGTERM
                assert time.monotonic() - began < slowdown  # seconds
        assert process.stderr.read() == ""
    finally:
        process.kill()
