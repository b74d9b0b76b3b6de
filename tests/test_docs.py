"""The pages in docs/ are what the tests say."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def claims():
    """What the marks in all test files claim, read without running them."""
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.matrix":
                yield tuple(ast.literal_eval(argument) for argument in node.args)


def test_the_page_of_hard_places_has_every_claim_and_none_fails():
    page = (TESTS.parent / "docs" / "hard_places.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    found = list(claims())
    assert len(found) > 40 and len(rows) == len(set(found)), "run make matrix"
    for place, claim in found:
        (row,) = [row for row in rows if row.startswith(f"| {place} | {claim} |")]
        assert "✓" in row, row
    assert "fails" not in page.split("|---")[1]
