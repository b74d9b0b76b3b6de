"""The dashboard in a real browser, served by its own command: every page, live, by keyboard, whatever the runs hold."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from itertools import count, pairwise
from urllib.parse import parse_qs, quote, urlsplit

import dashboard_samples as samples
import pytest
import torch
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from torchhook import Finding, Report
from torchhook.core.site import Site
from torchhook.render.palette import GREEN, NONFINITE, SEVERITY, ZERO
from torchhook.rules.history import settled
from torchhook.rules.ranks import RankStep
from torchhook.stats.reading import Snapshot
from torchhook.stats.reduce import Reduce
from torchhook.training.logs import Entry
from torchhook.training.runs.folders import delete
from torchhook.training.runs.schema import FILE

pytestmark = pytest.mark.usefixtures("one_thread")

DESKTOP, LOW, PHONE = (1280, 900), (1280, 500), (390, 844)
NUMBERS = count()  # names are used once
PATIENCE = 10.0  # seconds, for a machine that does other things, too


@pytest.fixture(scope="module")
def root(tmp_path_factory, one_thread):
    """Runs that do not change; each test adds those of its own."""
    root = tmp_path_factory.mktemp("runs")
    samples.trained(root, "healthy").rename(root / "healthy")
    samples.trained(root, "dead", is_dead=True).rename(root / "dead")
    samples.hostile(root / "hostile")
    samples.garbage(root / "garbage")
    samples.newer(root / "newer")
    return root


@pytest.fixture(scope="module")
def address(root):
    """Where the command serves them."""
    command = [sys.executable, "-m", "torchhook", "dashboard", str(root), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    yield process.stdout.readline().strip()
    ended = process.poll()
    process.terminate()
    _, said = process.communicate(timeout=30)
    assert (ended, said) == (None, ""), f"the server ended with {ended}: {said[-4000:]}"


@pytest.fixture
def browse(chrome, address):
    """Open a page of the dashboard; afterwards the console must be empty and nobody else have been asked."""
    for log in ("browser", "performance"):  # what came before is read and gone
        chrome.get_log(log)

    def opened(path="/", size=DESKTOP, theme="light"):
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        chrome.get("about:blank")
        chrome.get(address + path.lstrip("/"))
        until(lambda: chrome.execute_script("return document.querySelector('main')?.children.length > 0"))
        until(lambda: chrome.execute_script(DRAWN))
        return chrome

    yield opened
    chrome.get("about:blank")  # and no page asks for anything any more
    assert chrome.get_log("browser") == []
    assert outside(chrome, address) == []


DRAWN = """
    const rest = document.getElementById("overview-rest");
    return (!rest || rest.children.length > 0)
        && [...document.querySelectorAll(".graph")].every(graph => graph.querySelector(".main-svg"))"""


def outside(chrome, address):
    """What was asked for other than of the server and what is written in the page."""
    messages = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert urls
    return [url for url in urls if not url.startswith((address, "data:", "about:", "blob:", "chrome:"))]


def until(holds, why=""):
    """Wait for what comes by itself."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, why
        time.sleep(0.05)


def text(chrome, selector="main"):
    return chrome.find_element("css selector", selector).text


def shows(chrome, words, selector="main"):
    """Wait for words to be on the page."""

    def is_there():
        return words in chrome.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    until(is_there, f"{words!r} does not come")


def drawn(chrome, graph, what="x"):
    """What a graph has of its first trace."""
    script = "return [...document.querySelector(arguments[0] + ' .js-plotly-plot').data[0][arguments[1]]]"
    return chrome.execute_script(script, f"#{graph}", what)


def mark(chrome, graph):
    """Remember a graph as it is in the page now, and where the page was scrolled to."""
    chrome.execute_script("window.scrollTo(0, 60); window.__here = 1")
    chrome.execute_script("document.querySelector(arguments[0]).__same = 1", f"#{graph} .js-plotly-plot")


def is_same(chrome, graph):
    """Whether neither the page nor the graph was made anew since, nor scrolled."""
    script = "return [window.__here, document.querySelector(arguments[0]).__same, window.scrollY]"
    return chrome.execute_script(script, f"#{graph} .js-plotly-plot") == [1, 1, 60]


def press(chrome, *keys):
    ActionChains(chrome).send_keys(*keys).perform()


def tab_to(chrome, selector):
    """Go by keyboard to what is described."""
    for _ in range(60):
        press(chrome, Keys.TAB)
        if chrome.execute_script("return document.activeElement.matches(arguments[0])", selector):
            return
    raise AssertionError(f"the keyboard does not lead to {selector!r}")


def row(name):
    """The row of a run in the list, for XPath."""
    return f"//*[@role='row'][.//a='{name}']"


def listed(chrome):
    """The names of the runs in the list, from top to bottom."""
    names = """return [...document.querySelectorAll('.ag-row')].map(row => [+row.getAttribute('row-index'),
        row.querySelector('a')?.textContent]).sort((a, b) => a[0] - b[0]).map(([_, name]) => name)"""
    return chrome.execute_script(names)


def cell(chrome, name, column):
    """What the list says about a run."""
    return chrome.find_element("xpath", f"{row(name)}//*[@col-id='{column}']").text


def width(chrome):
    return chrome.execute_script("return document.documentElement.scrollWidth")


# Every page


def test_the_list_of_runs(browse):
    chrome = browse()
    until(lambda: {"healthy", "dead", "hostile", "garbage", "newer"} <= set(listed(chrome)))
    until(lambda: "…" not in {cell(chrome, name, "state") for name in ("healthy", "dead")})  # they are read one by one
    assert cell(chrome, "garbage", "state") == cell(chrome, "newer", "state") == "unreadable"
    assert cell(chrome, "garbage", "finding").startswith("Not a run, or corrupt")
    assert "a newer torchhook" in cell(chrome, "newer", "finding")
    assert cell(chrome, "dead", "finding").startswith("TH201 relu") and cell(chrome, "healthy", "finding") == ""
    assert cell(chrome, "healthy", "state") == "ended" and cell(chrome, "healthy", "model") == "Sequential"
    assert cell(chrome, "healthy", "step") == "39" and 0 < float(cell(chrome, "healthy", "loss")) < 2
    drawn = chrome.find_element("xpath", f"{row('healthy')}//*[@role='img']")
    assert drawn.accessible_name == "loss by step" and drawn.size["width"] > 60
    assert text(chrome, "h1") == "Runs" and chrome.title == "Runs · torchhook"
    chrome.find_element("link text", "dead").click()
    shows(chrome, "dead", "h1")
    shows(chrome, "never fire")


