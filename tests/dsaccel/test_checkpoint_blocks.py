"""Blocks that are recomputed give the same bits, and compute again what the policy says."""

from __future__ import annotations

import collections
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dskernels as dk
from dsaccel.amp import accumulate, keep_fp32
from dsaccel.checkpoint import checkpoint_blocks, memory_report, offload_activations
from dsaccel.modules import SlidingWindowLM, SwinTransformer, TransformerBlock

pytestmark = pytest.mark.usefixtures("one_thread")
RECOMPUTING = ["full", "every:2", "selective", "selective:2"]
TOKENS = torch.arange(2 * 24).reshape(2, 24) * 7 % 40


def language_model(layers: int = 3) -> SlidingWindowLM:
    return SlidingWindowLM(40, 16, layers, 2, window=6)


class Noisy(nn.Module):
    """A block whose result depends on three random draws."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inside = TransformerBlock(dim, 2)
        self.last = nn.Sequential(nn.Linear(dim, dim), nn.RReLU(0.1, 0.9), nn.Dropout(0.3))

    def forward(self, x: Tensor, *, mask: bool = False) -> Tensor:
        x = F.dropout(self.inside(x), 0.2, self.training)
        return x + self.last(x)


class NoisyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noisy(16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=True)
        return x


def step(model: nn.Module, *inputs: Tensor, seed: int = 3) -> list[Tensor]:
    """Loss, gradients, and the next random number, which tells where the generator stands."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(*inputs).square().mean()
    loss.backward()
    return [loss.detach(), torch.rand(1), *(p.grad for p in model.parameters())]


def assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


