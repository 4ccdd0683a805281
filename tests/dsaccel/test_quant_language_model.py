"""Language models of this package, quantized: every layer is replaced, and generation follows the logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsaccel.modules import SlidingWindowLM, WindowAttention
from dsaccel.quant import QuantizedLinear, quantize_

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = ("int8_dynamic", "int8_weight_only", "int4_dynamic", "int4_weight_only", "fp8_block")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_replaces_every_layer_of_a_language_model(scheme: str) -> None:
    model = SlidingWindowLM(vocab_size=50, dim=32, num_layers=2, num_heads=2, window=8).eval()
    tokens = torch.randint(50, (2, 13))
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    with torch.no_grad():
        before = model(tokens)
        report = quantize_(model, scheme)
        after = model(tokens)
    assert list(report.replaced) == names
    assert all(isinstance(model.get_submodule(name), QuantizedLinear) for name in names)
    assert all(layer.became == scheme for layer in report.layers if layer.became is not None)
    # 4 bits of weights change logits by several per cent, 8 by a few tenths.
    limit = 0.3 if "int4" in scheme else 0.1
    assert (after - before).norm() < limit * before.norm()
    assert not torch.equal(after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("embeddings", [False, True], ids=["float-embedding", "int8-embedding"])
def test_a_quantized_language_model_generates_what_its_logits_say(embeddings: bool, dtype: torch.dtype) -> None:
    model = SlidingWindowLM(vocab_size=50, dim=32, num_layers=2, num_heads=2, window=8).eval()
    nn.init.normal_(model.embed.weight)
    tokens = torch.randint(50, (2, 5))
    with torch.no_grad():
        before = model(tokens)
        quantize_(model, "int8_dynamic", embeddings=embeddings)
        out = model.to(dtype)(tokens)
        assert out.dtype == dtype
        assert (out.float() - before).norm() < 0.1 * before.norm()
        continued = model.generate(tokens, 6, temperature=0)
        logits = model(continued).float()
    # Each token was the likeliest but for what rounding can turn around.
    chosen = logits[:, 4:-1].gather(2, continued[:, 5:, None])[..., 0]
    slack = 1e-4 if dtype == torch.float32 else 0.05
    assert (logits[:, 4:-1].amax(2) - chosen <= slack * before.abs().max()).all()


def test_a_cache_for_quantized_attention_needs_a_dtype() -> None:
    model = nn.Sequential(WindowAttention(16, 2, window=(3, 0)))
    quantize_(model, "int8_dynamic")
    with pytest.raises(ValueError, match=r"dtype: expected that of the inputs, as the weights are quantized"):
        model[0].new_cache(2)
    assert model[0].new_cache(2, dtype=torch.float16).is_empty
