"""The same training step with other implementations of the attention: tokens per second, and memory.

Each variant runs in a process of its own, so that each has its own peak of memory. The processes take turns, step by
step, so that whatever else the machine does slows all of them alike.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.demo.data import even_windows, load_corpus
from dsaccel.demo.options import DemoError, Options
from dsaccel.demo.train import make_optimizer, train_step
from dsaccel.modules import SlidingWindowLM, TransformerBlock, WindowAttention
from dsaccel.train import Progress
from dskernels import explain, use_backend

ROUNDS = 3
SDPA = "PyTorch SDPA, dense mask"
VARIANTS = {"dskernels cpu": "cpu", SDPA: None, "dskernels reference": "reference"}
# Losses around 5, each from its own order of summation; half precision rounds to 3 digits.
AGREEMENT = {"off": 1e-4, "bf16": 2e-2, "fp16": 2e-2}


class MaskedAttention(WindowAttention):
    """What one writes without a windowed kernel: rotate q and k in PyTorch, then SDPA with a mask of all pairs."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """As `WindowAttention.attend`, without the options that `SlidingWindowLM` does not use."""
        if options:
            raise TypeError(f"attend: expected q, k and v alone, got {', '.join(options)} as well")
        if self.rope is not None:
            cos, sin, _ = self.rope()
            q, k = rotate(q, cos[: q.shape[2]], sin[: q.shape[2]]), rotate(k, cos[: k.shape[2]], sin[: k.shape[2]])
        mask = window_mask(q.shape[2], *self.window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.num_kv_heads != self.num_heads)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions as in most PyTorch models: ``x * cos + rotate_half(x) * sin``."""
    a, b = x.chunk(2, -1)
    return x * torch.cat((cos, cos), -1).to(x.dtype) + torch.cat((-b, a), -1) * torch.cat((sin, sin), -1).to(x.dtype)


@functools.lru_cache(maxsize=1)
def window_mask(length: int, left: int | None, right: int | None) -> Tensor:
    """Which token sees which, bool, shape ``[length, length]``; made once and shared by all layers."""
    mask = torch.ones(length, length, dtype=torch.bool)
    mask = mask if left is None else mask.triu(-left)
    return mask if right is None else mask.tril(right)


def with_masked_attention(model: SlidingWindowLM) -> SlidingWindowLM:
    """Replaces the attention of every block by `MaskedAttention` with the same weights."""
    for block in model.modules():
        if isinstance(block, TransformerBlock):
            old = block.attn
            bias = {"qkv_bias": old.qkv.bias is not None, "proj_bias": old.proj.bias is not None}
            block.attn = MaskedAttention(old.dim, old.num_heads, old.num_kv_heads, old.window, old.rope, **bias)
            block.attn.load_state_dict(old.state_dict())
    return model


def peak_resident_bytes() -> int:
    """The most memory this process has had resident since it started.

    ``ru_maxrss`` of `resource.getrusage` would not do: Linux hands it down from the process that starts this one, so
    a small child of a large parent would seem to need nothing more.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not report VmHWM")


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of one variant."""

    seconds: float
    loss: float
    grad_norm: float
    peak_bytes: int


def compare(options: Options, progress: Progress) -> list[dict[str, Any]]:
    """Runs the training step of ``options``, with one sequence of ``options.compare_length`` tokens, in every variant.

    Returns:
        For each variant ``variant``, ``seconds`` and ``tokens_per_second`` (medians over some steps) and
        ``peak_bytes``: by how much the first step raises the process's peak of resident memory over what it has with
        model, optimizer and batch made. So it counts activations, gradients, optimizer state and scratch memory.

    Raises:
        DemoError: the variants compute different losses or gradients, so that comparing them means nothing.
    """
    variants = [name for name, backend in VARIANTS.items() if backend is None or _serves(backend, options, progress)]
    steps: dict[str, list[Step]] = {name: [] for name in variants}
    with ExitStack() as stack:
        pipes = {name: stack.enter_context(_process(name, options)) for name in variants}
        # The first step of each warms up; its memory counts, and the losses and gradients are compared.
        for turn in range(ROUNDS + 1):
            for name, pipe in pipes.items():
                progress.update(f"comparison: step {turn + 1}/{ROUNDS + 1} of {name}")
                pipe.send("step")
                try:
                    steps[name].append(pipe.recv())
                except EOFError as error:
                    raise DemoError(f"comparison: the process of {name!r} ended early (out of memory?)") from error
    _check_agreement({name: done[0] for name, done in steps.items()}, AGREEMENT[options.amp])
    rows = []
    for name, (first, *timed) in steps.items():
        seconds = statistics.median(step.seconds for step in timed)
        rate = options.compare_length / seconds
        rows.append({"variant": name, "seconds": seconds, "tokens_per_second": rate, "peak_bytes": first.peak_bytes})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The comparison as lines of text, with ratios to the first row."""
    lines = [f"  {'attention':<28}{'tokens/s':>10}{'':18}{'peak memory':>12}"]
    for row in rows:
        slower = more = ""
        if row is not rows[0]:
            slower = f"{rows[0]['tokens_per_second'] / row['tokens_per_second']:.1f}x slower"
            more = f"{row['peak_bytes'] / max(1, rows[0]['peak_bytes']):.1f}x more"
        speed, memory = f"{row['tokens_per_second']:,.0f}", f"{row['peak_bytes'] / 2**20:,.0f} MiB"
        lines.append(f"  {row['variant']:<28}{speed:>10}   {slower:<15}{memory:>12}   {more}".rstrip())
    return "\n".join(lines)


def _serves(backend: str, options: Options, progress: Progress) -> bool:
    q = torch.zeros(1, 1, 1, options.dim // options.heads)
    refusal = explain("window_attention", q, q, q).refusals[backend]
    if refusal is not None:
        progress.say(f"The comparison leaves dskernels {backend} out: {refusal}.")
    return refusal is None


def _check_agreement(first: dict[str, Step], tolerance: float) -> None:
    names = list(first)
    for name in names[1:]:
        for quantity in ("loss", "grad_norm"):
            one, other = getattr(first[names[0]], quantity), getattr(first[name], quantity)
            if not abs(one - other) <= tolerance * abs(one):
                raise DemoError(f"comparison: {quantity} is {one:.6g} with {names[0]} but {other:.6g} with {name}")


@contextmanager
def _process(variant: str, options: Options) -> Iterator[Connection]:
    # Spawned, not forked: memory of the parent's must not count, and its threads are not copied half-way.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, variant, options), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _work(pipe: Connection, variant: str, options: Options) -> None:
    # Ctrl-C reaches all processes of a terminal; the one that started this one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = options.model()
    if VARIANTS[variant] is None:
        with_masked_attention(model)
    else:
        use_backend(VARIANTS[variant])
    optimizer = make_optimizer(list(model.parameters()), options.lr)
    windows = even_windows(load_corpus().train, options.compare_length, 1)
    before, peak = peak_resident_bytes(), 0
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        begin = time.perf_counter()
        loss = train_step(model, optimizer, windows, options.amp)
        seconds = time.perf_counter() - begin
        peak = peak or peak_resident_bytes() - before
        pipe.send(Step(seconds, loss.item(), _norm_of_first_moment(optimizer), peak))


def _norm_of_first_moment(optimizer: torch.optim.Optimizer) -> float:
    # After one step it is the clipped gradient times a constant: enough to compare gradients without keeping them.
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    return nn.utils.get_total_norm(moments).item()
