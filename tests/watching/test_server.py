"""`dolmen show --serve`: nobody without the secret, nothing but the runs, and what is new."""

import http.client
import json
import os
import socket
import threading
from contextlib import contextmanager

import pytest
from test_page import lines, make_run, row
from tinyrun import dolmen

from dolmen.watching.page import Server, Watched


@contextmanager
def serving(folder, every: float = 0.0):
    """(ask, token): ask(method, path) -> (status, body)."""
    server = Server(Watched([folder]), every, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def ask(method: str, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
        found = answer.status, body.decode()
        assert answer.getheader("Content-Length") == str(len(body))
        assert answer.getheader("Cache-Control") == "no-store" or found[0] == 501
        connection.close()
        return found

    try:
        yield ask, server.token
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_who_has_no_secret_sees_nothing(tmp_path):
    folder = make_run(tmp_path / "run")
    (tmp_path / "secret.txt").write_text("mine")
    with serving(folder) as (ask, token), serving(folder) as (_, other):
        assert token != other and len(token) >= 32
        for path in ("/", "/data", "/?token=", f"/?token={other}", f"/?token={token[:-1]}"):
            assert ask("GET", path) == (403, "the address lacks its secret token\n")
        assert ask("GET", "/data?token=%F0%9F")[0] == 403
        status, page = ask("GET", f"/?token={token}")
        assert status == 200 and 'data-every="0"' in page and token not in page
        assert "connect-src 'self'" in page
        for path in ("/config.yaml", "/../secret.txt", "/data/..%2fsecret.txt", "//etc/passwd"):
            assert ask("GET", f"{path}?token={token}") == (404, "there is no such page\n")
        assert ask("POST", f"/?token={token}")[0] == 501


def test_what_is_new_is_served(tmp_path):
    folder = make_run(tmp_path / "run")
    with serving(folder) as (ask, token):
        before = json.loads(ask("GET", f"/data?token={token}")[1])
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(lines([row(41, loss=0.5)]))
        after = json.loads(ask("GET", f"/data?token={token}")[1])
        rows = [data["runs"][0]["series"]["rows"] for data in (before, after)]
        assert rows == [42, 43] and after["runs"][0]["series"]["last"]["loss"] == 0.5


def test_runs_are_read_at_most_as_often_as_said(tmp_path):
    folder = make_run(tmp_path / "run")
    with serving(folder, every=1e6) as (ask, token):
        first = ask("GET", f"/data?token={token}")
        os.truncate(folder / "metrics.jsonl", 0)
        assert ask("GET", f"/data?token={token}") == first


def test_an_address_that_is_taken(tmp_path):
    folder = make_run(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = dolmen("show", folder, "--serve", "--port", taken.getsockname()[1])
    assert result.code == 2 and "in use" in result.words
    result = dolmen("show", tmp_path / "none", "--serve")
    assert result.code == 2 and "is not a folder" in result.words


@pytest.mark.parametrize("every", ("0", "nan", "inf"))
def test_how_often_is_checked(tmp_path, every):
    result = dolmen("show", tmp_path, "--serve", "--every", every)
    assert result.code == 2 and "--every is" in result.words