def test_names_and_findings_are_read_whole_in_the_list(browse, root):
    folder = samples.ended(root / "train_digits-20261118-204618")  # a name as runs get it
    chrome = browse()
    until(lambda: {"dead", folder.name} <= set(listed(chrome)))
    cells = [row("dead") + "//*[@col-id='finding']//span", row(folder.name) + "//a"]
    until(lambda: chrome.find_elements("xpath", cells[0]))
    for found in (chrome.find_element("xpath", cell) for cell in cells):
        cut = """const e = arguments[0], cell = e.closest(".ag-cell");
            return e.scrollHeight > cell.clientHeight || e.getBoundingClientRect().width > cell.clientWidth"""
        assert not chrome.execute_script(cut, found), found.text
    delete(folder)


def test_the_list_is_searched_and_sorted(browse):
    chrome = browse()
    until(lambda: {"healthy", "dead"} <= set(listed(chrome)))
    search = "th201 relu"  # both words: a large run of other tests has findings of this code, too
    chrome.find_element("id", "runs-search").send_keys(search)
    until(lambda: listed(chrome) == ["dead"], "a search finds what was found")
    chrome.find_element("id", "runs-search").send_keys(Keys.BACKSPACE * len(search), "ended")
    until(lambda: {"healthy", "dead"} <= set(listed(chrome)) and "garbage" not in listed(chrome))
    header = "//*[@role='columnheader'][@col-id='name']//*[contains(@class, 'ag-header-cell-label')]"
    for expected in (sorted, lambda names: sorted(names, reverse=True)):
        chrome.find_element("xpath", header).click()
        until(lambda expected=expected: listed(chrome) == expected(listed(chrome)))


def test_the_overview_shows_loss_findings_and_layers(browse):
    chrome = browse("/run/dead")
    assert "ended" in text(chrome, "#overview-facts") and "step 39" in text(chrome, "#overview-facts")
    assert len(drawn(chrome, "overview-loss")) == 40
    card = chrome.find_element("css selector", "#overview-findings .card.error")
    assert "TH201" in card.text and card.find_element("tag name", "a").text == "relu"
    dots = {
        item.find_element("tag name", "a").text: item.find_element("class name", "dot").accessible_name
        for item in chrome.find_elements("css selector", "#tree li:not(:has(ul))")
    }
    assert list(dots) == ["conv", "relu", "flat", "head.0", "head.1", "head.2"]
    assert dots["relu"] == "error" and dots["flat"] == "nothing found"
    card.find_element("tag name", "a").click()
    shows(chrome, "ReLU", "main h2")


def test_a_last_loss_that_is_not_finite_comes_last(browse, root):
    names = ["sorted-a", "sorted-b", "sorted-c"]
    for name, loss in zip(names, (2.0, float("nan"), 1.0), strict=True):
        log = samples.written(root / name, [])
        log.write(Entry(0, 0.0, samples.snapshot(0), losses={0: loss}))
        log.end(Report(), "ended")
    chrome = browse()
    until(lambda: set(names) <= set(listed(chrome)))
    chrome.find_element("id", "runs-search").send_keys("sorted-")
    header = "//*[@role='columnheader'][@col-id='loss']//*[contains(@class, 'ag-header-cell-label')]"
    for expected in (["sorted-c", "sorted-a", "sorted-b"], ["sorted-a", "sorted-c", "sorted-b"]):
        chrome.find_element("xpath", header).click()
        until(lambda expected=expected: listed(chrome) == expected, f"not {expected}")
    for name in names:
        delete(root / name)


def test_the_list_says_the_state_as_the_overview_does(browse):
    chrome = browse()
    until(lambda: {"healthy", "dead"} <= set(listed(chrome)) and cell(chrome, "dead", "state") != "…")
    assert cell(chrome, "dead", "state") == "ended with 1 error"
    columns = "return [...document.querySelectorAll('.ag-header-cell')].sort((a, b) => a.ariaColIndex - b.ariaColIndex)"
    order = [column.get_attribute("col-id") for column in chrome.execute_script(columns)]
    assert order.index("finding") == order.index("name") + 1  # which a phone shows


def test_a_page_has_a_title_of_its_own(browse):
    for path, title in {"/run/dead": "dead · Overview", "/run/dead/flow": "dead · Gradient flow"}.items():
        chrome = browse(path)
        until(lambda title=title, chrome=chrome: chrome.title == f"{title} · torchhook")


def test_an_error_of_a_page_leaves_the_links_to_the_others(browse, root):
    folder = samples.ended(root / "halved")
    with closing(sqlite3.connect(folder / FILE)) as db, db:
        db.execute("UPDATE states SET data = x'00'")
    chrome = browse("/run/halved/flow")
    assert chrome.find_elements("css selector", "[role=alert]") and "Model" in text(chrome, "nav")
    delete(folder)


def test_the_overview_begins_with_what_is_wrong(browse):
    chrome = browse("/run/dead")
    said = chrome.find_element("css selector", ".said.error")
    assert said.text == "1 error: 100% of the units never fire, at relu (ReLU)."
    said.find_element("link text", "relu (ReLU)").click()
    shows(chrome, "ReLU", "main h2")


def test_the_tree_says_class_and_shape_and_folds(browse):
    chrome = browse("/run/dead")
    tree = text(chrome, "#tree")
    assert "conv Conv2d → 16×8×6×6" in tree and "head.2 Linear → 16×4" in tree
    chrome.find_element("xpath", "//summary[contains(., 'head')]").click()
    assert "head Sequential" in text(chrome, "#tree") and "head.2" not in text(chrome, "#tree")


