"""Which nodes and wires of a model are drawn."""

from torchhook.dashboard.folding import drawn_wires, seen_as, unfolded_first


def test_a_residual_stream_is_a_chain_with_skips():
    layers = [f"h.{number}" for number in range(20)]
    sources = {path: layers[:number] for number, path in enumerate(layers)}  # each gets the sum of all before
    wires = drawn_wires(sources, layers)
    assert [(f"h.{number}", f"h.{number + 1}") in wires for number in range(19)] == [True] * 19
    assert len(wires) == 19 + 18  # and one skip each


def test_branches_all_stay():
    sources = {"left": ["stem"], "middle": ["stem"], "right": ["stem"], "last": ["left", "middle", "right"]}
    wires = drawn_wires(sources, ["stem", "left", "middle", "right", "last"])
    assert sorted(wires) == sorted((source, path) for path, some in sources.items() for source in some)


def test_a_layer_that_is_used_again_has_a_wire_back():
    assert drawn_wires({"relu": ["conv1", "conv2"], "conv2": ["relu"]}, ["conv1", "relu", "conv2"]) == [
        ("conv1", "relu"),
        ("conv2", "relu"),
        ("relu", "conv2"),
    ]


def test_a_small_model_is_unfolded_and_a_large_one_up_to_its_blocks():
    small = ["stem", "blocks.0.conv", "blocks.0.relu", "head"]
    assert unfolded_first(small) == ["blocks", "blocks.0"]
    large = [f"net.h.{block}.{part}.{layer}" for block in range(12) for part in ("attn", "mlp") for layer in "abc"]
    assert unfolded_first(large) == ["net", "net.h", *sorted(f"net.h.{block}" for block in range(12))]
    assert seen_as("net.h.3.attn.a", unfolded_first(large)) == "net.h.3.attn"
