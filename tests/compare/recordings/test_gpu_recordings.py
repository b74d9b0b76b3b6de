"""A CPU against a GPU, and what sketches of a large model cost there."""

import time

import pytest
import torch
from recorded_pairs import HEALTHY, LLAMA, ids, language
from test_recorded_pairs import module_of

from torchhook import diff, record

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("keep", ["all", "sketch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_against_a_cpu(tmp_path, dtype, keep):
    record(language(HEALTHY, llama=True), ids(), to=tmp_path / "a.th", keep=keep)
    for variant in (HEALTHY, *LLAMA):
        to = tmp_path / f"{variant}.th"
        record(language(variant, llama=True).cuda().to(dtype), ids(), to=to, keep=keep)
        expected = None if variant == HEALTHY else module_of("bfloat16", variant)
        assert diff(tmp_path / "a.th", to).module == expected


@pytest.mark.slow
def test_sketches_of_a_llama_are_small_and_cheap(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16().eval()
    x = torch.randint(32000, (4, 2048), device="cuda")

    def seconds(number=None):
        torch.cuda.synchronize()
        began = time.perf_counter()
        if number is None:
            model(x)
        else:
            leaves = [path for path, module in model.named_modules() if not any(module.children())]
            with record(model, to=tmp_path / f"{number}.th", sites=leaves, keep="sketch"):
                model(x)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    with torch.no_grad():
        seconds(), seconds("first")
        plain, watched = (min(run) for run in ([seconds() for _ in range(5)], [seconds(n) for n in range(5)]))
    size = sum(file.stat().st_size for file in (tmp_path / "0.th").iterdir())
    print(f"{size / 1e6:.2f} MB, {watched / plain:.3f} × the pass of {1e3 * plain:.0f} ms")
    assert size < 5e6 and watched < 1.3 * plain