def test_health_over_time_leads_to_the_layer(browse):
    chrome = browse("/run/dead")
    bars = (
        "return document.querySelector('#overview-health .js-plotly-plot').data.map(bars => [bars.name, bars.y.length])"
    )
    assert chrome.execute_script(bars) == [["nothing found", 6], ["info", 1], ["warning", 0], ["error", 2]]
    click = "document.querySelector('#overview-health .js-plotly-plot').emit('plotly_click', {points: [{y: 'relu'}]})"
    chrome.execute_script(click)
    shows(chrome, "ReLU", "main h2")


def test_a_mark_on_the_loss_leads_to_its_layer(browse):
    chrome = browse("/run/dead")
    (mark,) = chrome.find_elements("css selector", "#overview-loss .scatterlayer .point")
    ActionChains(chrome).move_to_element(mark).pause(0.3).click().perform()
    shows(chrome, "ReLU", "main h2")


def test_the_loss_is_smoothed_as_far_as_wanted(browse):
    chrome = browse("/run/healthy")
    script = "return [...document.querySelector('#overview-loss .js-plotly-plot').data[3].y]"
    losses, means = drawn(chrome, "overview-loss", "y"), chrome.execute_script(script)
    assert len(means) == len(losses) == 40 and max(means[1:]) - min(means[1:]) < max(losses[1:]) - min(losses[1:])
    tab_to(chrome, "#overview-smoothing [role=slider]")
    press(chrome, Keys.HOME)
    until(lambda: chrome.execute_script(script) == [])


def test_a_healthy_run_says_so(browse):
    chrome = browse("/run/healthy")
    assert "Nothing found so far." in text(chrome, "#overview-findings")
    assert text(chrome, ".said.passed") == "Nothing is wrong, as far as 40 measured steps show."
    assert not chrome.find_elements("css selector", "main .dot.error, main .card")


def test_layers_by_steps(browse):
    chrome = browse("/run/dead/layers")
    assert drawn(chrome, "layers-heat", "y") == ["conv", "relu", "flat", "head.0", "head.1", "head.2"]
    assert drawn(chrome, "layers-heat") == list(range(40))
    assert len(drawn(chrome, "layers-heat", "z")) == 40
    script = "return document.querySelector('#layers-heat .js-plotly-plot').data[1]"
    zeros = chrome.execute_script(script)
    assert (zeros["name"], zeros["y"], zeros["base"], zeros["x"]) == ("zero", ["relu", "flat"], [-0.5] * 2, [40] * 2)
    assert zeros["marker"]["color"] == ZERO


def test_what_is_not_finite_is_not_a_gap(browse, root):
    log = samples.written(root / "infinite", range(4))
    samples.append(log, range(4, 6), scale=float("inf"))
    log.end(Report(), "ended")
    chrome = browse("/run/infinite/layers")
    broken = chrome.execute_script("return document.querySelector('#layers-heat .js-plotly-plot').data[2]")
    assert (broken["name"], broken["y"], broken["base"], broken["x"]) == (
        "not finite",
        ["conv", "fc"],
        [3.5] * 2,
        [2] * 2,
    )
    assert broken["marker"]["color"] == NONFINITE
    chrome = browse("/run/infinite/layer?path=fc")
    traces = chrome.execute_script("return document.querySelector('#layer-output .js-plotly-plot').data")
    assert traces[0]["x"] == list(range(6)) and traces[0]["y"][4:] == [None] * 2
    assert (traces[-1]["name"], traces[-1]["x"]) == ("not finite", [4, 5, 4, 5])
    chrome = browse("/run/infinite/flow")
    symbols = chrome.execute_script(
        "return document.querySelector('#flow-grad_output .js-plotly-plot').data[1].marker.symbol"
    )
    assert symbols == ["x", "x"]
    delete(log.folder)


def test_a_layer_shows_its_history_and_its_maps(browse):
    chrome = browse("/run/healthy/layer?path=conv")
    for name in ("output", "zeros", "gradients", "updates"):
        values = drawn(chrome, f"layer-{name}", "y")
        assert len(values) > 5 and any(value is not None for value in values), name
    assert len(drawn(chrome, "layer-bands", "median")) == len(drawn(chrome, "layer-bands")) > 1
    assert len(drawn(chrome, "layer-units", "y")) == 8
    (picture,) = chrome.find_elements("css selector", "#layer-pictures img")
    assert picture.get_property("naturalWidth") > 8 and "conv at step" in picture.get_attribute("alt")
    last = picture.get_attribute("src")
    tab_to(chrome, "#layer-map-step [role=slider]")
    press(chrome, Keys.HOME)
    shows(chrome, "step 0", "#layer-pictures")
    assert chrome.find_element("css selector", "#layer-pictures img").get_attribute("src") != last
    chrome.find_element("partial link text", "next layer").click()
    shows(chrome, "relu", "main h2")


def test_a_layer_shows_what_was_found_there(browse):
    chrome = browse("/run/dead/layer?path=relu")
    assert "TH201" in text(chrome, "#layer-findings")
    assert set(drawn(chrome, "layer-zeros", "y")) == {1}
    assert "No feature maps" in text(chrome, "#layer-pictures")
    assert text(chrome, "#layer-updates") == "no parameter of this layer was measured"


def test_gradient_flow_starts_where_something_is_wrong(browse):
    assert text(browse("/run/healthy/flow"), "#flow-step-text") == "step 39"
    assert text(browse("/run/healthy/flow?step=7"), "#flow-step-text") == "step 7"
    chrome = browse("/run/dead/flow")
    assert text(chrome, "#flow-step-text") == "step 0, where TH201 was found"
    script = "return document.querySelector('#flow-' + arguments[0] + ' .js-plotly-plot').layout.xaxis.ticktext"
    layers, parameters = (chrome.execute_script(script, port) for port in ("grad_output", "param_grad"))
    assert layers[-1] == "head.2" and "conv.weight" in parameters
    script = "const drawn = document.querySelector('#flow-grad_output .js-plotly-plot').data[1];"
    numbers, symbols = chrome.execute_script(f"{script} return [[...drawn.x], drawn.marker.symbol]")
    assert [layers[number - 1] for number in numbers] == ["conv"]  # no gradient gets through the dead ReLU
    assert symbols == ["triangle-down"]


