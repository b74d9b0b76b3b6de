"""The page in a real browser: nothing from outside, a quiet console, plots drawn, of use to thumbs and keyboards."""

import json
import time

import pytest
import report_samples
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from torchhook import render
from torchhook.core.findings import Report

DESKTOP, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name in ("sick", "healthy", "hostile", "large"):
        render.save(getattr(report_samples, name)(), folder / f"{name}.html")
    render.save(Report(model="Net", checked=("TH101",)), folder / "empty.html")
    return folder


@pytest.fixture
def browse(chrome, pages):
    """Open a page in a window of a size and a theme; afterwards its console must be empty and the network unused."""
    for log in ("browser", "performance"):  # what came before is read and gone
        chrome.get_log(log)

    def opened(name, size=DESKTOP, theme="light"):
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        chrome.get("about:blank")
        chrome.get((pages / f"{name}.html").as_uri())
        return chrome

    yield opened
    assert chrome.get_log("browser") == []
    assert outside(chrome) == []
    assert chrome.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)") == []


def outside(chrome):
    """What was asked for other than files and what is written in the page."""
    messages = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert urls
    return [url for url in urls if not url.startswith(("file:", "data:", "about:", "chrome:"))]


def count(chrome, selector):
    return len(chrome.find_elements("css selector", selector))


def width(chrome):
    return chrome.execute_script("return document.documentElement.scrollWidth")


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("name", ["sick", "healthy", "hostile", "large"])
def test_plots_are_drawn_and_the_page_fits(browse, name, size):
    chrome = browse(name, size)
    assert width(chrome) <= size[0]
    for plot in ("loss", "gradient-flow", "activations", "updates"):
        assert count(chrome, f"#plot-{plot} svg.main-svg"), plot
        assert count(chrome, f"#plot-{plot} path.js-line, #plot-{plot} path.point"), plot
        drawn = chrome.find_element("css selector", f"#plot-{plot} svg.main-svg").size
        assert 250 < drawn["width"] <= size[0] and drawn["height"] >= 300


def test_a_slider_shows_the_gradients_of_another_step(browse):
    chrome = browse("sick")
    ys = "return [...document.querySelector('#plot-gradient-flow').data[0].y]"
    faulty = chrome.execute_script(ys)
    assert len(set(faulty)) > 1 and "step 240" in chrome.find_element("id", "plot-gradient-flow").text
    rail = chrome.find_element("css selector", "#plot-gradient-flow .slider-rail-touch-rect")
    left = 5 - rail.size["width"] // 2
    ActionChains(chrome).move_to_element_with_offset(rail, left, 0).click().perform()
    deadline = time.monotonic() + 5
    while set(chrome.execute_script(ys)) != {2.0}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "step 200" in chrome.find_element("id", "plot-gradient-flow").text


def test_plots_follow_the_window(browse):
    chrome = browse("sick")
    metrics = {"width": 700, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    deadline = time.monotonic() + 5
    while chrome.find_element("css selector", "#plot-loss svg.main-svg").size["width"] > 700:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert width(chrome) <= 700


def test_a_page_without_plots_has_no_script(browse):
    chrome = browse("empty", PHONE)
    assert count(chrome, "script") == 0 and count(chrome, "svg") == 0
    assert "Nothing found" in chrome.find_element("id", "findings").text


def test_hostile_names_do_not_run(browse):
    chrome = browse("hostile")
    ActionChains(chrome).move_to_element(chrome.find_element("css selector", "#plot-updates .main-svg")).perform()
    assert chrome.execute_script("return window.__pwned") is None
    assert count(chrome, "img") == 0
    assert "<script>" in chrome.find_element("tag name", "h1").text


def test_light_and_dark(browse):
    def brightness(selector, what):
        script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
        colour = chrome.execute_script(script, selector, what)
        return sum(map(int, colour.split("(")[1].rstrip(")").split(",")[:3])) / 3

    for theme, is_dark in (("light", False), ("dark", True)):
        chrome = browse("sick", theme=theme)
        assert (brightness("body", "backgroundColor") < 128) is is_dark
        assert (brightness("body", "color") > 128) is is_dark
        assert (brightness("#plot-loss .xtick text", "fill") > 128) is is_dark


def test_details_open_by_keyboard(browse):
    chrome = browse("sick")
    for _ in range(20):
        ActionChains(chrome).send_keys(Keys.TAB).perform()
        if chrome.switch_to.active_element.tag_name == "summary":
            break
    assert not chrome.find_element("tag name", "details").get_attribute("open")
    ActionChains(chrome).send_keys(Keys.ENTER).perform()
    assert chrome.find_element("tag name", "details").get_attribute("open")
    assert "layer4.0.conv" in chrome.find_element("tag name", "details").text


def test_wide_tables_scroll_in_their_own_box_by_keyboard(browse):
    chrome = browse("sick", PHONE)
    box = chrome.find_element("css selector", "#layers .scroll")
    assert box.get_property("scrollWidth") > box.get_property("clientWidth")
    chrome.execute_script("arguments[0].focus()", box)
    assert chrome.switch_to.active_element == box
    assert box.accessible_name == "Modules" and box.aria_role == "region"


def test_a_layer_leads_to_what_was_found(browse):
    chrome = browse("sick")
    chrome.execute_script("arguments[0].click()", chrome.find_element("css selector", "#layers a"))
    assert chrome.current_url.endswith("#finding-1")


def test_a_large_report_opens_quickly(browse, slowdown):
    start = time.monotonic()
    chrome = browse("large")
    assert count(chrome, "article.card") == 300
    assert count(chrome, "#layers tbody tr") == 1000
    assert count(chrome, "#plot-updates svg.main-svg")
    assert time.monotonic() - start < 5 * slowdown


@pytest.mark.parametrize("name", ["sick", "large"])
def test_paper_has_all_of_it_and_nothing_is_cut(browse, name):
    chrome = browse(name, (720, 1000))  # about the width of a sheet between its margins
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert width(chrome) <= 720
    script = """return [...document.querySelectorAll('.scroll')].every(
        box => box.scrollHeight <= box.clientHeight + 1 && box.scrollWidth <= box.clientWidth + 1)"""
    assert chrome.execute_script(script), "a table is cut"
    assert chrome.execute_script("return getComputedStyle(document.querySelector('nav')).display") == "none"
    folded = chrome.find_elements("css selector", "details li")
    assert all(item.size["height"] > 0 for item in folded), "what is folded cannot be opened on paper"
    assert len(folded) == (5 if name == "sick" else 0)
