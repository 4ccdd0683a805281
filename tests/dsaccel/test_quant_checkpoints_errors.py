"""Checkpoints and models that do not fit each other: what is said, and that nothing is loaded then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dsaccel.quant.checkpoints import load_quantized_

CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["head"],
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2, bias=False)


def tensors_for_net() -> dict[str, Tensor]:
    return {
        "body.weight": torch.ones(4, 8, dtype=torch.int8),
        "body.weight_scale": torch.ones(4, 1),
        "body.bias": torch.ones(4),
        "norm.weight": torch.full((4,), 7.0),
        "norm.bias": torch.ones(4),
        "head.weight": torch.ones(2, 4),
    }


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = CONFIG) -> None:
    (folder / "config.json").write_text(json.dumps({} if config is None else {"quantization_config": config}))
    save_file(tensors, folder / "model.safetensors")


def assert_refused(folder: Path, message: str, net: nn.Module | None = None, **options: Any) -> None:
    net = Net() if net is None else net
    before = {name: tensor.clone() for name, tensor in net.state_dict().items() if not tensor.is_meta}
    with pytest.raises(ValueError, match=message):
        load_quantized_(net, folder, progress=None, **options)
    after = net.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        (
            ["body.weight_scale"],
            {},
            r"checkpoint: expected the tensors of the model, got 1 missing \(body.weight_scale\)$",
        ),
        (["body.bias", "norm.bias"], {}, r"got 2 missing \(body.bias, norm.bias\)$"),
        (["body.weight", "body.weight_scale", "body.bias"], {}, r"got 2 missing \(body.weight, body.bias\)$"),
        ([], {"body.zeros": (4,), "tail.weight": (2, 2)}, r"got 2 unexpected \(body.zeros, tail.weight\)$"),
        (["norm.bias"], {"norm.beta": (4,)}, r"got 1 missing \(norm.bias\); 1 unexpected \(norm.beta\)$"),
        ([], {f"extra.{i:02}": (1,) for i in range(12)}, r"got 12 unexpected \(extra.00, .*extra.09 and 2 more\)$"),
    ],
)
def test_missing_and_unexpected_tensors(tmp_path: Path, drop: list[str], add: dict[str, Any], message: str) -> None:
    tensors = {name: tensor for name, tensor in tensors_for_net().items() if name not in drop}
    write(tmp_path, {**tensors, **{name: torch.ones(shape) for name, shape in add.items()}})
    assert_refused(tmp_path, message)


def test_a_missing_tensor_of_several_places_is_named_once(tmp_path: Path) -> None:
    net = Net()
    net.norm.bias = net.norm.weight
    tensors = {name: tensor for name, tensor in tensors_for_net().items() if "norm" not in name}
    write(tmp_path, tensors)
    assert_refused(tmp_path, r"got 1 missing \(norm.weight\)$", net)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm.weight": torch.ones(5)}, r"norm.weight: expected shape \[4\], got \[5\]"),
        ({"norm.weight": torch.ones(4).int()}, "norm.weight: expected a floating point tensor, .*, got torch.int32"),
        ({"norm.bias": torch.ones(4).to(torch.float8_e4m3fn)}, "norm.bias: expected a floating point tensor"),
        ({"head.weight": torch.ones(2, 4, dtype=torch.int8)}, "head.weight: expected .* as it is not quantized"),
        (
            {"head.weight_scale": torch.ones(2, 1)},
            "head: weight_scale: expected none, as ignore lists the layer, got one",
        ),
    ],
)
def test_tensors_that_do_not_fit_their_place(tmp_path: Path, changes: dict[str, Tensor], message: str) -> None:
    write(tmp_path, {**tensors_for_net(), **changes})
    assert_refused(tmp_path, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"body.weight": torch.ones(4, 9, dtype=torch.int8)}, r"body: weight: expected shape \[4, 8\], got \[4, 9\]"),
        ({"body.weight": torch.ones(4, 8)}, "body: weight: expected torch.int8, got torch.float32"),
        ({"body.weight_scale": torch.ones(1, 4)}, r"body: weight_scale: expected shape \[4, 1\], got \[1, 4\]"),
        ({"body.bias": torch.ones(5)}, r"body: bias: expected shape \[4\], got \[5\]"),
    ],
)
def test_layers_that_do_not_fit(tmp_path: Path, changes: dict[str, Tensor], message: str) -> None:
    write(tmp_path, {**tensors_for_net(), **changes})
    with pytest.raises(ValueError, match=message):
        load_quantized_(Net(), tmp_path, progress=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method: expected one of .*, got 'bitsandbytes'"),
        ({"config_groups": {}}, "quantization_config.config_groups: expected at least one"),
        (
            {"config_groups": {"W8A8": ["Linear"]}},
            "quantization_config.config_groups.W8A8: expected arguments written out",
        ),
        ({"kv_cache_scheme": {"num_bits": 8}}, "quantization_config.kv_cache_scheme: expected none"),
        ({"transform_config": {"R1": {}}}, "quantization_config.transform_config: expected none"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format: expected dense, got sparse-24"),
        (
            {"format": "marlin-24"},
            "body: quantization_config.config_groups.group_0.format: expected one of pack-quantized",
        ),
        ({"ignore": ["body"]}, "body: weight_scale: expected none, as ignore lists the layer, got one"),
        ({"ignore": []}, r"got 1 missing \(head.weight_scale\)"),
    ],
)
def test_configs_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, tensors_for_net(), {**CONFIG, **changes})
    assert_refused(tmp_path, message)


def test_layers_that_no_group_targets(tmp_path: Path) -> None:
    group = {**CONFIG["config_groups"]["group_0"], "targets": ["re:head"]}
    write(tmp_path, tensors_for_net(), {**CONFIG, "config_groups": {"group_0": group}})
    assert_refused(tmp_path, "body: weight_scale: expected none, as no config group targets the layer, got one")


def test_format_must_be_known(tmp_path: Path) -> None:
    write(tmp_path, tensors_for_net(), None)
    assert_refused(tmp_path, "format: expected one of gptq, .* where no config tells it, got None")
    assert_refused(tmp_path, "format: expected one of gptq, .*, got 'exl2'", format="exl2")
    assert_refused(tmp_path, "quantization_config.config_groups: expected at least one", format="compressed-tensors")


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_layers_that_cannot_be_replaced(tmp_path: Path) -> None:
    write(tmp_path, tensors_for_net())
    begin = "body: module: expected one that can become a QuantizedLinear, got one that cannot: "
    net = Net()
    net.body = Scaled(8, 4)
    assert_refused(tmp_path, begin + "its class, Scaled, has a forward of its own", net)
    net = Net()
    net.body.register_buffer("mask", torch.ones(1))
    assert_refused(tmp_path, begin + "it has mask beside weight and bias, which would be lost", net)
    alone = {name.removeprefix("body."): value for name, value in tensors_for_net().items() if "body" in name}
    write(tmp_path, alone)
    assert_refused(tmp_path, "got one that cannot: it is the model itself, without a parent", Net().body)


def test_buffers_that_no_checkpoint_holds_must_have_values(tmp_path: Path) -> None:
    write(tmp_path, tensors_for_net())
    net = Net()
    net.norm.register_buffer("cache", torch.empty(3, device="meta"), persistent=False)
    assert_refused(tmp_path, r"model: expected values in the buffers .*, got meta tensors: norm.cache", net)
    net.norm.cache = torch.zeros(3)
    load_quantized_(net, tmp_path, progress=None)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"source: expected a folder or a .safetensors file, got .*nowhere"):
        load_quantized_(Net(), tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="expected safetensors files, got none"):
        load_quantized_(Net(), tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"source: expected a folder or a .safetensors file, got .*model.bin"):
        load_quantized_(Net(), tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("weight_map", "error", "message"),
    [
        ({"a": "b.safetensors"}, FileNotFoundError, "expected safetensors files, got no b.safetensors"),
        ({"a": "../model.safetensors"}, ValueError, r"index.json: expected names of files beside it, got \.\./model"),
        ({"a": "model.safetensors"}, ValueError, "index.json: expected tensors that its files hold, got a"),
    ],
)
def test_index_that_is_wrong(tmp_path: Path, weight_map: Any, error: type[Exception], message: str) -> None:
    write(tmp_path, tensors_for_net())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(error, match=message):
        load_quantized_(Net(), tmp_path)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    write(tmp_path, tensors_for_net())
    save_file({"norm.bias": torch.ones(4)}, tmp_path / "more.safetensors")
    assert_refused(
        tmp_path, r"more.safetensors: expected tensors that no other file has, got norm.bias, as in model.safe"
    )


def test_only_modules_are_loaded() -> None:
    with pytest.raises(TypeError, match=r"model: expected an nn.Module, got 3"):
        load_quantized_(3, "nowhere")