def test_the_flow_begins_where_gradients_are_most_extreme_if_no_finding_has_a_step(browse, root):
    log = samples.written(root / "undated", range(3))
    samples.append(log, [3], scale=float("inf"))
    samples.append(log, range(4, 6))
    log.found(Finding("TH202", "error", "62 % of the units are nearly inactive", "fc"))
    chrome = browse("/run/undated/flow")
    assert text(chrome, "#flow-step-text") == "step 3"
    chrome = browse("/run/undated")
    shapes = "return document.querySelector('#overview-health .js-plotly-plot').data.at(-1).marker.pattern.shape"
    assert chrome.execute_script(shapes) == ["/"]
    delete(log.folder)


def test_sizes_of_parameters_have_a_log_scale_and_loud_zeros(browse, root):
    log = samples.written(root / "sizes", [])
    for step, norm in enumerate([1.0, 0.0, float("nan")]):
        reduce = Reduce("moments")
        reduce.cell(Site("fc.weight", "param_grad_norm"), None).update(torch.tensor([norm]))
        log.write(Entry(step, 0.0, settled(reduce.snapshot())))
    chrome = browse("/run/sizes/layers?port=param_grad_norm")
    bars = "return document.querySelector('#layers-heat .js-plotly-plot').data.slice(1, 3).map(bar => [...bar.base])"
    assert chrome.execute_script(bars) == [[0.5], [1.5]] and drawn(chrome, "layers-heat", "z") == [[0], [None], [None]]
    assert "Norm of each parameter's gradient" in text(chrome)
    delete(log.folder)


def test_menus_have_names(browse):
    menus = browse("/run/dead/layers").find_elements("css selector", ".choice button")
    assert [menu.accessible_name for menu in menus] == [
        "measured at Each layer's output",
        "statistic Standard deviation",
    ]


CY = "const cy = document.getElementById('graph-picture')?._cyreg?.cy;"
NODES = f"{CY} return cy ? cy.nodes().map(node => node.data('path')) : []"


def test_the_model_folds_by_block_and_leads_to_layers(browse):
    chrome = browse("/run/dead/graph")
    until(lambda: chrome.execute_script(NODES))
    leaves = ["conv", "relu", "flat", "head.0", "head.1", "head.2"]
    assert chrome.execute_script(NODES) == ["head", *leaves]
    edges = chrome.execute_script(
        f"{CY} return cy.edges().map(edge => [edge.source().data('path'), edge.data('shape')])"
    )
    assert edges == [
        [leaf, shape] for leaf, shape in zip(leaves, ["16×8×6×6"] * 2 + ["16×288"] + ["16×16"] * 2, strict=False)
    ]
    fill = f"{CY} return cy.nodes().filter(node => node.data('path') == arguments[0]).data('fill')"
    assert [chrome.execute_script(fill, path) for path in ("relu", "flat")] == [SEVERITY["error"], GREEN]
    chrome.find_element("id", "graph-fold").click()
    until(lambda: sorted(chrome.execute_script(NODES)) == ["conv", "flat", "head", "relu"])
    zoom = f"{CY} return cy.zoom()"
    chrome.execute_script(f"{CY} cy.zoom(0.05)")
    chrome.find_element("id", "graph-unfold").click()
    until(lambda: "head.1" in chrome.execute_script(NODES))
    chrome.find_element("id", "graph-fold").click()
    until(lambda: 0.3 < chrome.execute_script(zoom) <= 1, "what is folded is a speck")
    tap(chrome, "head")
    until(lambda: "head.1" in chrome.execute_script(NODES))
    tap(chrome, "relu")
    shows(chrome, "ReLU", "main h2")


def tap(chrome, path):
    """Click on a node of the graph, once it has its place."""
    script = f"{CY} cy.fit(undefined, 20); return cy.nodes().filter(node => node.data('path') == arguments[0])"
    places = [{}]

    def rests():
        time.sleep(0.2)
        places.append(chrome.execute_script(f"{script}.renderedPosition()", path))
        return places[-1] == places[-2]

    until(rests)
    picture = chrome.find_element("id", "graph-picture")
    right, down = places[-1]["x"] - picture.size["width"] / 2, places[-1]["y"] - picture.size["height"] / 2
    ActionChains(chrome).move_to_element_with_offset(picture, round(right), round(down)).pause(0.2).click().perform()


def test_a_model_that_is_too_high_for_the_page_is_in_the_middle_of_it(browse, root):
    names = [f"blocks.{number}" for number in range(20)]
    log = samples.written(root / "high", range(2), sites=names)
    log.write(Entry(2, 0.0, Snapshot({}), wires=list(pairwise(names))))
    log.end(Report(), "ended")
    chrome = browse("/run/high/graph", theme="dark")
    script = f"{CY} const box = cy?.elements().renderedBoundingBox(); return cy && [box.x1, cy.width() - box.x2]"
    until(lambda: (sides := chrome.execute_script(script)) and sides[0] == pytest.approx(sides[1]), "it is at one side")
    assert chrome.execute_script(f"{CY} return cy.zoom()") == 0.9
    delete(log.folder)


def test_the_model_is_coloured_by_a_statistic(browse):
    chrome = browse("/run/dead/graph")
    until(lambda: chrome.execute_script(NODES))
    chrome.find_element("id", "graph-colour").click()
    option = (
        "//*[contains(@class, 'dash-dropdown-option')][normalize-space()=\"Standard deviation of each layer's output\"]"
    )
    until(lambda: chrome.find_elements("xpath", option))
    chrome.find_element("xpath", option).click()
    shows(chrome, "Standard deviation of each layer's output at step 39", "#graph-legend")
    fills = dict(
        chrome.execute_script(f"{CY} return cy.nodes('.layer').map(node => [node.data('path'), node.data('fill')])")
    )
    assert fills["relu"] == fills["flat"] == ZERO and fills["conv"].startswith("rgb(")


