"""Cases of a whole Swin-T: inference, and a training step up to the gradients, without an optimizer.

Everybody has torchvision's model, with its weights; ours is `dsaccel.modules.SwinTransformer` made from it. Dropping
paths at random is off, so that all compute the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import OURS, Case, Competitor, Lane, Prepared, Results
from benchmarks.ops.swin_attention import SwinProblem, notes
from benchmarks.peers import competitors_for
from benchmarks.peers._torchvision import swin_transformer, why_no_torchvision

OP = "swin_attention_model"

_RGB = 3


class Inputs(NamedTuple):
    """torchvision's model, images ``[B, 3, H, W]`` and, to train on, their labels."""

    model: torch.nn.Module
    images: Tensor
    labels: Tensor | None

    def copy(self) -> torch.nn.Module:
        """The model for a contestant to keep."""
        return copy.deepcopy(self.model)

    def prepared(self, model: torch.nn.Module, forward: Callable[[Tensor], Tensor]) -> Prepared:
        """The work that is timed, by ``forward``, which is ``model`` in whatever form."""
        if self.labels is None:

            def infer() -> Results:
                with torch.inference_mode():
                    return [forward(self.images)]

            return Prepared(infer)
        labels = self.labels

        def train() -> Results:
            model.zero_grad()
            logits = forward(self.images)
            F.cross_entropy(logits, labels).backward()
            return [logits.detach()]

        return Prepared(train, comparable=lambda results: [*results, *_seen_gradients(model)])


def _seen_gradients(model: torch.nn.Module) -> Iterator[Tensor]:
    """What is compared whatever parameters are called: the first one's gradient, through all, and the norm of all."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    yield grads[0].flatten()
    yield torch.nn.utils.get_total_norm(grads)


@dataclass(frozen=True, kw_only=True)
class ModelProblem:
    """Sizes of a Swin v1 and of what it is given, float32; stages halve the image and double the channels."""

    image: int = 224
    batch: int = 4
    backward: bool = False
    channels: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    window: int = 7
    patch: int = 4
    classes: int = 1000
    dtype: str = "fp32"
    device: str = "cpu"

    def __str__(self) -> str:
        work = "training step" if self.backward else "inference"
        return f"{work}, {self.dtype}, {self.elements / 1e6:.0f}M parameters, B{self.batch} {self.image}x{self.image}"

    @property
    def result_names(self) -> Sequence[str]:
        """What `expected` and every competitor return, at last."""
        return ("logits", "grad_embedding", "grad_norm") if self.backward else ("logits",)

    @property
    def attentions(self) -> list[SwinProblem]:
        """The attention of each block: every second one shifts, unless the image is a single window."""
        blocks = []
        for stage, (depth, heads) in enumerate(zip(self.depths, self.heads, strict=True)):
            side = self.image // self.patch // 2**stage
            shift = self.window // 2 if side > self.window else 0
            sizes: dict[str, Any] = {"channels": self.channels * 2**stage, "heads": heads, "window": self.window}
            sizes |= {"batch": self.batch, "dtype": self.dtype, "backward": self.backward}
            blocks += [SwinProblem(height=side, width=side, shift=shift * (i % 2), **sizes) for i in range(depth)]
        return blocks

    @property
    def elements(self) -> int:
        """Parameters."""
        pixels, last = _RGB * self.patch**2, self.attentions[-1].channels
        count = self.channels * (pixels + 1) + 2 * self.channels
        for block in self.attentions:
            # Weights of qkv, proj and both of the MLP, their biases and those of two norms, and the table of biases.
            count += 12 * block.channels**2 + 13 * block.channels + (2 * self.window - 1) ** 2 * block.heads
        for stage in range(1, len(self.depths)):
            # Four tokens become one, which a norm and a projection to half of their channels follow.
            channels = self.channels * 2**stage
            count += 2 * channels * channels + 2 * 2 * channels
        return count + 2 * last + (last + 1) * self.classes

    @property
    def operations(self) -> int:
        """Those of attention and of all projections, three times as many with the backward; nothing else is counted."""
        first, *_, last = self.attentions
        tokens = self.batch * first.height * first.width
        embedding = tokens * self.channels * _RGB * self.patch**2
        projections = self.batch * last.channels * self.classes
        for block in self.attentions:
            projections += 12 * self.batch * block.height * block.width * block.channels**2
        for stage in range(1, len(self.depths)):
            channels = self.channels * 2**stage
            projections += tokens // 4**stage * 2 * channels * channels
        if self.backward:
            # Images need no gradient.
            embedding, projections = 2 * embedding, 3 * projections
        return 2 * (embedding + projections) + sum(block.operations for block in self.attentions)

    @property
    def compulsory_bytes(self) -> int:
        """Images and parameters read and logits written; to train, parameters read again and their gradients written.

        Nothing in between is counted.
        """
        images, logits = self.batch * _RGB * self.image**2, self.batch * self.classes
        return 4 * (images + logits + (3 if self.backward else 1) * self.elements)

    def draw(self) -> Inputs:
        """Images, labels and weights from a fixed seed; weights such that every branch counts in the results.

        As a model begins, attention is almost uniform, and a fault in it hard to see.
        """
        generator = torch.Generator().manual_seed(0)
        model = self._model()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if "bias_table" in name:
                    parameter.copy_(noise)
                elif parameter.dim() == 2:
                    parameter.copy_(noise * parameter.shape[1] ** -0.5)
                else:
                    parameter.add_(noise, alpha=0.02)
        images = torch.randn(self.batch, _RGB, self.image, self.image, generator=generator)
        labels = torch.randint(self.classes, (self.batch,), generator=generator)
        return Inputs(model.train(self.backward), images, labels if self.backward else None)

    def expected(self, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
        """Results of torchvision's model."""
        model = inputs.copy().to(dtype)
        prepared = inputs._replace(images=inputs.images.to(dtype)).prepared(model, model)
        return list(prepared.comparable(prepared.run()))

    def _model(self) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: torch.nn.Module = swin_transformer().SwinTransformer(
                patch_size=[self.patch] * 2,
                embed_dim=self.channels,
                depths=list(self.depths),
                num_heads=list(self.heads),
                window_size=[self.window] * 2,
                stochastic_depth_prob=0.0,
                num_classes=self.classes,
            )
        return model


