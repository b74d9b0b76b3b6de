"""Two models that should be the same, each recorded in a process of its own: nothing parts, and faults have a name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_pairs import HEALTHY, PAIRS, ids, recording_of

from torchhook import diff, record, render
from torchhook.render.figures.results import drawn
from torchhook.render.palette import GREY

HERE = Path(__file__).parent
ENGINE = HERE / "engine.toml"
TOGETHER = ("gpt2", "llama-fused", "llama-split", "bfloat16", "lora", "engine")  # sides that share a process
SEVERAL = ("tensor-parallel-2", "tensor-parallel-4", "fully-sharded", "engine-parallel")

COMBINED = ("late mask", "swapped", "eps")

ATTENTION, NORM, HEAD, DOWN, QUERIES = range(5)
WHERE = {
    "base": (ATTENTION, 0),
    "mask": (ATTENTION, 0),
    "scale": (ATTENTION, 0),
    "dropout": (ATTENTION, 0),
    "late mask": (ATTENTION, 2),
    "late scale": (ATTENTION, 1),
    "eps": (NORM, 1),
    "swapped": (QUERIES, 1),
    "head": (HEAD, 0),
    "bias": (DOWN, 2),
    "lora scale": (QUERIES, 1),
    "lora left out": (DOWN, 1),
    "lora swapped": (QUERIES, 1),
    "lora base": ("model.layers.1.self_attn.v_proj", 1),
    "lora norm": (NORM, 1),
    "lora head": (HEAD, 0),
}
GPT2 = ("transformer.h.{}.attn", "transformer.h.{}.ln_2", "lm_head", "transformer.h.{}.mlp.c_proj")
GPT2 = (*GPT2, "transformer.h.{}.attn.c_attn")
HUGGING = ("model.layers.{}.self_attn", "model.layers.{}.post_attention_layernorm", "lm_head")
HUGGING = (*HUGGING, "model.layers.{}.mlp.down_proj", "model.layers.{}.self_attn.q_proj")
OWN = ("blocks.{}.attn", "blocks.{}.norm2", "head", "blocks.{}.mlp.down", "blocks.{}.attn.wq")
FUSED = (*OWN[:-1], "blocks.{}.attn.qkv")
NAMES = {"gpt2": GPT2, "bfloat16": FUSED, "inductor": FUSED, "tensor-parallel-2": OWN, "tensor-parallel-4": OWN}
NAMES |= {"fully-sharded": OWN}


def module_of(pair, fault):
    """The path in a of the module where a fault is."""
    what, layer = WHERE[fault]
    return what if isinstance(what, str) else NAMES.get(pair, HUGGING)[what].format(layer)


def run(arguments):
    paths = os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def found(folder, pair, variant, keep):
    a, b = (recording_of(folder, pair, *side, keep) for side in (("a", HEALTHY), ("b", variant)))
    return diff(a, b, match=ENGINE if pair.startswith("engine") else None)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [TOGETHER, *((pair,) for pair in SEVERAL), ("inductor",)], ids=lambda pairs: pairs[0])
def test_nothing_parts_without_a_fault_and_each_fault_is_named_at_its_module(tmp_path, pairs):
    for side in "ab":
        run([HERE / "recorded_pairs.py", tmp_path, side, *pairs])
    for pair in pairs:
        for keep in ("all", "sketch"):
            healthy = found(tmp_path, pair, HEALTHY, keep)
            assert healthy.same, (pair, keep, healthy.verdict)
            named = {fault: found(tmp_path, pair, fault, keep).module for fault in PAIRS[pair].faults}
            assert len(named) >= 6 and named == {fault: module_of(pair, fault) for fault in named}, (pair, keep)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Llama of transformers as a, and one with fused projections and other names as b, with and without faults."""
    folder = tmp_path_factory.mktemp("llama")
    models = PAIRS["llama-fused"]
    record(models.a(), ids(), to=folder / "a.th")
    for variant in (HEALTHY, *COMBINED):
        record(models.b(variant), ids(), to=folder / f"{variant}.th")
    return folder


def test_fused_projections_with_other_names_have_a_map_that_can_be_kept(llama, tmp_path):
    a, b = llama / "a.th", llama / f"{HEALTHY}.th"
    result = diff(a, b)
    names = {pair.a: pair.b for pair in result.match}
    qkv = tuple(f"model.layers.*.self_attn.{name}_proj" for name in "qkv")
    assert names[qkv] == ("blocks.*.attn.qkv",)
    assert names["model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"] == ("blocks.*.mlp.gate_up",)
    assert names["model.embed_tokens",] == ("tok",)
    shown = "compared: model.embed_tokens with tok in b"
    assert shown in repr(result) and shown in render.html(result)
    result.match.save(tmp_path / "map.toml")
    again = diff(a, b, match=tmp_path / "map.toml")
    assert again.same and set(again.match) == set(result.match)


@pytest.mark.parametrize("variant", [HEALTHY, *COMBINED])
def test_models_and_recordings_in_any_combination(llama, variant):
    models, a, b = PAIRS["llama-fused"], llama / "a.th", llama / f"{variant}.th"
    expected = None if variant == HEALTHY else module_of("llama-fused", variant)
    for result in (
        diff(models.a(), b),
        diff(a, models.b(variant)),
        diff(a, b),
        diff(models.a(), models.b(variant), ids()),
    ):
        assert result.module == expected
    back = diff(b, a)
    assert back.same == (variant == HEALTHY) and (back.module or "blocks").startswith("blocks")


def test_a_page_has_what_rounding_explains_in_grey(llama):
    (figure,) = diff(llama / "a.th", llama / "eps.th")._figures()
    assert list(figure.values) == ["error", "own error", "rounding"]
    lines = {line.name: line.line.color for line in drawn(figure).data if line.mode != "markers"}
    assert lines["rounding"] == GREY not in (lines["error"], lines["own error"])


WORKER = """
import sys
from types import SimpleNamespace
import torch
from recorded_pairs import engine, ids
import torchhook as th

{recipe}

variant = sys.argv[1]
worker = SimpleNamespace(model_runner=SimpleNamespace(model=engine(variant)), rank=0)
install(worker)
with torch.inference_mode():
    worker.model_runner.model(ids().flatten())
worker.recorder.close()
"""


def test_the_recipe_for_inference_engines(tmp_path, monkeypatch):
    """The lines of the docs, in a process of their own, and the map of the docs on the command line."""
    page = (HERE.parents[2] / "docs" / "recordings.md").read_text(encoding="utf-8")
    recipe = page.partition('title="in the worker process"\n')[2].partition("```")[0]
    engine_map = page.partition("map of the engine's names:\n\n```toml\n")[2].partition("```")[0]
    (tmp_path / "engine.toml").write_text(engine_map)
    (tmp_path / "worker.py").write_text(WORKER.format(recipe=recipe))
    record(PAIRS["engine"].a(), ids(), to=tmp_path / "trainer.th")
    root = HERE.parents[2]
    source = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(root / part) for part in source))
    monkeypatch.chdir(tmp_path)
    for variant, code, said in ((HEALTHY, 0, "a and b agree"), ("swapped", 1, "model.layers.1.self_attn.q_proj")):
        run(["worker.py", variant])
        arguments = ["diff", "trainer.th", "engine-rank0.th", "--match", "engine.toml"]
        done = subprocess.run([sys.executable, "-m", "torchhook", *arguments], capture_output=True, text=True)
        assert done.returncode == code and said in done.stdout.splitlines()[-1], done.stdout + done.stderr
        Path("engine-rank0.th").rename(f"{variant}.th")
