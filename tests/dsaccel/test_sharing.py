"""Layers that share parameters: one parameter, whatever is done to the model."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dsaccel.modules import SlidingWindowLM, SwinTransformer, share_blocks, shared_modules, unique_parameter_count

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB, DIM = 18, 16
PARTS = [None, "attn", "mlp"]


def make_model(layers: int = 4, seed: int = 0) -> SlidingWindowLM:
    torch.manual_seed(seed)
    return SlidingWindowLM(VOCAB, DIM, layers, 2, window=5, max_positions=64)


def make_tokens(batch: int = 4, length: int = 13) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(7))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def ties(model: nn.Module) -> list[list[str]]:
    """Names of parameters, those of one object together."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(names.values())


def of_paper(count: int, groups: int, mode: str) -> list[int]:
    """Algorithm 1 of Takase and Kiyono, with layers and sets from 0."""
    sets: list[int] = []
    for i in range(1, count + 1):
        if mode == "sequence":
            sets.append((i - 1) // (count // groups))
        elif mode == "cycle" or i <= groups * (-(-count // groups) - 1) or i <= groups:
            sets.append((i - 1) % groups)
        else:
            sets.append(groups - 1 - (i - 1) % groups)
    return [sets.index(number) for number in sets]


@pytest.mark.parametrize("mode", ["sequence", "cycle", "cycle_rev"])
@pytest.mark.parametrize(
    ("count", "groups"), [(6, 3), (6, 2), (6, 1), (6, 6), (9, 3), (7, 3), (5, 4), (5, 2), (1, 1), (2, 1)]
)
def test_assignment_is_that_of_the_paper(count: int, groups: int, mode: str) -> None:
    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
    before = list(blocks)
    shared = share_blocks(blocks, groups, mode=mode)
    assert [before.index(block) for block in blocks] == list(shared.assignment)
    assert len(set(shared.assignment)) == groups
    assert (shared.parameters_before, shared.parameters_after) == (6 * count, 6 * groups)
    if mode != "sequence" or count % groups == 0:
        assert list(shared.assignment) == of_paper(count, groups, mode)


def test_sequence_is_balanced_where_it_cannot_be_even() -> None:
    blocks = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    assert share_blocks(blocks, 2, mode="sequence").assignment == (0, 0, 0, 3, 3)


@pytest.mark.parametrize(("part", "names"), [(None, ("attn", "mlp", "norm1", "norm2")), ("attn", ("attn",))])
def test_shared_model_is_one_with_equal_parameters(part: str | None, names: tuple[str, ...]) -> None:
    model, tokens = make_model(), make_tokens()
    apart = copy.deepcopy(model)
    for index, source in enumerate((0, 1, 0, 1)):
        for name in names:
            apart.blocks[index].get_submodule(name).load_state_dict(
                apart.blocks[source].get_submodule(name).state_dict()
            )
    share_blocks(model, 2, part=part)
    torch.testing.assert_close(model(tokens), apart(tokens), rtol=0, atol=0)
    loss_of(model, tokens).backward()
    loss_of(apart, tokens).backward()
    of_apart = dict(apart.named_parameters())
    for tied in ties(model):
        found = model.get_parameter(tied[0]).grad
        expected = torch.stack([of_apart[name].grad for name in tied]).sum(0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_layers_keep_their_own_caches() -> None:
    model, tokens = make_model().eval(), make_tokens(2, 20)
    share_blocks(model, 1)
    assert model.reach == 4 * 4 + 1
    caches = model.new_caches(2)
    with torch.no_grad():
        stepwise = torch.cat([model(tokens[:, i : i + 1], caches) for i in range(20)], 1)
        torch.testing.assert_close(stepwise, model(tokens), rtol=1e-4, atol=1e-5)


def test_optimizer_sees_each_parameter_once() -> None:
    model, tokens = make_model(), make_tokens()
    share_blocks(model, 2)
    parameters = list(model.parameters())
    assert len({id(p) for p in parameters}) == len(parameters) == 2 + 2 * 7
    assert sum(p.numel() for p in parameters) == unique_parameter_count(model)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    loss_of(model, tokens).backward()
    expected = [p.detach() - 0.1 * p.grad for p in parameters]
    optimizer.step()
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value)
    assert ties(model) == ties(copy.deepcopy(model))


@pytest.mark.parametrize(
    ("part", "groups", "after"),
    [
        (None, 3, 635_776),
        (None, 2, 434_816),
        (None, 1, 233_856),
        ("attn", 3, 771_200),
        ("attn", 2, 705_664),
        ("attn", 1, 640_128),
        ("mlp", 3, 701_568),
        ("mlp", 2, 566_400),
        ("mlp", 1, 431_232),
    ],
)
def test_counts_of_the_demo_model(part: str | None, groups: int, after: int) -> None:
    model = SlidingWindowLM(256, 128, 4, 4, window=128)
    shared = share_blocks(model, groups, part=part)
    assert (shared.parameters_before, shared.parameters_after) == (836_736, after)
    assert unique_parameter_count(model) == after
    # An embedding, the norms at its end, and of each layer 4 d^2 of attention, 3 d h of MLP and two norms.
    d, h = 128, 352
    sizes = {None: 4 * d * d + 3 * d * h + 2 * d, "attn": 4 * d * d, "mlp": 3 * d * h}
    assert shared.saved == pytest.approx((4 - groups) * sizes[part] / (256 * d + d + 4 * sizes[None]))


@pytest.mark.parametrize("part", PARTS)
def test_ties_survive_copies_and_checkpoints(part: str | None, tmp_path: Path) -> None:
    model, tokens = make_model(), make_tokens()
    share_blocks(model, 2, part=part)
    expected, tied = model(tokens), ties(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).double().float()):
        assert ties(copied) == tied
        assert torch.equal(copied(tokens), expected)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert len({value.data_ptr() for value in state.values()}) == len(tied)
    for assign in (False, True):
        loaded = make_model(seed=1)
        share_blocks(loaded, 2, part=part)
        loaded.load_state_dict(state, assign=assign)
        assert ties(loaded) == tied
        assert torch.equal(loaded(tokens), expected)


@pytest.mark.parametrize("part", PARTS)
def test_ties_survive_safetensors(part: str | None, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, loaded = make_model(), make_model(seed=1)
    for each in (model, loaded):
        share_blocks(each, 2, part=part)
    safetensors.save_model(model, tmp_path / "model.safetensors")
    assert sum(x.numel() for x in safetensors.load_file(tmp_path / "model.safetensors").values()) == (
        unique_parameter_count(model)
    )
    assert safetensors.load_model(loaded, tmp_path / "model.safetensors") == (set(), [])
    assert ties(loaded) == ties(model)
    assert torch.equal(loaded(make_tokens()), model(make_tokens()))


@pytest.mark.parametrize("part", [None, "attn"])
def test_export_keeps_ties(part: str | None) -> None:
    model, tokens = make_model(layers=2).eval(), make_tokens(2, 9)
    share_blocks(model, 1, part=part)
    with torch.no_grad():
        program = torch.export.export(model, (tokens,))
        assert unique_parameter_count(program.module()) == unique_parameter_count(model)
        torch.testing.assert_close(program.module()(tokens), model(tokens))
        file = io.BytesIO()
        torch.export.save(program, file)
        loaded = torch.export.load(io.BytesIO(file.getvalue())).module()
        # One tensor in memory for each tie, though torch makes a parameter of each name.
        assert len({p.data_ptr() for p in loaded.parameters()}) == len(ties(model))
        torch.testing.assert_close(loaded(tokens), model(tokens))


def test_compiled_like_eager() -> None:
    torch.compiler.reset()
    model, tokens = make_model(layers=2), make_tokens(2, 9)
    share_blocks(model, 1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(loss_of(each, tokens), list(model.parameters())) for each in (compiled, model)]
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


def test_shared_modules_are_the_outermost() -> None:
    model = make_model()
    # All layers share the table of rotary positions, which has no parameters.
    assert shared_modules(model) == []
    share_blocks(model, 2, part="attn")
    assert shared_modules(model) == [model.blocks[0].attn, model.blocks[1].attn]
    share_blocks(model, 2, part="mlp.down_proj")
    assert shared_modules(model)[1] is model.blocks[0].mlp.down_proj
    share_blocks(model, 1)
    assert shared_modules(model) == [model.blocks[0]]


def test_swin_shares_blocks_of_the_same_shift() -> None:
    sizes: dict[str, Any] = {"embed_dim": 8, "depths": (4,), "num_heads": (2,), "window_size": 4, "patch_size": 2}
    model = SwinTransformer(num_classes=3, **sizes)
    stage = model.stages[0]
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"layers 0 and 1, which would share, to be alike, got .*shift="):
        share_blocks(stage, 2, mode="sequence")
    assert len({id(block) for block in stage.blocks}) == 4
    share_blocks(stage, 2, mode="cycle")
    assert stage.blocks[0] is stage.blocks[2]
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    assert state.keys() == model.state_dict().keys()


def test_alike_in_print_is_not_enough() -> None:
    frozen = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    frozen[1].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="to be alike, got another weight"):
        share_blocks(frozen, 1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"groups": 0}, ValueError, "groups: expected a number from 1 to 4, the layers, got 0"),
        ({"groups": 5}, ValueError, "groups: expected a number from 1 to 4, the layers, got 5"),
        ({"groups": 1.0}, TypeError, r"groups: expected an integer, got 1.0 \(float\)"),
        ({"mode": "spiral"}, ValueError, "mode: expected one of 'sequence', 'cycle', 'cycle_rev', got 'spiral'"),
        ({"part": "atn"}, ValueError, "part: expected a submodule of layer 0, which has norm1, attn, norm2, mlp, got"),
        ({"part": ""}, TypeError, "part: expected the name of a submodule, or None, got ''"),
        ({"model": nn.Linear(2, 2)}, TypeError, "model: expected a ModuleList or Sequential of layers, or a module"),
        ({"model": nn.ModuleList()}, TypeError, "model: expected a ModuleList or Sequential of layers"),
    ],
)
def test_errors_name_the_argument(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"model": make_model(), "groups": 2}
    with pytest.raises(error, match=message):
        share_blocks(**{**arguments, **change})


