"""``torchhook rules``: list the rules, or explain one."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchhook.cli.loaders import split, wrong

if TYPE_CHECKING:
    from torchhook.rules import Rule


def rules(
    rule: Annotated[
        str | None,
        typer.Argument(metavar="RULE", help="A code, the beginning of one, or a name; all rules if omitted."),
    ] = None,
) -> None:
    """List the rules, or explain one: what it finds, what to do, when it is wrong.

    [bold]torchhook rules[/]
    [bold]torchhook rules TH201[/]
    [bold]torchhook rules dead-units[/]
    """
    from torchhook.rules import chosen

    console = Console(highlight=False)
    if rule is None:
        _list(console, chosen())
        return
    try:
        found = chosen(split([rule]))
    except ValueError as error:
        raise wrong("RULE", str(error)) from None
    console.print("\n\n".join(map(_explanation, found)))


def _list(console: Console, rules: list[Rule]) -> None:
    """Print a table on a terminal; elsewhere one line per rule, which is easy to search."""
    header = ["code", "name", "severity", "finds"]
    rows = [
        [rule.code, rule.name, str(rule.severity), _paragraphs(rule)[0].split(". ")[0].rstrip(".")] for rule in rules
    ]
    if not console.is_terminal:
        from torchhook.core.text import table

        typer.echo(table(header, rows))
        return
    shown = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        shown.add_row(*map(escape, row))
    console.print(shown)


def _explanation(rule: Rule) -> str:
    needs = ", ".join([*map(str, rule.needs), *rule.facts]) or "nothing"
    parts = {"Cause": rule.cause, "What to do": rule.hint, "When it is wrong": rule.wrong, "Needs": needs}
    title = f"[bold]{rule.code} {rule.name}[/] ({rule.severity})"
    advice = [f"[bold]{name}:[/] {escape(text)}" for name, text in parts.items() if text]
    return "\n\n".join([title, *map(escape, _paragraphs(rule)), *advice])


def _paragraphs(rule: Rule) -> list[str]:
    """The docstring of a rule, each paragraph as one line."""
    return [" ".join(text.split()) for text in inspect.cleandoc(type(rule).__doc__ or "").split("\n\n")]
