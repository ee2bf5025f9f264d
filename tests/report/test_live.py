from __future__ import annotations

import itertools
import shutil
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from longturn.report.live import LivePage, live_server
from longturn.report.schema import ResultError
from longturn.report.sweep import render_sweep
from tests.report.points import sweep


@contextmanager
def serving(page: LivePage) -> Iterator[str]:
    server = live_server(page, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Cache-Control"] == "no-store"
        return str(answer.read().decode())


def test_the_page_is_made_once_for_each_state() -> None:
    state = ["1"]
    made: list[str] = []

    def render(stamp: str) -> str:
        made.append(stamp)
        if stamp == "broken":
            raise ResultError("p.json: damaged")
        return f"<p>{stamp}"

    with serving(LivePage(render, lambda: state[0])) as url:
        assert get(url + "/") == get(url + "/") == "<p>1"
        assert get(url + "/stamp") == "1"
        state[0] = "2"
        assert get(url + "/stamp") == "2"
        assert get(url + "/") == "<p>2"
        assert made == ["1", "2"]
        state[0] = "broken"
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(url + "/")
        assert (caught.value.code, caught.value.read()) == (500, b"p.json: damaged\n")
        state[0] = "3"
        assert get(url + "/") == "<p>3", "it keeps serving"
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(url + "/../etc/passwd")
        assert caught.value.code == 404


def test_a_port_in_use_is_one_line() -> None:
    server = live_server(LivePage(str, str), "127.0.0.1", 0)
    try:
        port = server.server_address[1]
        with pytest.raises(ResultError, match=f"cannot listen on 127.0.0.1:{port}: "):
            live_server(LivePage(str, str), "127.0.0.1", port)
    finally:
        server.server_close()


def test_only_a_served_page_asks_for_changes() -> None:
    served = render_sweep(sweep(), "Sweep", stamp="abc")
    assert 'data-stamp="abc"' in served
    assert "connect-src 'self'" in served
    assert "fetch(" in served
    written = render_sweep(sweep(), "Sweep")
    assert "fetch(" not in written
    assert "connect-src" not in written


@pytest.mark.slow
def test_a_browser_is_told_of_new_results() -> None:
    """The stamp changes after the page was made: the button comes, and the page is not reloaded unasked."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    stamps = itertools.count()
    page = LivePage(lambda stamp: render_sweep(sweep(), "Sweep", stamp=stamp), lambda: str(next(stamps)))
    with serving(page) as url, tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"]
        command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        command += [f"--user-data-dir={profile}", "--virtual-time-budget=8000", "--dump-dom", url + "/"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 'id="news" role="status"><button type="button">New results: reload</button>' in shown.stdout
