"""What a build of the site puts into its pages: the rules and the commands, as they are in the code.

A page says where: ``<!-- rules -->`` and ``<!-- commands -->``. What its snippets need before them, ``<!-- before …
-->``, is for tests/test_docs.py and is left out.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

_BEFORE = re.compile(r"^<!-- before\n.*?^-->\n", re.M | re.S)
_BOLD = re.compile(r"\[bold\](.*?)\[/\]", re.S)
_FAMILIES = {
    "TH1": "Not finite",
    "TH2": "Units",
    "TH3": "Beginnings",
    "TH4": "Gradients",
    "TH5": "Updates",
    "TH6": "Losses",
    "TH7": "Batch norms and modes",
    "TH8": "Representations",
    "TH9": "Drift",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page as it is shown."""
    markdown = _BEFORE.sub("", markdown)
    for mark, made in (("<!-- rules -->", rules), ("<!-- commands -->", commands)):
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return markdown


def rules() -> str:
    """All rules, by family: what each says of itself, as ``torchhook rules CODE`` does."""
    from torchhook.rules import chosen

    parts = []
    for family, title in _FAMILIES.items():
        parts += [f"## {family}: {title}", *map(_about, chosen([family]))]
    return "\n\n".join(parts)


def commands() -> str:
    """All commands: what each says of itself with ``--help``."""
    from torchhook.cli.app import command

    return "\n\n".join(_told(f"torchhook {name}", one) for name, one in _leaves(command))


def _about(rule: Any) -> str:
    needs = ", ".join([*map(str, rule.needs), *rule.facts]) or "nothing that runs"
    said = {"What to do": rule.hint, "When it is wrong": rule.wrong, "Needs": needs}
    return "\n\n".join(
        [
            f"### {rule.code} {rule.name} {{ #{rule.code.lower()} }}",
            f"*{rule.severity}*",
            inspect.cleandoc(type(rule).__doc__ or ""),
            *(f"**{name}.** {text}" for name, text in said.items() if text),
        ]
    )


def _leaves(command: Any, path: str = "") -> Any:
    """Every command that has no commands below it, by what one types."""
    for name, one in command.commands.items():
        if hasattr(one, "commands"):
            yield from _leaves(one, f"{path}{name} ")
        else:
            yield f"{path}{name}", one


def _told(name: str, command: Any) -> str:
    """The sentences, the examples and the options of a command."""
    text = inspect.cleandoc(command.help).replace("\\[", "[")
    usage = " ".join([name, *(_bracketed(one) for one in command.params if one.param_type_name == "argument")])
    examples = "\n".join(line.strip() for found in _BOLD.findall(text) for line in found.splitlines())
    rows = [_row(one) for one in command.params if getattr(one, "help", None)]
    table = ["| | |", "|---|---|", *rows] if rows else []
    parts = [f"## {name}", f"`{usage}`", _BOLD.sub("", text).strip(), f"```sh\n{examples}\n```" if examples else ""]
    return "\n\n".join([*filter(None, parts), "\n".join(table)])


def _bracketed(argument: Any) -> str:
    shown = argument.metavar or argument.name.upper()
    return shown if argument.required else f"[{shown}]"


def _row(parameter: Any) -> str:
    """An option or argument: how it is written, what it is."""
    if parameter.param_type_name == "argument":
        spelt = parameter.metavar or parameter.name.upper()
    else:
        value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
        spelt = ", ".join([*parameter.opts, *parameter.secondary_opts]) + value
    plain = re.sub(r"([|_*])", r"\\\1", parameter.help)
    return f"| `{spelt}` | {plain} |"
