"""Pairs of models that should be the same, each side of which records itself in a process of its own.

``python recorded_pairs.py FOLDER SIDE PAIR...`` records side a, or side b as it is and with each of its faults.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from small_models import FAULTS, HEADS, LAYERS, LENGTH, PLANTED, VOCABULARY, WIDTH, EngineModel, Fault, Language, plant
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn

from torchhook import record

HEALTHY = "healthy"
GPT = ("mask", "scale", "dropout", "late mask", "late scale", *PLANTED)
LLAMA = ("base", *GPT)
LORA = ("lora scale", "lora left out", "lora swapped", "lora base", "lora norm", "lora head")


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


def llama(kv_heads):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
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
    model, inner = llama(own.blocks[0].attn.kv_heads), own.blocks[0].attn.kv_heads * WIDTH // HEADS
    inside = model.model
    with torch.no_grad():
        inside.embed_tokens.weight.copy_(own.tok.weight)
        for theirs, mine in zip(inside.layers, own.blocks, strict=True):
            theirs.input_layernorm.weight.copy_(mine.norm1.weight)
            theirs.post_attention_layernorm.weight.copy_(mine.norm2.weight)
            q, k, v = mine.attn.qkv.weight.split([WIDTH, inner, inner])
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


def engine(variant):
    """The stand-in for an inference engine: its names, fused layers, and tokens of all samples in one dimension."""
    return EngineModel(language(variant, llama=True, kv_heads=2))


def engine_parallel(variant):
    """The same on several ranks, each with some of the heads and features, as plain tensors."""
    return EngineModel(language(variant, llama=True), distributed.get_rank(), distributed.get_world_size())


@dataclass(frozen=True)
class Models:
    """Two models that should be the same: what records itself as side a, and as side b with each of some faults."""

    a: Callable[[], nn.Module]
    b: Callable[[str], nn.Module]
    faults: tuple[str, ...]
    ranks: int = 1  # that record side b

    @property
    def variants(self):
        return HEALTHY, *self.faults


def healthy_llama(**options):
    return language(HEALTHY, llama=True, **options)


PAIRS = {
    "gpt2": Models(lambda: as_gpt2(language(HEALTHY)), language, GPT),
    "llama-fused": Models(
        lambda: as_llama(healthy_llama(kv_heads=2)), lambda variant: language(variant, llama=True, kv_heads=2), LLAMA
    ),
    "llama-split": Models(lambda: as_llama(healthy_llama(kv_heads=2)), split_llama, LLAMA),
    "bfloat16": Models(healthy_llama, lambda variant: language(variant, llama=True).bfloat16(), LLAMA),
    "lora": Models(with_lora(merged=True), with_lora(merged=False), LORA),
    "engine": Models(lambda: as_llama(healthy_llama(kv_heads=2)), engine, LLAMA),
    "inductor": Models(
        lambda: healthy_llama(layers=2),
        lambda variant: torch.compile(language(variant, llama=True, layers=2), backend="inductor"),
        ("base", "mask", "scale", "eps", "swapped", "head"),
    ),
    "tensor-parallel-2": Models(lambda: healthy_llama(fused=False), tensor_parallel, LLAMA, ranks=2),
    "tensor-parallel-4": Models(lambda: healthy_llama(fused=False), tensor_parallel, LLAMA, ranks=4),
    "fully-sharded": Models(lambda: healthy_llama(fused=False), fully_sharded, LLAMA, ranks=2),
    "engine-parallel": Models(lambda: as_llama(healthy_llama()), engine_parallel, LLAMA, ranks=2),
}


def main(folder, side, *names):
    """Record one side of some pairs, each kept in both ways; pairs with several ranks run in as many processes."""
    if PAIRS[names[0]].ranks > 1 and side == "b":
        spawn(ranked, (folder, names[0]), PAIRS[names[0]].ranks)
    else:
        for name in names:
            recorded(folder, side, name)


def ranked(rank, folder, name):
    meeting = Path(folder, f"{name}.meeting")
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=PAIRS[name].ranks)
    recorded(folder, "b", name)
    distributed.destroy_process_group()


def recorded(folder, side, name):
    torch.set_num_threads(1)
    models = PAIRS[name]
    for variant in models.variants if side == "b" else (HEALTHY,):
        model = models.a() if side == "a" else models.b(variant)
        for keep in ("all", "sketch"):
            x = ids().flatten() if isinstance(model, EngineModel) else ids()
            record(model, x, to=recording_of(folder, name, side, variant, keep), keep=keep)


def recording_of(folder, name, side, variant, keep):
    return Path(folder, name, f"{side}-{variant.replace(' ', '-')}-{keep}.th")


if __name__ == "__main__":
    main(*sys.argv[1:])
