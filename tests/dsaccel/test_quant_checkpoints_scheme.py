"""What config groups of compressed-tensors say, in both directions, and which layers they mean."""

from __future__ import annotations

from typing import Any

import pytest

from dsaccel.quant.checkpoints import CompressedScheme
from dsaccel.quant.checkpoints.compressed_scheme import Targets

# As compressed-tensors writes them, shortened.
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
W8 = {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None, "symmetric": True, "dynamic": False}
F8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True, "observer": None}
STEP = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True, "symmetric": True}


def _packed(*options: Any, ordered: bool = False) -> CompressedScheme:
    return CompressedScheme("int4_weight_only", "pack-quantized", *options, ordered=ordered)


@pytest.mark.parametrize(
    ("weights", "inputs", "format", "want"),
    [
        (W4, None, "pack-quantized", _packed(128)),
        ({**W4, "symmetric": False}, None, "pack-quantized", _packed(128, False)),
        ({**W4, "actorder": "group"}, None, "pack-quantized", _packed(128, ordered=True)),
        ({**W4, "actorder": "weight"}, None, "pack-quantized", _packed(128)),
        ({**W4, "strategy": None}, TOKEN, "int-quantized", CompressedScheme("int4_dynamic", "int-quantized", 128)),
        ({**W4, "strategy": None, "group_size": -1}, None, "pack-quantized", _packed()),
        (W8, None, "pack-quantized", CompressedScheme("int8_weight_only", "pack-quantized")),
        (W8, TOKEN, "int-quantized", CompressedScheme("int8_dynamic", "int-quantized")),
        (W8, STEP, "int-quantized", CompressedScheme("int8_static", "int-quantized")),
        ({"num_bits": 8}, STEP, "int-quantized", CompressedScheme("int8_static", "int-quantized", per_tensor=True)),
        (F8, BLOCKS, "float-quantized", CompressedScheme("fp8_block", "float-quantized")),
        (F8, BLOCKS, "naive-quantized", CompressedScheme("fp8_block", "naive-quantized")),
    ],
)
def test_config_group_both_ways(weights: Any, inputs: Any, format: str, want: CompressedScheme) -> None:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    assert CompressedScheme.from_config(group, format) == want
    # The format of a group is preferred to that of the whole.
    assert CompressedScheme.from_config({**group, "format": format}, "dense") == want
    assert CompressedScheme.from_config(want.to_config()) == want


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"weights": W4, "format": "dense"}, "format: expected one of pack-quantized, .*, got 'dense'"),
        ({"weights": W4, "output_activations": TOKEN}, "output_activations: expected none"),
        ({"weights": {**W4, "num_bits": 3}}, "weights: expected int of 4 or 8 bits, or float of 8, got int of 3"),
        ({"weights": {**W4, "type": "float"}}, "weights: .*, got float of 4"),
        ({"weights": {**W8, "strategy": "group"}}, "weights.strategy: expected channel or tensor for int8, got group"),
        ({"weights": {**W4, "strategy": "tensor"}}, "weights.strategy: expected channel or group for int4, got tensor"),
        ({"weights": {**F8, "strategy": "channel"}}, "weights.strategy: expected block for fp8, got channel"),
        (
            {"weights": {**F8, "block_structure": [64, 128]}},
            r"weights.block_structure: expected \[128, 128\], got \[64",
        ),
        ({"weights": {**W8, "symmetric": False}}, "weights.symmetric: expected true for int8, got false"),
        ({"weights": F8}, r"input_activations: expected one of \(fp8, dynamic by groups of 128\) for fp8, got none"),
        (
            {"weights": W8, "input_activations": {**TOKEN, "symmetric": False}},
            "input_activations: .* got type int, num_bits 8, strategy token, dynamic True, symmetric False",
        ),
        ({"weights": W8, "input_activations": {**STEP, "dynamic": True}}, "input_activations: .*, dynamic True"),
        ({"weights": W4, "input_activations": STEP}, "input_activations: .* got 8 bits, static by tensor"),
        ({"weights": F8, "input_activations": {**BLOCKS, "group_size": 64}}, "input_activations: .* group_size 64"),
    ],
)
def test_config_groups_without_a_scheme_are_errors(group: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompressedScheme.from_config(group, "pack-quantized")


@pytest.mark.parametrize(
    ("targets", "want"),
    [
        (["Linear"], "Linear"),
        (["Module", "Conv1d"], "Module"),
        (["re:.*proj$"], None),
        (["re:layers", "Linear"], "re:layers"),
        (["re:ayers"], None),
        (["re:.*q$", "layers.0.q", "Linear"], "layers.0.q"),
        (["q"], None),
        ([], None),
    ],
)
def test_targets(targets: list[str], want: str | None) -> None:
    assert Targets(targets).match("layers.0.q", ["Linear", "Module", "object"]) == want
