"""Times whole models as they are and compiled by `torch.compile`, after a look that both give the same.

``python -m dsaccel.examples.static_graph`` needs a C++ compiler on a CPU, as `torch.compile` does.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.examples.command import parse_options
from dsaccel.examples.measure import machine, seconds_in_turns, speed
from dsaccel.examples.report import Row, markdown_table, publish, write
from dsaccel.modules import SlidingWindowLM, SwinTransformer
from dsaccel.train import Progress

COLUMNS = {
    "what": ("What", ""),
    "eager_ms": ("eager, ms", ".2f"),
    "compiled_ms": ("compiled, ms", ".2f"),
    "faster": ("Times as fast", ".2f"),
    "compile_s": ("compiling, s", ".0f"),
}
# Seconds in all, but for the compiler: to see that it runs.
QUICK: dict[str, Any] = {"rounds": 1, "threads": 1, "small": True}
DOC_SECTION = "static_graph"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run; `parse` tells what each means."""

    out: Path = Path("runs/static_graph")
    rounds: int = 25
    threads: int | None = None
    backend: str = "inductor"
    small: bool = False
    doc: Path | None = None


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """Compiles, compares, times, and writes the results.

    Returns:
        What ``results.json`` has.

    Raises:
        AssertionError: a compiled model computes something else.
    """
    rows = []
    for what, model, inputs, targets in (language_model(options.small), image_model(options.small)):
        for is_training in (True, False):
            row = compare(model, inputs, targets, is_training, options)
            row["what"] = f"{what}: {'training step' if is_training else 'forward'}"
            progress.say(f"{row['what']}: {row['eager_ms']:.2f} ms eager, {row['compiled_ms']:.2f} ms compiled")
            rows.append(row)
    result = {"timings": rows, "rounds": options.rounds, "backend": options.backend, "machine": machine()}
    write(options.out, result, report_of(result))
    return result


def language_model(small: bool) -> tuple[str, nn.Module, Tensor, Tensor]:
    """What it is, the model, inputs and targets: that of the demo, over bytes."""
    torch.manual_seed(0)
    batch, length = (2, 32) if small else (4, 512)
    dim, layers, heads, window = (32, 2, 2, 16) if small else (128, 4, 4, 128)
    model = SlidingWindowLM(256, dim, layers, heads, window=window)
    tokens = torch.randint(256, (batch, length + 1))
    return f"`SlidingWindowLM`, {batch} x {length} tokens", model, tokens[:, :-1], tokens[:, 1:]


def image_model(small: bool) -> tuple[str, nn.Module, Tensor, Tensor]:
    """The same of a Swin Transformer, of the sizes of Swin-T but for its depth."""
    torch.manual_seed(0)
    batch, pixels, dim = (1, 32, 8) if small else (2, 224, 96)
    heads, depths = ((2,), (2,)) if small else ((3, 6, 12, 24), (2, 2, 2, 2))
    window = 4 if small else 7
    model = SwinTransformer(embed_dim=dim, depths=depths, num_heads=heads, window_size=window, num_classes=10)
    images = torch.randn(batch, 3, pixels, pixels)
    return f"`SwinTransformer`, {batch} x {pixels} x {pixels} pixels", model, images, torch.arange(batch)


def compare(model: nn.Module, inputs: Tensor, targets: Tensor, is_training: bool, options: Options) -> dict[str, Any]:
    """Times a training step, or the forward, of ``model`` eager and compiled; ``model`` stays as it is.

    Returns:
        ``eager_ms`` and ``compiled_ms`` (medians), ``faster`` (median of the ratios within rounds) and ``compile_s``
        (the first call).

    Raises:
        AssertionError: outputs, losses or parameters after a step differ by more than the rounding of float32.
    """
    torch.compiler.reset()
    models = {name: copy.deepcopy(model) for name in ("eager", "compiled")}
    forwards: dict[str, Any] = {
        "eager": models["eager"],
        "compiled": torch.compile(models["compiled"], fullgraph=True, backend=options.backend),
    }
    begin = time.perf_counter()
    work = {
        name: _training(forward, models[name], inputs, targets) if is_training else _inference(forward, inputs)
        for name, forward in forwards.items()
    }
    compiled = work["compiled"]()
    seconds = time.perf_counter() - begin
    eager = work["eager"]()
    for one, other in zip(
        (compiled, *models["compiled"].parameters()), (eager, *models["eager"].parameters()), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    found = seconds_in_turns(work, options.rounds)
    milliseconds = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in found.items()}
    return {**milliseconds, "faster": speed(found, "compiled", "eager", 1)[1], "compile_s": seconds}


def _training(forward: nn.Module, model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    # A rate so small that the model stays comparable however often it is stepped.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> Tensor:
        logits = forward(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _inference(forward: nn.Module, inputs: Tensor) -> Callable[[], Tensor]:
    def infer() -> Tensor:
        with torch.no_grad():
            out: Tensor = forward(inputs)
        return out

    return infer


def report_of(result: Row) -> str:
    """The results in Markdown."""
    found = result["machine"]
    return (
        f"{markdown_table(COLUMNS, result['timings'])}\n\n"
        f"Medians of {result['rounds']} rounds in turns; the ratio is the median of those within rounds. Both sides "
        f"run the same fused ops; the compiler ('{result['backend']}') fuses what is around them. "
        f"{found['cpu']}, threads: {found['threads']}, CPU tier {found['cpu_tier']}, torch {found['torch']}."
    )


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m dsaccel.examples.static_graph", description=__doc__)
    parser.add_argument("--backend", default=Options.backend, help="of torch.compile (default: %(default)s)")
    numbers = {"rounds": ("in which both are timed", 1)}
    return parse_options(parser, Options, numbers, arguments, quick=QUICK, section=DOC_SECTION)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``python -m dsaccel.examples.static_graph``; returns its exit status."""
    options, progress = parse(arguments), Progress()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    result = run(options, progress)
    if options.doc is not None:
        files = {"results.json": options.out / "results.json"}
        publish(options.doc, DOC_SECTION, report_of(result), files)
    progress.say(f"\n{report_of(result)}\n\nIn {options.out}: results.json, results.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
