"""Whole models as one graph: torch.compile without breaks, and torch.export, with sizes that vary."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torch.nn import functional as F

from dsaccel.examples import static_graph
from dsaccel.modules import SlidingWindowLM, SwinTransformer

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 17


def language_model(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return SlidingWindowLM(VOCAB, 16, layers, 2, 1, window=5, max_positions=64)


def image_model() -> nn.Module:
    torch.manual_seed(0)
    return SwinTransformer(embed_dim=8, depths=(2,), num_heads=(2,), window_size=4, patch_size=2, num_classes=3)


def tokens_of(batch: int, length: int) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(batch + length))


def images_of(batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(batch + height))


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def image_loss(model: nn.Module, images: Tensor) -> Tensor:
    return F.cross_entropy(model(images), torch.arange(len(images)) % 3)


MODELS: dict[str, Any] = {
    "language": (language_model, language_loss, [tokens_of(*size) for size in ((3, 11), (2, 40), (5, 17), (4, 64))]),
    # The last is padded to whole windows.
    "images": (image_model, image_loss, [images_of(*size) for size in ((2, 32, 24), (3, 24, 32), (4, 36, 24))]),
}
DYNAMIC = [{0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}]
OPS = ("dskernels.window_attention.default", "dskernels.swin_attention.default")


def train(model: nn.Module, loss_fn: Callable[..., Tensor], batches: list[Tensor]) -> list[Tensor]:
    """The losses of some steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def assert_all_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        # The order of sums, over some steps.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("make", "loss_fn", "batches"), MODELS.values(), ids=MODELS)
def test_training_step_compiles_whole_for_all_sizes(
    make: Callable[[], nn.Module], loss_fn: Callable[..., Tensor], batches: list[Tensor]
) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, eager = make(), make()
    compiled = torch.compile(loss_fn, fullgraph=True, dynamic=True, backend=counter)
    # A first step, after which nothing is compiled again.
    found, expected = train(model, compiled, batches[:1]), train(eager, loss_fn, batches[:1])
    assert_all_close(found, expected)
    count = counter.frame_count
    assert_all_close(train(model, compiled, batches), train(eager, loss_fn, batches))
    assert counter.frame_count == count


@pytest.mark.parametrize("name", MODELS)
def test_inference_compiles_whole(name: str) -> None:
    torch.compiler.reset()
    make, _, batches = MODELS[name]
    model = make().eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for batch in batches:
            torch.testing.assert_close(compiled(batch), model(batch))


def test_training_step_through_inductor() -> None:
    torch.compiler.reset()
    # The C++ compiler takes its time for each layer.
    model, eager = language_model(layers=1), language_model(layers=1)
    compiled = torch.compile(language_loss, fullgraph=True)
    batches = [tokens_of(2, 9)] * 3
    assert_all_close(train(model, compiled, batches), train(eager, language_loss, batches))


@pytest.mark.parametrize(
    ("make", "loss_fn", "batches", "dynamic", "op"),
    [(*MODELS[name], dynamic, op) for name, dynamic, op in zip(MODELS, DYNAMIC, OPS, strict=True)],
    ids=MODELS,
)
def test_export_serves_and_trains_at_other_sizes(
    make: Callable[[], nn.Module], loss_fn: Callable[..., Tensor], batches: list[Tensor], dynamic: Any, op: str
) -> None:
    model = make()
    program = torch.export.export(model, (batches[0],), dynamic_shapes=(dynamic,))
    # The ops stay what they are, one for each layer: nothing is taken apart.
    assert sum(str(node.target) == op for node in program.graph.nodes) == 2
    file = io.BytesIO()
    torch.export.save(program, file)
    loaded = torch.export.load(io.BytesIO(file.getvalue())).module()
    with torch.no_grad():
        for batch in (*batches, batches[0][:1]):
            torch.testing.assert_close(loaded(batch), model(batch))
    trained, eager = program.module(), copy.deepcopy(model)
    names = [name for name, _ in eager.named_parameters()]
    found, expected = train(trained, loss_fn, batches), train(eager, loss_fn, batches)
    assert_all_close(found[: len(batches)], expected[: len(batches)])
    for name in names:
        torch.testing.assert_close(trained.get_parameter(name), eager.get_parameter(name), rtol=1e-4, atol=1e-5)


def test_exported_by_a_range_refuses_what_is_outside() -> None:
    model = language_model().eval()
    sizes = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=64)}
    program = torch.export.export(model, (tokens_of(3, 11),), dynamic_shapes=(sizes,)).module()
    torch.testing.assert_close(program(tokens_of(8, 64)), model(tokens_of(8, 64)))
    with pytest.raises((AssertionError, RuntimeError)):
        program(tokens_of(9, 11))


def test_command_compares_and_publishes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- static_graph -->\nold\n<!-- /static_graph -->\nafter\n")
    arguments = ["--quick", "--backend", "eager", "--out", str(tmp_path / "out"), "--doc", str(page)]
    assert static_graph.main(arguments) == 0
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(result["timings"]) == 4
    assert all(row["faster"] > 0 and row["compile_s"] > 0 for row in result["timings"])
    text = page.read_text()
    assert "old" not in text
    assert static_graph.report_of(result) in text
    assert "SwinTransformer" in capsys.readouterr().out
    assert (tmp_path / "static_graph" / "results.json").exists()


def test_command_refuses_a_wrong_computation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **options: nn.Sequential(model, nn.Softplus()))
    with pytest.raises(AssertionError, match="not close"):
        static_graph.main(["--quick", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds: expected a number from 1, got 0"),
        (["--threads", "0"], "--threads: expected a number from 1, got 0"),
        (["--doc", "nowhere.md"], "--doc: "),
    ],
)
def test_command_refuses_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        static_graph.main(arguments)
    assert message in capsys.readouterr().err
