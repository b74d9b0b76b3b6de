"""Pairs of models that should be the same, each side of which records itself in a process of its own.

``python pairs.py PAIR SIDE FOLDER KEEP`` records side a, or side b as it is and with each of its faults.
"""

import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn

from small_models import FAULTS, HEADS, LAYERS, LENGTH, PLANTED, VOCABULARY, WIDTH, Fault, Language, plant
from torchhook import record

HEALTHY = "healthy"
GPT = ("mask", "scale", "dropout", "late mask", "late scale", *PLANTED)
LLAMA = ("base", *GPT)


def ids():
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def seeded(model):
    """The same weights in every process: large enough that attention is not uniform, norms not all one."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            scale = 0.12 if parameter.dim() > 1 else 0.1
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(
                noise + (1 if "norm" in name or "ln_" in name else 0) * (parameter.dim() == 1) * ("bias" not in name)
            )
    return model.eval()


def language(variant, **options):
    """A `Language` with a fault, and the weights of the others."""
    model = seeded(Language(Fault(**FAULTS.get(variant, {})), **options))
    plant(model, variant)
    return model


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, bos_token_id=0, eos_token_id=0)).eval()


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def as_gpt2(own):
    """GPT-2 of transformers with the weights of a `Language`."""
    model = gpt2()
    inside = model.transformer
    with torch.no_grad():
        inside.wte.weight.copy_(own.tok.weight)
        inside.wpe.weight.copy_(own.pos.weight)
        for theirs, mine in zip(inside.h, own.blocks, strict=True):
            theirs.ln_1.load_state_dict(mine.norm1.state_dict())
            theirs.ln_2.load_state_dict(mine.norm2.state_dict())
            layers = {theirs.attn.c_attn: mine.attn.qkv, theirs.attn.c_proj: mine.attn.out}
            layers |= {theirs.mlp.c_fc: mine.mlp.up, theirs.mlp.c_proj: mine.mlp.down}
            for layer, other in layers.items():
                layer.weight.copy_(other.weight.T)
                layer.bias.copy_(other.bias)
        inside.ln_f.load_state_dict(own.norm.state_dict())
    return model


def as_llama(own):
    """Llama of transformers with the weights of a `Language`."""
    model = llama()
    inside = model.model
    with torch.no_grad():
        inside.embed_tokens.weight.copy_(own.tok.weight)
        for theirs, mine in zip(inside.layers, own.blocks, strict=True):
            theirs.input_layernorm.weight.copy_(mine.norm1.weight)
            theirs.post_attention_layernorm.weight.copy_(mine.norm2.weight)
            q, k, v = mine.attn.qkv.weight.split([WIDTH, WIDTH // 2, WIDTH // 2])
            gate, up = mine.mlp.gate_up.weight.chunk(2)
            attention, mlp = theirs.self_attn, theirs.mlp
            for layer, weight in {
                attention.q_proj: q,
                attention.k_proj: k,
                attention.v_proj: v,
                attention.o_proj: mine.attn.out.weight,
                mlp.gate_proj: gate,
                mlp.up_proj: up,
                mlp.down_proj: mine.mlp.down.weight,
            }.items():
                layer.weight.copy_(weight)
        inside.norm.weight.copy_(own.norm.weight)
    return model


def split_llama(variant):
    """The same Llama with split projections."""
    own, other = (
        language(variant, llama=True, kv_heads=2),
        Language(Fault(**FAULTS.get(variant, {})), llama=True, fused=False, kv_heads=2),
    )
    state = {name: value for name, value in own.state_dict().items() if name in other.state_dict()}
    for number, block in enumerate(own.blocks):
        q, k, v = block.attn.qkv.weight.split([WIDTH, WIDTH // 2, WIDTH // 2])
        gate, up = block.mlp.gate_up.weight.chunk(2)
        names = {"attn.wq": q, "attn.wk": k, "attn.wv": v, "mlp.gate": gate, "mlp.up": up}
        state |= {f"blocks.{number}.{name}.weight": weight for name, weight in names.items()}
    other.load_state_dict(state)
    for block, source in zip(other.blocks, own.blocks, strict=True):
        block.norm2.eps = source.norm2.eps
    if variant == "head":
        other.head.weight = nn.Parameter(own.head.weight.detach().clone())
        other.tok.weight = own.tok.weight
    return other.eval()


def tensor_parallel(variant):
    """A Llama whose heads and features are shared by all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = language(variant, llama=True, fused=False)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    columns = ("attn.wq", "attn.wk", "attn.wv", "mlp.gate", "mlp.up")
    plan = {name: ColwiseParallel() for name in columns} | {
        name: RowwiseParallel() for name in ("attn.out", "mlp.down")
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def fully_sharded(variant):
    """A Llama whose parameters are shared by all ranks."""
    from torch.distributed.fsdp import fully_shard

    model = language(variant, llama=True, fused=False)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def with_lora(merged):
    """Llama of transformers with adapters of peft, merged into its weights or not."""

    def made(variant=HEALTHY):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        model = get_peft_model(
            as_llama(language(HEALTHY, llama=True, kv_heads=2)),
            LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False),
        )
        layer = model.base_model.model.model.layers[1]
        with torch.no_grad():
            if variant == "lora scale":
                layer.self_attn.q_proj.scaling["default"] *= 1.5
            elif variant == "lora left out":
                layer.mlp.down_proj.lora_B["default"].weight.zero_()
            elif variant == "lora swapped":
                attention = layer.self_attn
                attention.q_proj.lora_A["default"], attention.v_proj.lora_A["default"] = (
                    attention.v_proj.lora_A["default"],
                    attention.q_proj.lora_A["default"],
                )
            elif variant == "lora base":
                layer.self_attn.v_proj.base_layer.weight.mul_(1.1)
            elif variant == "lora norm":
                layer.post_attention_layernorm.variance_epsilon = 0.3
            elif variant == "lora head":
                head = model.base_model.model.lm_head
                head.weight = nn.Parameter(head.weight.roll(1, 0))
        return (model.merge_and_unload() if merged else model).eval()

    return made


