"""Tensor parallelism gives what one process gives: outputs, gradients, steps, whatever is split."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from ranks import Ranks
from split_models import (
    VOCABULARY,
    assert_same,
    batch,
    gradients,
    language_model,
    loss_of,
    parameters,
    tp_mesh,
    train,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dsaccel.modules import GeluMLP, SlidingWindowLM, SwiGLU, SwinBlock, TransformerBlock, WindowAttention
from dsaccel.parallel.tensor import canonical_layout, rows_by_kind, rows_by_rank, tensor_parallel
from dsaccel.quant import quantize_


def trains_alike(rank: int, sequence_parallel: bool, options: dict[str, Any]) -> None:
    mesh = tp_mesh()
    for lengths in ([24, 25], [25, 24, 3]):
        alone = language_model(**options)
        model = copy.deepcopy(alone)
        if rank:
            # The first rank's weights count.
            torch.nn.init.ones_(model.embed.weight)
        tensor_parallel(model, mesh, sequence_parallel=sequence_parallel)
        assert_same(parameters(model), parameters(alone))
        expected, found = train(alone, lengths), train(model, lengths)
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-10, atol=0)
        assert_same(gradients(model), gradients(alone))
        assert_same(parameters(model), parameters(alone))
        for name, parameter in model.named_parameters():
            assert parameter.grad.placements == parameter.placements, name


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "plain"])
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (2, {"mlp": "gelu", "num_kv_heads": 8, "hidden_dim": None}),
        (4, {}),
        (4, {"mlp": "gelu"}),
    ],
    ids=["2-swiglu-gqa", "2-gelu", "4-swiglu-gqa", "4-gelu-gqa"],
)
def test_training_equals_one_process(
    ranks: Ranks, world: int, sequence_parallel: bool, options: dict[str, Any]
) -> None:
    ranks.run(trains_alike, world, sequence_parallel=sequence_parallel, options=options)


def part_alike(rank: int, kind: str, sequence_parallel: bool) -> None:
    options: dict[str, Any] = {"window": (4, 2), "num_kv_heads": 4}
    make = {
        "attention": lambda: WindowAttention(16, 8, qkv_bias=True, head_dim=3, **options),
        "blocks": lambda: nn.Sequential(
            TransformerBlock(16, 8, bias=True, mlp="gelu", **options), TransformerBlock(16, 4, bias=True)
        ),
        "mlps": lambda: nn.Sequential(GeluMLP(16, 8), nn.LayerNorm(16), SwiGLU(16, 4, bias=True)),
    }[kind]
    torch.manual_seed(2)
    alone = make().double()
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model = tensor_parallel(copy.deepcopy(alone), tp_mesh(), sequence_parallel=sequence_parallel)
    for length in (12, 13):
        inputs: list[dict[str, Tensor]] = [{}]
        if kind == "attention":
            shapes = ((2, 8, 1, length), (length, length), (1, 1, 1, length))
            inputs += [{"bias": torch.randn(shape).double()} for shape in shapes]
        x, weight = torch.randn(2, 2, length, 16).double()
        for arguments in inputs:
            results = []
            for module in (alone, model):
                module.zero_grad()
                leaves = {name: value.clone().requires_grad_() for name, value in {"x": x, **arguments}.items()}
                out = module(leaves["x"], **{name: value for name, value in leaves.items() if name != "x"})
                assert type(out) is Tensor or type(out).__name__ == "AsyncCollectiveTensor"
                (out * weight).sum().backward()
                of_inputs = {name: value.grad for name, value in leaves.items()}
                results.append({"out": out.detach(), **of_inputs, **gradients(module)})
            assert_same(results[1], results[0])


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "plain"])
@pytest.mark.parametrize("kind", ["attention", "blocks", "mlps"])
def test_parts_of_any_model_take_and_give_whole_tensors(ranks: Ranks, kind: str, sequence_parallel: bool) -> None:
    ranks.run(part_alike, 2, kind=kind, sequence_parallel=sequence_parallel)


class Stage(nn.Module):
    """A part of a `SlidingWindowLM`, as of a pipeline: the last has the embedding as its head."""

    def __init__(self, model: SlidingWindowLM, *, first: bool, last: bool) -> None:
        super().__init__()
        self.is_first = first
        self.embed = model.embed if first or last else None
        self.blocks = nn.Module()
        for i, block in enumerate(model.blocks):
            if i == int(last):
                self.blocks.add_module(str(i), block)
        self.norm = model.norm if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embed(x)
        for block in self.blocks.children():
            x = block(x)
        return x if self.norm is None else F.linear(self.norm(x), self.embed.weight)


def stages_alike(rank: int, sequence_parallel: bool) -> None:
    ends = ({"first": True, "last": False}, {"first": False, "last": True})
    # Copies, as each process of a pipeline has one.
    alone = [Stage(language_model(), **end) for end in ends]
    stages = [Stage(language_model(), **end) for end in ends]
    for stage in stages:
        tensor_parallel(stage, tp_mesh(), sequence_parallel=sequence_parallel)
    assert all(isinstance(x, DTensor) for stage in stages for x in stage.parameters())
    tokens, _ = batch(13)
    results = []
    for parts in (alone, stages):
        hidden = parts[0](tokens)
        received = hidden.detach().requires_grad_()
        out = parts[1](received)
        assert hidden.is_contiguous()
        weight = torch.arange(out.numel()).double().view_as(out).sin()
        (out * weight).sum().backward()
        hidden.backward(received.grad)
        named = {f"{i}.{name}": x for i, part in enumerate(parts) for name, x in gradients(part).items()}
        results.append({"hidden": hidden.detach(), "out": out.detach(), **named})
    assert_same(results[1], results[0])


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "plain"])
def test_stages_of_a_pipeline_take_and_give_whole_tensors(ranks: Ranks, sequence_parallel: bool) -> None:
    ranks.run(stages_alike, 2, sequence_parallel=sequence_parallel)


class Messages(TorchDispatchMode):
    """Counts collectives by name; CommDebugMode cannot be used twice in a process."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(type_, DTensor) for type_ in types):
            return NotImplemented
        name = str(func).split(".")[1]
        if func.namespace == "_c10d_functional" and not name.startswith(("wait", "_")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def messages_of(rank: int, sequence_parallel: bool, layers: int) -> list[Counter[str]]:
    torch.manual_seed(1)
    model = SlidingWindowLM(VOCABULARY, 16, layers, 4, window=5, max_positions=32).double()
    tensor_parallel(model, tp_mesh(), sequence_parallel=sequence_parallel)
    with Messages() as forward:
        loss = loss_of(model, 16)
    with Messages() as backward:
        loss.backward()
    return [forward.counts, backward.counts]


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "plain"])
def test_messages_of_a_block_are_those_of_the_papers(ranks: Ranks, sequence_parallel: bool) -> None:
    one, three = (ranks.run(messages_of, 2, sequence_parallel=sequence_parallel, layers=n)[0] for n in (1, 3))
    blocks, ends = [], []
    for least, most in zip(one, three, strict=True):
        block = {name: (most[name] - least[name]) // 2 for name in most}
        blocks.append({name: count for name, count in block.items() if count})
        ends.append({name: least[name] - count for name, count in block.items() if least[name] - count})
    gathers, scatters, reduces = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
    if sequence_parallel:
        # Backward, a gain has a part of its gradient on each rank: C numbers.
        assert blocks == [{gathers: 2, scatters: 2}, {gathers: 2, scatters: 2, reduces: 2}]
        # Embedding; what the head is given, and the logits.
        assert ends == [{scatters: 1, gathers: 2}, {gathers: 1, scatters: 1, reduces: 1}]
    else:
        assert blocks == [{reduces: 2}, {reduces: 2}]
        assert ends == [{reduces: 1, gathers: 1}, {reduces: 1}]


def refusals(rank: int) -> list[str]:
    mesh = tp_mesh()
    quantized = nn.Sequential(GeluMLP(64, 64))
    quantize_(quantized, "int8_weight_only")
    adapted = nn.Sequential(WindowAttention(16, 4))
    adapted[0].proj = nn.Sequential(nn.Linear(16, 16))
    tied = language_model()
    tied.lm_head = nn.Linear(16, VOCABULARY, bias=False)
    tied.lm_head.weight = tied.embed.weight
    other_mlp = TransformerBlock(16, 4)
    other_mlp.mlp = nn.Linear(16, 16)
    split = tensor_parallel(SwiGLU(16, 8), mesh)
    renormed = language_model()
    renormed.embed.max_norm = 1.0
    cases: list[tuple[Any, Any]] = [
        ("model", mesh),
        (GeluMLP(4, 5), mesh),
        (nn.Sequential(nn.Identity(), SwiGLU(4, 5)), mesh),
        (WindowAttention(12, 3), mesh),
        (WindowAttention(12, 6, 3), mesh),
        (SlidingWindowLM(5, 16, 1, 4), mesh),
        (quantized, mesh),
        (adapted, mesh),
        (tied, mesh),
        (other_mlp, mesh),
        (renormed, mesh),
        (split, mesh),
        (nn.Linear(4, 4), mesh),
        (SwinBlock(16, 4, window_size=2), mesh),
        (GeluMLP(4, 4), "tp"),
        (GeluMLP(4, 4), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))),
    ]
    said = []
    for model, where in cases:
        before = copy.deepcopy(model.state_dict()) if isinstance(model, nn.Module) and model is not split else {}
        with pytest.raises((TypeError, ValueError)) as caught:
            tensor_parallel(model, where)
        said.append(f"{type(caught.value).__name__} {caught.value}")
        if before:
            assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
            assert not any(isinstance(x, DTensor) for x in model.parameters())
    return said


