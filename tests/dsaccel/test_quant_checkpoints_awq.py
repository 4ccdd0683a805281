"""AWQ checkpoints, written here bit by bit, against the weights that they were made from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import dskernels as dk
from dsaccel.quant.checkpoints import from_awq, load_quantized_

# From the lowest bits of a word on.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}


def word(values: list[int]) -> int:
    """An int32 with eight values of 4 bits in AWQ's order."""
    total = sum(values[place] * 16**i for i, place in enumerate(ORDER))
    return total - 2**32 if total >= 2**31 else total


def written(rows: int, columns: int, group: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A weight ``[rows, columns]`` and the tensors that stand for it."""
    groups = -(-columns // group)
    codes = [[random.randint(0, 15) for _ in range(rows)] for _ in range(columns)]
    zeros = [[random.randint(0, 15) for _ in range(rows)] for _ in range(groups)]
    scales = torch.empty(groups, rows).uniform_(0.01, 0.1).half()
    weight = [
        [float(scales[k // group, n]) * (codes[k][n] - zeros[k // group][n]) for k in range(columns)]
        for n in range(rows)
    ]
    words = [[[word(row[n : n + 8]) for n in range(0, rows, 8)] for row in values] for values in (codes, zeros)]
    qweight, qzeros = (torch.tensor(values, dtype=torch.int32) for values in words)
    return torch.tensor(weight), {"qweight": qweight, "qzeros": qzeros, "scales": scales}


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)


def test_the_first_word() -> None:
    # 0x75316420 holds the codes 0 to 7 of outputs 0 to 7.
    assert word(list(range(8))) == 0x75316420
    qweight = torch.full((16, 1), 0x75316420, dtype=torch.int32)
    weight = from_awq(qweight, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 8).half(), group_size=16)
    assert torch.equal(weight.dequantize(), torch.arange(8.0)[:, None].expand(8, 16))


@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [
        pytest.param(8, 32, 16, id="small"),
        pytest.param(136, 64, 32, id="more_than_a_block_of_rows"),
        pytest.param(16, 33, 33, id="odd_number_of_columns"),
        pytest.param(24, 80, 32, id="short_last_group"),
    ],
)
def test_weight_is_exact(rows: int, columns: int, group: int) -> None:
    want, tensors = written(rows, columns, group)
    weight = from_awq(**tensors, group_size=-1 if group == columns else group)
    assert torch.equal(weight.dequantize(), want)
    assert weight.group_size == group
    x = torch.randn(3, columns)
    torch.testing.assert_close(dk.quantized_matmul(x, weight), x @ want.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 0}, "group_size: expected a multiple of 16, or -1 for all 64 columns, got 0"),
        ({"group_size": 64}, r"scales: expected shape \[1, 16\], got \[2, 16\]"),
        ({"qweight": torch.zeros(64, 2)}, "qweight: expected torch.int32, got torch.float32"),
        ({"qzeros": torch.zeros(2, 1, dtype=torch.int32)}, r"qzeros: expected shape \[2, 2\], got \[2, 1\]"),
    ],
)
def test_what_does_not_fit_is_an_error(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {**written(16, 64, 32)[1], "group_size": 32, **changes}
    with pytest.raises(ValueError, match=message):
        from_awq(**arguments)


class Net(nn.Module):
    """A layer for the checkpoint to quantize, and one that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 16)
        self.head = nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).relu())


def _checkpoint(folder: Path) -> Net:
    net = Net()
    net.inner.weight.data, tensors = written(16, 32, 16)
    net.inner.bias.data = torch.randn(16).half().float()
    tensors["bias"] = net.inner.bias.data.half()
    stored = {f"inner.{name}": value for name, value in tensors.items()}
    save_file({**stored, "head.weight": net.head.weight.data}, folder / "model.safetensors")
    return net


@pytest.mark.parametrize(
    ("file", "config"),
    [
        pytest.param("config.json", {"quantization_config": {**CONFIG, "version": "gemm"}}, id="transformers"),
        pytest.param("config.json", {"quantization_config": {**CONFIG, "checkpoint_format": "gemm"}}, id="gptqmodel"),
        pytest.param("config.json", {"quantization_config": {**CONFIG, "modules_to_not_convert": ["head"]}}, id="list"),
        pytest.param("quant_config.json", {"w_bit": 4, "q_group_size": 16, "version": "GEMM"}, id="autoawq"),
    ],
)
def test_loaded_model_computes_what_the_float_model_does(tmp_path: Path, file: str, config: dict[str, Any]) -> None:
    want = _checkpoint(tmp_path)
    (tmp_path / file).write_text(json.dumps(config))
    with torch.device("meta"):
        net = Net()
    loaded = load_quantized_(net, tmp_path, progress=None)
    assert loaded.replaced == ("inner",)
    assert loaded.layers[0].reason == "from awq"
    x = torch.randn(5, 32)
    torch.testing.assert_close(net(x), want(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"version": "gemv"}, "quantization_config.version: expected gemm, got gemv"),
        ({"bits": 8}, "quantization_config.bits: expected 4, got 8"),
        ({"group_size": "16"}, "quantization_config.group_size: expected an integer, got 16"),
        ({"modules_to_not_convert": ["inner"]}, "inner: weight: expected one that is not quantized"),
    ],
)
def test_config_that_does_not_fit_is_an_error(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    _checkpoint(tmp_path)
    config = {**CONFIG, **config}
    with pytest.raises(ValueError, match=message):
        load_quantized_(Net(), tmp_path, quantization_config=config, progress=None)
