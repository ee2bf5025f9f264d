from __future__ import annotations

import csv
import io
import json
import random
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from longturn.bench.frontier import frontier_of
from longturn.report.point import Band, Bound, Platform, Validity, point_to_json
from longturn.report.schema import ResultError
from longturn.report.series import group
from longturn.report.sweep import badges, baseline_index, render_sweep, time_text, write_sweep
from tests.report.points import changed, point, server, sweep, timeline
from tests.report.test_page import read


def test_the_page_nests_and_shows_the_figures_without_scripts() -> None:
    text = read(render_sweep(sweep(), "Sweep")).text
    for figure in (
        "1.23 s",  # P90 of TTFT is not P50: 2.5 x 30000 / 61
        "16.4 ms",
        "36,800.0",
        "96.7 %",
        "3 of 64",
        "context_overflow_rate 2.1 % is over 1 %",
        "1 point is invalid",
        "--concurrency 16 --seed 42",
        "eagle3 3 (synthetic, 2.83 tokens a step)",
        "2.9 USD per chip-hour, 3-year rental",
        "1730 W per chip",
        "97.3 %",
    ):
        assert figure in text, figure


def test_the_page_asks_the_network_for_nothing() -> None:
    page = render_sweep(sweep(), "Sweep")
    for name, value in read(page).attributes:
        assert name not in ("src", "srcset", "action"), (name, value)
        if name == "href":
            assert value is not None
            assert value.startswith("#")
    # The example's own commands hold an address, as data.
    code = page.replace("http://www.w3.org/2000/svg", "").replace("http://host:8000", "")
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest", code)
    assert "default-src 'none'" in page


def test_data_in_the_page_are_the_points() -> None:
    data = re.search(r'id="data">(.*?)</script>', render_sweep(sweep(), "Sweep", "plain LRU"), re.S)
    assert data is not None
    held = json.loads(data[1])
    assert held["points"] == [json.loads(point_to_json(p)) for p in sweep()]
    assert [one["name"] for one in held["series"]] == ["session cache", "plain LRU"]
    assert held["baseline"] == 1
    assert baseline_index(group(sweep()), sweep(), None) == 0


def test_text_from_outside_stays_text() -> None:
    evil = '</script><img src=x onerror=alert(1)> @@DATA@@ "&'
    made = point(
        evil, 1, 10.0, 5.0,
        command=evil, client=evil, flags={evil: evil},
        validity=Validity(valid=False, reasons=(evil,)),
        platform=Platform(chip=evil, chips=1, name=evil, price_per_chip_hour=1.0, price_basis=evil),
        metrics={"errors": 1, "error_kinds": {evil: 1}},
    )  # fmt: skip
    page = render_sweep([made], evil)
    parser = read(page)
    assert "onerror" not in {name for name, _ in parser.attributes}
    assert page.count("</script>") == 2
    assert evil in parser.text


def test_unlike_conditions_are_said_first() -> None:
    assert "Not everything here was measured alike" not in render_sweep(sweep(), "Sweep")
    page = read(render_sweep([*sweep(), point("other", 1, 10.0, 5.0, source="simulated", chip="Rubin")], "Sweep")).text
    assert "Not everything here was measured alike. Source: measured, simulated; chip: H200, Rubin." in page


def test_times_are_in_the_unit_that_fits() -> None:
    times = (time_text(ms) for ms in (None, 90_000.0, 600_000.0, 7_200_000.0))
    assert list(times) == ["–", "90.0 s", "10.0 min", "2.0 h"]


def test_nothing_to_show_and_unknown_baseline() -> None:
    with pytest.raises(ResultError, match="at least one point"):
        render_sweep([], "Sweep")
    with pytest.raises(ResultError, match=r"no configuration 'x' \(there is: session cache, plain LRU\)"):
        render_sweep(sweep(), "Sweep", "x")


def test_a_point_without_figures_is_a_row_of_dashes() -> None:
    nothing = {"interactivity": None, "ttft_ms": None, "itl_ms": None, "e2e_ms": None, "jobs": None, "turns": ()}
    assert "–" in read(render_sweep([point("c", 1, None, 5.0, metrics=nothing)], "Sweep")).text