def test_no_other_page_loads_the_graph(browse):
    loaded = "return !!window.dash_cytoscape"
    assert not browse("/run/dead").execute_script(loaded)
    chrome = browse("/run/dead/graph")
    until(lambda: chrome.execute_script(loaded))


def test_runs_that_are_chosen_are_compared(browse):
    chrome = browse()
    until(lambda: {"healthy", "dead"} <= set(listed(chrome)))
    for name in ("healthy", "dead"):
        chrome.find_element("xpath", f"{row(name)}//input").click()
    shows(chrome, "Compare 2 runs")
    chrome.find_element("id", "runs-compare").click()
    shows(chrome, "Activations")
    until(lambda: chrome.execute_script(DRAWN))
    assert sorted(parse_qs(urlsplit(chrome.current_url).query)["run"]) == ["dead", "healthy"]
    names = "return document.querySelector('#compare-loss .js-plotly-plot').data.map(trace => trace.name)"
    assert sorted(chrome.execute_script(names)) == ["dead", "healthy"]
    assert "never fire" in text(chrome, "#compare-findings") and "Nothing found." in text(chrome, "#compare-findings")


@pytest.mark.parametrize("page", ["", "/layers", "/layer?path=conv", "/flow", "/graph"])
def test_pages_fit_a_phone(browse, page):
    assert width(browse(f"/run/dead{page}", PHONE)) <= PHONE[0]


def test_long_names_leave_room_for_the_heat_map_on_a_phone(browse, root):
    folder = samples.ended(root / "gpt", sites=[f"transformer.h.{number}.attn.resid_dropout" for number in range(20)])
    plot = browse("/run/gpt/layers", PHONE).find_element("css selector", "#layers-heat .nsewdrag")
    assert plot.size["width"] > 150
    delete(folder)


def test_the_way_of_a_slider_is_seen_in_the_dark(browse):
    track = browse("/run/dead", theme="dark").find_element("css selector", ".dash-slider-track")
    red = re.search(r"\d+", track.value_of_css_property("background-color")).group()
    assert int(red) > 40  # which the page has not


def test_the_list_fits_a_phone(browse):
    assert width(browse("/", PHONE)) <= PHONE[0]


# By mouse and by keyboard


@pytest.mark.parametrize(("row", "layer"), [(0, "conv"), (1, "relu")])  # the second is a gap: all zeros
def test_a_click_into_the_heat_map_leads_to_the_layer(browse, row, layer):
    chrome = browse("/run/dead/layers")
    plot = chrome.find_element("css selector", "#layers-heat .nsewdrag")
    below = round(plot.size["height"] * ((row + 0.5) / 6 - 0.5))  # the middle
    ActionChains(chrome).move_to_element_with_offset(plot, 50, below).pause(0.3).click().perform()
    shows(chrome, layer, "main h2")
    assert parse_qs(urlsplit(chrome.current_url).query)["path"] == [layer]
    chrome.back()
    shows(chrome, "All layers")


def test_the_heat_map_of_parameters_leads_to_their_layer(browse):
    chrome = browse("/run/dead/layers?stat=l2&port=param_grad")
    assert "head.0.weight" in drawn(chrome, "layers-heat", "y")
    click = "document.querySelector('#layers-heat .js-plotly-plot').emit('plotly_click', {points: [{%s}]})"
    chrome.execute_script(click % "x: 3, y: 'head.0.weight', z: 1, curveNumber: 0, pointNumber: [2, 3]")
    shows(chrome, "head.0", "main h2")


def test_the_keyboard_alone_leads_to_a_layer(browse):
    chrome = browse()
    tab_to(chrome, "[role=columnheader]")
    press(chrome, Keys.ARROW_RIGHT)
    until(lambda: "dead" in listed(chrome))
    for _ in listed(chrome):
        press(chrome, Keys.ARROW_DOWN)
        if chrome.switch_to.active_element.text == "dead":
            break
    press(chrome, Keys.ENTER)
    shows(chrome, "dead", "h1")
    tab_to(chrome, "a[href$='/layers']")
    press(chrome, Keys.ENTER)
    shows(chrome, "All layers")
    tab_to(chrome, "main a[href$='path=relu']")
    press(chrome, Keys.ENTER)
    shows(chrome, "ReLU", "main h2")


def test_focus_is_seen(browse):
    chrome = browse("/run/dead")
    tab_to(chrome, "nav a")
    style = chrome.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert style != "none"


@pytest.mark.parametrize(
    "page", ["/", *(f"/run/dead{page}" for page in ("", "/layers", "/flow", "/graph", "/layer?path=conv"))]
)
def test_what_can_be_used_has_a_name(browse, page):
    chrome = browse(page)
    kinds = "a, button, summary, [role=slider], input:not([aria-hidden]), [role=group], img"
    usable = chrome.find_elements("css selector", kinds)
    assert usable and [item.get_attribute("outerHTML")[:200] for item in usable if not item.accessible_name] == []


def test_another_statistic_is_another_picture(browse):
    chrome = browse("/run/dead/layers")
    before = drawn(chrome, "layers-heat", "z")
    chrome.find_element("id", "layers-stat").click()
    option = "//*[contains(@class, 'dash-dropdown-option')][normalize-space()='Share of zeros']"
    until(lambda: chrome.find_elements("xpath", option))
    chrome.find_element("xpath", option).click()
    shows(chrome, "Share of zeros of each layer's output")
    until(lambda: chrome.execute_script(DRAWN))
    assert drawn(chrome, "layers-heat", "z") != before
    assert {row[1] for row in drawn(chrome, "layers-heat", "z")} == {1}  # of the dead ReLU
    until(lambda: "stat=zero_fraction" in chrome.current_url)  # it can be sent to others
    chrome.refresh()
    shows(chrome, "Share of zeros of each layer's output")


