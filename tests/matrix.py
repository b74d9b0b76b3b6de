"""Writes docs/hard_places.md from the results of the tests that are marked with ``matrix``.

python -m pytest -m matrix --matrix=docs/matrix/cpu.json      # in each environment
python tests/matrix.py docs/matrix/*.json > docs/hard_places.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HEAD = """# Hard places

These are the places where hooks usually fail. Each works, or is refused with the reason and the remedy, and a test
proves every line. Each column is one environment in which the tests ran (– means not run there); the last column has
the number of the test in [the list below](#the-tests). `make matrix` regenerates this page.

Also good to know:

- Inside a compiled graph a tap is an op that runs in order and is never optimised away; edits are traced like the model
  itself. Graphs with taps are not loaded from the compiler's cache on disk: attaching taps compiles the model.
- A model that is called inside a compiled function has no passes of its own, and `keep=1` keeps the newest call of each
  site, unless `torchhook.arm(model).open()` was called before compiling.
- What was compiled with CUDA graphs (`mode="reduce-overhead"`) runs without them while taps are attached.
  `static=True` is for graphs that you capture yourself.
- With checkpointing and an edit, run the backward inside the block, since it repeats the forward.
- A missing gradient is an answer, not a miss: it is listed in `.silent` with a warning, and does not raise.

"""


def page(results: list[dict]) -> str:
    """The page as Markdown: one line per claim, one column per environment, and the names of the tests in a list."""
    environments = [result["environment"] for result in results]
    claims: dict[tuple[str, str], str] = {}
    for result in results:
        for row in result["rows"]:
            claims.setdefault((row["place"], row["claim"]), row["test"])
    lines = [f"| where | what holds | {' | '.join(environments)} | test |", "|---|---|" + "---|" * (len(results) + 1)]
    ordered = sorted(claims.items(), key=lambda item: item[0][0].lower())
    tests = list(dict.fromkeys(test for _, test in ordered))
    for (place, claim), test in ordered:
        cells = [_outcome(result, place, claim) for result in results]
        lines.append(f"| {place} | {claim} | {' | '.join(cells)} | {tests.index(test) + 1} |")
    lines += ["", "## The tests", "", *(f"{number}. `{test}`" for number, test in enumerate(tests, 1))]
    return HEAD + "\n".join(lines) + "\n"


def _outcome(result: dict, place: str, claim: str) -> str:
    found = [row["outcome"] for row in result["rows"] if (row["place"], row["claim"]) == (place, claim)]
    if "failed" in found:
        return "**fails**"
    return "✓" if "passed" in found else "–"


if __name__ == "__main__":
    sys.stdout.write(page([json.loads(Path(file).read_text()) for file in sys.argv[1:]]))
