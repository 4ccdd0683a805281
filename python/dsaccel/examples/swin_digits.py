"""Handwritten digits of 8 x 8 pixels, and a small Swin Transformer that learns to read them."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dskernels as dk
from dsaccel.amp import label_smoothing_loss
from dsaccel.demo.options import DemoError
from dsaccel.modules import SwinTransformer

CLASSES = 10
VALIDATION_PART = 0.2
# Of the split alone: other weights and batches are judged by the same digits.
SPLIT_SEED = 0
BATCH = 64
LR = 2e-3
WARMUP = 0.1
WEIGHT_DECAY = 0.05
MAX_GRAD_NORM = 1.0
SMOOTHING = 0.1


@dataclass(frozen=True)
class Digits:
    """Images, float32 ``[n, 1, 8, 8]`` from -1 to 1, and what they show, int64 ``[n]``."""

    images: Tensor
    labels: Tensor


def require_sklearn() -> None:
    """Says before a run that there are no digits.

    Raises:
        DemoError: scikit-learn is not installed.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise DemoError("the digits come with scikit-learn, which is not installed: pip install 'dskernels[vision]'")


def load_digits() -> tuple[Digits, Digits]:
    """scikit-learn's 1797 digits, which are installed with it: four fifths to learn from, one to validate with.

    A fifth of each class goes to the validation, drawn at random, but always the same.

    Raises:
        DemoError: scikit-learn is not installed.
    """
    require_sklearn()
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    found = datasets.load_digits()
    # Grey levels are 0 to 16.
    images = torch.from_numpy(found.images).float().unsqueeze(1) / 8 - 1
    labels = torch.from_numpy(found.target).long()
    parts = train_test_split(
        range(len(labels)), test_size=VALIDATION_PART, stratify=found.target, random_state=SPLIT_SEED
    )
    train, validation = (Digits(images[part], labels[part]) for part in parts)
    return train, validation


def make_model() -> SwinTransformer:
    """4 x 4 tokens of 2 x 2 pixels; two blocks in windows of 2 x 2, the second shifted; merged, two over all 2 x 2."""
    model = SwinTransformer(
        image_channels=1,
        patch_size=2,
        embed_dim=48,
        depths=(2, 2),
        num_heads=(3, 6),
        window_size=2,
        num_classes=CLASSES,
    )
    # Swin's 0.02 is made for wider layers and hundreds of epochs: blocks as narrow would add next to nothing at first.
    for linear in [module for module in model.stages.modules() if isinstance(module, nn.Linear)]:
        nn.init.trunc_normal_(linear.weight, std=linear.in_features**-0.5)
    return model


def make_optimizer(model: nn.Module, lr: float = LR) -> torch.optim.Optimizer:
    """AdamW; biases, gains and the tables of positions are not decayed, as in the paper's code."""
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and not name.endswith("bias.table")]
    others = [p for name, p in model.named_parameters() if p.dim() <= 1 or name.endswith("bias.table")]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, fused=True)


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by -1, 0 or 1 pixels down and right, at random; what comes in is empty."""
    height, width = images.shape[2:]
    # Every place where the frame can lie in the larger image: [n, 1, 3, 3, H, W].
    places = F.pad(images, (1, 1, 1, 1), value=-1.0).unfold(2, height, 1).unfold(3, width, 1)
    down, right = torch.randint(3, (2, len(images)), generator=generator)
    return places[torch.arange(len(images)), :, down, right]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """One step of training; returns the loss before it."""
    loss = label_smoothing_loss(model(images), labels, smoothing=SMOOTHING)
    loss.backward()
    dk.clip_and_scale_([p.grad for p in model.parameters()], max_norm=MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def log_probabilities(model: nn.Module, images: Tensor) -> Tensor:
    """``[n, classes]``, float32."""
    return torch.cat([model(part).float() for part in images.split(4 * BATCH)]).log_softmax(-1)


def accuracy(model: nn.Module, digits: Digits) -> float:
    """What part of the digits ``model`` reads right."""
    return (log_probabilities(model, digits.images).argmax(-1) == digits.labels).double().mean().item()


def train(
    model: nn.Module, digits: Digits, validation: Digits, *, epochs: int, seed: int, say: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Trains ``model`` in place.

    Args:
        model: maps images to the scores of the classes.
        digits: to learn from, in batches of `BATCH`; each time moved by up to a pixel.
        validation: read after each epoch, for the record alone: no epoch is preferred for it.
        epochs: passes over ``digits``.
        seed: of order and movements.
        say: gets a line after each epoch.

    Returns:
        For each epoch ``epoch`` (from 1), ``loss`` (the mean over it), ``accuracy`` of the validation, and ``seconds``
        since the beginning.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(model)
    steps = epochs * -(-len(digits.labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LR, total_steps=steps + 1, pct_start=WARMUP, cycle_momentum=False
    )
    history: list[dict[str, Any]] = []
    begin = time.monotonic()
    for epoch in range(1, epochs + 1):
        model.train()
        losses = []
        for chosen in _batches(len(digits.labels), generator):
            images = shifted(digits.images[chosen], generator)
            losses.append(train_step(model, optimizer, images, digits.labels[chosen]) * len(chosen))
            schedule.step()
        model.eval()
        right = accuracy(model, validation)
        row = {"epoch": epoch, "loss": torch.stack(losses).sum().item() / len(digits.labels), "accuracy": right}
        history.append({**row, "seconds": time.monotonic() - begin})
        say(f"epoch {epoch:>{len(str(epochs))}}/{epochs}   loss {row['loss']:.3f}   validation accuracy {right:.1%}")
    return history


def confusion(predicted: Tensor, labels: Tensor) -> Tensor:
    """How often each class (row) was read as each (column): int64 ``[classes, classes]``."""
    return torch.bincount(labels * CLASSES + predicted, minlength=CLASSES**2).view(CLASSES, CLASSES)


def _batches(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    yield from torch.randperm(count, generator=generator).split(BATCH)
