"""``python -m dsaccel.checkpoint``: what each policy costs for a `SlidingWindowLM` of given sizes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from dsaccel.checkpoint.blocks import checkpoint_blocks
from dsaccel.checkpoint.estimator import POLICIES, CostEstimate, estimate
from dsaccel.checkpoint.memory import as_mebibytes, memory_report
from dsaccel.checkpoint.policy import BlockPolicy
from dsaccel.modules import SlidingWindowLM

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table of `estimate`; with ``--measure`` also what a real step saves and computes."""
    options = _parse(arguments)
    # With no weights, unless they are to be computed with.
    with torch.device("cpu" if options.measure else "meta"):
        model = SlidingWindowLM(
            options.vocab,
            options.dim,
            options.layers,
            options.heads,
            window=options.window or options.length,
            max_positions=options.length,
            hidden_dim=options.hidden,
        ).to(_DTYPES[options.dtype])
        tokens = torch.randint(options.vocab, (options.batch, options.length))

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), torch.randint(options.vocab, (options.batch * options.length,)))

    costs = estimate(model, tokens, options.policies, loss=loss)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:,.1f} M parameters and buffers: {as_mebibytes(costs.held_bytes)}")
    print(costs)
    if options.measure:
        _measure(model, tokens, loss, costs)


def _measure(model: SlidingWindowLM, tokens: Tensor, loss: Callable[[Tensor], Tensor], costs: CostEstimate) -> None:
    for cost in costs.costs:
        handle = checkpoint_blocks(model, cost.policy)
        with memory_report(model) as report, FlopCounterMode(display=False) as flops:
            loss(model(tokens)).backward()
        handle.remove()
        model.zero_grad()
        total = flops.get_total_flops() / 1e9
        print(f"measured with {cost.policy}: {as_mebibytes(report.saved_bytes)} saved, {total:,.1f} GFLOP in all")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dsaccel.checkpoint",
        description="Says what each policy of checkpoint_blocks saves and recomputes in a training step of a "
        "SlidingWindowLM of the given sizes (default: the demo's), without computing it.",
    )
    sizes = {"vocab": 256, "dim": 128, "layers": 4, "heads": 4, "window": 128, "length": 512, "batch": 4}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, metavar="INT", help=f"(default: {size})")
    parser.add_argument("--hidden", type=int, metavar="INT", help="components inside the MLPs (default: SwiGLU's)")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the weights (default: float32)")
    parser.add_argument("--policies", nargs="+", type=BlockPolicy.parse, default=POLICIES, metavar="POLICY")
    parser.add_argument("--measure", action="store_true", help="run the step as well, and count what it saves")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
