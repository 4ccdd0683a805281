"""Times of Swin with the op and with the usual code, after a look that both give the same."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsaccel.examples.measure import seconds_in_turns, speed
from dsaccel.examples.swin_digits import BATCH, Digits, make_optimizer, train_step
from dsaccel.examples.swin_eager import with_eager_attention
from dsaccel.modules import SwinBlock
from dskernels import explain

FUSED, EAGER = "fused", "eager"
# The first stage of Swin-T, at the 224 x 224 pixels that it was made for.
BLOCK: dict[str, Any] = {"dim": 96, "num_heads": 3, "window_size": 7, "shift": 3}
BLOCK_IMAGES = (8, 56, 56, 96)


def backend() -> str | None:
    """What serves the op in the rows of `time_block`: a name, or None."""
    batch, height, width, dim = BLOCK_IMAGES
    qkv = torch.empty(batch, height, width, 3 * dim)
    bias = torch.empty(BLOCK["num_heads"], *2 * [BLOCK["window_size"] ** 2])
    options = {name: BLOCK[name] for name in ("num_heads", "window_size", "shift")}
    return explain("swin_attention", qkv, **options, bias=bias).chosen


def check_same(fused: nn.Module, eager: nn.Module, x: Tensor) -> None:
    """Compares outputs and all gradients of two models with the same parameters, within the rounding of float32.

    Raises:
        AssertionError: they differ.
    """
    found, expected = _results(fused, x), _results(eager, x)
    for name in expected:
        atol = 1e-5 * expected[name].abs().max().item()
        try:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=atol)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def time_model(model: nn.Module, digits: Digits, rounds: int) -> list[dict[str, Any]]:
    """A training step of ``model`` on a batch of ``digits``, and reading that batch; ``model`` stays as it is.

    Returns:
        Rows with ``what``, ``fused_ms`` and ``eager_ms`` (medians of ``rounds``), and ``faster`` (median of ratios).
    """
    images, labels = digits.images[:BATCH], digits.labels[:BATCH]
    models = {FUSED: copy.deepcopy(model).eval(), EAGER: with_eager_attention(model).eval()}
    check_same(models[FUSED], models[EAGER], images)
    reading = {name: _inference(found, images) for name, found in models.items()}
    rows = [_compared(f"the digits' model, {len(images)} images: reading", reading, rounds)]
    training = {name: _training(found.train(), images, labels) for name, found in models.items()}
    return [_compared(f"the digits' model, {len(images)} images: training step", training, rounds), *rows]


def time_block(rounds: int) -> list[dict[str, Any]]:
    """One `SwinBlock` of a usual size, and its attention alone: rows as of `time_model`."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(BLOCK_IMAGES, generator=generator) for _ in range(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = SwinBlock(**BLOCK)
    blocks: dict[str, Any] = {FUSED: block, EAGER: with_eager_attention(block)}
    check_same(blocks[FUSED], blocks[EAGER], x)
    batch, height, width, dim = BLOCK_IMAGES
    size = f"{batch} images of {height} x {width} tokens of {dim} components"
    rows = []
    for what, modules in (
        (f"a block, {size}", blocks),
        ("its attention, projections included", {name: found.attn for name, found in blocks.items()}),
    ):
        both = {name: _forward_and_backward(module, x, grad) for name, module in modules.items()}
        forward = {name: _inference(module, x) for name, module in modules.items()}
        rows.append(_compared(f"{what}: forward and backward", both, rounds))
        rows.append(_compared(f"{what}: forward", forward, rounds))
    return rows


def _results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    names, parameters = zip(*model.named_parameters(), strict=True)
    # Random, or else sums over the tokens may cancel, of which nothing but rounding is left.
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    grads = torch.autograd.grad((out * weights).sum(), (x, *parameters))
    return dict(zip(("output", "x", *names), (out.detach(), *grads), strict=True))


def _compared(what: str, work: dict[str, Callable[[], object]], rounds: int) -> dict[str, Any]:
    seconds = seconds_in_turns(work, rounds)
    milliseconds = {f"{name}_ms": 1e3 * statistics.median(found) for name, found in seconds.items()}
    return {"what": what, **milliseconds, "faster": speed(seconds, FUSED, EAGER, 1)[1]}


def _training(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], object]:
    optimizer = make_optimizer(model)
    return lambda: train_step(model, optimizer, images, labels)


def _inference(model: nn.Module, x: Tensor) -> Callable[[], object]:
    def infer() -> None:
        with torch.no_grad():
            model(x)

    return infer


def _forward_and_backward(block: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], object]:
    x = x.clone().requires_grad_()

    def step() -> None:
        block(x).backward(grad)
        for tensor in (x, *block.parameters()):
            tensor.grad = None

    return step
