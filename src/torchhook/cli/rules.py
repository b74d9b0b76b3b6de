"""``torchhook rules``: what can be found, and all about one of it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated

import typer

from torchhook.cli.errors import told

if TYPE_CHECKING:
    from torchhook.rules import Rule


def rules(
    code: Annotated[str | None, typer.Argument(help="A code or name, as TH201; all are listed without.")] = None,
) -> None:
    """List the rules, or tell all about one: what it finds, by which numbers, what to do, when it is wrong."""
    with told():
        from rich.console import Console
        from rich.table import Table

        from torchhook.rules import chosen

        console = Console()
        if code is not None:
            for rule in chosen([code]):
                console.print(_all_about(rule))
            return
        table = Table("code", "name", "severity", "what it finds", box=None, pad_edge=False, header_style="bold")
        for rule in chosen():
            table.add_row(rule.code, rule.name, str(rule.severity), _docs(rule).split("\n\n")[0])
        console.print(table)


def _all_about(rule: Rule) -> str:
    from rich.markup import escape

    needs = ", ".join(str(need) for need in rule.needs) or "nothing that runs"
    parts = {"what to do": rule.hint, "when it is wrong": rule.wrong, "needs": needs}
    said = "\n".join(f"[bold]{name}[/]: {escape(text)}" for name, text in parts.items() if text)
    return f"[bold]{rule.code} {rule.name}[/] ({rule.severity})\n\n{escape(_docs(rule))}\n\n{said}\n"


def _docs(rule: Rule) -> str:
    """What the rule says of itself, each paragraph in a line."""
    paragraphs = inspect.cleandoc(type(rule).__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