def _from_torchvision(model: torch.nn.Module) -> torch.nn.Module:
    # Not at the top: the cases of dskernels need nothing of it.
    from dsaccel.modules import SwinTransformer

    ours: torch.nn.Module = SwinTransformer.from_torchvision(model)
    return ours


def _prepare_ours(problem: ModelProblem, inputs: Inputs) -> Prepared:
    model = _from_torchvision(inputs.copy()).train(problem.backward)
    prepared = inputs.prepared(model, model)
    return Prepared(prepared.run, notes(problem.attentions[0]), prepared.comparable)


_OURS = Competitor(
    name=OURS, title="dsaccel.modules.SwinTransformer", refuses=why_no_torchvision, prepare=_prepare_ours
)


def _against_peers(name: str, problem: ModelProblem) -> Case:
    competitors = [_OURS, *competitors_for(OP)]
    lanes = [Lane(name=c.name, title=c.title, problem=problem, competitor=c) for c in competitors]
    return Case(op=OP, name=name, title=str(problem), dtype=problem.dtype, lanes=lanes, seconds=30.0)


def cases(quick: bool = False) -> list[Case]:
    """All cases. No target is set."""
    problem = ModelProblem()
    if quick:
        sizes: dict[str, Any] = {"channels": 8, "depths": (2, 2), "heads": (1, 2), "window": 4, "classes": 10}
        problem = replace(problem, image=32, batch=2, **sizes)
    return [
        _against_peers("inference-fp32", problem),
        _against_peers("training-fp32", replace(problem, backward=True)),
    ]
