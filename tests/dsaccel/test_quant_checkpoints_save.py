"""Saving as compressed-tensors: what is in the folder, and that loading gives back the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dskernels as dk
from dsaccel.modules import WindowMultiheadAttention
from dsaccel.quant import QuantizedLinear, quantize_
from dsaccel.quant.checkpoints import from_gptq, load_quantized_, save_compressed_tensors

KINDS: dict[str, dict[str, Any]] = {
    "int8_dynamic": {},
    "int8_static": {"input_scale": 0.25},
    "int8_weight_only": {},
    "int4_dynamic": {"group_size": 32, "symmetric": False},
    "int4_weight_only": {"group_size": 16},
    "fp8_block": {},
}


class Net(nn.Module):
    """A quantizable layer of each scheme, one that is not, and things beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 64)
        self.layers = nn.ModuleDict({name: nn.Linear(64, 64, bias=name != "int8_static") for name in KINDS})
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 6, bias=False)
        self.register_buffer("table", torch.arange(5), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = self.norm(x + layer(x))
        return self.head(x)


def quantized(net: Net, *schemes: str) -> Net:
    for name in schemes or KINDS:
        net.layers[name] = QuantizedLinear.from_linear(net.layers[name], name, **KINDS[name])
    return net


def assert_same_state(got: nn.Module, want: nn.Module) -> None:
    state = got.state_dict()
    assert state.keys() == want.state_dict().keys()
    for name, tensor in want.state_dict().items():
        assert state[name].dtype == tensor.dtype, name
        assert torch.equal(state[name], tensor), name
        assert state[name].is_contiguous()


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_every_scheme_comes_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    net = quantized(Net().to(dtype)).eval()
    net(torch.tensor([0, 5]))
    save_compressed_tensors(net, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = Net().eval()
    loaded = load_quantized_(again, tmp_path, progress=None)
    became = {layer.name: layer.became for layer in loaded.layers}
    assert became == {"embed": None, **{f"layers.{name}": name for name in KINDS}, "head": None}
    assert_same_state(again, net)
    assert torch.equal(again(torch.tensor([0, 5])), net(torch.tensor([0, 5])))


@pytest.mark.parametrize("columns", [64, 80, 37])
@pytest.mark.parametrize("rows", [16, 13])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("scheme", ["int4_weight_only", "int4_dynamic"])
def test_int4_of_any_shape_comes_back_bit_by_bit(
    tmp_path: Path, scheme: str, symmetric: bool, rows: int, columns: int
) -> None:
    group = 16 if columns % 16 == 0 else -1
    float_model = nn.Sequential(nn.Linear(columns, rows))
    layer = QuantizedLinear.from_linear(float_model[0], scheme, group_size=group, symmetric=symmetric)
    save_compressed_tensors(nn.Sequential(layer), tmp_path)
    load_quantized_(float_model, tmp_path, progress=None)
    assert_same_state(float_model[0], layer)
    assert float_model[0].weight[3:5] == layer.weight[3:5]


def test_order_of_columns_comes_back(tmp_path: Path) -> None:
    g_idx = torch.arange(64)[torch.randperm(64)] // 16
    tensors = torch.randint(0, 2**31, (8, 24)).int(), torch.full((4, 3), 0x12345678).int(), torch.rand(4, 24).half()
    layer = QuantizedLinear(from_gptq(*tensors, g_idx, group_size=16, version=2))
    assert layer.input_order is not None
    save_compressed_tensors(nn.Sequential(layer), tmp_path)
    group = config_of(tmp_path)["quantization_config"]["config_groups"]["group_0"]
    assert group["weights"]["actorder"] == "group"
    assert torch.equal(load_file(tmp_path / "model.safetensors")["0.weight_g_idx"], g_idx.int())
    again = nn.Sequential(nn.Linear(64, 24, bias=False))
    load_quantized_(again, tmp_path, progress=None)
    assert_same_state(again[0], layer)


def test_config_and_tensors_of_one_kind(tmp_path: Path) -> None:
    net = quantized(Net(), "int4_weight_only")
    save_compressed_tensors(net, tmp_path, config={"model_type": "net", "quantization_config": "old"})
    config = config_of(tmp_path)
    others = [f"layers.{name}" for name in KINDS if name != "int4_weight_only"]
    assert config == {
        "model_type": "net",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "strategy": "group",
                        "group_size": 16,
                        "symmetric": True,
                        "dynamic": False,
                    },
                    "input_activations": None,
                    "output_activations": None,
                    "format": "pack-quantized",
                }
            },
            "ignore": [*others, "head"],
            "kv_cache_scheme": None,
        },
    }
    stored = load_file(tmp_path / "model.safetensors")
    names = {name.removeprefix("layers.int4_weight_only.") for name in stored if "int4_weight_only" in name}
    assert names == {"weight_packed", "weight_scale", "weight_shape", "bias"}
    assert stored["layers.int4_weight_only.weight_shape"].tolist() == [64, 64]
    assert torch.equal(stored["head.weight"], net.head.weight)
    assert "table" not in stored