def test_what_cannot_be_split_is_refused_before_anything_changes(ranks: Ranks) -> None:
    expected = [
        "TypeError model: expected a module, got 'model' (str)",
        "ValueError model: expected fc2.in_features a multiple of 2 ranks, got 5",
        "ValueError model: expected 1.down_proj.in_features a multiple of 2 ranks, got 5",
        "ValueError model: expected num_heads a multiple of 2 ranks, got 3",
        "ValueError model: expected num_kv_heads a multiple of 2 ranks, got 3",
        "ValueError model: expected embed.num_embeddings a multiple of 2 ranks, got 5",
        "ValueError model: expected a plain nn.Linear as 0.fc1, got QuantizedLinear",
        "ValueError model: expected a plain nn.Linear as 0.proj, got Sequential",
        "ValueError model: expected parameters shared only by layers that are split alike, got embed and lm_head",
        "ValueError model: expected SwiGLU or GeluMLP as mlp, got Linear",
        "ValueError model: expected embed.max_norm None, got 1.0",
        "ValueError model: expected plain parameters, as tensor_parallel comes before what else splits them, got a DT",
        "ValueError model: expected a WindowAttention, SwiGLU, GeluMLP or what is made of them, got Linear without one",
        "ValueError model: expected no SwinAttention, which is not split over ranks yet, got one as attn",
        "TypeError mesh: expected a DeviceMesh, got 'tp' (str)",
        "ValueError mesh: expected one dimension, as of mesh['tp'], got 2",
    ]
    for said in ranks.run(refusals, 2):
        for found, message in zip(said, expected, strict=True):
            assert found.startswith(message)


@pytest.mark.parametrize("shape", [(16,), (16, 3)])
def test_rows_by_rank_and_back(shape: tuple[int, ...]) -> None:
    x = torch.arange(16 * (3 if len(shape) > 1 else 1)).view(shape)
    # 8 rows of q, 4 of k and 4 of v over two ranks.
    ordered = rows_by_rank(x, (8, 4, 4), 2)
    assert torch.equal(ordered, x[[0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]])
    assert torch.equal(rows_by_kind(ordered, (8, 4, 4), 2), x)
    assert canonical_layout(WindowAttention(8, 2)) == {}
