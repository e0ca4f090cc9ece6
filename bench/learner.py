"""Measure what the learner adds to a training step, on networks of today.

One table: milliseconds of a step of AdamW alone and with GPM and TRGP in their third task, when two
old tasks are trusted in every layer, each row with a baseline of its own in the same process. Rows
that the file given already holds are not measured again.

    python bench/learner.py --out bench-learner.json            # all rows, on a GPU
    python bench/learner.py --out bench-learner.json vit-s gpt2  # some
    python bench/learner.py --out tiny.json tiny                 # a row for a CPU
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trgp import GPM, TRGP
from trgp.files import write_text

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], Tensor]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCHES, WARM = 4, 5


def timm_model(name: str) -> nn.Module:
    """Build a network of timm, untrained."""
    import timm

    model: nn.Module = timm.create_model(name, num_classes=10)
    return model


def llama(hidden: int, inner: int, layers: int, heads: int) -> nn.Module:
    """Build a Llama, untrained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def gpt2() -> nn.Module:
    """Build GPT-2 (124M), untrained."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config(use_cache=False))
    return model


def tiny() -> nn.Module:
    """Build a small MLP on images, for a CPU."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3 * 32 * 32, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.Linear(256, 10),
    )


TEXT = ["lm_head", "model.embed_tokens", "transformer.wte", "transformer.wpe"]
# Name: how it is made, the images' size or the texts' length, samples a batch, exclude=[...].
ROWS: dict[str, tuple[Callable[[], nn.Module], int, int, list[str]]] = {
    "tiny": (tiny, 32, 16, ["4"]),
    "vit-s": (lambda: timm_model("vit_small_patch16_224"), 224, 64, ["head"]),
    "vit-b": (lambda: timm_model("vit_base_patch16_224"), 224, 64, ["head"]),
    "resnet50": (lambda: timm_model("resnet50"), 224, 64, ["fc"]),
    "gpt2": (gpt2, 512, 8, TEXT),
    "llama-1024x12": (lambda: llama(1024, 2816, 12, 16), 512, 8, TEXT),
    "llama-2048x12": (lambda: llama(2048, 5632, 12, 16), 512, 8, TEXT),
}


def images(task: int, count: int, size: int) -> Batch:
    """Images of ten classes in a subspace of 64 smooth patterns."""
    g = torch.Generator().manual_seed(100 + task)
    patterns = torch.randn(64, 3, size // 8, size // 8, generator=g)
    patterns = F.interpolate(patterns, size=size, mode="bicubic")
    y = torch.randint(10, (count,), generator=g)
    z = torch.randn(10, 64, generator=g)[y] + 0.5 * torch.randn(count, 64, generator=g)
    return (z @ patterns.flatten(1) / 8).view(count, 3, size, size).to(DEVICE), y.to(DEVICE)


def texts(task: int, count: int, length: int) -> Batch:
    """Texts over 2,000 words of their own, the rarer the later."""
    g = torch.Generator().manual_seed(100 + task)
    words = torch.randint(32000, (2000,), generator=g)
    weights = (1 / torch.arange(1, 2001)).expand(count, -1)
    return (words[torch.multinomial(weights, length, True, generator=g)].to(DEVICE),)


def image_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy under bfloat16 autocast."""
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        return F.cross_entropy(model(batch[0]), batch[1])


def text_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Next-token loss under bfloat16 autocast."""
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        loss: Tensor = model(input_ids=batch[0], labels=batch[0]).loss
        return loss


def now() -> float:
    """Seconds, once the device is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(model: nn.Module, loader: Sequence[Batch], loss_fn: Loss, steps: int) -> float:
    """Median milliseconds of a step of a new AdamW."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True
    )
    model.train()
    spent = []
    for step in range(steps):
        before = now()
        optimizer.zero_grad(set_to_none=True)
        loss_fn(model, loader[step % len(loader)]).backward()
        optimizer.step()
        spent.append(1e3 * (now() - before))
    return statistics.median(spent[WARM:])