def test_another_statistic_by_keyboard(browse):
    chrome = browse("/run/dead/layers")
    tab_to(chrome, "#layers-stat")
    press(chrome, Keys.ENTER)
    until(lambda: chrome.execute_script("return document.activeElement.value") == "std")
    press(chrome, Keys.ARROW_DOWN)
    until(lambda: chrome.execute_script("return document.activeElement.value") == "min")
    press(chrome, Keys.ENTER)
    shows(chrome, "Smallest value of each layer's output")
    assert chrome.switch_to.active_element.get_attribute("id") == "layers-stat"  # who chooses can choose again


def test_the_step_of_the_flow_is_chosen_by_arrow_keys(browse):
    chrome = browse("/run/healthy/flow")
    last = drawn(chrome, "flow-grad_output", "y")
    tab_to(chrome, "#flow-step [role=slider]")
    press(chrome, Keys.ARROW_LEFT)
    shows(chrome, "step 38", "#flow-step-text")
    until(lambda: chrome.current_url.endswith("?step=38"))
    slider = chrome.find_element("css selector", "#flow-step [role=slider]")
    until(lambda: slider.get_attribute("aria-valuetext") == "step 38")
    press(chrome, Keys.HOME)
    shows(chrome, "step 0", "#flow-step-text")
    until(lambda: drawn(chrome, "flow-grad_output", "y") != last)


# Live


@pytest.fixture
def growing(root):
    """A run that goes on."""
    log = samples.written(root / f"growing-{next(NUMBERS)}", range(10))
    yield log
    log.end(Report(), "ended")
    delete(log.folder)


def test_the_overview_grows_in_place(browse, growing):
    chrome = browse(f"/run/{growing.folder.name}", LOW)
    mark(chrome, "overview-loss")
    samples.append(growing, range(10, 14))
    shows(chrome, "step 13", "#overview-facts")
    until(lambda: drawn(chrome, "overview-loss") == list(range(14)))
    assert is_same(chrome, "overview-loss")


def test_findings_arrive(browse, growing):
    chrome = browse(f"/run/{growing.folder.name}", LOW)
    mark(chrome, "overview-loss")
    assert "Nothing found" in text(chrome, "#overview-findings")
    growing.found(Finding("TH201", "error", "61 % of the units never fire", "fc", 9))
    shows(chrome, "61 % of the units never fire", "#overview-findings")
    until(lambda: chrome.find_elements("css selector", "#tree .dot.error"))
    assert is_same(chrome, "overview-loss")


def test_the_end_is_told(browse, growing):
    chrome = browse(f"/run/{growing.folder.name}")
    assert "running" in text(chrome, "#overview-facts")
    growing.end(Report(), "interrupted")
    shows(chrome, "interrupted", "#overview-facts")


def test_the_heat_map_grows_in_place(browse, growing):
    chrome = browse(f"/run/{growing.folder.name}/layers", LOW)
    mark(chrome, "layers-heat")
    samples.append(growing, range(10, 14))
    until(lambda: drawn(chrome, "layers-heat") == list(range(14)))
    assert len(drawn(chrome, "layers-heat", "z")) == 14
    assert is_same(chrome, "layers-heat")


def test_new_layers_appear_in_the_heat_map(browse, growing):
    chrome = browse(f"/run/{growing.folder.name}/layers")
    samples.append(growing, [10], sites=("conv", "fc", "late"))
    until(lambda: drawn(chrome, "layers-heat", "y") == ["conv", "fc", "late"])
    assert [row[2] is None for row in drawn(chrome, "layers-heat", "z")] == [True] * 10 + [False]


def test_the_flow_follows_while_it_is_at_the_end(browse, growing):
    chrome = browse(f"/run/{growing.folder.name}/flow", LOW)
    mark(chrome, "flow-grad_output")
    samples.append(growing, range(10, 12))
    shows(chrome, "step 11", "#flow-step-text")
    assert is_same(chrome, "flow-grad_output")
    tab_to(chrome, "#flow-step [role=slider]")
    press(chrome, Keys.HOME)
    shows(chrome, "step 0", "#flow-step-text")
    samples.append(growing, range(12, 14))
    slider = chrome.find_element("css selector", "#flow-step [role=slider]")
    until(lambda: slider.get_attribute("aria-valuemax") == "13")
    assert text(chrome, "#flow-step-text") == "step 0"  # who looks at something is left there


@pytest.mark.parametrize(
    ("page", "graph"), [("/run/{}/layer?path=fc", "layer-output"), ("/compare?run={}&run=dead", "compare-loss")]
)
def test_other_pages_grow_too(browse, growing, page, graph):
    chrome = browse(page.format(growing.folder.name), LOW)
    mark(chrome, graph)
    samples.append(growing, range(10, 14))
    until(lambda: drawn(chrome, graph) == list(range(14)))
    assert is_same(chrome, graph)


def test_a_run_from_its_very_beginning(browse, root):
    log = samples.written(root / "fresh", [])
    chrome = browse("/run/fresh")
    assert "nothing measured yet" in text(chrome, "#overview-facts")
    samples.append(log, range(3))
    shows(chrome, "conv", "#tree")
    until(lambda: drawn(chrome, "overview-loss") == [0, 1, 2])
    delete(log.folder)


def test_empty_pages_fill(browse, root):
    log = samples.written(root / "empty", [])
    chrome = browse("/run/empty/flow")
    samples.append(log, range(3))
    shows(chrome, "step 2", "#flow-step-text")
    chrome = browse("/run/empty/graph")
    samples.append(log, [3], sites=("conv", "fc", "late"))
    shows(chrome, "late")
    delete(log.folder)


def test_new_runs_appear_in_the_list(browse, root):
    chrome = browse()
    chrome.execute_script("window.__here = 1")
    folder = samples.ended(root / "a b&c")
    shows(chrome, "a b&c")
    chrome.find_element("link text", "a b&c").click()
    shows(chrome, "ended", "#overview-facts")
    assert text(chrome, "h1") == "a b&c" and chrome.execute_script("return window.__here") == 1
    chrome.find_element("link text", "Layers").click()
    shows(chrome, "All layers")
    chrome.find_element("link text", "torchhook").click()
    shows(chrome, "a b&c")
    delete(folder)
    until(lambda: "a b&c" not in text(chrome))