class Calls(TorchDispatchMode):
    """Counts the calls of each operator by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[op._schema.name] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", ["none", *RECOMPUTING])
def test_random_blocks_give_the_same_bits(policy: str) -> None:
    model, x = NoisyModel(), torch.randn(2, 10, 16)
    expected = step(model, x)
    handle = checkpoint_blocks(model, policy, blocks=model.layers)
    assert_same(step(model, x), expected)
    handle.remove()
    assert_same(step(model, x), expected)


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_an_input_without_gradient_trains_the_block(policy: str) -> None:
    model, x = NoisyModel(), torch.randn(2, 10, 16)
    checkpoint_blocks(model, policy)
    assert not x.requires_grad
    assert all(gradient.abs().sum() > 0 for gradient in step(model, x)[2:])
    asked = x.clone().requires_grad_()
    step(model, asked)
    assert asked.grad.abs().sum() > 0


@pytest.mark.parametrize("policy", RECOMPUTING)
@pytest.mark.parametrize("offload", [None, 0], ids=["stay", "offload"])
def test_under_autocast(policy: str, offload: int | None) -> None:
    model = language_model()

    def run() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    expected = run()
    moving = None if offload is None else offload_activations(min_bytes=offload)
    checkpoint_blocks(model, policy, offload=moving)
    assert_same(run(), expected)


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_accumulated_gradients(policy: str) -> None:
    model = language_model()

    def run() -> list[Tensor]:
        model.zero_grad()
        for micro in accumulate(TOKENS.split(1), 2):
            (model(micro.batch).square().mean() * micro.mean_factor).backward()
        return [p.grad for p in model.parameters()]

    expected = run()
    checkpoint_blocks(model, policy)
    assert_same(run(), expected)


def swin() -> SwinTransformer:
    sizes = {"embed_dim": 8, "depths": (1, 2), "num_heads": (1, 2), "window_size": 2, "patch_size": 2}
    return SwinTransformer(num_classes=3, stochastic_depth=0.3, **sizes)


class VarlenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(1)
        out, lse = dk.window_attention_varlen(q, k, v, bounds, bounds, window=(3, 0), return_lse=True)
        return self.proj(out.flatten(1)) + lse.mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str, int]] = {
    "window_attention": (language_model, lambda: TOKENS, "window_attention", 3),
    "swin_attention": (swin, lambda: torch.randn(2, 3, 12, 12), "swin_attention", 3),
    "varlen": (
        lambda: nn.Sequential(VarlenBlock(), VarlenBlock()),
        lambda: torch.randn(12, 16, requires_grad=True),
        "window_attention_varlen",
        2,
    ),
}


@pytest.mark.skipif(dk.build_info()["compiled"] is None, reason="the references are no operators, and never kept")
@pytest.mark.parametrize("case", CASES)
def test_selective_computes_the_costly_operators_once(case: str) -> None:
    build, make_input, operator, count = CASES[case]
    model, x = build(), make_input()
    is_block = (lambda name, module: isinstance(module, VarlenBlock)) if case == "varlen" else None
    expected = step(model, x)
    for policy, times in {"full": 2 * count, "selective": count, "none": count}.items():
        handle = checkpoint_blocks(model, policy, blocks=is_block)
        with Calls() as calls:
            results = step(model, x)
        assert_same(results, expected)
        assert calls.counts[f"dskernels::{operator}"] == times
        assert calls.counts[f"dskernels::{operator}_backward"] == count
        handle.remove()


def test_the_references_are_recomputed_too() -> None:
    model = language_model()
    with dk.use_backend("reference"):
        expected = step(model, TOKENS)
        checkpoint_blocks(model, "selective")
        assert_same(step(model, TOKENS), expected)


def test_selective_goes_backward_once() -> None:
    model = language_model()
    checkpoint_blocks(model, "selective")
    loss = model(TOKENS).sum()
    loss.backward(retain_graph=True)
    if dk.build_info()["compiled"] is None:
        return
    with pytest.raises(RuntimeError, match="only allowed to backward once"):
        loss.backward()


@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [("none", []), ("full", [0, 1, 2, 3, 4]), ("every:2", [0, 2, 4]), ("every:3", [0, 3]), ("selective:4", [0, 4])],
)
def test_which_blocks(policy: str, recomputed: list[int]) -> None:
    model = language_model(5)
    runs: collections.Counter[int] = collections.Counter()
    once: collections.Counter[int] = collections.Counter()
    for index, block in enumerate(model.blocks):
        block.norm1.register_forward_hook(lambda *_, index=index: runs.update([index]))
        block.register_forward_hook(lambda *_, index=index: once.update([index]))
    handle = checkpoint_blocks(model, policy)
    assert handle.recomputed == tuple(f"blocks.{index}" for index in recomputed)
    assert handle.kept == tuple(f"blocks.{index}" for index in range(5) if index not in recomputed)
    step(model, TOKENS)
    assert runs == {index: 2 if index in recomputed else 1 for index in range(5)}
    assert once == dict.fromkeys(range(5), 1)


def test_prints_what_was_done() -> None:
    lines = str(checkpoint_blocks(language_model(), "every:2")).splitlines()
    assert lines == [
        "every:2: 2 blocks recomputed, 1 kept",
        "  recomputed blocks.0",
        "  recomputed blocks.2",
        "  kept blocks.1",
    ]


def test_default_blocks_of_other_models() -> None:
    found = checkpoint_blocks(swin(), "full").recomputed
    assert found == ("stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1")
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    x = torch.randn(2, 5, 8)
    expected = step(encoder, x)
    assert checkpoint_blocks(encoder, "full").recomputed == ("layers.0", "layers.1")
    assert_same(step(encoder, x), expected)
    # Of lists within lists the inner ones; no list of one, and none of several classes; nothing inside a block.
    nested = nn.ModuleList(nn.ModuleList((nn.Linear(2, 2), nn.Linear(2, 2))) for _ in range(2))
    others = nn.ModuleDict({"one": nn.ModuleList([nn.ReLU()]), "two": nn.ModuleList([nn.ReLU(), nn.Tanh()])})
    others["nested"] = nested
    assert checkpoint_blocks(others, "full").recomputed == ("nested.0.0", "nested.0.1", "nested.1.0", "nested.1.1")
    assert checkpoint_blocks(NoisyModel(), "full").recomputed == tuple(f"layers.{index}.inside" for index in range(3))


def test_model_stays_as_it_is() -> None:
    model, plain = language_model(), language_model()
    plain.load_state_dict(model.state_dict())
    classes = [type(module) for module in model.modules()]
    handle = checkpoint_blocks(model, "full")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [type(module) for module in model.modules()] == classes
    model.load_state_dict(plain.state_dict(), strict=True)
    assert repr(model) == repr(plain)
    handle.remove()
    handle.remove()
    assert all(vars(a).keys() == vars(b).keys() for a, b in zip(model.modules(), plain.modules(), strict=True))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_recompute_for_themselves(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = language_model()
    expected = step(model, TOKENS)
    handle = checkpoint_blocks(model, "full", offload=offload_activations(min_bytes=7))
    other = copied(model)
    handle.remove()
    runs: list[int] = []
    other.blocks[0].norm1.register_forward_hook(lambda *_: runs.append(0))
    with torch.no_grad():
        model.blocks[0].mlp.down_proj.weight.zero_()
    assert_same(step(other, TOKENS), expected)
    assert len(runs) == 2
    assert other.blocks[0].forward.block is other.blocks[0]
    assert other.blocks[0].forward.offload.min_bytes == 7


def test_without_gradients_blocks_run_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model().eval()
    expected = model.generate(TOKENS[:, :3], 5, temperature=0)
    checkpoint_blocks(model, "full")
    # The state of the random generators is not even copied.
    monkeypatch.setattr(torch, "get_rng_state", lambda: pytest.fail("not needed"))
    assert torch.equal(model.generate(TOKENS[:, :3], 5, temperature=0), expected)
    with torch.no_grad():
        assert model(TOKENS).grad_fn is None


def test_norms_kept_in_float32() -> None:
    model = language_model().bfloat16()
    keep_fp32(model)
    expected = step(model, TOKENS)
    checkpoint_blocks(model, "selective")
    assert_same(step(model, TOKENS), expected)


@pytest.mark.parametrize("policy", ["full", "selective", "every:2"])
def test_compiles_whole(policy: str) -> None:
    model = language_model(2)
    with memory_report(model) as plain:
        expected = step(model, TOKENS)
    checkpoint_blocks(model, policy)
    torch._dynamo.reset()
    with memory_report(model) as report:
        results = step(torch.compile(model, fullgraph=True, backend="aot_eager"), TOKENS)
    torch.testing.assert_close(results, expected)
    # Recomputed in the graph, too.
    assert report.saved_bytes < (0.7 if policy == "every:2" else 0.4) * plain.saved_bytes


def test_compiles_around_offload() -> None:
    model = language_model(2)
    expected = step(model, TOKENS)
    checkpoint_blocks(model, "full", offload=offload_activations(min_bytes=0))
    torch._dynamo.reset()
    torch.testing.assert_close(step(torch.compile(model, backend="aot_eager"), TOKENS), expected)


def test_a_block_is_changed_once() -> None:
    model = language_model()
    handle = checkpoint_blocks(model, "every:2")
    with pytest.raises(ValueError, match=r"blocks: .*, got 'blocks.0', replaced by checkpoint_blocks: call remove"):
        checkpoint_blocks(model, "full")
    assert "forward" not in vars(model.blocks[1])
    handle.remove()
    model.blocks[2].forward = lambda x, cache: x
    with pytest.raises(ValueError, match=r"blocks: expected modules with the forward of their class, got 'blocks.2'"):
        checkpoint_blocks(model, "full")
    # That of somebody else is not ours to remove.
    handle.remove()
    assert "forward" in vars(model.blocks[2])


def test_errors_of_arguments() -> None:
    model = language_model()
    with pytest.raises(ValueError, match="policy: expected"):
        checkpoint_blocks(model, "half")
    with pytest.raises(TypeError, match="model: expected a module, got 3"):
        checkpoint_blocks(3, "full")
    with pytest.raises(TypeError, match="offload: expected an offload_activations or None, got True"):
        checkpoint_blocks(model, "full", offload=True)
    with pytest.raises(TypeError, match="blocks: expected modules or a function of name and module, got 3"):
        checkpoint_blocks(model, "full", blocks=3)
    with pytest.raises(ValueError, match="blocks: expected modules of the model, got 'blocks'"):
        checkpoint_blocks(model, "full", blocks=["blocks"])
    with pytest.raises(ValueError, match="blocks: expected modules of the model, got Linear"):
        checkpoint_blocks(model, "full", blocks=[model.blocks[0], nn.Linear(1, 1)])
    for nothing in ([], lambda name, module: False):
        with pytest.raises(ValueError, match="blocks: expected at least one in the model, got none"):
            checkpoint_blocks(model, "full", blocks=nothing)
    with pytest.raises(ValueError, match="blocks: expected at least one in the model, got none"):
        checkpoint_blocks(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), "full")
    with pytest.raises(ValueError, match=r"blocks: expected none inside another, got 'blocks.1.mlp' inside 'blocks.1'"):
        checkpoint_blocks(model, "full", blocks=[model.blocks[1], model.blocks[1].mlp])