PAIRS = {
    "gpt2": (lambda: as_gpt2(language(HEALTHY)), language, GPT),
    "llama fused": (
        lambda: as_llama(language(HEALTHY, llama=True, kv_heads=2)),
        lambda variant: language(variant, llama=True, kv_heads=2),
        LLAMA,
    ),
    "llama split": (lambda: as_llama(language(HEALTHY, llama=True, kv_heads=2)), split_llama, LLAMA),
    "bfloat16": (
        lambda: language(HEALTHY, llama=True),
        lambda variant: language(variant, llama=True).bfloat16(),
        LLAMA,
    ),
    "inductor": (
        lambda: language(HEALTHY, llama=True),
        lambda variant: torch.compile(language(variant, llama=True), backend="inductor"),
        ("base", "mask", "scale", "eps", "swapped", "head"),
    ),
    "tensor parallel": (lambda: language(HEALTHY, llama=True, fused=False), tensor_parallel, LLAMA),
    "fully sharded": (lambda: language(HEALTHY, llama=True, fused=False), fully_sharded, LLAMA),
    "lora": (
        with_lora(merged=True),
        with_lora(merged=False),
        ("lora scale", "lora left out", "lora swapped", "lora base", "lora norm", "lora head"),
    ),
}
"""What records itself as side a, what as side b with each of some faults."""


def main(pair, side, folder, keep, ranks="1"):
    """Record one side, in one process or in several."""
    if int(ranks) > 1:
        spawn(ranked, (pair, side, folder, keep, int(ranks)), int(ranks))
    else:
        recorded(pair, side, folder, keep)


def ranked(rank, pair, side, folder, keep, ranks):
    meeting = Path(folder, f"meeting-{side}")
    meeting.parent.mkdir(parents=True, exist_ok=True)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    recorded(pair, side, folder, keep)
    distributed.destroy_process_group()


def recorded(pair, side, folder, keep):
    torch.set_num_threads(1)
    a, b, faults = PAIRS[pair]
    for variant in (HEALTHY, *faults) if side == "b" else (HEALTHY,):
        model = a() if side == "a" else b(variant)
        record(model, ids(), to=Path(folder) / f"{side}-{variant.replace(' ', '-')}.th", keep=keep)


if __name__ == "__main__":
    main(*sys.argv[1:])
