"""The page of a saved result, whatever verb it comes from: each kind of its parts has its place."""

from __future__ import annotations

import time

from dash import dcc, html
from dash.development.base_component import Component
from dash_ag_grid import AgGrid

from torchhook.core.errors import FileError
from torchhook.core.findings import Report
from torchhook.core.parts import Bars, Matrix, Part, Picture, Sentence, Table
from torchhook.core.result import SUFFIX, Saved, read
from torchhook.dashboard.library import Library
from torchhook.dashboard.pages.runs import THEME
from torchhook.dashboard.parts import address, card, graph, section
from torchhook.render.figures.results import caption, drawn
from torchhook.render.to_html import PLOTS
from torchhook.render.words import by_reason, heading, printable, scope, shown

_ROWS = 10_000  # of a table
_HIGH, _ROW = 560, 36  # pixels: greatest height of a table, height of a row


def listed(library: Library) -> Component:
    """Links to the results in the folder, newest first; nothing if there are none."""
    links = [html.Li([_link(name), " ", _written(library, name)]) for name in _names(library)]
    return section("Results", html.Ul(links)) if links else html.Div()


def page(library: Library, name: str) -> tuple[Component, Component]:
    """The page of a result, and its header."""
    if name not in _names(library):  # so that a name cannot lead to another folder
        raise FileError(f"there is no result {name!r} in {str(library.root)!r}")
    result = read(library.root / name)
    kind = heading(result._kind()) if isinstance(result, Saved) else f"Report on {result.model}"
    header = html.Div([html.H1(printable(kind)), html.P(printable(name), className="quiet")])
    return html.Div([_shown(number, part) for number, part in enumerate(result._parts())]), header


def _names(library: Library) -> list[str]:
    if library.only is not None or library.only_result is not None:
        return [library.only_result] if library.only_result else []
    files = [file for file in library.root.glob(f"*{SUFFIX}") if file.is_file() and not file.is_symlink()]
    return [file.name for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)]


def _link(name: str) -> Component:
    return dcc.Link(printable(name), href=address(name, kind="result"))


def _written(library: Library, name: str) -> Component:
    at = time.localtime((library.root / name).stat().st_mtime)
    return html.Span(time.strftime("%Y-%m-%d %H:%M", at), className="quiet")


def _shown(number: int, part: Part) -> Component:
    if isinstance(part, Sentence):
        return html.P(printable(part.text), className="lead" if number == 0 else "quiet")
    if isinstance(part, Report):
        return _report(part)
    if isinstance(part, Picture):
        return section(part.title, html.Img(src=part.address(), alt=part.title, className="drawn"))
    if isinstance(part, (Bars, Matrix)):
        return section(printable(part.title), graph(f"result-{number}", drawn(part), printable(caption(part))))
    return section(printable(part.title), _grid(number, part), note=_left_out(part))


def _report(report: Report) -> Component:
    cards = [card("", finding, ()) for finding in report.findings]
    figures = [
        section(name, graph(f"result-{name.lower().replace(' ', '-')}", figure, said))
        for name, (draw, said) in PLOTS.items()
        if (figure := draw(report)) is not None
    ]
    found = section("Findings", *(cards or [html.P("Nothing found.", className="quiet")]))
    return html.Div([found, *figures, *_checks(report)])


def _checks(report: Report) -> list[Component]:
    """What was checked, and what was not, with the reason."""
    skipped = [f"{', '.join(codes)}: {reason}" for reason, codes in by_reason(report.skipped).items()]
    lines = [html.Li(line) for line in (*skipped, *map(printable, report.notes))]
    return [section("Checked", html.P(scope(report)), html.Ul(lines))] if report.checked or lines else []


def _left_out(table: Table) -> str:
    return f"The first {_ROWS:,} of {len(table.rows):,} rows." if len(table.rows) > _ROWS else ""


def _grid(number: int, table: Table) -> Component:
    """The table, to sort and to filter. Columns are numbered, because a grid reads a dot in a name as a path."""
    columns = [
        {
            "field": str(column),
            "headerName": printable(name),
            "type": "rightAligned" if table.is_number(column) else None,
            "filter": "agNumberColumnFilter" if table.is_number(column) else "agTextColumnFilter",
        }
        for column, name in enumerate(table.header)
    ]
    rows = [{str(column): _cell(value) for column, value in enumerate(row)} for row in table.rows[:_ROWS]]
    return AgGrid(
        id=f"result-{number}",
        columnDefs=columns,
        rowData=rows,
        columnSize="autoSize",
        dashGridOptions={"theme": {"function": THEME}, "rowHeight": _ROW, "animateRows": False},
        style={"height": f"{min(_HIGH, _ROW * (len(rows) + 2))}px", "width": "100%"},
    )


def _cell(value: object) -> object:
    """A number as it is read, so that it sorts; text without what would harm a page."""
    if isinstance(value, float):
        text = shown(value)
        return float(text) if text.lower() not in ("nan", "infinity", "-infinity") else text
    return printable(value) if isinstance(value, str) else value