def test_what_was_chosen_to_compare_stays_chosen(browse, root):
    chrome = browse()
    box = f"{row('healthy')}//input"
    until(lambda: chrome.find_elements("xpath", box))
    chrome.find_element("xpath", box).click()
    folder = samples.ended(root / "another")
    shows(chrome, "another")
    assert chrome.find_element("xpath", box).is_selected()
    delete(folder)


# What cannot be shown


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/run/garbage", "is not a run, or is corrupt"),
        ("/run/garbage/layers", "is not a run, or is corrupt"),
        ("/run/newer", "newer torchhook"),
        ("/run/nowhere", "there is no run 'nowhere'"),
        ("/run/..%2f..%2fetc", "there is no run"),
        ("/run/dead/nothing", "There is no page"),
        ("/nothing", "There is no page"),
        ("/run/dead/layer?path=nowhere", "Nothing was measured at 'nowhere'"),
        ("/run/dead/layer", "Nothing was measured"),
        ("/compare", "Choose the runs"),
        ("/compare?run=dead&run=garbage", "corrupt"),
        ("/run/%3Cscript%3Ealert(1)%3C%2Fscript%3E", "there is no run '<script>alert(1)</script>'"),
    ],
)
def test_what_is_not_there_is_a_sentence(browse, path, words):
    assert words in text(browse(path))


def test_broken_runs_hide_no_others(browse):
    chrome = browse("/run/garbage")
    chrome.find_element("link text", "torchhook").click()
    until(lambda: chrome.find_elements("link text", "dead"))
    chrome.find_element("link text", "dead").click()
    shows(chrome, "never fire")


def test_odd_choices_of_a_statistic_are_ours(browse):
    chrome = browse("/run/dead/layers?stat=__class__&port=../../x")
    assert drawn(chrome, "layers-heat", "y")[0] == "conv" and "Standard deviation of each" in text(chrome)


@pytest.mark.parametrize("page", ["", "/layers", "/flow"])
def test_a_run_that_is_deleted_while_it_is_shown_says_so(browse, root, page):
    folder = samples.ended(root / f"doomed-{next(NUMBERS)}")
    chrome = browse(f"/run/{folder.name}{page}")
    delete(folder)
    shows(chrome, "there is no run")
    chrome.find_element("link text", "torchhook").click()
    shows(chrome, "healthy")
    assert "doomed" not in text(chrome)


def test_a_run_that_breaks_while_it_is_shown_says_so(browse, root):
    folder = samples.ended(root / "breaking")
    chrome = browse("/run/breaking")
    broken = samples.garbage(root / "broken")
    (broken / FILE).replace(folder / FILE)
    shows(chrome, "is not a run, or is corrupt")
    delete(folder)
    broken.rmdir()


def test_a_run_that_begins_anew_is_shown_anew(browse, root):
    samples.ended(root / "again", range(20))
    chrome = browse("/run/again")
    delete(root / "again")
    samples.ended(root / "again", range(3))
    chrome = browse("/run/again")
    assert drawn(chrome, "overview-loss") == [0, 1, 2]
    delete(root / "again")


# Names that mean harm


@pytest.mark.parametrize("page", ["", "/layers", "/flow", "/graph", "/layers?stat=l2&port=param_grad"])
def test_hostile_names_are_shown_and_do_not_run(browse, page):
    chrome = browse(f"/run/hostile{page}")
    for name in ("<b>bold</b>", "<a href='//x'>link</a>"):
        assert f"{name}.fc" in chrome.execute_script("return document.querySelector('main').textContent")
    for plot in chrome.find_elements("css selector", ".nsewdrag"):
        ActionChains(chrome).move_to_element(plot).perform()  # what is told of a point is a name, too
    assert chrome.execute_script("return window.__pwned") is None
    assert not chrome.find_elements("css selector", "main img, main a[href^=javascript], svg a")
    assert width(chrome) <= DESKTOP[0]


@pytest.mark.parametrize(("page", "axis"), [("layers", "y"), ("flow", "x")])
def test_figures_draw_no_tags(browse, page, axis):
    chrome = browse(f"/run/hostile/{page}")
    ticks = f"return [...document.querySelectorAll('.graph .{axis}tick text')].map(tick => tick.textContent)"
    assert {"<b>bold</b>.fc", "<a href='//x'>link</a>.fc"} <= set(chrome.execute_script(ticks))


def test_layers_with_hostile_names_are_led_to(browse):
    chrome = browse("/run/hostile/layers")
    links = [link.get_attribute("href") for link in chrome.find_elements("css selector", "main li a")]
    paths = [parse_qs(urlsplit(link).query)["path"][0] for link in links]
    assert paths == [f"{name}.{inner}" for name in samples.HOSTILE for inner in ("0", "fc")]
    for number in range(0, len(links), 2):
        link = chrome.find_elements("css selector", "main li a")[number]
        chrome.execute_script("arguments[0].click()", link)
        until(lambda: chrome.find_elements("id", "layer-output"))
        assert text(chrome, "main h2").endswith("Linear"), paths[number]
        chrome.back()
        until(lambda: chrome.find_elements("css selector", "main li a"))
    assert chrome.execute_script("return window.__pwned") is None


def test_the_map_of_a_hostile_layer_is_shown(browse):
    chrome = browse(f"/run/hostile/layer?path={quote(samples.HOSTILE[0] + '.0', safe='')}")
    (picture,) = chrome.find_elements("css selector", "#layer-pictures img")
    assert picture.get_property("naturalWidth") > 1
    assert chrome.execute_script("return window.__pwned") is None


# Large, light and dark


@pytest.fixture(scope="module")
def large(root):
    samples.large(root / "large")
    yield "/run/large"
    delete(root / "large")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["", "/layers", "/flow", "/graph", "/layer?path=blocks.0.0.projection"])
