import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from specimens import Shared, resnet18
from torchhook import SelectionError, Selector, glob, marked, of_type, regex, select
from torchhook.core.selection import walk

SEGMENTS = st.text("ab1", min_size=1, max_size=3)
PATHS = st.lists(SEGMENTS, min_size=1, max_size=4).map(".".join)
PATTERNS = st.lists(
    st.sampled_from(["a", "b", "1", "*", "?", "**", "a*", "*b", "[ab]", "[!a]*"]), min_size=1, max_size=4
)


def naive(pattern: list[str], path: list[str]) -> bool:
    """Segment by segment; ``**`` stands for any number of them, at the end for at least one."""
    if not pattern:
        return not path
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        if not rest:
            return bool(path)
        return any(naive(rest, path[skip:]) for skip in range(len(path) + 1))
    return bool(path) and matches(head, path[0]) and naive(rest, path[1:])


def matches(pattern: str, text: str) -> bool:
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(matches(pattern[1:], text[skip:]) for skip in range(len(text) + 1))
    if pattern[0] == "[":
        inside, _, rest = pattern[1:].partition("]")
        hit = bool(text) and ((text[0] in inside[1:]) is False if inside[0] == "!" else text[0] in inside)
        return hit and matches(rest, text[1:])
    return bool(text) and pattern[0] in (text[0], "?") and matches(pattern[1:], text[1:])


@given(PATTERNS, PATHS)
def test_globs_mean_what_they_say(pattern, path):
    assert glob(".".join(pattern)).test(path, nn.ReLU(), None) == naive(pattern, path.split("."))


@given(st.lists(st.sampled_from(["a*", "*.b", "**", "a", "?.1"]), min_size=1, max_size=3), PATHS)
def test_selectors_are_a_boolean_algebra(patterns, path):
    tests = [glob(pattern) for pattern in patterns]
    hits = [selector.test(path, nn.ReLU(), None) for selector in tests]
    every, some = tests[0], tests[0]
    for selector in tests[1:]:
        every, some = every & selector, some | selector
    assert every.test(path, nn.ReLU(), None) == all(hits)
    assert some.test(path, nn.ReLU(), None) == any(hits)
    assert (~some).test(path, nn.ReLU(), None) == (not any(hits))
    assert Selector.union(patterns).test(path, nn.ReLU(), None) == any(hits)


def test_no_query_means_every_leaf():
    net = resnet18()
    assert list(select(net)) == [path for path, module in net.named_modules() if not list(module.children())]
    assert list(select(nn.ReLU())) == [""]


def test_the_root_is_selected_by_the_empty_string_alone():
    net = nn.Sequential(nn.ReLU())
    assert select(net, "") == {"": net}
    for query in ("**", nn.Module, re.compile(".*"), lambda path, module: True, glob("**") | of_type(nn.Sequential)):
        assert list(select(net, query)) == ["0"]
    with pytest.raises(SelectionError):
        select(net, net)


def test_several_queries_are_a_union_in_the_models_order():
    net = resnet18()
    assert list(select(net, "fc", "conv1", "layer1", "conv*")) == ["conv1", "layer1", "fc"]


def test_a_module_is_found_under_each_of_its_names():
    net = Shared()
    assert list(select(net, net.second)) == ["first", "second"]
    assert list(select(net, nn.Linear)) == ["first", "second"]
    assert select(net, "second") == {"second": net.first}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("layr4", "no module matches 'layr4'; nearest: 'layer4'"),
        ("layer4.7.*", "no module matches 'layer4.7.\\*'"),
        (nn.LSTM, "no module matches LSTM"),
        (re.compile("zzz"), "no module matches regex 'zzz'"),
        (lambda path, module: False, "predicate"),
        (glob("x*") & of_type(nn.ReLU), "no module matches"),
    ],
)
def test_a_query_that_matches_nothing_names_itself_and_the_nearest(query, message):
    with pytest.raises(SelectionError, match=message):
        select(resnet18(), "conv1", query)


@pytest.mark.parametrize("query", [3, None, [3], int, b"conv1"])
def test_a_query_of_another_kind_says_what_to_pass(query):
    with pytest.raises(SelectionError, match="pass a path, a glob"):
        select(nn.Sequential(nn.ReLU()), query)


def test_malformed_queries():
    with pytest.raises(SelectionError, match="malformed"):
        glob("[z-a]")
    with pytest.raises(SelectionError, match="of_type"):
        of_type("Linear")
    with pytest.raises(SelectionError, match="two queries"):
        of_type(nn.ReLU) | marked("x")
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not str"):
        select("resnet")
    with pytest.raises(SelectionError, match="marks"):
        select(nn.Sequential(nn.ReLU()), marked("x"))


def test_names_with_odd_characters():
    net = nn.ModuleDict({"a:b": nn.ReLU(), "c*": nn.ReLU(), "cd": nn.ReLU()})
    assert list(select(net, "a:b")) == ["a:b"]
    assert list(select(net, "c*")) == ["c*"]  # an exact path comes before a glob
    assert list(select(net, regex(r"^c"))) == ["c*", "cd"]


def test_a_module_that_contains_itself_ends_the_walk():
    net = nn.Sequential(nn.ReLU())
    net[0].parent = net
    assert [path for path, _ in walk(net)] == ["", "0"]
    assert [path for path, _ in walk(resnet18())] == [path for path, _ in resnet18().named_modules()]
