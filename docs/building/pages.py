"""Adds generated content to the site: the rules, the commands and the examples, taken from the code.

Rules and commands replace the markers ``<!-- rules -->`` and ``<!-- commands -->`` in a page. The set-up code of its
snippets, ``<!-- before … -->``, is only for tests/test_docs.py and is removed. Every file in examples/ becomes a page,
and links to the file point to that page.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_EXAMPLES = Path(__file__).parents[2] / "examples"
_EXAMPLE = re.compile(r"\]\((?:\.\./(?=examples/))?((?:examples/)?\w+)\.(?:py|ipynb|md)\)")
_BEFORE = re.compile(r"^<!-- before\n.*?^-->\n", re.M | re.S)
_BOLD = re.compile(r"\[bold\](.*?)\[/\]", re.S)
_FAMILIES = {
    "TH1": "Non-finite values",
    "TH2": "Units",
    "TH3": "Initialization and inputs",
    "TH4": "Gradients",
    "TH5": "Updates and the loop",
    "TH6": "Losses, outputs and targets",
    "TH7": "Batch norm and train/eval modes",
    "TH8": "Representations",
    "TH9": "Drift",
    "TR1": "Several ranks",
}


def on_files(files: Any, *, config: Any) -> Any:
    """Add a page for each example to the pages of docs/."""
    makers = {".md": Path.read_text, ".py": _script, ".ipynb": _notebook}
    for path in sorted(_EXAMPLES.iterdir()):
        if path.suffix in makers:
            content = makers[path.suffix](path)
            files.append(File.generated(config, f"examples/{path.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the Markdown of a page with the generated content filled in."""
    markdown = _EXAMPLE.sub(r"](\1.md)", _BEFORE.sub("", markdown))
    for mark, made in (("<!-- rules -->", rules), ("<!-- commands -->", commands)):
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return markdown


def rules() -> str:
    """All rules by family, described as in ``torchhook rules CODE``."""
    from torchhook.rules import chosen

    parts = []
    for family, title in _FAMILIES.items():
        parts += [f"## {family}: {title}", *map(_about, chosen([family]))]
    return "\n\n".join(parts)


def commands() -> str:
    """All commands, described as in ``--help``."""
    from torchhook.cli.app import command

    return "\n\n".join(_described(f"torchhook {name}", one) for name, one in _leaves(command))


def _script(path: Path) -> str:
    """A page with the code of a script, titled with the first line of its docstring."""
    code = path.read_text(encoding="utf-8")
    question = code.splitlines()[0].strip('"')
    return f"# {question}\n\n`examples/{path.name}`\n\n```python\n{code}```\n"


def _notebook(path: Path) -> str:
    """A page with the cells of a notebook and their outputs."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += map(_output, cell.get("outputs", ()))
    return "\n\n".join([parts[0], f"`examples/{path.name}`", *parts[1:]])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![plot drawn by the cell](data:image/png;base64,{''.join(data['image/png'].split())})"
    text = "".join(output.get("text") or data["text/plain"])
    return f"```text\n{text.rstrip()}\n```"


def _about(rule: Any) -> str:
    from torchhook.rules import History

    needs = rule.missing(History()).removeprefix("needs ") or "nothing"  # an empty history lacks everything
    said = {"What to do": rule.hint, "When it is wrong": rule.wrong, "Needs": f"{needs[0].upper()}{needs[1:]}."}
    return "\n\n".join(
        [
            f"### {rule.code} {rule.name} {{ #{rule.code.lower()} }}",
            f"*{rule.severity}*, cause `{rule.cause}`",
            inspect.cleandoc(type(rule).__doc__ or ""),
            *(f"**{name}.** {text}" for name, text in said.items() if text),
        ]
    )


def _leaves(command: Any, path: str = "") -> Any:
    """Every command without subcommands, with the words that call it."""
    for name, one in command.commands.items():
        if hasattr(one, "commands"):
            yield from _leaves(one, f"{path}{name} ")
        else:
            yield f"{path}{name}", one


def _described(name: str, command: Any) -> str:
    """The description, examples and options of a command."""
    text = inspect.cleandoc(command.help).replace("\\[", "[")
    usage = " ".join([name, *(_bracketed(one) for one in command.params if one.param_type_name == "argument")])
    examples = "\n".join(line.strip() for found in _BOLD.findall(text) for line in found.splitlines())
    rows = [_row(one) for one in command.params if getattr(one, "help", None)]
    table = ["| option | meaning | default |", "|---|---|---|", *rows] if rows else []
    parts = [f"## {name}", f"`{usage}`", _BOLD.sub("", text).strip(), f"```sh\n{examples}\n```" if examples else ""]
    return "\n\n".join([*filter(None, parts), "\n".join(table)])


def _bracketed(argument: Any) -> str:
    shown = argument.metavar or argument.name.upper()
    return shown if argument.required else f"[{shown}]"


def _row(parameter: Any) -> str:
    """The table row of an option or argument: its spelling, meaning and default."""
    if parameter.param_type_name == "argument":
        spelt = parameter.metavar or parameter.name.upper()
    else:
        value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
        spelt = ", ".join([*parameter.opts, *parameter.secondary_opts]) + value
    plain = re.sub(r"([|_*])", r"\\\1", parameter.help)
    return f"| `{spelt}` | {plain} | {_default(parameter)} |"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "*required*"
    value = getattr(parameter.default, "value", parameter.default)  # for an enum, the word that a user types
    if isinstance(value, bool) and parameter.secondary_opts:
        return f"`{(parameter.opts if value else parameter.secondary_opts)[0]}`"
    return "" if value is None or value is False else f"`{value}`"