def train(model: nn.Module, tokens: Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()


def case_data_parallel(rank: int, kind: str, part: str | None, reshard: bool) -> dict[str, Tensor]:
    model = make_model().double()
    share_blocks(model, 2, mode="cycle_rev", part=part)
    start = {name: x.clone() for name, x in model.state_dict().items()}
    wrapped: nn.Module = model
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for module in dict.fromkeys((*shared_modules(model), *model.blocks)):
            fully_shard(module, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
    train(wrapped, make_tokens()[2 * rank : 2 * rank + 2])
    state = {name: x.full_tensor() if kind == "fully_shard" else x for name, x in model.state_dict().items()}
    assert all(not torch.equal(value, start[name]) for name, value in state.items())
    shared = "attn.qkv.weight" if part == "attn" else "mlp.down_proj.weight"
    assert model.get_parameter(f"blocks.0.{shared}") is model.get_parameter(f"blocks.3.{shared}")
    return state


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("kind", "reshard"),
    [("ddp", False), ("fully_shard", True), ("fully_shard", False)],
    ids=["ddp", "zero 3", "zero 2"],
)
def test_data_parallel_trains_like_one_process(ranks: Ranks, kind: str, reshard: bool, part: str | None) -> None:
    model = make_model().double()
    share_blocks(model, 2, mode="cycle_rev", part=part)
    train(model, make_tokens())
    expected = model.state_dict()
    for state in ranks.run(case_data_parallel, 2, kind=kind, part=part, reshard=reshard):
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def case_tensor_parallel(rank: int, part: str | None, sequence_parallel: bool) -> dict[str, Tensor]:
    from dsaccel.parallel.tensor import rows_by_kind, tensor_parallel

    model = make_model().double()
    share_blocks(model, 2, part=part)
    tied = ties(model)
    tensor_parallel(model, init_device_mesh("cpu", (2,)), sequence_parallel=sequence_parallel)
    assert ties(model) == tied
    train(model, make_tokens())
    state = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.state_dict().items()}
    for name, value in state.items():
        if name.endswith("qkv.weight"):
            # The rows are held in another order, by rank.
            state[name] = rows_by_kind(value, (DIM, DIM, DIM), 2)
    return state


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("part", [None, "attn"])
def test_tensor_parallel_trains_like_one_process(ranks: Ranks, part: str | None, sequence_parallel: bool) -> None:
    pytest.importorskip("dsaccel.parallel.tensor")
    model = make_model().double()
    share_blocks(model, 2, part=part)
    train(model, make_tokens())
    expected = model.state_dict()
    for state in ranks.run(case_tensor_parallel, 2, part=part, sequence_parallel=sequence_parallel):
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
