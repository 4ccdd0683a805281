"""What each policy will cost, said before training."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from dsaccel.checkpoint._saved import Counter
from dsaccel.checkpoint.blocks import BlockForward, Blocks, checkpoint_blocks, find_blocks
from dsaccel.checkpoint.memory import as_mebibytes, counting
from dsaccel.checkpoint.policy import BlockPolicy
from dskernels.checks import wrong_type, wrong_value

POLICIES = ("none", "selective", "every:2", "full")


@dataclass(frozen=True)
class PolicyCost:
    """What a policy costs in one forward and backward.

    Attributes:
        policy: the policy.
        saved_bytes: what is kept from forward to backward, as `MemoryReport.saved_bytes`.
        block_bytes: the most that one recomputed block adds to it while backward is at that block, at most: its input
            and what ``"selective"`` keeps of it are counted again. 0 where nothing is recomputed.
        forward_flops: floating point operations of the forward, a multiply-add counted as two.
        recomputed_flops: those that backward does once more.
    """

    policy: BlockPolicy
    saved_bytes: int
    block_bytes: int
    forward_flops: int
    recomputed_flops: int


@dataclass(frozen=True)
class CostEstimate:
    """What `estimate` found; ``print`` shows a table.

    Attributes:
        costs: one for each policy, in the order asked for.
        held_bytes: of parameters and buffers; gradients and the optimizer's state come on top.
        unchanged: what is saved with no policy at all, the measure of the table's percentages.
    """

    costs: tuple[PolicyCost, ...]
    held_bytes: int
    unchanged: PolicyCost

    def __getitem__(self, policy: str | BlockPolicy) -> PolicyCost:
        """The cost of one of the policies.

        Raises:
            KeyError: it was not asked for.
        """
        parsed = BlockPolicy.parse(policy)
        for cost in self.costs:
            if cost.policy == parsed:
                return cost
        raise KeyError(str(policy))

    def __str__(self) -> str:
        lines = [f"{'policy':<12} {'saved':>16} {'':>6} {'one block':>14} {'recomputed':>14} {'of forward':>10}"]
        for cost in self.costs:
            part = cost.saved_bytes / self.unchanged.saved_bytes if self.unchanged.saved_bytes else 1
            again = cost.recomputed_flops / cost.forward_flops if cost.forward_flops else 0
            lines.append(
                f"{cost.policy!s:<12} {as_mebibytes(cost.saved_bytes):>16} {part:>6.1%}"
                f" {as_mebibytes(cost.block_bytes):>14} {cost.recomputed_flops / 1e9:>7,.1f} GFLOP {again:>10.1%}"
            )
        return "\n".join(lines)


def estimate(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any],
    policies: Iterable[str | BlockPolicy] = POLICIES,
    *,
    blocks: Blocks | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> CostEstimate:
    """Says what is saved and what is recomputed under each policy, without computing anything.

    Forward and backward run on tensors without data (`torch._subclasses.FakeTensorMode`), on a copy of ``model`` that
    shares nothing with it and has no weights. So models of any size are estimated on any machine: build those too large
    for it under ``with torch.device("meta")``. Bytes and operations are those that `memory_report` and
    `torch.utils.flop_counter.FlopCounterMode` measure in a real step. Autocast, where it is on, is taken into account.

    Args:
        model: on any device; of ``"meta"``, what a CPU saves is estimated.
        example_inputs: arguments of the model: a tensor, or a sequence of arguments; tensors may be on ``"meta"``.
        policies: as `checkpoint_blocks` takes them. Default: none, selective, every:2 and full.
        blocks: as in `checkpoint_blocks`; a function, as modules of ``model`` are not those of the copy, or None.
        loss: ``loss(output)`` is differentiated; what it saves is counted. Default: the sum of all that has a gradient
            in ``output``, which saves nothing.

    Returns:
        A table of costs.

    Raises:
        TypeError, ValueError: as `checkpoint_blocks`; or the loss does not depend on any parameter.
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "a module", model)
    if blocks is not None and (not callable(blocks) or isinstance(blocks, nn.Module)):
        raise wrong_type("blocks", "a function of name and module, or None", blocks)
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    asked = [BlockPolicy.parse(policy) for policy in policies]
    step = _Step(model, inputs, blocks, loss or _sum_of)
    unchanged = step.cost(BlockPolicy("none"))
    costs = tuple(step.cost(policy) for policy in asked)
    held = {id(x): x.numel() * x.element_size() for x in itertools.chain(model.parameters(), model.buffers())}
    return CostEstimate(costs, sum(held.values()), unchanged)


class _Step:
    # One forward and backward of a model, run without data under a policy each.

    def __init__(
        self, model: nn.Module, inputs: tuple[Any, ...], blocks: Blocks | None, loss: Callable[[Any], Tensor]
    ) -> None:
        # What is no parameter and no buffer, as tables that modules make themselves, becomes fake on the way.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = {id(x): x for x in itertools.chain(model.parameters(), model.buffers())}
        memo: dict[int, Any] = {key: self._fake(x) for key, x in tensors.items()}
        self._model = copy.deepcopy(model, memo)
        self._inputs = tree_map_only(Tensor, self._fake, inputs)
        self._blocks = blocks
        self._loss = loss
        self._totals: tuple[int, int] | None = None
        self._largest: dict[str, int] = {}

    def _fake(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            # Views of one memory stay views of one.
            return self._mode.from_tensor(x)
        with self._mode:
            fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
        if isinstance(x, nn.Parameter):
            return nn.Parameter(fake, requires_grad=x.requires_grad)
        return fake.requires_grad_(x.requires_grad)

    def cost(self, policy: BlockPolicy) -> PolicyCost:
        handle = checkpoint_blocks(self._model, policy, blocks=self._blocks)
        for module in self._model.modules():
            forward = vars(module).get("forward")
            if isinstance(forward, BlockForward):
                # Random states are no tensors without data.
                forward.preserve_rng_state = False
        with self._mode, counting(self._model) as counter:
            watches = [] if self._totals else self._watch(counter)
            with FlopCounterMode(display=False) as counted:
                output = self._model(*self._inputs)
                loss = self._loss(output)
            saved = counter.saved.peak
            for watch in watches:
                watch.remove()
            if not loss.requires_grad:
                raise wrong_value("loss", "a value that depends on a parameter", "one that depends on none")
            with FlopCounterMode(display=False) as backward:
                loss.backward()
        handle.remove()
        self._model.zero_grad()
        totals = counted.get_total_flops(), backward.get_total_flops()
        # Without a policy, which comes first, backward computes nothing twice.
        self._totals = self._totals or totals
        largest = max((self._largest[name] for name in handle.recomputed), default=0)
        return PolicyCost(policy, saved, largest, totals[0], totals[1] - self._totals[1])

    def _watch(self, counter: Counter) -> list[Any]:
        # What each block saves when nothing is recomputed.
        def watch(name: str, block: nn.Module) -> list[Any]:
            def before(*_: Any) -> None:
                self._largest[name] = -counter.saved.now

            def after(*_: Any) -> None:
                self._largest[name] += counter.saved.now

            return [block.register_forward_pre_hook(before), block.register_forward_hook(after)]

        return [h for name, block in find_blocks(self._model, self._blocks).items() for h in watch(name, block)]


def _sum_of(output: Any) -> Tensor:
    parts = [x.sum() for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not parts:
        raise wrong_value("model", "an output with a gradient", "none")
    return sum(parts[1:], parts[0])
