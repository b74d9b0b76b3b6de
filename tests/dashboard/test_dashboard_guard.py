"""Who may look at the dashboard, and which files it gives away."""

import re
import shutil
import sqlite3

import pytest
import torch
from dashboard_samples import written

from torchhook import Report
from torchhook.dashboard.app import create_app
from torchhook.dashboard.guard import Guard
from torchhook.dashboard.library import Library
from torchhook.dashboard.server import Server
from torchhook.stats.reading import Snapshot
from torchhook.training.logs import Entry
from torchhook.training.runs.schema import FILE

PICTURE = "00000003-0.png"
# One of each kind: a page, an asset of ours, what Dash serves itself, a picture, what is not there.
KINDS = (
    "/",
    "/run/net/layers",
    "/assets/dashboard.css",
    "/_dash-layout",
    "/_dash-dependencies",
    "/_dash-component-suites/dash/dcc/dash_core_components.js",
    f"/run/net/samples/{PICTURE}",
    "/favicon.ico",
    "/nothing",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    log = written(root / "net", range(3))
    log.write(Entry(3, 0.0, Snapshot({}), maps={"conv": torch.rand(2, 4, 4)}))
    log.end(Report(), "ended")
    (root / "secret.png").write_bytes(b"secret")
    return root


def client_of(root, token=None):
    return create_app(Library(root), Guard(token)).server.test_client()


@pytest.fixture(scope="module")
def client(root):
    return client_of(root)


@pytest.mark.parametrize("host", ["127.0.0.1:8787", "localhost:1", "localhost", "[::1]:8787", "127.0.0.1"])
def test_names_of_this_machine_are_answered(client, host):
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8787",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "127.0.0.1@evil.example",
        "evil.example:127.0.0.1",
        "192.168.0.7:8787",
        "0.0.0.0:8787",
        "[::2]:8787",
        "localhost:x",
        ":8787",
    ],
)
@pytest.mark.parametrize("path", KINDS)
def test_a_page_whose_name_was_made_to_lead_here_reads_nothing(client, host, path):
    for answer in (client.get(path, headers={"Host": host}), client.post(path, headers={"Host": host})):
        assert answer.status_code in (400, 403) and len(answer.data) < 300  # 400: that is no name


def test_without_a_token_none_is_asked_for(client):
    assert client.get("/").status_code == 200
    assert client.get(f"/run/net/samples/{PICTURE}").data.startswith(b"\x89PNG")


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("token", [None, "", "wrong", "right ", "RIGHT", "righ", "rïght", "\ud800"])
def test_nothing_is_shown_without_the_right_token(root, path, token):
    client = client_of(root, "right")
    if token is not None:
        with_token = client.get(path, query_string={"token": token.encode(errors="surrogatepass")})
        assert with_token.status_code == 403 and "Set-Cookie" not in with_token.headers
        client.set_cookie("torchhook-token", token.encode(errors="replace").decode())
    answers = [client.get(path), client.post(path), client.head(path), client.options(path)]
    assert {answer.status_code for answer in answers} == {403}
    assert answers[0].data == b"This page requires a token: open the address that torchhook dashboard printed."


def test_the_token_becomes_a_cookie_and_leaves_the_address(root):
    client = client_of(root, "right")
    answer = client.get("/run/net/layers?stat=mean&token=right&port=a%26b")
    assert answer.status_code == 302
    assert answer.headers["Location"] == "/run/net/layers?stat=mean&port=a%26b"
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert client.get(answer.headers["Location"]).status_code == 200
    for path in KINDS[2:7]:
        assert client.get(path).status_code == 200, path


def test_with_a_token_any_name_may_lead_here(root):
    client = client_of(root, "right")
    answer = client.get("/?token=right", headers={"Host": "gpu-7.example:8787"})
    assert answer.status_code == 302 and answer.headers["Location"] == "/"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "gpu-7.example"])
def test_beyond_this_machine_a_token_is_made(host):
    first, second = Guard.for_host(host).token, Guard.for_host(host).token
    assert first and second and first != second and len(first) >= 32
    assert Guard.for_host(host, "mine").token == "mine"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_on_this_machine_a_token_is_asked_for_only_if_one_is_named(host):
    assert Guard.for_host(host).token is None and Guard.for_host(host, "mine").token == "mine"


def test_the_address_of_a_server_has_its_token(root):
    server = Server(root, host="0.0.0.0", port=0)
    server._server.server_close()
    assert re.fullmatch(r"http://[\w.-]+:\d+/\?token=[\w-]{32,}", server.address)


@pytest.mark.parametrize("path", KINDS)
def test_headers_are_on_every_answer(client, path):
    headers = client.get(path).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "http" not in policy and "*" not in policy and "unsafe-eval" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"


