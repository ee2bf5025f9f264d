from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from longturn.report.page import ratio_text, render_page, seconds_text, turn_table, write_page
from longturn.report.schema import Run, to_json
from tests.report.samples import result, totals, turn

VOID = {"meta", "br", "link", "input", "hr"}


class Balanced(HTMLParser):
    """Checks that tags nest, and collects text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert not parser.open
    return parser


def test_the_page_nests_and_shows_the_figures_without_scripts() -> None:
    text = read(render_page(result())).text
    for figure in (
        "0.400 s",
        "2.80 s",
        "7.0×",
        "896",
        "50.0",
        "39.0 %",
        "2.0× shorter",
        "longturn serve --set x",
        "8 GiB",
    ):
        assert figure in text, figure


def test_the_turns_beside_those_of_the_baseline() -> None:
    table = turn_table(*result().runs)
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr.*?</tr>", table)]
    cells = [[" ".join(re.sub("<[^>]+>", " ", cell).split()) for cell in row] for row in rows]
    assert cells == [
        ["Turn", "Prompt tokens", "cache on", "cache off", "TTFT ratio"],
        ["cached", "output", "TTFT", "tok/s", "TTFT", "tok/s"],
        ["1 read_file", "1,000", "0", "40", "2.00 s", "50.0", "2.00 s", "50.0", "1.0×"],
        ["2 read_file", "1,300", "896", "40", "0.400 s", "50.0", "2.80 s", "50.0", "7.0×"],
        ["All turns", "2,300", "896", "80", "2.40 s", "", "4.80 s", "", "2.0×"],
    ]
    assert [row[-1:] for row in re.findall(r'<td class="gain">[^<]*', table)] == ["×", "×"], "the second turn and all"


def test_a_run_alone_has_figures_of_its_own() -> None:
    text = read(render_page(result(runs=result().runs[:1]))).text
    assert "Time to first token 1.20 s median; P90 1.20 s" in text and "Throughput 476" in text
    assert "TTFT ratio" not in text and "TTFT ratio" in read(render_page(result())).text


def test_the_page_asks_the_network_for_nothing() -> None:
    page = render_page(result())
    for name, value in read(page).attributes:
        assert name not in ("src", "srcset", "action"), (name, value)
        if name == "href":
            assert value is not None
            assert value.startswith("#")
    without_namespace = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest", without_namespace)
    assert "default-src 'none'" in page


def test_data_in_the_page_is_the_result() -> None:
    page = render_page(result())
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data is not None
    assert json.loads(data[1]) == json.loads(to_json(result()))


def test_text_from_outside_stays_text() -> None:
    evil = '</script><img src=x onerror=alert(1)> @@DATA@@ "&'
    run = Run(evil, evil, (turn(0, 10.0, 0, label=evil, session=evil),), totals(10.0, 0), False)
    page = render_page(result(title=evil, model=evil, description=evil, runs=(run,)))
    parser = read(page)
    assert "onerror" not in {name for name, _ in parser.attributes}
    assert page.count("</script>") == 2
    assert evil in parser.text


def test_failures_and_partial_runs_are_marked() -> None:
    failed = turn(1, None, None, error="HTTP 500: no", itl_ms=None, prompt_tokens=None, output_tokens=None)
    run = Run("measured", "http://host", (turn(0, 5.0, None), failed), totals(5.0, 0), True)
    text = read(render_page(result(runs=(run,)))).text
    assert "Partial: the run “measured” is incomplete" in text
    assert "HTTP 500: no" in text
    assert "Partial" not in read(render_page(result())).text


def test_a_server_that_reports_no_cached_tokens_is_said_so() -> None:
    run = Run("measured", "http://host", (turn(0, 5.0, None),), totals(5.0, 0), False)
    assert "does not report how many" in render_page(result(runs=(run,)))


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "–"),
        (0.4, "0.40 ms"),
        (41.23, "41.2 ms"),
        (412.3, "0.412 s"),
        (4123, "4.12 s"),
        (10_000, "10.0 s"),
        (41234, "41.2 s"),
    ],
)
def test_seconds(ms: float | None, text: str) -> None:
    assert seconds_text(ms) == text


def test_ratios() -> None:
    assert ratio_text(10.0, 4.0) == "2.5×"
    assert ratio_text(1000.0, 4.0) == "250×"
    assert ratio_text(None, 4.0) == ratio_text(4.0, 0.0) == "–"


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
def test_in_a_browser(tmp_path: Path, width: int) -> None:
    """The scripts run, draw a bar for each figure, and nothing is wider than the window."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    path = tmp_path / "index.html"
    write_page(result(), path)
    probe = (
        "<script>addEventListener('load',()=>setTimeout(()=>{document.title="
        "[document.querySelectorAll('#ttft-chart g.turn').length,"
        "document.querySelectorAll('#ttft-chart rect[fill]').length,"
        "document.querySelectorAll('#tokens-chart rect[fill]').length,"
        "document.documentElement.scrollWidth<=document.documentElement.clientWidth].join(' ')},50))</script>"
    )
    path.write_text(path.read_text().replace("</body>", probe + "</body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--virtual-time-budget=2000"]
    shown = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", shown.stdout)
    assert title is not None, shown.stderr[-500:]
    # 2 turns; 2 runs x 2 turns; 2 turns of which the first has no cached part.
    assert title[1] == "2 4 3 true"
