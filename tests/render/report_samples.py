"""Reports to render: a sick training, a healthy one, one that means harm, and a large one."""

import math
import random
from dataclasses import replace

from torchhook.core.findings import Finding, Report, Trial

BLOCKS = [
    "conv1",
    "bn1",
    "relu",
    *(f"layer{i}.{j}.{k}" for i in (1, 2, 3, 4) for j in (0, 1) for k in ("conv", "bn")),
    "fc",
]
CODES = tuple(f"TH{family}{number:02d}" for family in (1, 2, 3, 4, 5) for number in range(1, 6))
HOSTILE = "<script>window.__pwned=1</script>\"'`|*&\x00\x1b[31m\u202e</style><img src=x onerror=window.__pwned=1>\ud800"


def layers(names, fade=0.5, sick=()):
    """Modules whose gradient fades backwards, each with a weight."""
    dice = random.Random(0)
    found = []
    for depth, name in enumerate(names):
        size = fade ** (len(names) - depth) * dice.uniform(0.6, 1.6)
        kind = "Linear" if name == "fc" else "BatchNorm2d" if "bn" in name else "ReLU" if name == "relu" else "Conv2d"
        zeros = dice.uniform(0.3, 0.5) if kind == "ReLU" else dice.uniform(0, 0.02)
        std = math.nan if name in sick else dice.uniform(0.5, 1.5)
        module = {"site": name, "kind": "module", "module": kind, "mean": dice.gauss(0, 0.1), "std": std}
        found.append(module | {"zero_fraction": zeros, "grad_norm": size})
        if kind != "ReLU":
            ratio = 10 ** dice.uniform(-4, -2) if name != "fc" else 0.41
            weight = {"site": f"{name}.weight", "kind": "parameter", "norm": dice.uniform(1, 30)}
            found.append(weight | {"grad_norm": size * dice.uniform(1, 4), "update_ratio": ratio})
    return tuple(found)


def losses(steps, broken=()):
    dice = random.Random(1)
    curve = {step: 2.3 * math.exp(-step / 80) + dice.uniform(0.05, 0.12) for step in range(steps)}
    return curve | dict.fromkeys(broken, math.nan)


def sick():
    sites = [name for name in BLOCKS if name.startswith("layer4")] + ["fc"]
    measured = layers(BLOCKS, sick=("layer3.1.bn",))
    sizes = [layer["grad_norm"] for layer in measured]
    after = tuple(Finding("TH102", "error", "passes on what is not finite", site, 240) for site in sites)
    return Report(
        findings=(
            Finding(
                "TH101",
                "error",
                "The first value that is not finite comes from here: 312 of 65,536 are NaN, yet all inputs are finite",
                site="layer3.1.bn",
                step=240,
                evidence={"nan": 312, "inf": 0, "numel": 65536, "largest_input": 6.27e4, "dtype": "float16"},
                hint="The largest input is at 96 % of what float16 can hold. Use bfloat16, or lower the learning rate.",
                affected=after,
            ),
            Finding(
                "TH403",
                "warning",
                "A step moves the weight by 41 % of its size",
                site="fc.weight",
                step=180,
                evidence={"update_ratio": 0.41, "healthy": [1e-5, 3e-2]},
                hint="Lower the learning rate of this group, or warm up.",
                tried=Trial("learning rate a tenth", without=2.28, repaired=0.31, steps=100),
            ),
            Finding(
                "TH501",
                "info",
                "The loss at step 0 is what guessing gives",
                evidence={"loss": 2.31, "ln_classes": 2.3026},
            ),
        ),
        model="ResNet",
        checked=CODES[:21],
        skipped={
            "TH502": "no validation loss was given",
            "TH503": "no validation loss was given",
            "TH504": "no labels were given",
        },
        layers=measured,
        span=(240, 240),
        gradients={200: [2.0] * len(sizes), 240: sizes, 250: [math.nan] * len(sizes)},
        losses=losses(260, broken=range(240, 260)),
        notes=("Gradients are those before clipping.",),
    )


def healthy():
    return Report(model="ResNet", checked=CODES, layers=layers(BLOCKS, fade=0.95), losses=losses(200))


def hostile():
    finding = Finding(HOSTILE, "error", HOSTILE, HOSTILE, 3, {HOSTILE: HOSTILE, "list": [HOSTILE]}, HOSTILE)
    finding = replace(finding, tried=Trial(HOSTILE, math.nan, math.inf, 3, helped=False))
    root = Finding(HOSTILE, "warning", HOSTILE, HOSTILE, 3, {}, HOSTILE, affected=(finding,) * 3)
    module = {"site": HOSTILE, "kind": "module", "module": HOSTILE, "std": 1.0, "zero_fraction": 0.5, "grad_norm": 0.1}
    parameter = {"site": HOSTILE, "kind": "parameter", "norm": math.inf, "grad_norm": 0.0, "update_ratio": math.nan}
    return Report(
        (finding, root),
        model=HOSTILE,
        checked=(HOSTILE,),
        skipped={"TH1": HOSTILE},
        layers=(module, parameter),
        losses={0: 1.0, 3: 0.5},
        notes=(HOSTILE,),
    )


def large(findings=300, names=500):
    sites = [f"encoder.layers.{number}.self_attention.output_projection" for number in range(names)]
    severities = ["error"] * (findings // 3) + ["warning"] * (findings - findings // 3)
    found = (
        Finding(
            CODES[n % 25],
            severities[n],
            f"Finding number {n}",
            sites[n % names],
            n,
            {"share": n / findings},
            "Look there.",
        )
        for n in range(findings)
    )
    return Report(tuple(found), "Transformer", checked=CODES, layers=layers(sites, fade=0.99), losses=losses(20_000))