def test_a_picture_is_served(client):
    answer = client.get(f"/run/net/samples/{PICTURE}")
    assert answer.mimetype == "image/png" and answer.data.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "path",
    [
        "/run/net/samples/../run.sqlite",
        "/run/net/samples/..%2frun.sqlite",
        "/run/net/samples/%2e%2e/run.sqlite",
        "/run/net/samples/%2e%2e%2f%2e%2e%2fsecret.png",
        "/run/net/samples/..%5c..%5csecret.png",
        "/run/net/samples/....//secret.png",
        "/run/net/samples/%252e%252e%252fsecret.png",
        "/run/net/samples/%2fetc%2fpasswd",
        "/run/net/samples/00000003-0.png%00.txt",
        "/run/net/samples/00000003-0.png%0a",
        "/run/net/samples/00000009-0.png",
        "/run/net/samples/",
        "/run/net/run.sqlite",
        "/run/net/samples",
        f"/run/../net/samples/{PICTURE}x",
        f"/run/..%2fnet/samples/{PICTURE}",
        f"/run/%2e/samples/{PICTURE}",
        f"/run/%2e%2e/samples/{PICTURE}",
        f"/run/other/samples/{PICTURE}",
        "/assets/../app.py",
        "/assets/%2e%2e/app.py",
        "/assets/..%2fapp.py",
        "/assets//etc/passwd",
        "/_dash-component-suites/dash/../../app.py",
        "/_dash-component-suites/torchhook/dashboard/app.py",
    ],
)
def test_no_other_file_is_served(client, path):
    answer = client.get(path, follow_redirects=True)
    if answer.mimetype == "text/html" and answer.status_code == 200:  # the frame of all pages, whatever the address
        assert b"SQLite" not in answer.data and b"secret" not in answer.data and b"root:" not in answer.data
        assert b"_dash-config" in answer.data
    else:
        assert answer.status_code in (404, 500) and len(answer.data) < 300  # 500: what Dash does not know of


@pytest.fixture
def another(root, tmp_path):
    """A copy of the run, to do things to."""
    shutil.copytree(root / "net", tmp_path / "runs" / "net")
    (tmp_path / "secret.png").write_bytes(b"secret")
    return tmp_path / "runs"


def test_a_picture_that_is_a_link_is_not_followed(another):
    picture = another / "net" / "samples" / PICTURE
    picture.unlink()
    picture.symlink_to(another.parent / "secret.png")
    assert client_of(another).get(f"/run/net/samples/{PICTURE}").status_code == 404


def test_a_folder_of_pictures_that_is_a_link_is_not_followed(another):
    shutil.rmtree(another / "net" / "samples")
    elsewhere = another.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / PICTURE).write_bytes(b"secret")
    (another / "net" / "samples").symlink_to(elsewhere)
    assert client_of(another).get(f"/run/net/samples/{PICTURE}").status_code == 404


def test_a_run_that_is_a_link_is_not_followed(another, root):
    (another / "linked").symlink_to(root / "net")
    assert client_of(another).get(f"/run/linked/samples/{PICTURE}").status_code == 404


def test_a_picture_that_no_table_names_is_not_served(another):
    shutil.copy(another / "net" / "samples" / PICTURE, another / "net" / "samples" / "00000004-0.png")
    assert client_of(another).get("/run/net/samples/00000004-0.png").status_code == 404


@pytest.mark.parametrize("named", ["../run.sqlite", "../../../secret.png", "/etc/passwd", "run.sqlite", "note.txt"])
def test_a_table_cannot_name_another_file(another, named):
    db = sqlite3.connect(another / "net" / FILE)
    db.execute("UPDATE samples SET file = ?", (named,))
    db.commit()
    db.close()
    (another / "net" / "samples" / "note.txt").write_bytes(b"secret")
    client = client_of(another)
    assert client.get(f"/run/net/samples/{named.rpartition('/')[2]}").status_code == 404


def test_a_picture_that_is_gone_is_not_found(another):
    (another / "net" / "samples" / PICTURE).unlink()
    assert client_of(another).get(f"/run/net/samples/{PICTURE}").status_code == 404


def test_pictures_of_runs_with_odd_names_are_served(another):
    (another / "net").rename(another / "a b&c")
    assert client_of(another).get(f"/run/a%20b%26c/samples/{PICTURE}").status_code == 200


CALLBACK = {
    "output": "..page.children...where.children..",
    "outputs": [{"id": "page", "property": "children"}, {"id": "where", "property": "children"}],
    "inputs": [
        {"id": "url", "property": "pathname", "value": "/run/net"},
        {"id": "url", "property": "search", "value": ""},
    ],
    "changedPropIds": ["url.pathname"],
}


def called(client, **headers):
    return client.post("/_dash-update-component", json=CALLBACK, headers={"Host": "localhost:8787", **headers})


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "http://localhost:9999"},  # another server on this machine
        {"Origin": "http://localhost:8787.evil.example"},
        {"Origin": "null"},  # a page in a sandbox, or a file
        {"Origin": ""},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:9999"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost:8787"},
    ],
)
def test_callbacks_of_other_pages_are_refused(client, root, headers):
    answer = called(client, **headers)
    assert (answer.status_code, answer.data) == (403, b"Requests of other pages are refused.")
    with_token = client_of(root, "right")
    with_token.get("/?token=right", headers={"Host": "localhost:8787"})
    assert called(with_token, **headers).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},  # a program
        {"Origin": "http://localhost:8787"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:8787"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "https://hub.example"},  # a proxy that changes the host
        {"Sec-Fetch-Site": "none"},
    ],
)
def test_callbacks_of_its_own_pages_are_answered(client, headers):
    answer = called(client, **headers)
    assert answer.status_code == 200 and b"page" in answer.data


def test_callbacks_on_another_machine_are_those_of_the_host_that_was_asked(root):
    client, here = client_of(root, "right"), "http://gpu-7.example:8787"
    client.get("/?token=right", base_url=here)
    for origin, status in ((here, 200), ("http://gpu-7.example", 403), ("http://a.example", 403)):
        answer = client.post("/_dash-update-component", json=CALLBACK, headers={"Origin": origin}, base_url=here)
        assert answer.status_code == status


def test_a_request_that_is_nested_too_deeply_is_refused(client):
    deep, headers = '{"output": ' + "[" * 100_000 + "]" * 100_000 + "}", {"Host": "localhost:8787"}
    answer = client.post("/_dash-update-component", data=deep, content_type="application/json", headers=headers)
    assert (answer.status_code, answer.data) == (400, b"This request is nested too deeply.")
