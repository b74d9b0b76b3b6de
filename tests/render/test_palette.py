"""One palette: no colour is written anywhere but in palette.py and in style sheets, which have the same colours."""

import re
from pathlib import Path

import pytest

import torchhook
from torchhook.render import palette

SOURCE = Path(torchhook.__file__).parent
ROOMS = ("core", "compare", "dashboard", "explain", "plot", "render", "training")
HEX = re.compile(r"#(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})\b")


def files(*suffixes):
    found = [file for room in ROOMS for file in (SOURCE / room).rglob("*") if file.suffix in suffixes]
    return [file for file in found if ".min." not in file.name and file.name != "palette.py"]


def test_no_colour_is_written_outside_the_palette():
    written = {str(file.relative_to(SOURCE)): HEX.findall(file.read_text()) for file in files(".py", ".js")}
    assert len(written) > 50
    assert {file: found for file, found in written.items() if found} == {}


@pytest.mark.parametrize("name", ["render/page.css", "core/card.css"])
def test_style_sheets_have_the_colours_of_the_palette(name):
    sheet = (SOURCE / name).read_text()
    for severity, colour in palette.SEVERITY.items():
        assert set(re.findall(rf"--{severity}: (#\w+)|\.{severity} {{ --hue: (#\w+)", sheet)) <= {
            (colour, ""),
            ("", colour),
        }
        assert colour in sheet, severity
    if name == "render/page.css":
        for ink, paper in palette.PAGES.values():
            assert f"--paper: {paper}; " in sheet and f"--ink: {ink}; " in sheet
        assert f"--quiet: {palette.QUIET}" in sheet and f"--good: {palette.GREEN}" in sheet


def test_no_two_colours_that_mean_something_are_the_same():
    meanings = [palette.ZERO, palette.NONFINITE, palette.UNMEASURED, palette.QUIET, *palette.LINES]
    assert len(set(meanings)) == len(meanings)


def test_no_style_sheet_changes_the_colours_of_figures():
    """In the dark, too, a line has the colour of its legend, and zero the one that it has in every other plot."""
    assert [file.name for file in files(".css") if "filter:" in file.read_text()] == []