def test_500_layers_and_20000_steps_open_fluidly(browse, large, page, slowdown):
    start = time.monotonic()
    chrome = browse(f"{large}{page}")
    assert time.monotonic() - start < 5 * slowdown  # most of which is reading, at the first look
    sent = "return performance.getEntriesByType('resource').reduce((sum, entry) => sum + entry.decodedBodySize, 0)"
    assert chrome.execute_script(sent) < 12e6  # of which plotly is a third
    frames = """
        const done = arguments[0], times = [];
        const next = now => { times.push(now); times.length < 20 ? requestAnimationFrame(next) : done(times) };
        requestAnimationFrame(next)"""
    times = chrome.execute_async_script(frames)
    assert (times[-1] - times[0]) / 19 < 100  # it scrolls


def test_500_layers_have_500_rows(browse, large):
    chrome = browse(f"{large}/layers")
    assert len(drawn(chrome, "layers-heat", "y")) == 500
    assert 100 <= len(drawn(chrome, "layers-heat")) <= 500
    assert drawn(chrome, "layers-heat")[-1] == 19_999
    chrome = browse(large)
    assert 1000 <= len(drawn(chrome, "overview-loss")) <= 4000
    assert drawn(chrome, "overview-loss")[-1] == 19_999


CONTRAST = """
    const parse = colour => {
        const numbers = colour.match(/[\\d.]+%?/g).map(parseFloat);
        const scale = colour.startsWith('color(') ? 255 : 1;
        return [...numbers.slice(0, 3).map(number => number * scale), numbers[3] ?? 1];
    };
    const over = ([r, g, b, a], under) => [r, g, b].map((part, i) => part * a + under[i] * (1 - a));
    const light = colour => colour.map(part => part / 255)
        .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
    const below = element => {
        const layers = [];
        for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
        return layers.reduceRight((under, layer) => over(layer, under), [255, 255, 255]);
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement, style = getComputedStyle(element);
        const box = element.getBoundingClientRect();
        if (!walker.currentNode.data.trim() || box.width < 2 || style.visibility == 'hidden') continue;
        if (element.closest('script, style, noscript')) continue;
        const ground = below(element);
        const ink = over(parse(element instanceof SVGElement ? style.fill : style.color), ground);
        const [a, b] = [light(ink), light(ground)].sort((a, b) => b - a);
        found.push([(a + 0.05) / (b + 0.05), walker.currentNode.data.trim().slice(0, 40)]);
    }
    return found"""


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/run/dead",
        "/run/dead/layers",
        "/run/dead/layer?path=conv",
        "/run/dead/flow",
        "/run/dead/graph",
        "/compare?run=dead&run=healthy",
        "/run/garbage",
    ],
)
def test_all_text_can_be_read_in_light_and_dark(browse, path):
    for theme in ("light", "dark"):
        chrome = browse(path, theme=theme)
        assert unreadable(chrome) == []
        ground = chrome.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (int(ground.split("(")[1].split(",")[0]) < 128) is (theme == "dark")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_an_open_menu_can_be_read(browse, theme):
    chrome = browse("/run/dead/layers", theme=theme)
    chrome.find_element("id", "layers-stat").click()
    until(lambda: chrome.find_elements("class name", "dash-dropdown-option"))
    assert unreadable(chrome, "Share of zeros") == []


def unreadable(chrome, expected="torchhook"):
    """Words whose contrast is less than WCAG asks for."""
    found = chrome.execute_script(CONTRAST)
    assert expected in [words for _, words in found]
    return [(round(contrast, 1), words) for contrast, words in found if contrast < 4.5]


def test_ranks_are_shown_by_layer(browse, root):
    """Three ranks, of which one has larger activations in the last step and was lost."""
    samples.ranked(root / "ranked").end(Report(model="Net"), "ended")
    for theme, size in (("light", DESKTOP), ("dark", PHONE)):
        chrome = browse("/run/ranked/ranks", size, theme)
        rows = [row.text.split() for row in chrome.find_elements("css selector", "#ranks-table tbody tr")]
        assert [(row[0], row[1], row[3]) for row in rows] == [
            ("0", "a", "running"),
            ("1", "b", "lost"),
            ("2", "a", "running"),
        ]
        heat = "return document.querySelector('#ranks-heat .js-plotly-plot').data[0]"
        drawn = chrome.execute_script(heat)
        assert drawn["x"] == [0, 1, 2] and drawn["y"] == ["fc", "head"] and width(chrome) <= size[0]
        assert drawn["z"][1][0] == pytest.approx(2) and drawn["z"][0][0] == pytest.approx(0)  # of 100 and 1
    delete(root / "ranked")


def test_the_ranks_begin_where_something_was_measured(browse, root):
    log = samples.ranked(root / "ranked")
    chrome = browse("/run/ranked/ranks")
    assert text(chrome, "#ranks-step-text") == "step 2"
    tab_to(chrome, "#ranks-step [role=slider]")
    press(chrome, Keys.ARROW_RIGHT)
    shows(chrome, "step 3", "#ranks-step-text")
    shows(chrome, "not measured", "#ranks-heat")
    press(chrome, Keys.HOME)
    shows(chrome, "step 0", "#ranks-step-text")
    log.write(Entry(4, 0.0, Snapshot({}), ranks=RankStep(4, 3)))
    slider = chrome.find_element("css selector", "#ranks-step [role=slider]")
    until(lambda: slider.get_attribute("aria-valuemax") == "4", "the page does not grow")
    delete(log.folder)


def test_the_ranks_begin_at_the_step_of_a_finding(browse, root):
    log = samples.ranked(root / "jumping", [Finding("TH602", "warning", "the loss jumped", step=1)])
    assert text(browse("/run/jumping/ranks"), "#ranks-step-text") == "step 1"
    delete(log.folder)


def test_a_run_of_one_process_has_no_page_of_ranks(browse):
    chrome = browse("/run/healthy")
    assert "Ranks" not in text(chrome, "nav") and "Model" in text(chrome, "nav")
    chrome = browse("/run/healthy/ranks")
    assert "One process trained alone" in text(chrome)
