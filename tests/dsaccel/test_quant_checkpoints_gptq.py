"""GPTQ checkpoints, written here bit by bit, against the weights that they were made from."""

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
from dsaccel.quant import QuantizedLinear
from dsaccel.quant.checkpoints import from_gptq, load_quantized_


class Written:
    """A layer in GPTQ's layout, and the weight that it stands for."""

    def __init__(
        self,
        rows: int,
        columns: int,
        group: int,
        *,
        version: int,
        bits: int = 4,
        symmetric: bool,
        act_order: bool = False,
    ) -> None:
        groups = -(-columns // group)
        group_of = [k // group for k in range(columns)]
        if act_order:
            random.shuffle(group_of)
        middle, top = 2 ** (bits - 1), 2**bits - 1
        codes = [[random.randint(0, top) for _ in range(columns)] for _ in range(rows)]
        lowest = 1 if version == 1 else 0
        zeros = [[middle if symmetric else random.randint(lowest, top) for _ in range(rows)] for _ in range(groups)]
        scales = torch.empty(groups, rows).uniform_(0.01, 0.1).half()
        self.weight = torch.tensor(
            [
                [float(scales[group_of[k], n]) * (codes[n][k] - zeros[group_of[k]][n]) for k in range(columns)]
                for n in range(rows)
            ]
        )
        in_word = 32 // bits
        # [K / in_word, N]: consecutive columns of the weight in one word.
        qweight = [
            [word([codes[n][k + i] for i in range(in_word)], bits) for n in range(rows)]
            for k in range(0, columns, in_word)
        ]
        stored = [[zero - (version == 1) for zero in row] for row in zeros]
        qzeros = [[word(row[n : n + in_word], bits) for n in range(0, rows, in_word)] for row in stored]
        self.tensors = {
            "qweight": torch.tensor(qweight, dtype=torch.int32),
            "qzeros": torch.tensor(qzeros, dtype=torch.int32),
            "scales": scales,
            "g_idx": torch.tensor(group_of, dtype=torch.int32),
        }


def word(values: list[int], bits: int) -> int:
    """An int32 with the first of the values in the lowest bits."""
    total = 0
    for i, value in enumerate(values):
        total += value * 2 ** (bits * i)
    return total - 2**32 if total >= 2**31 else total


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)


@pytest.mark.parametrize("act_order", [False, True], ids=["in_order", "act_order"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [
        pytest.param(8, 32, 16, id="small"),
        pytest.param(8, 8, 8, id="one_word"),
        pytest.param(136, 64, 32, id="more_than_a_block_of_rows"),
        pytest.param(16, 80, 32, id="short_last_group"),
        pytest.param(16, 40, 40, id="one_group"),
    ],
)
def test_weight_is_exact(rows: int, columns: int, group: int, version: int, symmetric: bool, act_order: bool) -> None:
    written = Written(rows, columns, group, version=version, symmetric=symmetric, act_order=act_order)
    weight = from_gptq(**written.tensors, group_size=group, version=version, symmetric=symmetric)
    assert torch.equal(weight.dequantize(), written.weight)
    assert (weight.zero_point is None) == symmetric
    assert (weight.input_order is not None) == (act_order and group < columns)
    assert weight.scheme == "int4_weight_only"
    x = torch.randn(3, columns)
    torch.testing.assert_close(dk.quantized_matmul(x, weight), x @ written.weight.T, rtol=1e-5, atol=1e-5)


def test_columns_of_a_group_keep_their_order() -> None:
    written = Written(8, 32, 16, version=2, symmetric=True)
    written.tensors["g_idx"] = torch.tensor([1, 0] * 16, dtype=torch.int32)
    weight = from_gptq(**written.tensors, group_size=16, version=2)
    assert weight.input_order is not None
    assert weight.input_order.tolist() == [*range(1, 32, 2), *range(0, 32, 2)]


def test_group_size_minus_one_and_no_g_idx() -> None:
    written = Written(8, 48, 48, version=1, symmetric=False)
    del written.tensors["g_idx"]
    weight = from_gptq(**written.tensors, group_size=-1, version=1)
    assert torch.equal(weight.dequantize(), written.weight)
    assert weight.group_size == 48


@pytest.mark.parametrize("version", [1, 2])
def test_eight_bits_of_one_group_are_int8(version: int) -> None:
    written = Written(12, 36, 36, version=version, bits=8, symmetric=True)
    weight = from_gptq(**written.tensors, group_size=-1, version=version, bits=8)
    assert weight.scheme == "int8_weight_only"
    assert torch.equal(weight.dequantize(), written.weight)


def test_scales_of_bfloat16_are_exact() -> None:
    written = Written(8, 32, 32, version=2, symmetric=True)
    scales = written.tensors["scales"].bfloat16()
    weight = from_gptq(**{**written.tensors, "scales": scales}, group_size=32, version=2)
    assert torch.equal(weight.scale, scales.T.float())


def _broken(**changes: Any) -> dict[str, Any]:
    written = Written(16, 64, 32, version=2, symmetric=True)
    return {**written.tensors, "group_size": 32, "version": 2, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits: expected 4 or 8, got 3"),
        ({"version": 3}, "version: expected 1 or 2, got 3"),
        ({"group_size": 24}, "group_size: expected a multiple of 16, or -1 for all 64 columns, got 24"),
        ({"group_size": 16}, r"scales: expected shape \[4, 16\], got \[2, 16\]"),
        ({"bits": 8}, r"scales: expected shape \[1, 16\]|scales: expected one group for 8 bits"),
        ({"qweight": torch.zeros(8, 16)}, "qweight: expected torch.int32, got torch.float32"),
        ({"qweight": torch.zeros(16, dtype=torch.int32)}, r"qweight: expected shape \[any, any\], got \[16\]"),
        ({"qzeros": torch.zeros(2, 1, dtype=torch.int32)}, r"qzeros: expected shape \[2, 2\], got \[2, 1\]"),
        (
            {"scales": torch.zeros(2, 16, dtype=torch.float64)},
            "scales: expected torch.float16 or .*, got torch.float64",
        ),
        ({"g_idx": torch.zeros(3, dtype=torch.int32)}, r"g_idx: expected shape \[64\], got \[3\]"),
        (
            {"g_idx": torch.tensor([0] * 40 + [1] * 24, dtype=torch.int32)},
            "g_idx: expected 32 columns in each of groups 0 to 1, got 40 in group 0, 24 in group 1",
        ),
        ({"g_idx": torch.tensor([1] * 32 + [2] * 32, dtype=torch.int32)}, r"g_idx: .*, got groups \[1, 2\]"),
        (
            {"version": 1, "symmetric": True},
            r'qzeros: expected 8 everywhere.*"gptq_v2" reads it so, got 9 \(version 1\)',
        ),
    ],
)
def test_what_does_not_fit_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_gptq(**_broken(**changes))


def test_version_two_that_is_version_one_is_told() -> None:
    tensors = Written(16, 64, 32, version=1, symmetric=True).tensors
    with pytest.raises(ValueError, match=r'"gptq_v1" reads it so, got 7 \(version 2\)'):
        from_gptq(**tensors, group_size=32, version=2, symmetric=True)


def test_zero_that_ran_over_in_version_one_is_an_error() -> None:
    # 15 stands for 16 to some readers, and for 0 to others.
    tensors = Written(16, 64, 32, version=1, symmetric=True).tensors
    tensors["qzeros"][0, 0] = -1
    with pytest.raises(ValueError, match=r"qzeros: expected zeros of 1 to 15.*got stored 15"):
        from_gptq(**tensors, group_size=32, version=1)


def test_eight_bits_that_int8_cannot_hold_are_errors() -> None:
    grouped = Written(8, 64, 32, version=2, bits=8, symmetric=True)
    with pytest.raises(ValueError, match=r"scales: expected one group for 8 bits.*, got 2 groups"):
        from_gptq(**grouped.tensors, group_size=32, version=2, bits=8)
    shifted = Written(8, 64, 64, version=2, bits=8, symmetric=False)
    with pytest.raises(ValueError, match="qzeros: expected 128 everywhere for 8 bits"):
        from_gptq(**shifted.tensors, group_size=-1, version=2, bits=8)


def test_number_of_outputs_must_fill_words() -> None:
    tensors = Written(8, 32, 32, version=2, symmetric=True).tensors
    cut = {**tensors, "qweight": tensors["qweight"][:, :7], "scales": tensors["scales"][:, :7]}
    with pytest.raises(ValueError, match=r"qzeros: expected shape \[1, 0\]"):
        from_gptq(**cut, group_size=32, version=2)


class Net(nn.Module):
    """Two layers for the checkpoint to quantize, and one that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 48, bias=False)
        self.outer = nn.Linear(48, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.outer(self.inner(x).relu()).relu())


def _checkpoint(
    folder: Path, config: dict[str, Any], *, version: int, act_order: bool
) -> tuple[Net, dict[str, Tensor]]:
    """Writes a folder for `Net`; returns the float model that it stands for, and the tensors."""
    net = Net()
    tensors = {f"head.{name}": value.data for name, value in net.head.named_parameters()}
    tensors["outer.bias"] = torch.randn(16).half()
    for name, layer in (("inner", net.inner), ("outer", net.outer)):
        written = Written(*layer.weight.shape, 16, version=version, symmetric=False, act_order=act_order)
        layer.weight.data = written.weight
        tensors |= {f"{name}.{key}": value for key, value in written.tensors.items()}
    net.outer.bias.data = tensors["outer.bias"].float()
    save_file(tensors, folder / "model.safetensors")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, **config}
    (folder / "config.json").write_text(json.dumps({"model_type": "net", "quantization_config": config}))
    return net, tensors


@pytest.mark.parametrize(
    ("version", "config", "options"),
    [
        pytest.param(1, {}, {}, id="v1_by_default"),
        pytest.param(1, {"checkpoint_format": "gptq", "desc_act": True}, {}, id="v1"),
        pytest.param(2, {"checkpoint_format": "gptq_v2"}, {}, id="v2"),
        pytest.param(2, {"checkpoint_format": "gptq"}, {"format": "gptq_v2"}, id="v2_that_says_v1"),
        pytest.param(1, {"dynamic": {"-:head": {}, "+:.*er$": {"group_size": 16}}, "group_size": 99}, {}, id="dynamic"),
    ],
)
def test_loaded_model_computes_what_the_float_model_does(
    tmp_path: Path, version: int, config: dict[str, Any], options: dict[str, str]
) -> None:
    want, _ = _checkpoint(tmp_path, config, version=version, act_order=bool(config.get("desc_act")))
    with torch.device("meta"):
        net = Net()
    loaded = load_quantized_(net, tmp_path, progress=None, **options)
    assert [layer.became for layer in loaded.layers] == ["int4_weight_only", "int4_weight_only", None]
    assert loaded.replaced == ("inner", "outer")
    assert isinstance(net.outer, QuantizedLinear)
    assert torch.equal(net.outer.weight.dequantize(), want.outer.weight)
    assert net.outer.bias.dtype == torch.float16
    x = torch.randn(5, 32)
    torch.testing.assert_close(net(x), want(x), rtol=1e-5, atol=1e-5)


def test_config_in_a_file_of_its_own(tmp_path: Path) -> None:
    want, _ = _checkpoint(tmp_path, {}, version=1, act_order=False)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 16}')
    net = Net()
    report = load_quantized_(net, tmp_path, progress=None)
    assert report.layers[0].reason == "from gptq"
    assert torch.equal(net.inner.weight.dequantize(), want.inner.weight)


def test_bias_of_zeros_where_the_model_has_none(tmp_path: Path) -> None:
    want, tensors = _checkpoint(tmp_path, {}, version=1, act_order=False)
    save_file({**tensors, "inner.bias": torch.zeros(48).half()}, tmp_path / "model.safetensors")
    net = Net()
    load_quantized_(net, tmp_path, progress=None)
    assert net.inner.bias is None
    assert torch.equal(net.inner.weight.dequantize(), want.inner.weight)
    save_file({**tensors, "inner.bias": torch.ones(48).half()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="inner: bias: expected none, or zeros, as the model has none, got others"):
        load_quantized_(Net(), tmp_path, progress=None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"checkpoint_format": "marlin"},
            "quantization_config.checkpoint_format: expected gptq or gptq_v2, got marlin",
        ),
        ({"is_marlin_format": True}, "quantization_config.checkpoint_format: .*, got marlin"),
        ({"pack_dtype": "int64"}, "quantization_config.pack_dtype: expected int32, got int64"),
        ({"bits": 3}, "inner: bits: expected 4 or 8, got 3"),
        ({"group_size": None}, "inner: quantization_config.group_size: expected an integer, got None"),
        ({"group_size": 32}, r"inner: scales: expected shape \[1, 48\], got \[2, 48\]"),
        ({"sym": True}, "inner: qzeros: expected 8 everywhere, for symmetric weights"),
        ({"dynamic": {"-:in": {}}}, r"inner: qweight: expected none, as quantization_config.dynamic\['-:in'\] says"),
        (
            {"modules_to_not_convert": ["inner"]},
            "inner: weight: expected one that is not quantized, as .* lists 'inner'",
        ),
    ],
)
def test_config_that_does_not_fit_is_an_error(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    _checkpoint(tmp_path, config, version=1, act_order=False)
    with pytest.raises(ValueError, match=message):
        load_quantized_(Net(), tmp_path, progress=None)
