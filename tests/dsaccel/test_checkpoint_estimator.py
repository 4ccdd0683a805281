"""What is said before training is what a step then saves and computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from dsaccel.checkpoint import BlockPolicy, checkpoint_blocks, estimate, memory_report
from dsaccel.checkpoint.__main__ import main
from dsaccel.modules import SlidingWindowLM, SwinTransformer

pytestmark = pytest.mark.usefixtures("one_thread")
POLICIES = ["none", "every:2", "selective", "selective:2", "full"]


def language_model() -> SlidingWindowLM:
    return SlidingWindowLM(40, 16, 3, 4, 2, window=6)


def cross_entropy(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits.shape[:2].numel(), dtype=torch.int64))


def swin() -> SwinTransformer:
    sizes = {"embed_dim": 8, "depths": (1, 2), "num_heads": (1, 2), "window_size": 2, "patch_size": 2}
    return SwinTransformer(num_classes=3, stochastic_depth=0.3, **sizes)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), 3)


Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], Callable[[Any], Tensor] | None, bool]
CASES: dict[str, Case] = {
    # The tokens are a view of more, as they are in training.
    "language_model": (language_model, lambda: (torch.randint(40, (2, 31))[:, :-1],), cross_entropy, False),
    "autocast": (language_model, lambda: (torch.randint(40, (2, 30)),), cross_entropy, True),
    "bfloat16": (lambda: language_model().bfloat16(), lambda: (torch.randint(40, (2, 30)),), None, False),
    "swin": (swin, lambda: (torch.randn(2, 3, 12, 12),), None, False),
    "encoder": (encoder, lambda: (torch.randn(2, 5, 8, requires_grad=True),), None, False),
}


@pytest.mark.parametrize("case", CASES)
def test_is_what_a_step_measures(case: str) -> None:
    build, make_inputs, loss, autocast = CASES[case]
    model, inputs = build(), make_inputs()
    total = loss or (lambda output: output.sum())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        estimated = estimate(model, inputs, POLICIES, loss=loss)
    backward_flops = {}
    for policy in POLICIES:
        handle = checkpoint_blocks(model, policy)
        with memory_report(model) as report:
            with FlopCounterMode(display=False) as forward, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                value = total(model(*inputs))
            with FlopCounterMode(display=False) as backward:
                value.backward()
        handle.remove()
        backward_flops[policy] = backward.get_total_flops()
        cost = estimated[policy]
        assert cost.policy == BlockPolicy.parse(policy)
        assert cost.saved_bytes == report.saved_bytes
        assert cost.forward_flops == forward.get_total_flops()
        assert cost.recomputed_flops == backward_flops[policy] - backward_flops["none"]
    assert estimated["full"].saved_bytes < estimated["every:2"].saved_bytes < estimated["none"].saved_bytes


def test_what_one_block_adds() -> None:
    model, tokens = language_model(), torch.randint(40, (2, 30))
    estimated = estimate(model, tokens, POLICIES)
    sizes = []
    for block in model.blocks:
        x = torch.randn(2, 30, 16, requires_grad=True) * 1
        with memory_report(model) as report:
            block(x)
        sizes.append(report.saved_bytes)
    assert len(set(sizes)) == 1
    assert estimated["full"].block_bytes == estimated["every:2"].block_bytes == sizes[0]
    assert estimated["none"].block_bytes == 0
    # Beside the blocks: the tokens, and at most three tensors and the roots of the last norm.
    beside = 2 * 30 * 8 + 2 * 30 * (3 * 16 + 1) * 4
    assert 3 * sizes[0] < estimated["none"].saved_bytes <= 3 * sizes[0] + beside


def test_model_is_left_alone() -> None:
    model, tokens = language_model(), torch.randint(40, (2, 30))
    before = {name: (id(p), p._version) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    estimate(model, (tokens, None))
    assert {name: (id(p), p._version) for name, p in model.named_parameters()} == before
    assert all(p.grad is None for p in model.parameters())
    assert all("forward" not in vars(module) for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_models_without_weights() -> None:
    tokens = torch.randint(40, (2, 30))
    policies = ["none", "selective"]
    expected = estimate(language_model(), tokens, policies, loss=cross_entropy)
    with torch.device("meta"):
        model, empty = language_model(), torch.empty(2, 30, dtype=torch.int64)
    for inputs in (tokens, empty):
        assert estimate(model, inputs, policies, loss=cross_entropy) == expected
    assert all(p.is_meta for p in model.parameters())
    # What no machine of the tests could hold.
    with torch.device("meta"):
        large = SlidingWindowLM(1000, 4096, 2, 32, window=4096, max_positions=4096)
    costs = estimate(large, torch.empty(64, 4096, dtype=torch.int64, device="meta"), ["none", "full"])
    # The input of each block and of the last norm, inside the norm one more at most, and what the head takes.
    assert 4 <= costs["full"].saved_bytes / (64 * 4096 * 4096 * 4) < 5.01
    assert costs.held_bytes == sum(p.numel() * 4 for p in large.parameters()) + 2 * 4096 * 64 * 4


def test_other_blocks_and_tied_weights() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    model[2].weight = model[0].weight
    costs = estimate(model, torch.randn(5, 8), ["none", "full"], blocks=lambda name, module: name in ("1", "3"))
    # Of Tanh its result is saved, and instead its input; the second product saves what Tanh returned, too.
    assert (costs["none"].saved_bytes, costs["full"].saved_bytes) == (3 * 160, 4 * 160)
    assert costs["full"].recomputed_flops == 0
    assert costs.held_bytes == (64 + 8 + 8) * 4


def test_table() -> None:
    costs = estimate(language_model(), torch.randint(40, (2, 30)), ["full", "every:2"])
    lines = str(costs).splitlines()
    assert lines[0].split() == ["policy", "saved", "one", "block", "recomputed", "of", "forward"]
    part = costs["full"].saved_bytes / costs.unchanged.saved_bytes
    again = costs["full"].recomputed_flops / costs.unchanged.forward_flops
    assert lines[1].split()[0] == "full"
    assert f" {part:.1%} " in lines[1]
    assert lines[1].endswith(f" {again:.1%}")
    assert [cost.policy.every for cost in costs.costs] == [1, 2]
    with pytest.raises(KeyError, match="none"):
        costs["none"]


def test_errors() -> None:
    model, tokens = language_model(), torch.randint(40, (2, 30))
    with pytest.raises(ValueError, match="policy: expected"):
        estimate(model, tokens, ["all"])
    with pytest.raises(TypeError, match="model: expected a module, got 3"):
        estimate(3, tokens)
    with pytest.raises(TypeError, match="blocks: expected a function of name and module, or None, got"):
        estimate(model, tokens, blocks=model.blocks)
    with pytest.raises(ValueError, match="loss: expected a value that depends on a parameter, got one that depends on"):
        estimate(model, tokens, loss=lambda logits: logits.detach().sum())
    with pytest.raises(ValueError, match="model: expected an output with a gradient, got none"):
        estimate(language_model().requires_grad_(False), tokens)
    checkpoint_blocks(model, "full")
    with pytest.raises(ValueError, match=r"blocks: .* replaced by checkpoint_blocks"):
        estimate(model, tokens)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--vocab 40 --dim 16 --layers 2 --heads 2 --window 0 --length 30 --batch 2 --hidden 24 --dtype bfloat16"
    main([*sizes.split(), "--policies", "none", "full", "--measure"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0.0 M parameters and buffers: 0.0 MiB"
    assert [line.split()[0] for line in lines[1:4]] == ["policy", "none", "full"]
    assert lines[4].startswith("measured with none: ")
    with pytest.raises(SystemExit):
        main(["--policies", "half"])
    assert "invalid parse value: 'half'" in capsys.readouterr().err


def test_command_by_name() -> None:
    sizes = ["--vocab", "40", "--dim", "16", "--layers", "2", "--heads", "2", "--length", "30", "--policies", "every:2"]
    done = subprocess.run([sys.executable, "-m", "dsaccel.checkpoint", *sizes], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("every:2 ")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model, tokens = language_model().cuda(), torch.randint(40, (2, 30), device="cuda")
    estimated = estimate(model, tokens, POLICIES)
    for policy in POLICIES:
        handle = checkpoint_blocks(model, policy)
        with memory_report(model) as report:
            model(tokens).sum().backward()
        handle.remove()
        assert estimated[policy].saved_bytes == report.saved_bytes
