"""Writes docs/hard_places.md from what the tests that are marked with ``matrix`` showed.

python -m pytest -m matrix --matrix=docs/matrix/cpu.json      # in each environment
python tests/matrix.py docs/matrix/*.json > docs/hard_places.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HEAD = """# Hard places

Where hooks usually fail: each works, or refuses with the reason and the remedy. Every line is proven by a test. A
column is one run of them (– : not run there); the last one has the number of the test in
[the list below](#the-tests). `make matrix` writes this page anew.

Some things to know beside the table:

- Inside a compiled graph a tap is an op that runs in order and is never optimised away; edits are traced like the model
  itself. Graphs with taps are not taken from the compiler's cache on disk: attaching compiles.
- A model called inside a compiled function has no passes of its own, unless it was armed with `torchhook.arm(model)`
  before: then the newest call of each site is what `keep=1` keeps.
- What was compiled with CUDA graphs (`mode="reduce-overhead"`) is compiled without them while taps are there.
  `static=True` is for graphs that you capture yourself.
- With checkpointing and an edit, run the backward inside the block: it computes the forward again.
- That no gradient reaches a place is an answer, not a miss: it is listed in `.silent` and warned of, not raised.

"""


def page(results: list[dict]) -> str:
    """The page as Markdown: a line a claim, a column an environment; the tests have long names, and a list below."""
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
