"""The page in a real browser: Debian's chromium and chromium-driver, as .ci/run installs them.

Screenshots go to the folder that HDET_ARTIFACTS names, or to pytest's own temporary one.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.report.data import load_run
from hdet.report.page import Table, write_report
from tests.models import batch, groups_of, make_optimizer, two_layer
from tests.ranks import run_ranks
from tests.report.made_up import a_header, a_round, probed_folder, write_folder

pytest.importorskip("selenium", reason="selenium is not installed: pip install 'hdet[test]'")
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no chromium and chromedriver on the PATH: apt-get install chromium chromium-driver, or run .ci/run",
)
DRAWN = "return [...document.querySelectorAll('.plot')].filter(p => p.querySelector('.main-svg .xy')).length"
WIDE, PHONE = (1100, 900), (390, 844)


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
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


def test_hover_zoom_and_the_switch_of_steps(browser: webdriver.Chrome, tmp_path: Path) -> None:
    look(browser, write_report([load_run(probed_folder(tmp_path / "auto"))], tmp_path / "r.html"))
    x, y = browser.execute_script(POINT)
    actions = ActionChains(browser)
    actions.w3c_actions.pointer_action.move_to_location(int(x), int(y))
    actions.perform()
    hover = "return [...document.querySelectorAll('.hoverlayer .hovertext')].map(t => t.textContent).join()"
    text = WebDriverWait(browser, 5, 0.05).until(lambda b: b.execute_script(hover))
    assert "lr[embedding]" in text
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
    page = write_report([load_run(probed_folder(tmp_path / "auto"))], tmp_path / "r.html")
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
    assert browser.execute_script("return document.documentElement.scrollWidth") == PHONE[0]
    assert browser.execute_script("return document.querySelector('.modebar')") is None
    keep(browser, artifacts / "report-phone.png")
    no_complaints(browser)


def colours(browser: webdriver.Chrome) -> dict[str, str]:
    script = """
    const plot = document.querySelector('.plot'), trace = plot.data.find(t => t.name === 'lr[embedding]');
    const fill = s => getComputedStyle(plot.querySelector(s)).fill;
    return {page: getComputedStyle(document.body).backgroundColor, text: fill('.xtick text'), line: trace.line.color};
    """
    return dict(browser.execute_script(script))


def luminance(colour: str) -> float:
    """Of "rgb(r, g, b)", roughly."""
    channels = [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    return sum(channels) / (3 * 255)


def test_folded_runs_are_drawn_when_they_are_opened(browser: webdriver.Chrome, artifacts: Path, tmp_path: Path) -> None:
    runs = [load_run(probed_folder(tmp_path / name, name, seed)) for seed, name in enumerate(("auto", "tuned"))]
    table = Table(["a long heading of a column"] * 8, [["a cell that is wide"] * 8], "Ablation")
    page = write_report(runs, tmp_path / "r.html", table=table)
    look(browser, page, PHONE)
    assert browser.execute_script(DRAWN) == 2
    keep(browser, artifacts / "report-several-phone.png")
    browser.find_element("css selector", "details.run summary").click()
    wait_until_drawn(browser, ".plot:not(details:not([open]) *)")
    assert browser.execute_script(DRAWN) == 7
    widths = browser.execute_script(
        "return [...document.querySelectorAll('details[open] .plot')].map(p => p.offsetWidth)"
    )
    assert min(widths) > 300
    assert browser.execute_script("return document.documentElement.scrollWidth") == PHONE[0]
    no_complaints(browser)


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
