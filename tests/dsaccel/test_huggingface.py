"""Models of transformers give with ``attn_implementation="dskernels"`` what they give with ``"eager"``."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from dskernels.testing import assert_close_to_reference

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import masking_utils  # noqa: E402

from dsaccel.integrations import huggingface  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 7
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
SLIDING = {**GROUPED, "sliding_window": WINDOW}
QWEN = {**SLIDING, "use_sliding_window": True, "max_window_layers": 1}

DECODERS = {
    "llama": ("LlamaConfig", GROUPED),
    "mistral": ("MistralConfig", SLIDING),
    "qwen2": ("Qwen2Config", QWEN),
    "qwen3": ("Qwen3Config", QWEN),
    "gemma2": ("Gemma2Config", {**SLIDING, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 11}),
    "gemma3": ("Gemma3TextConfig", SLIDING),
    "gpt-oss": ("GptOssConfig", {**SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
# Masks that are no window: images see each other, chunks do not.
UNUSUAL = {
    "gemma3-bidirectional": ("Gemma3TextConfig", {**SLIDING, "use_bidirectional_attention": True}),
    "llama4-chunks": (
        "Llama4TextConfig",
        {**GROUPED, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    huggingface.register()
    transformers.AttentionInterface.register("exact", exact_attention)
    transformers.AttentionMaskInterface.register("exact", exact_mask)
    transformers.utils.logging.set_verbosity_error()


def exact_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **options: object
) -> tuple[Tensor, None]:
    """The formula, in float64; eager attention has softmax in float32, in which float64's masks are infinite."""
    group = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = q @ k.mT * scaling
    if options.get("softcap") is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if options.get("position_bias") is not None:
        scores = scores + options["position_bias"]
    scores = scores.masked_fill(~mask, -torch.inf)
    if options.get("s_aux") is not None:
        sink = options["s_aux"].double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        # A query of padding that sees nothing; nobody looks at the result.
        weights = torch.where(mask.any(-1, keepdim=True), scores, 0).softmax(-1)
    return (weights @ v).transpose(1, 2).to(query.dtype), None


def exact_mask(**arguments: object) -> Tensor:
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(**{**arguments, **skips})