def test_kinds_have_groups_of_their_own(tmp_path: Path) -> None:
    save_compressed_tensors(quantized(Net()), tmp_path)
    config = config_of(tmp_path)["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert [group["targets"] for group in config["config_groups"].values()] == [[f"layers.{name}"] for name in KINDS]
    formats = [group["format"] for group in config["config_groups"].values()]
    assert formats == [*["int-quantized"] * 2, "pack-quantized", "int-quantized", "pack-quantized", "float-quantized"]


def test_shards_are_no_larger_than_asked_for(tmp_path: Path) -> None:
    net = quantized(Net())
    written = save_compressed_tensors(net, tmp_path, max_shard_bytes=6000)
    assert written == sorted(tmp_path.glob("*.safetensors"))
    files = [path.name for path in written]
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) > 3
    assert not list(tmp_path.glob("part*"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = {file: load_file(tmp_path / file) for file in files}
    assert index["weight_map"] == {name: file for file, shard in shards.items() for name in shard}
    sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in shards.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(size <= 6000 for size in sizes)
    again = Net()
    load_quantized_(again, tmp_path, progress=None)
    assert_same_state(again, net)


def test_a_tensor_larger_than_a_shard_has_its_own(tmp_path: Path) -> None:
    net = quantized(Net())
    save_compressed_tensors(net, tmp_path, max_shard_bytes=1)
    again = Net()
    load_quantized_(again, tmp_path, progress=None)
    assert_same_state(again, net)


def test_tied_and_shared_tensors_are_stored_once(tmp_path: Path) -> None:
    net = quantized(Net())
    net.head.weight = net.embed.weight
    net.layers["fp8_block"] = net.layers["int8_dynamic"]
    save_compressed_tensors(net, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert not [name for name in stored if name.startswith(("head", "layers.fp8_block"))]
    again = Net()
    again.head.weight = again.embed.weight
    again.layers["fp8_block"] = again.layers["int8_dynamic"]
    load_quantized_(again, tmp_path, progress=None)
    assert again.head.weight is again.embed.weight
    assert_same_state(again, net)


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int4_weight_only", "fp8_block"])
def test_layers_that_share_their_codes_are_stored_each(tmp_path: Path, scheme: str) -> None:
    net = Net()
    net.layers["int8_static"].weight = net.layers["int8_dynamic"].weight
    quantize_(net, scheme, filter=lambda name, layer: name.startswith("layers.int8"))
    assert net.layers["int8_static"].qweight is net.layers["int8_dynamic"].qweight
    save_compressed_tensors(net, tmp_path)
    again = Net()
    load_quantized_(again, tmp_path, progress=None)
    assert_same_state(again, net)


def test_attention_of_this_package_comes_back(tmp_path: Path) -> None:
    net, again = (nn.Sequential(WindowMultiheadAttention(32, 2, window=(3, 0))) for _ in range(2))
    assert quantize_(net, "int8_dynamic").replaced == ("0.out_proj",)
    save_compressed_tensors(net, tmp_path)
    load_quantized_(again, tmp_path, progress=None)
    assert_same_state(again, net)
    # The same layer in torch's attention is read past its forward.
    with pytest.raises(
        ValueError, match=r"0.out_proj: module: .* nn.MultiheadAttention reads the weight of its out_proj"
    ):
        load_quantized_(nn.Sequential(nn.MultiheadAttention(32, 2)), tmp_path, progress=None)


def test_views_of_one_storage_are_stored(tmp_path: Path) -> None:
    net = quantized(Net())
    both = torch.randn(96)
    net.norm.weight.data, net.norm.bias.data = both[:64], both[32:]
    net.norm.running_mean = net.norm.running_var.view(64)
    net.head.weight.data = torch.randn(64, 6).T
    save_compressed_tensors(net, tmp_path)
    again = Net()
    load_quantized_(again, tmp_path, progress=None)
    assert_same_state(again.norm, net.norm)
    assert torch.equal(again.head.weight, net.head.weight)


def test_config_of_the_model_is_the_default(tmp_path: Path) -> None:
    class Config:
        def to_dict(self) -> dict[str, int]:
            return {"hidden_size": 64}

    net = quantized(Net())
    net.config = Config()
    save_compressed_tensors(net, tmp_path)
    assert config_of(tmp_path)["hidden_size"] == 64


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        pytest.param(
            QuantizedLinear.from_linear(nn.Linear(80, 4), "int4_weight_only", group_size=32),
            "1: group_size: expected one that divides 80 .*, got 32",
            id="short_group",
        ),
        pytest.param(
            QuantizedLinear(dk.quantize_weight(torch.ones(4, 8), "int8_dynamic")._replace(input_order=torch.arange(8))),
            "1: input_order: expected none for int8_dynamic, got one",
            id="order",
        ),
        pytest.param(
            QuantizedLinear.empty(16, 4, "int8_dynamic", bias=False, device="meta"),
            "1.qweight: expected a tensor with values, got one on meta",
            id="meta",
        ),
    ],
)
def test_nothing_is_written_for_what_cannot_be_held(tmp_path: Path, layer: nn.Module, message: str) -> None:
    good = QuantizedLinear.from_linear(nn.Linear(32, 4), "int8_dynamic")
    with pytest.raises(ValueError, match=message):
        save_compressed_tensors(nn.Sequential(good, layer), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_other_quantized_modules_are_refused(tmp_path: Path) -> None:
    net = quantized(Net())
    net.embed.register_buffer("qweight", torch.ones(3))
    with pytest.raises(ValueError, match=r"embed: expected a QuantizedLinear \(.*\), got Embedding"):
        save_compressed_tensors(net, tmp_path)


def test_arguments(tmp_path: Path) -> None:
    net = quantized(Net())
    with pytest.raises(TypeError, match=r"model: expected an nn.Module, got 1"):
        save_compressed_tensors(1, tmp_path)
    with pytest.raises(TypeError, match=r"max_shard_bytes: expected an int, got 1.0"):
        save_compressed_tensors(net, tmp_path, max_shard_bytes=1.0)
    with pytest.raises(ValueError, match="max_shard_bytes: expected a positive number, got 0"):
        save_compressed_tensors(net, tmp_path, max_shard_bytes=0)
    with pytest.raises(ValueError, match="model: expected at least one QuantizedLinear, got none"):
        save_compressed_tensors(Net(), tmp_path)
    with pytest.raises(ValueError, match="model: expected a module with layers in it, got a layer"):
        save_compressed_tensors(net.layers["int8_dynamic"], tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "old.safetensors")
    with pytest.raises(ValueError, match=r"folder: expected one without a checkpoint, got old.safetensors in "):
        save_compressed_tensors(net, tmp_path)
