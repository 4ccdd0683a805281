"""What waits for backward elsewhere comes back the same, and edits in between are found.

Without a GPU, `moving` lets tensors of the CPU be moved: all of the code but the streams.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import dskernels as dk
from dsaccel.checkpoint import blocks, checkpoint_blocks, memory_report, offload, offload_activations
from dsaccel.modules import SlidingWindowLM

HANDS_OVER = blocks._HOOKED and dk.build_info()["compiled"] is not None
pytestmark = pytest.mark.usefixtures("one_thread")


class Log:
    """Bytes of each copy, in the order of their start."""

    def __init__(self) -> None:
        self.out: list[int] = []
        self.back: list[int] = []


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()

    class Copies:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cpu"

        def to_host(self, data: Tensor) -> Tensor:
            log.out.append(data.numel())
            return data.clone()

        def to_device(self, host: Tensor) -> tuple[Tensor, Callable[[], None]]:
            log.back.append(host.numel())
            return host.clone(), lambda: None

    monkeypatch.setattr(offload, "Transfers", Copies)
    monkeypatch.setattr(offload, "_is_offloaded_from", lambda device: True)
    return log


def gradients(loss: Tensor, inputs: list[Tensor], **options: bool) -> list[Tensor]:
    return list(torch.autograd.grad(loss, inputs, **options))


def assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_weights_and_their_views_stay(moving: Log) -> None:
    w = nn.Parameter(torch.randn(6, 6))
    leaf = torch.randn(6, 6, requires_grad=True)
    for x in (w, leaf):
        expected = gradients((x @ x.t()).square().sum(), [x])
        moving.out.clear()
        with offload_activations(min_bytes=1):
            loss = (x @ x.t()).square().sum()
        # Only what is squared.
        assert moving.out == [6 * 6 * 4]
        assert_same(gradients(loss, [x]), expected)


def test_small_tensors_stay(moving: Log) -> None:
    a, b = torch.randn(100, requires_grad=True), torch.randn(10, requires_grad=True)
    with offload_activations(min_bytes=41):
        loss = a.exp().sum() + b.exp().sum()
    assert moving.out == [400]
    assert_same(gradients(loss, [a, b]), [a.detach().exp(), b.detach().exp()])
    with offload_activations(min_bytes=40):
        b.exp()
    with offload_activations(min_bytes=0):
        torch.empty(0, requires_grad=True).exp()
    assert moving.out == [400, 40]


def test_what_shares_memory_is_moved_once(moving: Log) -> None:
    x = torch.randn(4, 12, requires_grad=True)
    with offload_activations(min_bytes=1):
        y = x * 2
        q, k, v = y.split(4, dim=1)
        loss = (q * k * v).sum() + (y * y).sum()
    # All of y, and the product of q and k.
    assert moving.out == [4 * 12 * 4, 4 * 4 * 4]
    grads = gradients(loss, [x])
    assert sorted(moving.back) == sorted(moving.out)
    y = x * 2
    q, k, v = y.split(4, dim=1)
    assert_same(grads, gradients((q * k * v).sum() + (y * y).sum(), [x]))


def test_a_slice_of_much_is_moved_alone(moving: Log) -> None:
    data, w = torch.randn(100, 3), torch.randn(3, requires_grad=True)
    with offload_activations(min_bytes=1):
        loss = (data[7:9] * w).sum() + (data[9:11, 1:] * w[1:]).sum()
    assert moving.out == [2 * 3 * 4, 5 * 4]
    assert_same(gradients(loss, [w]), gradients((data[7:9] * w).sum() + (data[9:11, 1:] * w[1:]).sum(), [w]))


def test_layouts_come_back(moving: Log) -> None:
    x = torch.randn(3, 4, 5, requires_grad=True)

    def compute() -> Tensor:
        y = x * 1.5
        parts = [y.transpose(0, 2), y[:, 1:3], y[1:, :, ::2], y.sum(1, keepdim=True).expand(3, 4, 5), y.bfloat16()]
        return sum(part.exp().pow(2).sum().float() for part in parts)

    strides: list[tuple[int, ...]] = []

    def record(x: Tensor) -> Tensor:
        strides.append((*x.shape, *x.stride(), x.storage_offset()))
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        compute()
    with offload_activations(min_bytes=1):
        loss = compute()
    saved = []
    unpack = offload_activations._unpack
    context = offload_activations(min_bytes=1)
    context.unpack_hook = lambda packed: saved.append(unpack(context, packed)) or saved[-1]
    with context:
        again = compute()
    assert_same(gradients(loss, [x]), gradients(compute(), [x]))
    again.backward()
    layouts = {(*y.shape, *y.stride()) for y in saved}
    assert layouts == {entry[:-1] for entry in strides}


def test_what_has_no_plain_memory_stays(moving: Log) -> None:
    x = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
    s = torch.eye(4).to_sparse()
    w = torch.randn(4, 4, requires_grad=True)

    def compute() -> Tensor:
        y = x * 2
        return (y.conj() * y.conj()).abs().sum() + torch.sparse.mm(s, w * 2).sum()

    with offload_activations(min_bytes=1):
        loss = compute()
    for result, expected in zip(gradients(loss, [x, w]), gradients(compute(), [x, w]), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("where", ["moved", "kept", "without a GPU"])
def test_edits_in_between_are_found(where: str, request: pytest.FixtureRequest) -> None:
    if where != "without a GPU":
        request.getfixturevalue("moving")
    x = torch.randn(8, requires_grad=True)
    context = offload_activations(min_bytes=1 if where == "moved" else 10**6)

    def compute(edit: Callable[[Tensor], object]) -> Tensor:
        y = x * 2
        loss = (y * y).sum()
        with torch.no_grad():
            edit(y)
        return loss

    def error_of(loss: Tensor) -> str:
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        return str(caught.value)

    edits: list[Callable[[Tensor], object]] = [lambda y: y.add_(1), lambda y: y.view(2, 4)[0].zero_()]
    for edit in edits:
        plain = error_of(compute(edit))
        with context:
            loss = compute(edit)
        text = error_of(loss)
        # Torch's own words, but for the name of the operation that made the tensor.
        assert text.startswith("one of the variables needed for gradient computation has been modified by an inplace")
        assert text[: text.index(" is at version")] == plain[: plain.index(", which is output")]
        assert "is at version 1; expected version 0 instead" in text
        assert "is at version 1; expected version 0 instead" in plain
    # Neither before nor by way of .data, which torch does not look at either.
    with context:
        y = (x * 2).add_(1)
        loss = (y * y).sum()
    y.data.add_(0)
    loss.backward()


def test_an_edit_between_two_uses(moving: Log) -> None:
    x = torch.randn(8, requires_grad=True)
    with offload_activations(min_bytes=1):
        y = x * 1
        first = y.detach() * x
        with torch.no_grad():
            y.add_(1)
        second = y.detach() * x
    # Either use has its own version, of which the first is gone.
    assert_same(gradients(second.sum(), [x]), [y.detach()])
    assert len(moving.out) == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_fetches_ahead(ahead: int, moving: Log) -> None:
    x = torch.randn(1, requires_grad=True)
    steps: list[tuple[str, int]] = []
    with offload_activations(min_bytes=1, prefetch=ahead):
        y = x.expand(1).clone()
        for size in range(2, 6):
            y = torch.cat((y, y[:1])).exp()
            y.register_hook(lambda _, size=size: steps.append((f"backward of {size}", len(moving.back))))
    assert moving.out == [8, 12, 16, 20]
    y.sum().backward()
    # In reverse, once each, and so many before they are asked for.
    assert moving.back == [20, 16, 12, 8]
    # When the gradient of the exp of n comes, those after it have been unpacked.
    assert [fetched for _, fetched in steps] == [0, *(min(4, done + ahead) for done in (1, 2, 3))]


def test_graphs_are_retained_and_differentiated_again(moving: Log) -> None:
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    with offload_activations(min_bytes=1):
        loss = x.exp().sin().sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(loss, x)
    e = x.detach().exp()
    torch.testing.assert_close(first.detach(), e * e.cos())
    torch.testing.assert_close(second, e * e.cos() - e * e * e.sin())
    assert torch.equal(again, first)

    def function(x: Tensor) -> Tensor:
        with offload_activations(min_bytes=1):
            return x.exp().sin()

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("end", ["backward", "dropped"])
@pytest.mark.parametrize("moved", [True, False])
def test_frees_what_it_holds(moved: bool, end: str, request: pytest.FixtureRequest) -> None:
    if moved:
        request.getfixturevalue("moving")
    x = torch.randn(50, requires_grad=True)
    context = offload_activations(min_bytes=1)
    gc.collect()
    gc.disable()
    try:
        with context:
            y = x.exp()  # an output that its own node saves
            loss = (y * y).sum()
        memory = StorageWeakRef(y.untyped_storage())
        del y
        assert memory.expired() == moved
        if end == "backward":
            loss.backward()
        else:
            del loss
        assert memory.expired()
        assert not context._places
        assert context._last is None or context._last() is None
    finally:
        gc.enable()


def test_fetched_memory_is_let_go(moving: Log) -> None:
    x = torch.randn(5, requires_grad=True)
    context = offload_activations(min_bytes=1)
    with context:
        y = x.exp()
        loss, other = (y * y).sum(), (y * 3).sum() + y.square().sum()
    entry = context._last()
    assert moving.out == [20]
    assert entry.waiting == 4
    gradients(loss, [x], retain_graph=True)
    # The square has not asked yet.
    assert entry.waiting == 1
    assert entry._back is not None
    gradients(other, [x], retain_graph=True)
    assert entry._back is None
    # The exponential asked a second time, when nobody was expected any more.
    assert moving.back == [20, 20]
    gradients(loss, [x], retain_graph=True)
    assert entry._back is None
    # What is never asked for is not waited for.
    with context:
        y = x.exp()
        loss, other = (y * y).sum(), y.square().sum()
    entry = context._last()
    gradients(loss, [x])
    assert entry._back is not None
    del other
    assert entry._back is None


@pytest.mark.parametrize("policy", ["none", "full", "selective", "every:2"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "autocast"])
def test_with_recomputed_blocks(policy: str, bf16: bool, moving: Log) -> None:
    model = SlidingWindowLM(40, 16, 3, 2, window=6)
    tokens = torch.randint(40, (2, 24))

    def run() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    expected = run()
    handle = checkpoint_blocks(model, policy, offload=offload_activations(min_bytes=1))
    for _ in range(2):
        moving.out.clear()
        assert_same(run(), expected)
        # Of a block that is recomputed its input; and both results of the attention where torch hands them over.
        inputs_and_kept = {"full": 3, "selective": 3 + (6 if HANDS_OVER else 0)}
        assert len(moving.out) == inputs_and_kept.get(policy, len(moving.out))
    handle.remove()
    moving.out.clear()
    assert_same(run(), expected)
    assert moving.out == []
    # Around the whole model, and around recomputed blocks.
    checkpoint_blocks(model, policy)
    with offload_activations(min_bytes=1):
        assert_same(run(), expected)
    assert moving.out


def test_a_report_is_told(moving: Log) -> None:
    x = torch.randn(50, requires_grad=True)
    with memory_report() as report, offload_activations(min_bytes=100):
        y = x.exp()
        loss = (y * y).sum() + x[:5].exp().sum()
        del y
        loss.backward()
    assert (report.offloaded_bytes, report.saved_bytes) == (200, 20)


def test_costs_nothing_without_gpu() -> None:
    x = torch.randn(50, requires_grad=True)
    before = torch.cuda.is_initialized()
    with offload_activations(min_bytes=0):
        y = x.exp()
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()
    assert torch.cuda.is_initialized() == before


def test_copies_start_with_nothing(moving: Log) -> None:
    context = offload_activations(min_bytes=3, prefetch=5)
    x = torch.randn(4, requires_grad=True)
    with context:
        y = x.exp()
    for other in (copy.deepcopy(context), pickle.loads(pickle.dumps(context))):
        assert (other.min_bytes, other.prefetch, len(other._places)) == (3, 5, 0)
        with other:
            assert_same(gradients(x.exp().sum(), [x]), [y.detach()])


@pytest.mark.parametrize("name", ["min_bytes", "prefetch"])
def test_errors(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected an integer, got 1.5"):
        offload_activations(**{name: 1.5})
    with pytest.raises(ValueError, match=f"{name}: expected a number not below 0, got -1"):
        offload_activations(**{name: -1})