def randomized(model: nn.Module) -> nn.Module:
    """Weights large enough for attention to be far from uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.2)
    return model.eval()


def decoder(case: tuple[str, dict]) -> nn.Module:
    config = getattr(transformers, case[0])(**case[1])
    # Experts of the default implementation have no float64.
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return randomized(transformers.AutoModelForCausalLM.from_config(config, **options))


def tokens(batch: int = 3, length: int = 40) -> Tensor:
    return torch.randint(2, 97, (batch, length))


def padded(ids: Tensor) -> Tensor:
    """1 where there is a token: none missing, some on the left, some on the right."""
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    mask[2, 33:] = 0
    return mask


def in_float64(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("exact")
    return model


def compare(model: nn.Module, call, chosen=lambda out: out) -> None:
    """Holds the implementation to float64 by the rule of `dskernels.testing`; plain PyTorch is eager attention."""
    results = {}
    for name in ("dskernels", "eager"):
        model.set_attn_implementation(name)
        results[name] = chosen(call(model))
    exact_model = in_float64(model)
    assert_close_to_reference(results["dskernels"], chosen(call(exact_model)), results["eager"])


@pytest.mark.parametrize("case", [*DECODERS.values(), *UNUSUAL.values()], ids=[*DECODERS, *UNUSUAL])
@torch.no_grad()
def test_logits_of_decoders(case: tuple[str, dict]) -> None:
    model, ids = decoder(case), tokens()
    compare(model, lambda model: model(ids).logits)


@pytest.mark.parametrize("case", [*DECODERS.values(), *UNUSUAL.values()], ids=[*DECODERS, *UNUSUAL])
@torch.no_grad()
def test_logits_of_padded_batches(case: tuple[str, dict]) -> None:
    model, ids = decoder(case), tokens()
    mask = padded(ids)
    compare(model, lambda model: model(ids, attention_mask=mask).logits, lambda out: out[mask.bool()])


@pytest.mark.parametrize("case", DECODERS.values(), ids=DECODERS)
def test_gradients(case: tuple[str, dict]) -> None:
    model, ids = decoder(case), tokens(2)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    weights = torch.randn(2, 40, 97) * mask[..., None]

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        (model(ids, attention_mask=mask).logits * weights).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    results = {}
    for name in ("dskernels", "eager"):
        model.set_attn_implementation(name)
        results[name] = gradients(model)
    exact = gradients(in_float64(model))
    assert any("k_proj" in name for name in exact)
    for name in exact:
        assert_close_to_reference(results["dskernels"][name], exact[name], results["eager"][name], name)


@pytest.mark.parametrize("case", DECODERS.values(), ids=DECODERS)
@torch.no_grad()
def test_bfloat16(case: tuple[str, dict]) -> None:
    model, ids = decoder(case).bfloat16(), tokens()
    compare(model, lambda model: model(ids, attention_mask=padded(ids)).logits, lambda out: out[padded(ids).bool()])


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("case", [*DECODERS.values(), *UNUSUAL.values()], ids=[*DECODERS, *UNUSUAL])
def test_greedy_generation_beyond_the_window(case: tuple[str, dict], cache: str) -> None:
    model, ids = decoder(case), tokens(2, 11)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = {"use_cache": False} if cache == "none" else {"cache_implementation": cache}
    generated = {}
    for name in ("eager", "dskernels"):
        model.set_attn_implementation(name)
        generated[name] = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, **options)
    assert len(generated["eager"][0, 11:].unique()) > 3
    assert torch.equal(generated["dskernels"], generated["eager"])


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_prompt_in_parts(static: bool) -> None:
    """Several queries at once that do not start at the first key, in sliding and in full layers."""
    model, ids = decoder(DECODERS["qwen2"]), tokens(2)
    whole = model(ids).logits
    model.set_attn_implementation("dskernels")
    if static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    else:
        cache = transformers.DynamicCache(config=model.config)
    parts = [model(part, cache=cache, use_cache=True).logits for part in ids.split([3, 15, 1, 21], 1)]
    # Other matrix products are made for parts: 16 roundings in each of 3 layers, of logits up to about 8.
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=3 * 16 * 2**-24 * 8)


ENCODERS = {
    "bert": ("BertConfig", "BertModel", SIZES),
    # Sees `local_attention / 2` tokens on either side, its module is told one more.
    "modernbert": (
        "ModernBertConfig",
        "ModernBertModel",
        {**SIZES, "local_attention": 8, "global_attn_every_n_layers": 3, "cls_token_id": 1, "sep_token_id": 1},
    ),
}


@pytest.mark.parametrize("case", ENCODERS.values(), ids=ENCODERS)
@torch.no_grad()
def test_encoders(case: tuple[str, str, dict]) -> None:
    model = randomized(getattr(transformers, case[1])(getattr(transformers, case[0])(**case[2])))
    ids = tokens()
    mask = padded(ids)
    compare(model, lambda model: model(ids).last_hidden_state)
    compare(model, lambda model: model(ids, attention_mask=mask).last_hidden_state, lambda out: out[mask.bool()])


def t5gemma() -> nn.Module:
    # Its encoder sees `sliding_window` tokens on either side, its decoder that many in all.
    half = {**SLIDING, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
    encoder, decoder = (transformers.T5GemmaModuleConfig(**half) for _ in range(2))
    config = transformers.T5GemmaConfig(encoder=encoder, decoder=decoder, vocab_size=97)
    return transformers.T5GemmaForConditionalGeneration(config)


def t5() -> nn.Module:
    # A learned bias of the positions is added to the scores.
    sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


@pytest.mark.parametrize("make", [t5gemma, t5])
@torch.no_grad()
def test_encoder_and_decoder(make) -> None:
    model, ids = randomized(make()), tokens()
    mask = padded(ids)
    compare(model, lambda model: model(ids, attention_mask=mask, decoder_input_ids=ids[:, :20]).logits)


@torch.no_grad()
def test_packed_sequences() -> None:
    model, ids = decoder(DECODERS["mistral"]), tokens(1)
    positions = torch.cat((torch.arange(15), torch.arange(25)))[None]
    compare(model, lambda model: model(ids, position_ids=positions, use_cache=False).logits)


@pytest.mark.parametrize("boolean", [True, False], ids=["bool", "float"])
@torch.no_grad()
def test_masks_of_all_pairs_by_the_user(boolean: bool) -> None:
    model, ids = decoder(DECODERS["llama"]), tokens(2)
    seen = (torch.rand(2, 1, 40, 40) > 0.3).tril() | torch.eye(40, dtype=torch.bool)
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = model(ids, attention_mask=added).logits
    model.set_attn_implementation("dskernels")
    result = model(ids, attention_mask=seen if boolean else added).logits
    torch.testing.assert_close(result, expected, rtol=0, atol=3 * 16 * 2**-24 * 8)  # as above


def forbid_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mask(**_: object) -> None:
        raise AssertionError("a mask of all pairs was built")

    monkeypatch.setattr(masking_utils, "sdpa_mask", no_mask)


@pytest.mark.parametrize("case", DECODERS.values(), ids=DECODERS)
@torch.no_grad()
def test_no_mask_of_all_pairs_is_built(case: tuple[str, dict], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = decoder(case), tokens()
    model.set_attn_implementation("dskernels")
    forbid_masks(monkeypatch)
    model(ids)
    model(ids, attention_mask=padded(ids))
    model.generate(ids, attention_mask=padded(ids), max_new_tokens=3, do_sample=False)


@torch.no_grad()
def test_compiles_whole_and_keeps_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = decoder(("MistralConfig", {**SLIDING, "num_hidden_layers": 1})), tokens()
    model.set_attn_implementation("dskernels")
    eager, eager_padded = model(ids).logits, model(ids, attention_mask=padded(ids)).logits

    forbid_masks(monkeypatch)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    atol = 3 * 16 * 2**-24 * 8
    torch.testing.assert_close(compiled(ids).logits, eager, rtol=0, atol=atol)
    kept = padded(ids).bool()
    result = compiled(ids, attention_mask=padded(ids)).logits
    torch.testing.assert_close(result[kept], eager_padded[kept], rtol=0, atol=atol)


def test_gradient_checkpointing_gives_the_same_bits() -> None:
    model, ids = decoder(DECODERS["mistral"]).train(), tokens(2)
    model.set_attn_implementation("dskernels")

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, attention_mask=padded(tokens(3))[1:], labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert all(torch.equal(a, b) for a, b in zip(gradients(), plain, strict=True))


def test_training_with_dropout_is_an_error() -> None:
    model = decoder(("MistralConfig", {**SLIDING, "attention_dropout": 0.1}))
    model.set_attn_implementation("dskernels")
    model(tokens())
    with pytest.raises(ValueError, match="dropout: expected 0"):
        model.train()(tokens())


def test_without_transformers_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['transformers'] = None; import dsaccel.integrations.huggingface"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'pip install "dskernels[huggingface]"' in result.stderr