def test_a_simulated_points_band_is_said_to_be_one_of_steps() -> None:
    """A step that is 15 % longer makes a loaded server's figures worse by more: the share is of no figure beside it."""
    end = Bound(interactivity=None, total_tokens_per_s=1.0, output_tokens_per_s=None, ttft_ms=None)
    band = Band(relative=0.15, slow=end, fast=end, basis="residuals")
    assert "simulated, steps ±15%" in badges(point("m", 1, 10.0, 5.0, source="simulated", band=band))


# --- in a browser ----------------------------------------------------------------------------------------------------


def in_browser(page: str, script: str, tmp_path: Path, width: int) -> Any:
    """Run the script after the page has loaded and return what it gives to `report`."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    probe = f"""<script>addEventListener('load', () => setTimeout(async () => {{
        const report = (value) => {{
          const made = parent.document.createElement('pre');
          made.id = 'probe';
          made.textContent = encodeURIComponent(JSON.stringify(value));
          parent.document.body.append(made);
        }};
        try {{ {script} }} catch (error) {{ report(String(error.stack)); }}
      }}, 100))</script>"""
    # In a frame: a window cannot be made narrower than 500 pixels, a frame can.
    inside = escape(page.replace("</body>", probe + "</body>"))
    path = tmp_path / "page.html"
    path.write_text(f'<!doctype html><iframe style="width:{width}px;height:900px;border:0" srcdoc="{inside}"></iframe>')
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width + 40},960",
        "--virtual-time-budget=4000",
    ]
    shown = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe">(.*?)</pre>', shown.stdout, re.S)
    assert found is not None, shown.stderr[-500:]
    return json.loads(unquote(found[1]))


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
def test_chart_tables_and_controls(tmp_path: Path, width: int) -> None:
    seen = in_browser(
        render_sweep(sweep(), "Sweep", "plain LRU"),
        """
        const $ = (q) => document.querySelector(q), all = (q) => [...document.querySelectorAll(q)];
        const cells = () => all('#matched-table tbody tr').map((r) => [...r.cells].map((c) => c.textContent));
        const event = (key) => new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true});
        const key = (node, name) => node.dispatchEvent(event(name));
        const seen = {};
        const fits = () => document.documentElement.scrollWidth <= document.documentElement.clientWidth;
        seen.fits = fits();
        seen.points = all('g.point').length; seen.front = all('g.point:not(.behind)').length;
        seen.invalid = all('g.point.invalid').length; seen.curves = all('path.curve').length;
        seen.matched = cells();
        seen.pair = all('#pair-table tbody tr').map((r) => r.textContent);
        seen.tails = all('rect.tail').length;
        // keyboard: Tab stop, arrow, Enter
        const stop = $('g.point[tabindex="0"]'); stop.focus();
        seen.tip = !$('#tip').hidden;
        key(stop, 'ArrowRight');
        seen.moved = document.activeElement !== stop && document.activeElement.matches('g.point');
        const chosen = document.activeElement.dataset.i; key(document.activeElement, 'Enter');
        seen.chosen = $('#point-b').value === chosen;
        key($('g.point:focus'), '+');
        seen.zoomed = all('#chart text').map((t) => t.textContent).join(' ');
        $('#zoom-reset').click();
        seen.unzoomed = all('#chart text').map((t) => t.textContent).join(' ');
        // controls
        all('#percentiles button')[1].click();
        seen.p50 = $('tr[data-point="4"] [data-figure="ttft_ms"]').textContent;
        seen.header = $('#points .percentile').textContent;
        all('#percentiles button')[3].click();
        all('.key')[0].click();
        seen.hidden = all('g.point').length; seen.rows = all('#points tr[data-point]:not([hidden])').length;
        all('.key')[0].click();
        $('#add-value').value = '55.5'; $('#add').requestSubmit();
        seen.added = cells().find((c) => c[0].startsWith('55.5'));
        $('#log').click(); seen.log = all('path.curve').length; $('#log').click();
        for (const id of ['x-axis', 'y-axis']) for (const option of [...$('#' + id).options]) {
          $('#' + id).value = option.value; $('#' + id).dispatchEvent(new Event('change'));
          if (!all('g.point').length) seen.empty = option.value;
        }
        $('#theme').click(); seen.theme = [document.documentElement.dataset.theme, $('#theme').textContent];
        seen.fitsStill = fits();
        report(seen);
        """,
        tmp_path,
        width,
    )
    assert isinstance(seen, dict), seen
    assert seen["fits"]
    assert seen["fitsStill"]
    assert (seen["points"], seen["front"], seen["invalid"], seen["curves"]) == (12, 10, 1, 2)
    assert "empty" not in seen
    # The table equals the Python frontiers.
    on = frontier_of([(i, t) for t, i in ((5200, 118), (9800, 104), (17400, 86), (27900, 61), (36800, 37))])
    off = frontier_of([(i, t) for t, i in ((3900, 96), (6900, 84), (11200, 66), (15900, 41), (18300, 22))])
    assert on is not None
    assert off is not None
    rows = {row[0]: row for row in seen["matched"]}
    assert len(rows) >= 8
    assert rows["60"] == [
        "60",
        f"{off.at(60).throughput:,.0f}",
        f"{on.at(60).throughput:,.0f}",
        f"{on.at(60).throughput / off.at(60).throughput:.2f}×",
    ]
    assert rows["100"][1] == "not reached"
    assert rows["30"][2] == "≥ 36,800"
    assert rows["100"][3] == rows["30"][3] == "–", "no ratio outside the range"
    assert seen["added"][0] == "55.5×"  # the figure and its button
    assert any(row.startswith("TTFT P90") for row in seen["pair"])
    assert seen["tails"] == 36  # 3 charts, 6 groups of turns, 2 points
    assert seen["tip"]
    assert seen["moved"]
    assert seen["chosen"]
    assert seen["zoomed"] != seen["unzoomed"]
    assert (seen["p50"], seen["header"]) == ("0.811 s", "P50")  # 30000 / 37
    assert (seen["hidden"], seen["rows"]) == (6, 6)
    assert seen["log"] == 2
    assert seen["theme"] == ["dark", "Light theme"]


@pytest.mark.slow
def test_curves_equal_the_python_ones(tmp_path: Path) -> None:
    draw = random.Random(11)
    sweeps = [[(draw.uniform(1, 200), draw.uniform(1, 9e4)) for _ in range(n)] for n in (1, 2, 3, 5, 9, 20)]
    at = [draw.uniform(0, 210) for _ in range(170)]
    found = in_browser(
        render_sweep(sweep(), "Sweep"),
        f"const sweeps={json.dumps(sweeps)}, at={json.dumps(at)};"
        "report(sweeps.map((s)=>{const c=Curves.steffen(Curves.nonDominated(s).map((i)=>s[i]));"
        "return at.map((x)=>{const v=c.at(x);return [v.value,v.place]})}))",
        tmp_path,
        1200,
    )
    for points, values in zip(sweeps, found, strict=True):
        frontier = frontier_of(points)
        assert frontier is not None
        for x, (value, place) in zip(at, values, strict=True):
            expected = frontier.at(x)
            assert (value, place) == (pytest.approx(expected.throughput, rel=1e-12), expected.place.value)


@pytest.mark.slow
def test_the_timeline_of_a_session_and_the_server_beside_it(tmp_path: Path) -> None:
    points = sweep()
    points[7] = changed(points[7], timeline=timeline(), server=server())
    seen = in_browser(
        render_sweep(points, "Sweep"),
        """
        const all = (q) => [...document.querySelectorAll(q)];
        const bars = all('g.request').map((g) => [...g.querySelectorAll('rect')].map((r) => [r.getAttribute('class'),
          +r.getAttribute('x'), +r.getAttribute('width')]));
        const text = document.getElementById('timeline-text').textContent;
        all('g.request')[0].focus();
        report({bars, text, samples: all('path.sample').length, tip: document.getElementById('tip').textContent});
        """,
        tmp_path,
        1200,
    )
    assert isinstance(seen, dict), seen
    assert seen["text"].startswith("plain LRU, 4 live; session fix-tests, 5 requests")
    assert "From cache0" in seen["tip"]
    first, _, _, failed, last = seen["bars"]
    scale = (last[0][1] + last[0][2] + last[1][2]) / 52_000  # pixels a millisecond: the last request ends at 52 s
    assert [(kind, round(x / scale), round(w / scale)) for kind, x, w in first] == [
        ("wait", 0, 9000),
        (None, 9000, 6000),
    ]
    assert [kind for kind, _, _ in failed] == ["failed"]
    assert seen["samples"] == 3


@pytest.mark.slow
def test_exports(tmp_path: Path) -> None:
    formula = changed(sweep()[0], command='=cmd|"x"')
    seen = in_browser(
        render_sweep([formula, *sweep()[1:]], "A sweep"),
        """
        // All at once: the browser's time is virtual here, and does not wait for what works in the background.
        const saved = [];
        window.Blob = function (parts) { this.parts = parts; };
        HTMLCanvasElement.prototype.toBlob = function (done, type) {
          done(new Blob([Uint8Array.from(atob(this.toDataURL(type).split(',')[1]), (c) => c.charCodeAt(0))]));
        };
        URL.createObjectURL = (blob) => { saved.push(blob.parts[0]); return '#'; };
        HTMLAnchorElement.prototype.click = function () {
          saved.push(this.download);
          const [csv, first, png, second] = saved;
          if (png) report({csv, names: [first, second], png: [...png.slice(0, 20)], bytes: png.length});
        };
        document.getElementById('csv').click();
        document.getElementById('png').click();
        """,
        tmp_path,
        1200,
    )
    assert isinstance(seen, dict), seen
    assert seen["names"] == ["a-sweep.csv", "a-sweep.png"]
    assert bytes(seen["png"][:4]) == b"\x89PNG"
    assert int.from_bytes(bytes(seen["png"][16:20]), "big") > 2000  # width: drawn twice as large
    assert seen["bytes"] > 20_000, "an empty picture is smaller"
    rows = list(csv.DictReader(io.StringIO(seen["csv"].removeprefix("\ufeff"))))
    assert len(rows) == 12
    assert float(rows[4]["interactivity P90 tok/s"]) == pytest.approx(37.0)
    assert float(rows[4]["TTFT P50 ms"]) == pytest.approx(30_000 / 37)
    assert float(rows[4]["cost per million tokens USD"]) == pytest.approx(2.9e6 / (3600 * 36_800))
    assert rows[0]["command"] == """'=cmd|"x\""""
    assert [row["valid"] for row in rows].count("no") == 1


