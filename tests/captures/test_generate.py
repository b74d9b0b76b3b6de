import torch
from torch import nn

from torchhook import capture


def test_generate_makes_a_pass_a_step():
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=20, n_positions=32)).eval()
    prompt = torch.arange(5).reshape(1, 5)
    with capture(net, "transformer.h.*", "lm_head", keep=None) as acts:
        tokens = net.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    hidden = [out[0] if isinstance(out, tuple) else out for out in acts["transformer.h.1"].outputs]
    assert [step.shape[1] for step in hidden] == [5, 1, 1, 1]
    assert [out[0, -1].argmax().item() for out in acts["lm_head"].outputs] == tokens[0, 5:].tolist()
    with capture(net, nn.Linear, keep=1) as acts:
        net.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert len(acts["lm_head"].outputs) == 1
