"""Reports as HTML, JSON, JUnit XML, Markdown and terminal output, one function per format.

`save` picks the format by the suffix of the file, and takes other results, too. `load` reads JSON and results back.
"""

from torchhook.core.result import Saved
from torchhook.render.files import load, save
from torchhook.render.to_html import html
from torchhook.render.to_json import json
from torchhook.render.to_junit import junit
from torchhook.render.to_markdown import markdown
from torchhook.render.to_terminal import terminal

__all__ = ["Saved", "html", "json", "junit", "load", "markdown", "save", "terminal"]
