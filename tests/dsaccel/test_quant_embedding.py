"""QuantizedEmbedding looks up int8 rows, alone or tied to the head of a model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dskernels as dk
from dsaccel.quant import QuantizedEmbedding, QuantizedLinear, quantize_

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class TiedLM(nn.Module):
    """An embedding, a layer, and a head that has the embedding's weight."""

    def __init__(self, vocab_size: int = 41, dim: int = 24, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim, dtype=dtype)
        self.body = nn.Linear(dim, dim, dtype=dtype)
        self.head = nn.Linear(dim, vocab_size, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)).tanh())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_looks_up_rows_of_the_dequantized_weight(dtype: torch.dtype) -> None:
    embedding = nn.Embedding(17, 33, padding_idx=3, dtype=dtype)
    layer = QuantizedEmbedding.from_embedding(embedding)
    ids = torch.randint(17, (4, 5))
    expected = layer.weight.dequantize().to(dtype)[ids]
    assert torch.equal(layer(ids), expected)
    assert torch.equal(layer(ids.int()), expected)
    assert layer(ids[:0]).shape == (0, 5, 33)
    # Half a step of each row, plus the rounding of the dtype.
    step = embedding.weight.float().abs().amax(1, keepdim=True) / 127
    error = (layer(torch.arange(17)).float() - embedding.weight.float()).abs()
    assert (error <= step * 0.5001 + 2**-7 * embedding.weight.float().abs() * (dtype.itemsize == 2)).all()
    assert torch.equal(layer(torch.tensor([3])), torch.zeros(1, 33, dtype=dtype))
    assert layer.padding_idx == 3


def test_ids_out_of_range_are_an_error() -> None:
    layer = QuantizedEmbedding.from_embedding(nn.Embedding(5, 3))
    for wrong in (5, -1):
        with pytest.raises(IndexError):
            layer(torch.tensor([wrong]))


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_casts_change_the_result_alone(cast: str) -> None:
    layer = QuantizedEmbedding.from_embedding(nn.Embedding(7, 5))
    before = copy.deepcopy(layer)
    out = getattr(layer, cast)()(torch.arange(7))
    assert torch.equal(layer.qweight, before.qweight)
    assert torch.equal(layer.scale, before.scale)
    assert layer.scale.dtype == torch.float32
    assert torch.equal(out, before.weight.dequantize().to(out.dtype))
    assert out.dtype == getattr(torch, {"half": "float16", "double": "float64"}.get(cast, cast))


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_loads_strictly(assign: bool) -> None:
    layer, other = (QuantizedEmbedding.from_embedding(nn.Embedding(7, 5)) for _ in range(2))
    assert set(layer.state_dict()) == {"qweight", "scale"}
    other.load_state_dict(layer.state_dict(), assign=assign)
    assert torch.equal(other(torch.arange(7)), layer(torch.arange(7)))
    with pytest.raises(RuntimeError, match=r"qweight: expected torch.int8, got torch.uint8"):
        other.load_state_dict({**layer.state_dict(), "qweight": layer.qweight.view(torch.uint8)})


def test_compiles_and_exports() -> None:
    layer = QuantizedEmbedding.from_embedding(nn.Embedding(7, 5))
    ids = torch.randint(7, (2, 3))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(ids), layer(ids))
    assert torch.equal(torch.export.export(layer, (ids,)).module()(ids), layer(ids))


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_weight_only"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_a_tied_head_and_its_embedding_share_one_memory(scheme: str, dtype: torch.dtype) -> None:
    model = TiedLM(dtype=dtype).eval()
    ids = torch.randint(41, (3, 4))
    before = model(ids)
    report = quantize_(model, scheme, embeddings=True)
    assert model.embed.qweight is model.head.qweight
    assert model.embed.scale is model.head.scale
    assert (model(ids) - before).float().norm() < 0.05 * before.float().norm()
    assert {layer.name: layer.reason for layer in report.layers} == {
        "embed": "tied to head",
        "body": "",
        "head": "tied to embed",
    }
    # Codes and scales once; those of the body, and its bias.
    assert report.bytes_after == 41 * 24 + 41 * 4 + 24 * 24 + 24 * 4 + 24 * dtype.itemsize


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "half": lambda model: model.half().float(),
    "to": lambda model: model.to("cpu"),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_they_go_on_sharing_it(make: Callable) -> None:
    model = TiedLM()
    quantize_(model, "int8_dynamic", embeddings=True)
    model = make(model)
    assert model.embed.qweight.data_ptr() == model.head.qweight.data_ptr()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["head.qweight"][0, 0] = state["embed.qweight"][0, 0] = 5
    model.load_state_dict(state)
    assert model.embed.qweight.data_ptr() == model.head.qweight.data_ptr()
    assert model.embed.qweight[0, 0] == 5