@pytest.mark.slow
def test_a_page_of_one_bare_point_draws(tmp_path: Path) -> None:
    nothing = {"interactivity": None, "ttft_ms": None, "itl_ms": None, "e2e_ms": None, "jobs": None, "turns": ()}
    page = render_sweep([point("c", 1, None, 5.0, metrics=nothing), point("d", 1, 10.0, 5.0)], "Bare")
    seen = in_browser(page, "report(document.querySelectorAll('g.point').length)", tmp_path, 390)
    assert seen == 1
    write_sweep(sweep(), "Sweep", tmp_path / "new" / "index.html")
    assert (tmp_path / "new" / "index.html").read_text().startswith("<!doctype html>")


def test_what_nobody_told_keeps_curves_apart_and_is_not_in_their_names() -> None:
    told, untold = changed(sweep()[0], client="longturn-bench 0.1.0"), changed(sweep()[0], client="")
    first, second = group([told, untold])
    assert first.name == f"{told.configuration} · longturn-bench 0.1.0"
    assert second.name == told.configuration


@pytest.mark.slow
def test_curves_of_one_point_have_their_figure_in_the_table(tmp_path: Path) -> None:
    points = [point("a", 1, 400.0, 16.83), point("b", 1, 200.0, 17.58)]
    rows = in_browser(
        render_sweep(points, "Sweep", "a"),
        "const rows = [...document.querySelectorAll('#matched-table tbody tr')];"
        "report(rows.map((row) => [...row.cells].map((cell) => cell.textContent)))",
        tmp_path,
        1200,
    )
    assert ["16.8", "400", "≥ 200", "–"] in rows
    assert ["17.6", "not reached", "200", "–"] in rows


@pytest.mark.slow
def test_what_is_hidden_stays_hidden_and_paper_is_light(tmp_path: Path) -> None:
    """Without scripts the controls keep their `hidden`; the dark theme is for screens alone."""
    seen = in_browser(
        render_sweep(sweep(), "Sweep"),
        """
        const controls = document.getElementById('controls');
        controls.hidden = true;
        const dark = [];
        const walk = (rules, media) => { for (const rule of rules) {
          if (rule.selectorText && rule.selectorText.includes('data-theme')) dark.push(media);
          else if (rule.cssRules) walk(rule.cssRules, rule.conditionText || media);
        } };
        for (const sheet of document.styleSheets) walk(sheet.cssRules, '');
        report({display: getComputedStyle(controls).display, dark: [...new Set(dark)].sort()});
        """,
        tmp_path,
        1200,
    )
    assert seen == {"display": "none", "dark": ["screen", "screen and (prefers-color-scheme: dark)"]}
