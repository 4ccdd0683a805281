"""fp8 checkpoints in blocks of 128 x 128, against the weights that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import dskernels as dk
from dsaccel.quant.checkpoints import from_fp8_block, load_quantized_

CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def e4m3(bits: int) -> float:
    """The value of a byte: a sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa."""
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -size if bits >> 7 else size


def written(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Tensor]]:
    """A weight and the tensors that stand for it; every byte but the NaNs is there, if it is large enough."""
    bits = torch.arange(rows * columns).remainder(253).reshape(rows, columns)
    bits = (bits + (bits >= 127)).to(torch.uint8)
    scale = torch.empty(-(-rows // 128), -(-columns // 128)).uniform_(0.01, 0.1).to(dtype)
    values = torch.tensor([e4m3(i) for i in range(256)], dtype=torch.float64)[bits.long()]
    exact = values * scale.double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return exact.float(), {"weight": bits.view(torch.float8_e4m3fn), "weight_scale_inv": scale}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu], ids=lambda dtype: str(dtype)[6:]
)
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (130, 300), (7, 5)])
def test_weight_is_exact(rows: int, columns: int, dtype: torch.dtype) -> None:
    want, tensors = written(rows, columns, dtype)
    weight = from_fp8_block(**tensors)
    assert weight.scheme == "fp8_block"
    assert torch.equal(weight.dequantize(), want)
    assert torch.equal(weight.qweight, tensors["weight"].view(torch.uint8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.ones(130, 300)}, "weight: expected torch.float8_e4m3fn, got torch.float32"),
        ({"weight_scale_inv": torch.ones(2, 2)}, r"weight_scale_inv: expected shape \[2, 3\], got \[2, 2\]"),
        (
            {"weight_scale_inv": torch.ones(2, 3).int()},
            "weight_scale_inv: expected torch.float32 or .*, got torch.int32",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_fp8_block(**{**written(130, 300)[1], **changes})


class Net(nn.Module):
    """Two layers for the checkpoint to quantize, and one that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(20, 130)
        self.down = nn.Linear(130, 20, bias=False)
        self.head = nn.Linear(20, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x).relu()))


def _checkpoint(folder: Path, config: dict[str, Any], **changes: Tensor) -> Net:
    net = Net()
    tensors = {"head.weight": net.head.weight.data.bfloat16(), "up.bias": net.up.bias.data}
    for name, layer in (("up", net.up), ("down", net.down)):
        layer.weight.data, found = written(*layer.weight.shape)
        tensors |= {f"{name}.{key}": value for key, value in found.items()}
    net.head.weight.data = net.head.weight.data.bfloat16().float()
    tensors |= changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor.numel()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {**CONFIG, **config}}))
    return net


@pytest.mark.parametrize("config", [{}, {"modules_to_not_convert": ["head", "lm_head"]}, {"ignored_layers": None}])
def test_loaded_weights_are_exact(tmp_path: Path, config: dict[str, Any]) -> None:
    want = _checkpoint(tmp_path, config)
    with torch.device("meta"):
        net = Net()
    loaded = load_quantized_(net, tmp_path, progress=None)
    assert loaded.replaced == ("up", "down")
    assert torch.equal(net.up.weight.dequantize(), want.up.weight)
    assert torch.equal(net.down.weight.dequantize(), want.down.weight)
    assert torch.equal(net.up.bias, want.up.bias)
    assert net.head.weight.dtype == torch.bfloat16
    x = torch.randn(3, 20)
    weights = (dk.QuantizedWeight(*net.up.weight), dk.QuantizedWeight(*net.down.weight))
    hidden = dk.quantized_matmul(dk.quantized_matmul(x, weights[0], want.up.bias).relu(), weights[1])
    torch.testing.assert_close(net.float()(x), want.head(hidden))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fmt": "e5m2"}, "quantization_config.fmt: expected e4m3, got e5m2"),
        ({"activation_scheme": "static"}, "quantization_config.activation_scheme: expected dynamic, got static"),
        ({"weight_block_size": None}, r"quantization_config.weight_block_size: expected \[128, 128\], got None"),
        ({"modules_to_not_convert": ["up"]}, "up: weight: expected one that is not quantized, as .* lists 'up'"),
        ({"ignored_layers": ["down"]}, "down: weight: expected one that is not quantized, as .* lists 'down'"),
    ],
)
def test_config_that_does_not_fit_is_an_error(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    _checkpoint(tmp_path, config)
    with pytest.raises(ValueError, match=message):
        load_quantized_(Net(), tmp_path, progress=None)


def test_codes_without_scales_are_an_error(tmp_path: Path) -> None:
    _checkpoint(tmp_path, {}, **{"up.weight_scale_inv": torch.empty(0)})
    with pytest.raises(ValueError, match=r"got 1 missing \(up.weight_scale_inv\)"):
        load_quantized_(Net(), tmp_path, progress=None)
    _checkpoint(tmp_path, {}, **{"head.weight": torch.ones(4, 20, dtype=torch.int8)})
    with pytest.raises(ValueError, match=r"got 1 missing \(head.weight_scale_inv\)"):
        load_quantized_(Net(), tmp_path, progress=None)
