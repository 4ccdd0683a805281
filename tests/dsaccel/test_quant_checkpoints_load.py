"""How checkpoints get into models: files, names, ties, memory, progress, and everything that must raise."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dsaccel.quant import QuantizedLinear
from dsaccel.quant.checkpoints import (
    CompressedScheme,
    LoadProgress,
    from_awq,
    from_compressed_tensors,
    from_gptq,
    load,
    load_quantized_,
)

GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True},
}
CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["head"],
}


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim, bias=False)


class Net(nn.Module):
    """A model with parameters, buffers, and a head that may be tied to the embedding."""

    def __init__(self, dim: int = 8, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.BatchNorm1d(dim)
        self.head = nn.Linear(dim, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block.down(block.up(x).relu())
        return self.head(self.norm(x))


def tensors_for(net: Net, quantized: tuple[str, ...] = ("up", "down")) -> dict[str, Tensor]:
    """The checkpoint of a model: its layers of these names in int8 with scales of 0.01, everything else as it is."""
    tensors = {}
    for name, tensor in net.state_dict().items():
        layer, _, attribute = name.rpartition(".")
        if attribute == "weight" and layer.rpartition(".")[2] in quantized:
            tensors[name] = torch.randint(-128, 128, tensor.shape, dtype=torch.int8)
            tensors[f"{layer}.weight_scale"] = torch.rand(tensor.shape[0], 1) / 100
        else:
            tensors[name] = (
                torch.randint(0, 9, tensor.shape) if tensor.dtype == torch.int64 else torch.rand(tensor.shape)
            )
    return tensors


def write(folder: Path, *shards: dict[str, Tensor], config: dict[str, Any] = CONFIG) -> Path:
    """A folder with these shards, and an index if there are several."""
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors")
        return folder
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file)
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def on_meta(**options: Any) -> Net:
    with torch.device("meta"):
        return Net(**options)


def quiet(net: nn.Module, source: Path, **options: Any) -> Any:
    return load_quantized_(net, source, progress=None, **options)


def assert_holds(net: Net, tensors: dict[str, Tensor]) -> None:
    """Whether ``net`` holds just these tensors, in the dtypes that they have."""
    for name, tensor in tensors.items():
        layer, _, attribute = name.rpartition(".")
        module = net.get_submodule(layer)
        if isinstance(module, QuantizedLinear) and attribute in ("weight", "weight_scale"):
            scale = tensors[f"{layer}.weight_scale"]
            assert torch.equal(module.weight.dequantize(), tensors[f"{layer}.weight"].float() * scale)
        else:
            value = getattr(module, attribute)
            assert value.dtype == tensor.dtype
            assert torch.equal(value, tensor)
    assert not any(tensor.is_meta for tensor in net.state_dict().values())


@pytest.mark.parametrize("meta", [True, False], ids=["meta", "real"])
def test_everything_is_where_it_belongs(tmp_path: Path, meta: bool) -> None:
    tensors = tensors_for(Net())
    net = on_meta() if meta else Net()
    net.blocks[0].eval()
    net.embed.weight.requires_grad_(False)
    loaded = quiet(net, write(tmp_path, tensors))
    assert loaded.replaced == ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")
    assert loaded.kept == dict.fromkeys(("embed", "head"), "the checkpoint has its weight in floating point")
    assert [layer.became for layer in loaded.layers[1:-1]] == ["int8_dynamic"] * 4
    assert {layer.reason for layer in loaded.layers[1:-1]} == {"from compressed-tensors"}
    assert_holds(net, tensors)
    assert (net.blocks[0].up.training, net.blocks[1].up.training) == (False, True)
    assert (net.embed.weight.requires_grad, net.head.weight.requires_grad) == (False, True)
    assert net.eval()(torch.tensor([0, 4])).isfinite().all()


def test_dtypes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    tensors = tensors_for(Net())
    tensors["embed.weight"] = tensors["embed.weight"].bfloat16()
    tensors["blocks.0.up.bias"] = tensors["blocks.0.up.bias"].half()
    net = Net()
    quiet(net, write(tmp_path, tensors))
    assert_holds(net, tensors)


def test_nothing_stays_bound_to_the_file(tmp_path: Path) -> None:
    tensors = tensors_for(Net())
    net = on_meta()
    quiet(net, write(tmp_path, tensors))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * (tmp_path / "model.safetensors").stat().st_size)
    assert_holds(net, tensors)


def test_a_layer_may_be_split_over_files(tmp_path: Path) -> None:
    tensors = tensors_for(Net())
    names = sorted(tensors)
    shards = [{name: tensors[name] for name in names[i::3]} for i in range(3)]
    assert any("blocks.0.up.weight" in shard and "blocks.0.up.weight_scale" not in shard for shard in shards)
    net = on_meta()
    quiet(net, write(tmp_path, *shards))
    assert_holds(net, tensors)


def test_files_without_an_index_and_a_single_file(tmp_path: Path) -> None:
    tensors = tensors_for(Net())
    names = sorted(tensors)
    write(tmp_path, {name: tensors[name] for name in names[::2]}, {name: tensors[name] for name in names[1::2]})
    (tmp_path / "model.safetensors.index.json").unlink()
    net = on_meta()
    quiet(net, tmp_path)
    assert_holds(net, tensors)
    alone = tmp_path / "alone"
    alone.mkdir()
    save_file(tensors, alone / "weights.safetensors")
    net = on_meta()
    quiet(net, alone / "weights.safetensors", format="compressed-tensors", quantization_config=CONFIG)
    assert_holds(net, tensors)


def test_memory_is_the_model_and_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = on_meta(dim=64, layers=6)
    tensors = tensors_for(Net(dim=64, layers=6))
    names = sorted(tensors)
    shards = [{name: tensors[name] for name in names[i::6]} for i in range(6)]
    write(tmp_path, *shards)
    total = sum(tensor.nbytes for tensor in tensors.values())
    largest = max(sum(tensor.nbytes for tensor in shard.values()) for shard in shards)
    del tensors, shards
    live = LiveBytes()
    read = load.tensors_of

    earlier: list[StorageWeakRef] = []

    def counted(*arguments: Any) -> Iterator[Tensor]:
        own: list[StorageWeakRef] = []
        for tensor in read(*arguments):
            live.add(tensor)
            own.append(StorageWeakRef(tensor.untyped_storage()))
            # The caller's variable still holds the last tensor when it asks for the first of the next file.
            assert len(own) == 1 or all(storage.expired() for storage in earlier)
            yield tensor
        earlier[:] = own

    monkeypatch.setattr(load, "tensors_of", counted)
    with live:
        quiet(net, tmp_path)
    assert total * 0.99 < live.peak <= total + largest
    assert live.now() <= total * 1.01


def _gptq() -> tuple[Any, ...]:
    g_idx = torch.arange(256).remainder(8)
    tensors = torch.ones(32, 4096).int(), torch.ones(8, 512).int(), torch.ones(8, 4096).half(), g_idx
    return from_gptq, tensors, {"group_size": 32, "version": 2}


def _awq() -> tuple[Any, ...]:
    tensors = torch.ones(256, 512).int(), torch.ones(8, 512).int(), torch.ones(8, 4096).half()
    return from_awq, tensors, {"group_size": 32}


def _bytes() -> tuple[Any, ...]:
    tensors = {"weight": torch.ones(4096, 256, dtype=torch.int8), "weight_scale": torch.ones(4096, 8).half()}
    return from_compressed_tensors, (tensors, CompressedScheme("int4_dynamic", "int-quantized", 32)), {}


@pytest.mark.parametrize("case", [_gptq, _awq, _bytes])
def test_conversions_unpack_a_little_at_a_time(case: Any) -> None:
    convert, tensors, options = case()
    live = LiveBytes()
    for tensor in tensors[0].values() if isinstance(tensors[0], dict) else tensors:
        live.add(tensor)
    read = live.now()
    with live:
        weight = convert(*tensors, **options)
    kept = sum(field.nbytes for field in weight if isinstance(field, Tensor))
    assert 4096 * 128 < kept <= live.peak - read < 1.5 * kept


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that came from an operator or from `add` and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def add(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        self.storages = {key: value for key, value in self.storages.items() if not value[0].expired()}
        return sum(size for _, size in self.storages.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return result


def test_tied_head_is_loaded_once_and_stays_tied(tmp_path: Path) -> None:
    net = on_meta(tied=True)
    tensors = tensors_for(Net())
    del tensors["head.weight"]
    quiet(net, write(tmp_path, tensors))
    assert_holds(net, tensors)
    assert net.head.weight is net.embed.weight


def test_tied_tensors_that_differ_are_an_error(tmp_path: Path) -> None:
    tensors = tensors_for(Net())
    write(tmp_path, {**tensors, "head.weight": tensors["embed.weight"].clone()})
    net = on_meta(tied=True)
    quiet(net, tmp_path)
    assert net.head.weight is net.embed.weight
    write(tmp_path, tensors)
    with pytest.raises(
        ValueError, match=r"head.weight: expected the values of embed.weight and head.weight, which are one"
    ):
        quiet(on_meta(tied=True), tmp_path)


def test_quantized_head_is_untied(tmp_path: Path) -> None:
    net = on_meta(tied=True)
    tensors = tensors_for(Net(), quantized=("up", "down", "head"))
    assert "head" in quiet(net, write(tmp_path, tensors, config={**CONFIG, "ignore": []})).replaced
    assert_holds(net, tensors)
    assert isinstance(net.embed.weight, nn.Parameter)


def test_a_layer_in_two_places_is_replaced_in_both(tmp_path: Path) -> None:
    tensors = tensors_for(Net())
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("blocks.1.up")}
    net = on_meta()
    net.blocks[1].up = net.blocks[0].up
    loaded = quiet(net, write(tmp_path, tensors))
    assert net.blocks[1].up is net.blocks[0].up
    assert isinstance(net.blocks[1].up, QuantizedLinear)
    assert [layer.reason for layer in loaded.layers][1] == "also blocks.1.up; from compressed-tensors"
    assert_holds(net, tensors)


def test_hooks_and_encoders_of_torch_go_on(tmp_path: Path) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    calls: list[nn.Module] = []
    encoder.layers[0].linear1.register_forward_hook(lambda module, *_: calls.append(module))
    tensors = {}
    for name, tensor in encoder.state_dict().items():
        tensors[name] = tensor
        if name.endswith(("linear1.weight", "linear2.weight")):
            tensors[name] = torch.randint(-128, 128, tensor.shape, dtype=torch.int8)
            tensors[f"{name}_scale"] = torch.full((tensor.shape[0], 1), 0.01)
    quiet(encoder, write(tmp_path, tensors, config={**CONFIG, "ignore": ["re:.*out_proj"]}))
    with torch.no_grad():
        assert encoder(torch.randn(2, 3, 8)).isfinite().all()
        assert calls == [encoder.layers[0].linear1]
        assert isinstance(calls[0], QuantizedLinear)
        # Without hooks torch would take its fused kernel, which reads the weights.
        calls[0]._forward_hooks.clear()
        assert encoder(torch.randn(2, 3, 8)).isfinite().all()


def test_names_can_be_mapped_and_left_out(tmp_path: Path) -> None:
    tensors = tensors_for(Net())
    stored = {f"model.{name}": tensor for name, tensor in tensors.items()}
    write(tmp_path, {**stored, "mtp.weight": torch.ones(3)}, config={**CONFIG, "ignore": ["model.head"]})
    net = on_meta()
    quiet(net, tmp_path, rename=lambda name: None if name.startswith("mtp.") else name.removeprefix("model."))
    assert_holds(net, tensors)
    with pytest.raises(ValueError, match=r"rename: expected a name of its own for each tensor, got a.weight for two"):
        quiet(on_meta(), tmp_path, rename=lambda name: "a.weight")


@pytest.mark.parametrize(
    ("targets", "ignore"),
    [
        (["re:.*up$", "re:.*down$"], []),
        (["re:blocks", "head"], ["re:h"]),
        ([f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")], []),
        (["Module"], ["head", "Embedding", "BatchNorm1d"]),
    ],
)
def test_targets_and_ignore(tmp_path: Path, targets: list[str], ignore: list[str]) -> None:
    tensors = tensors_for(Net())
    config = {**CONFIG, "config_groups": {"group_0": {**GROUP, "targets": targets}}, "ignore": ignore}
    net = on_meta()
    quiet(net, write(tmp_path, tensors, config=config))
    assert_holds(net, tensors)


def test_groups_of_several_kinds(tmp_path: Path) -> None:
    tensors = tensors_for(Net())
    for i in range(2):
        tensors[f"blocks.{i}.down.input_scale"] = torch.tensor([0.5])
    static = {**GROUP["input_activations"], "strategy": "tensor", "dynamic": False}
    groups = {
        "a": {**GROUP, "targets": ["Linear"]},
        "b": {**GROUP, "targets": ["re:.*down"], "input_activations": static},
    }
    net = on_meta()
    loaded = quiet(net, write(tmp_path, tensors, config={**CONFIG, "config_groups": groups}))
    became = {layer.name: layer.became for layer in loaded.layers}
    assert (became["blocks.1.up"], became["blocks.1.down"]) == ("int8_dynamic", "int8_static")
    assert float(net.blocks[1].down.input_scale) == 0.5


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = tensors_for(Net())
    names = sorted(tensors)
    write(tmp_path, {name: tensors[name] for name in names[:9]}, {name: tensors[name] for name in names[9:]})
    seen: list[LoadProgress] = []
    load_quantized_(on_meta(), tmp_path, progress=seen.append)
    assert sorted(step.tensor for step in seen) == names
    assert [step.done for step in seen] == sorted(step.done for step in seen)
    assert seen[-1].done == seen[-1].total == sum(tensor.nbytes for tensor in tensors.values())
    assert [(step.file, step.files) for step in seen if step.last_of_file] == [(1, 2), (2, 2)]
    assert capsys.readouterr() == ("", "")
    load_quantized_(on_meta(), tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["1 of 2 files loaded, 0.00 of 0.00 GB", "2 of 2 files loaded, 0.00 of 0.00 GB"]


def test_needs_safetensors_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, tensors_for(Net()))
    code = (
        "import sys; sys.modules['safetensors'] = None; import torch.nn, dsaccel.quant\n"
        "from dsaccel.quant.checkpoints import load_quantized_\n"
        f"load_quantized_(torch.nn.Linear(1, 1), {str(tmp_path)!r})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    message = 'ImportError: reading and writing checkpoints needs safetensors: pip install "dskernels[quant]"'
    assert found.stderr.splitlines()[-1] == message
