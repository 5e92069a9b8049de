"""The page in a real browser: Debian's chromium and chromium-driver, as .ci/run installs them.

Screenshots go to the folder that HDET_ARTIFACTS names, or to pytest's own temporary one.
"""

from __future__ import annotations

import base64
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.report.data import load_run
from hdet.report.page import write_report
from hdet.report.verdict import Table
from tests.models import batch, groups_of, make_optimizer, two_layer
from tests.processes import run_ranks
from tests.report.made_up import a_header, a_round, searched_folder, write_folder, write_journal

pytest.importorskip("selenium", reason="selenium is not installed: pip install -e '.[test]'")
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no chromium and chromedriver on the PATH: apt-get install chromium chromium-driver, or run .ci/run",
    ),
]
DRAWN = "return [...document.querySelectorAll('.plot')].filter(p => p.querySelector('.main-svg .xy')).length"
WIDE, PHONE = (1100, 900), (390, 844)


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with opened_browser("normal") as driver:
        yield driver


@contextmanager
def opened_browser(strategy: str) -> Iterator[webdriver.Chrome]:
    """A browser. ``strategy``: "normal" waits until a page has loaded, "none" does not."""
    options = webdriver.ChromeOptions()
    options.page_load_strategy = strategy
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("HDET_ARTIFACTS") or tmp_path_factory.mktemp("artifacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def look(browser: webdriver.Chrome, page: Path, size: tuple[int, int] = WIDE, scheme: str = "light") -> None:
    """Open a page on a screen of that size and wait until what is not folded is drawn."""
    prefers(browser, scheme)
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    wait_until_drawn(browser, ".plot:not(details:not([open]) *)")


def prefers(browser: webdriver.Chrome, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def wait_until_drawn(browser: webdriver.Chrome, which: str) -> None:
    wanted = len(browser.execute_script(f"return [...document.querySelectorAll({which!r})].map(p => p.id)"))
    assert wanted
    WebDriverWait(browser, 20, 0.05).until(lambda b: b.execute_script(DRAWN) >= wanted)


def keep(browser: webdriver.Chrome, path: Path) -> None:
    """A picture of the whole page, not only of what fits the screen."""
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"})
    path.write_bytes(base64.b64decode(shot["data"]))


def fits(browser: webdriver.Chrome, size: tuple[int, int] = PHONE) -> bool:
    """Whether the page itself does not scroll sideways."""
    return bool(browser.execute_script("return document.documentElement.scrollWidth") == size[0])


def plot_areas(browser: webdriver.Chrome, which: str = ".plot") -> dict[str, tuple[float, float, list[float]]]:
    """By title: left edge and right edge of the area inside the axes, and the steps that it shows."""
    script = """
    return [...document.querySelectorAll(arguments[0])].map(plot => {
      const box = plot.querySelector('.draglayer .nsewdrag').getBoundingClientRect();
      const title = plot.closest('figure').querySelector('h3').textContent;
      return [title, box.left, box.right, plot.layout.xaxis.range];
    });
    """
    return {title: (left, right, steps) for title, left, right, steps in browser.execute_script(script, which)}


def no_complaints(browser: webdriver.Chrome) -> None:
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    assert browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []


def train(rank: int, path: str) -> None:
    """A real small run: two replicas, three parameter groups, four rounds."""
    model = two_layer()
    optimizer = make_optimizer("sgd", groups_of(model))
    scheduler = hdet.OneCycleLR(optimizer, 0.05, 40, sync_every=10, auto_lr_start=10, journal=path)
    for t in range(40):
        x, y = batch(t, rank)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        for p in model.parameters():
            torch.distributed.all_reduce(p.grad)
        optimizer.step()
        scheduler.step(loss)


def test_a_real_run_is_drawn(browser: webdriver.Chrome, artifacts: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run_ranks(train, 2, str(path))
    page = write_report([load_run(path)], tmp_path / "real.html")
    look(browser, page)
    titles = browser.execute_script("return [...document.querySelectorAll('h3')].map(t => t.textContent)")
    assert titles == ["Learning rate", "Loss", "Hypergradient", "Replica divergence", "Where the time went"]
    assert browser.execute_script(DRAWN) == 5
    no_complaints(browser)
    keep(browser, artifacts / "report-real.png")


def test_hover_and_the_switch_of_steps(browser: webdriver.Chrome, tmp_path: Path) -> None:
    look(browser, write_report([load_run(searched_folder(tmp_path / "auto"))], tmp_path / "r.html"))
    x, y = browser.execute_script(POINT)
    actions = ActionChains(browser)
    actions.w3c_actions.pointer_action.move_to_location(int(x), int(y))
    actions.perform()
    hover = "return [...document.querySelectorAll('.hoverlayer .hovertext')].map(t => t.textContent).join()"
    text = WebDriverWait(browser, 5, 0.05).until(lambda b: b.execute_script(hover))
    assert "lr[" in text
    assert "step" in text
    kind = "return document.querySelector('.plot')._fullLayout.xaxis.type"
    assert browser.execute_script(kind) == "log"  # its rounds grow
    browser.find_element("id", "log-steps").click()
    assert browser.execute_script(kind) == "linear"
    no_complaints(browser)


POINT = """
const plot = document.querySelector('.plot');
plot.scrollIntoView({block: 'center', behavior: 'instant'});
const {xaxis, yaxis} = plot._fullLayout, trace = plot.data.find(t => t.name === 'lr[embedding]');
const i = Math.floor(trace.x.length / 2), box = plot.getBoundingClientRect();
return [box.left + xaxis._offset + xaxis.d2p(trace.x[i]), box.top + yaxis._offset + yaxis.d2p(trace.y[i])];
"""


def test_light_dark_and_a_phone(browser: webdriver.Chrome, artifacts: Path, tmp_path: Path) -> None:
    page = write_report([load_run(searched_folder(tmp_path / "auto"))], tmp_path / "r.html")
    look(browser, page)
    light = colours(browser)
    keep(browser, artifacts / "report-light.png")
    prefers(browser, "dark")
    WebDriverWait(browser, 5, 0.05).until(lambda b: colours(b)["text"] != light["text"])
    dark = colours(browser)
    assert all(light[key] != dark[key] for key in light)
    assert luminance(light["page"]) > 0.8 > luminance(light["text"])
    assert luminance(dark["page"]) < 0.2 < luminance(dark["text"])
    keep(browser, artifacts / "report-dark.png")
    look(browser, page, PHONE)
    assert fits(browser)
    assert browser.execute_script("return document.querySelector('.modebar')") is None
    keep(browser, artifacts / "report-phone.png")
    no_complaints(browser)


def colours(browser: webdriver.Chrome) -> dict[str, str]:
    script = """
    const of = s => getComputedStyle(document.querySelector(s));
    const grid = of('.plot .gridlayer path').stroke, legend = of('.plot .legendtext').fill;
    return {page: of('body').backgroundColor, text: of('.plot .xtick text').fill, grid: grid, legend: legend};
    """
    return dict(browser.execute_script(script))


def luminance(colour: str) -> float:
    """Roughly."""
    return sum(channels(colour)) / (3 * 255)


def channels(colour: str) -> list[int]:
    """Of "rgb(r, g, b)" or "rgba(r, g, b, 1)"."""
    return [int(part) for part in colour.partition("(")[2].removesuffix(")").split(",")[:3]]


def test_folded_runs_are_drawn_when_they_are_opened(browser: webdriver.Chrome, artifacts: Path, tmp_path: Path) -> None:
    runs = [load_run(searched_folder(tmp_path / name, seed)) for seed, name in enumerate(("auto", "tuned"))]
    table = Table(["a long heading of a column"] * 8, [["a cell that is wide"] * 8], "Ablation")
    page = write_report(runs, tmp_path / "r.html", table=table)
    look(browser, page, PHONE)
    assert browser.execute_script(DRAWN) == 2
    keep(browser, artifacts / "report-several-phone.png")
    browser.execute_script("Plotly.relayout(document.querySelector('.plot'), {'xaxis.range': [1, 2]})")
    browser.find_element("css selector", "details.run summary").click()
    wait_until_drawn(browser, ".plot:not(details:not([open]) *)")
    assert browser.execute_script(DRAWN) == 5
    zoomed = "return document.querySelector('.plot').layout.xaxis.range"
    assert browser.execute_script(zoomed) == [1, 2]  # as it was before
    widths = browser.execute_script(
        "return [...document.querySelectorAll('details[open] .plot')].map(p => p.offsetWidth)"
    )
    assert min(widths) > 300
    assert fits(browser)
    scrolls = "return [...document.querySelectorAll('.scroll')].filter(t => t.scrollWidth > t.clientWidth).length"
    assert browser.execute_script(scrolls) >= 2  # the tables do what the page does not
    no_complaints(browser)


def test_a_table_that_is_too_wide_scrolls_and_has_a_shadow(
    browser: webdriver.Chrome, artifacts: Path, tmp_path: Path
) -> None:
    run = load_run(searched_folder(tmp_path / "auto"))
    table = Table(["a long heading of a column"] * 4, [["a cell that is wide"] * 4], "Ablation")
    page = write_report([run], tmp_path / "r.html", table=table)
    box = "const box = document.querySelector('.scroll');"
    look(browser, page, PHONE)
    assert fits(browser)
    assert browser.execute_script(f"{box} return box.scrollWidth > box.clientWidth")
    # One gradient moves with the table and covers the other, which is the shadow, once its end is reached.
    assert browser.execute_script(f"{box} return getComputedStyle(box).backgroundAttachment") == "local, scroll"
    keep(browser, artifacts / "report-scroll-phone.png")
    look(browser, page, WIDE)
    assert not browser.execute_script(f"{box} return box.scrollWidth > box.clientWidth")
    no_complaints(browser)


def test_a_notebook_shows_the_page_in_a_frame(browser: webdriver.Chrome, artifacts: Path, tmp_path: Path) -> None:
    shown = hdet.show(searched_folder(tmp_path / "auto"))
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><meta charset=utf-8><body>{shown._repr_html_()}</body>", encoding="utf-8")
    metrics = {"width": 900, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(notebook.as_uri())
    outside = browser.find_element("tag name", "p").text
    frame = browser.find_element("tag name", "iframe")
    assert frame.size["width"] > 800
    browser.switch_to.frame(frame)
    wait_until_drawn(browser, ".plot")
    assert browser.execute_script(DRAWN) == 3
    assert outside
    assert outside not in browser.find_element("tag name", "body").text  # it is said once
    assert browser.execute_script("return window.origin") == "null"  # it cannot reach the notebook
    browser.switch_to.default_content()
    keep(browser, artifacts / "notebook.png")
    no_complaints(browser)


@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_steps_line_up_from_figure_to_figure(browser: webdriver.Chrome, tmp_path: Path, size: tuple[int, int]) -> None:
    page = write_report([load_run(searched_folder(tmp_path / "auto"))], tmp_path / "r.html")
    assert page.stat().st_size <= 2_100_000
    look(browser, page, size)
    for _ in ("logarithmic", "linear"):
        areas = plot_areas(browser)
        time = areas.pop("Where the time went")
        assert set(areas) == {"Learning rate", "Loss"}
        assert len({(left, right, *steps) for left, right, steps in areas.values()}) == 1
        assert time[2] != areas["Loss"][2]
        browser.find_element("id", "log-steps").click()
    no_complaints(browser)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_alarm_is_red_and_comes_first(
    browser: webdriver.Chrome, artifacts: Path, tmp_path: Path, scheme: str
) -> None:
    words = "steps do not follow the rate"
    records = [a_round(0), a_round(1, event="stopped", why=words), a_round(2)]
    journal = write_journal(tmp_path / "blind.jsonl", a_header(guess=[0.1]), *records)
    look(browser, write_report([load_run(journal)], tmp_path / "r.html"), PHONE, scheme)
    banner = browser.find_element("css selector", "main > :first-child")
    assert banner.is_displayed()
    assert f"step 20: {words}." in banner.text
    assert "Fix that first, as the run's warning says" in banner.text
    red, green, blue = channels(banner.value_of_css_property("background-color"))
    assert red > 150 > 80 > max(green, blue)
    assert banner.rect["y"] < 100
    assert fits(browser)
    keep(browser, artifacts / f"report-alarm-{scheme}.png")
    no_complaints(browser)


def test_several_runs_over_each_other(browser: webdriver.Chrome, artifacts: Path, tmp_path: Path) -> None:
    runs = [load_run(searched_folder(tmp_path / name)) for name in ("low", "high")]
    page = write_report(runs, tmp_path / "r.html", title="All")
    for size in (PHONE, WIDE):
        look(browser, page, size)
        assert fits(browser, size)
        drawn = "return document.querySelector('.plot').data.map(t => [t.name, t.line.dash])"
        names, dashes = zip(*browser.execute_script(drawn), strict=True)
        assert names == ("low", "high")
        assert len(set(dashes)) == 2  # they coincide
        keep(browser, artifacts / f"report-several-{size[0]}.png")
    no_complaints(browser)


def test_a_page_that_arrives_slowly_is_readable_and_then_drawn(tmp_path: Path) -> None:
    """The first part is text; the scripts come later, and a run that was opened before them is drawn then."""
    runs = [load_run(searched_folder(tmp_path / name)) for name in ("one", "two")]
    page = write_report(runs, tmp_path / "r.html").read_bytes()
    with opened_browser("none") as browser, arriving(page) as (address, rest):
        browser.get(address)
        opened = "const run = document.querySelector('details.run'); if (run) run.open = true; return run !== null"
        WebDriverWait(browser, 10, 0.05).until(lambda b: b.execute_script(opened))
        assert "ended lowest" in browser.find_element("css selector", ".verdict").text
        assert browser.execute_script(DRAWN) == 0
        rest.set()
        WebDriverWait(browser, 20, 0.05).until(lambda b: b.execute_script(DRAWN) == 5)
        assert browser.get_log("browser") == []


@contextmanager
def arriving(page: bytes) -> Iterator[tuple[str, threading.Event]]:
    """A server that sends the page up to the middle of its scripts, and the rest when it is told to."""
    rest, half = threading.Event(), len(page) // 2

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            if self.path == "/page":
                self.wfile.write(page[:half])
                self.wfile.flush()
                rest.wait(30)
                self.wfile.write(page[half:])

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/page", rest
        finally:
            rest.set()
            server.shutdown()
            thread.join()


def test_a_browser_that_cannot_unpack_says_so(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = write_report([load_run(searched_folder(tmp_path / "auto"))], tmp_path / "r.html")
    without = "delete window.DecompressionStream"
    script = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": without})
    browser.get(page.as_uri())
    text = "return document.querySelector('.plot').textContent"
    WebDriverWait(browser, 10, 0.05).until(lambda b: "cannot draw the figures" in b.execute_script(text))
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    browser.get_log("browser")  # it says why in the console


def test_names_from_files_do_nothing(browser: webdriver.Chrome, tmp_path: Path) -> None:
    nasty = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    record: dict[str, Any] = {**a_round(0, delta=[1.0], learned=[2.0]), "event": nasty}
    folder = write_folder(tmp_path / "x", a_header([f"lr[{nasty}]"], **{nasty: nasty}), record, name=nasty)
    look(browser, write_report([load_run(folder)], tmp_path / "r.html", title=nasty, table=Table([nasty], [[nasty]])))
    assert browser.execute_script("return window.hacked") is None
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    legend = browser.execute_script("return document.querySelector('.legendtext').textContent")
    assert browser.title.startswith(nasty)
    assert legend
    no_complaints(browser)