def test_a_tied_model_goes_through_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = TiedLM(), TiedLM()
    for tied in (model, other):
        quantize_(tied, "int8_dynamic", embeddings=True)
    safetensors.save_model(model, str(tmp_path / "state"))
    assert (tmp_path / "state").stat().st_size < 41 * 24 + 24 * 24 + 2000
    safetensors.load_model(other, str(tmp_path / "state"))
    ids = torch.randint(41, (3, 4))
    assert torch.equal(other(ids), model(ids))
    assert other.embed.qweight is other.head.qweight


def test_by_default_a_tied_embedding_keeps_its_weight_and_the_report_says_so() -> None:
    model = TiedLM()
    weight = model.embed.weight
    report = quantize_(model, "int8_dynamic")
    assert model.embed.weight is weight
    assert isinstance(model.head, QuantizedLinear)
    assert "embeddings=True" in report.kept["embed"]
    assert report.layers[2].reason == f"tied to embed, which keeps its {41 * 24 * 4} bytes of weight"


def test_an_embedding_tied_to_an_int4_head_gets_codes_of_its_own() -> None:
    model = TiedLM()
    expected = QuantizedEmbedding.from_embedding(model.embed)
    report = quantize_(model, "int4_weight_only", embeddings=True)
    assert torch.equal(model.embed.qweight, expected.qweight)
    assert model.head.scheme == "int4_weight_only"
    assert report.replaced == ("embed", "body", "head")


def test_embeddings_tied_to_each_other_share_one_memory() -> None:
    model = nn.ModuleList([nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(4, 9)])
    model[1].weight = model[2].weight = model[0].weight
    quantize_(model, "int4_dynamic", embeddings=True)
    assert model[0].qweight is model[1].qweight
    assert model[0].qweight.dtype == torch.int8
    assert model[2].qweight.dtype == torch.uint8


def test_the_filter_may_part_the_two() -> None:
    model = TiedLM()
    report = quantize_(model, "int8_dynamic", embeddings=True, filter=lambda name, module: name != "head")
    assert report.kept == {"head": "the filter says so"}
    assert report.layers[0].reason == f"tied to head, which keeps its {41 * 24 * 4} bytes of weight"


def test_repr_tells_the_sizes() -> None:
    assert "7, 5, padding_idx=2, scheme=int8" in repr(QuantizedEmbedding.from_embedding(nn.Embedding(7, 5, 2)))


def test_wrong_arguments_are_named() -> None:
    weight = dk.quantize_weight(torch.randn(7, 5), "int8_weight_only")
    with pytest.raises(TypeError, match=r"weight: expected a QuantizedWeight"):
        QuantizedEmbedding(torch.randn(7, 5))
    with pytest.raises(ValueError, match=r"weight: expected a QuantizedWeight of int8, got fp8_block"):
        QuantizedEmbedding(dk.quantize_weight(torch.randn(7, 5), "fp8_block"))
    with pytest.raises(ValueError, match=r"weight: expected columns in their own order"):
        QuantizedEmbedding(weight._replace(input_order=torch.arange(5)))
    with pytest.raises(ValueError, match=r"dtype: expected float32, bfloat16, .* got torch.int8"):
        QuantizedEmbedding(weight, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"embedding: expected an nn.Embedding, got Linear"):
        QuantizedEmbedding.from_embedding(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"embedding: expected max_norm=None.*, got 2.0"):
        QuantizedEmbedding.from_embedding(nn.Embedding(3, 3, max_norm=2.0))
