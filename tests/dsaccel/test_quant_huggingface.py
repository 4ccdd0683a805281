"""quantize_ on models of transformers: what their own code expects of layers still holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsaccel.quant import QuantizedEmbedding, QuantizedLinear, quantize_

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).eval()


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("embeddings", [False, True], ids=["float-embedding", "int8-embedding"])
def test_a_tied_llama_computes_and_generates(embeddings: bool) -> None:
    model = llama()
    ids = torch.randint(2, 97, (2, 7))
    with torch.no_grad():
        before = model(ids).logits
        report = quantize_(model, "int8_dynamic", embeddings=embeddings)
        after = model(ids).logits
    assert len(report.replaced) == 2 * 7 + 1 + embeddings
    assert isinstance(model.lm_head, QuantizedLinear)
    assert isinstance(model.get_input_embeddings(), QuantizedEmbedding if embeddings else nn.Embedding)
    assert (after - before).norm() < 0.05 * before.norm()
    continued = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert continued.shape == (2, 11)


def test_a_t5_with_one_weight_for_three_embeddings_and_the_head() -> None:
    model = t5()
    ids = torch.randint(2, 97, (2, 7))
    with torch.no_grad():
        before = model(ids, labels=ids).logits
        quantize_(model, "int8_weight_only", embeddings=True)
        after = model(ids, labels=ids).logits
    assert (after - before).norm() < 0.05 * before.norm()
    codes = {model.shared.qweight, model.encoder.embed_tokens.qweight, model.decoder.embed_tokens.qweight}
    assert codes == {model.lm_head.qweight}