def peak() -> float:
    """GiB at most since the last call."""
    if DEVICE.type != "cuda":
        return 0.0
    found = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return found


def measure(name: str, steps: int) -> dict[str, Any]:
    """Measure one row."""
    make, size, batch, exclude = ROWS[name]
    text = exclude is TEXT
    loss_fn = text_loss if text else image_loss
    loaders = [
        list(zip(*(t.split(batch) for t in data), strict=True))
        for data in ((texts if text else images)(t, BATCHES * batch, size) for t in range(3))
    ]
    torch.manual_seed(0)
    model = make().to(DEVICE)
    row: dict[str, Any] = {"row": name, "parameters": sum(p.numel() for p in model.parameters())}
    peak()
    row["AdamW"] = {"ms": train(model, loaders[0], loss_fn, 20), "GiB": peak()}
    del model
    for method in (GPM, TRGP):
        torch.manual_seed(0)
        model = make().to(DEVICE)
        learner: GPM = GPM(model, exclude=exclude)
        if method is TRGP:
            learner = TRGP(model, exclude=exclude, epsilon=0.0)
        old: list[Tensor] = []
        found: dict[str, Any] = {}
        for task, loader in enumerate(loaders):
            start = now()
            learner.begin_task(task, loader, loss_fn)
            begun = now()
            peak()
            found["ms"] = train(model, loader, loss_fn, steps if task == 2 else 20)
            found["GiB"] = peak()
            trained = now()
            learner.end_task(loader)
            found |= {"begin s": begun - start, "end s": now() - trained}
            if task == 0:
                old = outputs(model, loader[0])
        with learner.task(0):
            moved = [a - b for a, b in zip(outputs(model, loaders[0][0]), old, strict=True)]
        held = learner.ranks.values()
        row[method.__name__] = found | {
            "ratio": found["ms"] / row["AdamW"]["ms"],
            "rank share": sum(r for r, _ in held) / sum(n for _, n in held),
            "drift of logits": float(moved[0].norm() / old[0].norm()),
            "trusted": max((len(t) for t in learner.selected[2].values()), default=0),
        }
        del learner, model
    return row


@torch.no_grad()
def outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Logits of a batch in float32."""
    model.eval()
    if len(batch) == 1:
        return [model(input_ids=batch[0][:2]).logits.float()]
    return [model(batch[0]).float()]


def main() -> None:
    """Measure the rows that are missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help=f"which of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to read and complete")
    parser.add_argument("--steps", type=int, default=300, help="steps of the third task")
    arguments = parser.parse_args()
    unknown = set(arguments.rows) - ROWS.keys()
    if unknown:
        parser.error(f"unknown row {', '.join(sorted(unknown))}; known are {', '.join(ROWS)}.")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    for name in arguments.rows or [name for name in ROWS if name != "tiny"]:
        if name in {row["row"] for row in rows}:
            continue
        try:
            rows.append(measure(name, arguments.steps))
        except TypeError as error:  # a model that the learner refuses
            rows.append({"row": name, "refused": str(error)})
        write_text(arguments.out, json.dumps(rows, indent=1))
        print(json.dumps(rows[-1]), flush=True)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    print("| row | AdamW ms | GPM / AdamW | TRGP / AdamW | rank share | drift GPM, TRGP |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        if "refused" in row:
            print(f"| {row['row']} | refused: {row['refused']} |")
            continue
        gpm, trgp = row["GPM"], row["TRGP"]
        print(
            f"| {row['row']} | {row['AdamW']['ms']:.1f} | {gpm['ratio']:.2f} | {trgp['ratio']:.2f} "
            f"| {trgp['rank share']:.0%} | {gpm['drift of logits']:.1e}, "
            f"{trgp['drift of logits']:.1e} |"
        )


if __name__ == "__main__":
    main()
