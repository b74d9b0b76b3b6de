"""A report for people, machines and teams: one function a format, each from a `Report` to text.

`save` picks the format by the suffix of the file; JSON is the contract, which `load` reads back, the others are views.
"""

from torchhook.render.files import load, save
from torchhook.render.to_html import html
from torchhook.render.to_json import json
from torchhook.render.to_junit import junit
from torchhook.render.to_markdown import markdown
from torchhook.render.to_terminal import terminal

__all__ = ["html", "json", "junit", "load", "markdown", "save", "terminal"]
