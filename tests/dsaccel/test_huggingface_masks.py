"""What stands in for masks of all pairs in transformers: the window that is found, and how attention reads it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import masking_utils

from dsaccel.integrations import huggingface
from dsaccel.integrations.mask_algebra import window_of

PADDING = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
sliding = masking_utils.sliding_window_causal_mask_function(3)
symmetric = masking_utils.sliding_window_bidirectional_mask_function(3)
MASKS = {
    "causal": ({}, (None, 0), 0, None),
    "sliding": ({"mask_function": sliding}, (2, 0), 0, None),
    "symmetric": (
        {"mask_function": symmetric, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": True},
        (3, 3),
        0,
        None,
    ),
    "all-tokens": ({"attention_mask": torch.ones(2, 6)}, (None, 0), 0, None),
    "left-padding": ({"attention_mask": PADDING}, (None, 0), 0, PADDING),
    "right-padding": ({"attention_mask": PADDING.flip(1)}, (None, 0), 0, PADDING.flip(1)),
    "future-padding": ({"q_length": 4, "attention_mask": PADDING.flip(1)[[0, 0]]}, (None, 0), 0, None),
    "cache": ({"q_length": 2, "q_offset": 4}, (None, 0), 4, None),
    "dropped-keys": (
        {"q_length": 2, "q_offset": 8, "kv_offset": 4, "attention_mask": torch.ones(2, 10)},
        (None, 0),
        4,
        None,
    ),
    # Slots that wait for tokens are out of sight already.
    "static-cache": (
        {"q_length": 2, "q_offset": torch.tensor(2), "attention_mask": torch.ones(2, 4)},
        (None, 0),
        2,
        None,
    ),
}


@pytest.mark.parametrize(("arguments", "window", "offset", "padding"), MASKS.values(), ids=MASKS)
def test_window_mask(arguments: dict, window: tuple, offset: int, padding: Tensor | None) -> None:
    arguments = {"batch_size": 2, "q_length": 6, "kv_length": 6, **arguments}
    mask = huggingface.window_mask(**arguments)
    assert isinstance(mask, huggingface.WindowMask)
    assert (mask.window, mask.query_offset) == (window, offset)
    assert (mask.ndim, mask.shape) == (4, (2, 1, arguments["q_length"], 6))
    if padding is None:
        assert mask.bias is None
    else:
        assert torch.equal(mask.bias, torch.where(padding.bool(), 0.0, -torch.inf)[:, None, None])
    assert huggingface.window_mask(2, 6, 6, attention_mask=mask) is mask


def test_window_mask_is_built_where_transformers_wants_it() -> None:
    mask = huggingface.window_mask(2, 6, 6, mask_function=sliding, allow_is_causal_skip=False)
    assert torch.equal(mask, torch.ones(2, 1, 6, 6).tril().triu(-2).bool())


def of_distance(distance: Tensor) -> Tensor:
    return distance < 2


WINDOWS = {
    "causal": (masking_utils.causal_mask_function, (None, 0)),
    "everything": (masking_utils.bidirectional_mask_function, (None, None)),
    "sliding": (sliding, (2, 0)),
    "symmetric": (symmetric, (3, 3)),
    "strict": (lambda b, h, q, k: abs(q - k) < 3, (2, 2)),
    "turned-round": (lambda b, h, q, k: q + 1 >= k, (None, 1)),
    "both-sides": (lambda b, h, q, k: (k - q <= 4) & (q - k < 2), (1, 4)),
    "behind": (lambda b, h, q, k: k < q - 2, (None, -3)),
    "chunks": (masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int)), None),
    "padding": (masking_utils.padding_mask_function(PADDING), None),
    "packed": (masking_utils.packed_sequence_mask_function(PADDING), None),
    "union": (masking_utils.or_masks(sliding, symmetric), None),
    "first-keys": (lambda b, h, q, k: k < 4, None),
    "not-the-first-query": (lambda b, h, q, k: q > 0, None),
    "diagonal": (lambda b, h, q, k: q == k, None),
    "diagonal-or-causal": (lambda b, h, q, k: (q == k) | (k <= q), None),
    "sum": (lambda b, h, q, k: q + k < 5, None),
    "shifted-distance": (lambda b, h, q, k: abs(q - k + 1) < 5, None),
    "by-a-tensor": (lambda b, h, q, k: k <= q + torch.tensor(1), None),
    "by-another-function": (lambda b, h, q, k: of_distance(q - k), (1, None)),
    "constant": (lambda b, h, q, k: True, None),
}


@pytest.mark.parametrize(("function", "window"), WINDOWS.values(), ids=WINDOWS)
def test_window_of_a_mask_function(function, window: tuple | None) -> None:
    assert window_of(function) == window
    if window is None:
        return
    # What it says of numbers is what the window says.
    for q in range(9):
        for k in range(9):
            left, right = (99 if bound is None else bound for bound in window)
            assert bool(function(0, 0, torch.tensor(q), torch.tensor(k))) == (-left <= k - q <= right)


def call(**arguments: object) -> Tensor:
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    module = SimpleNamespace(is_causal=False)
    options = {"attention_mask": None, **arguments}
    return huggingface.attention_forward(module, q, k, k, **options)[0]


@pytest.mark.parametrize(
    ("is_causal", "sliding_window", "window"),
    [(None, None, (None, None)), (True, None, (None, 0)), (None, 2, (1, 1)), (True, 2, (1, 0))],
    ids=["module", "causal", "symmetric", "sliding"],
)
def test_window_without_a_mask(
    is_causal: bool | None, sliding_window: int | None, window: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(huggingface, "window_attention", lambda q, k, v, **o: seen.append(o["window"]) or q)
    call(is_causal=is_causal, sliding_window=sliding_window)
    assert seen == [window]


ERRORS = {
    "dropout": ({"dropout": 0.1}, r"dropout: expected 0 .*attention_dropout = 0.*, got 0.1"),
    "weights": ({"output_attentions": True}, "output_attentions: expected False .*, got True"),
    "padding": (
        {"attention_mask": torch.ones(2, 5)},
        r"attention_mask: expected shape \[B, 1 or Hq, Nq, Nk\], got \[2, 5\]",
    ),
    "integers": (
        {"attention_mask": torch.ones(2, 1, 3, 5, dtype=torch.int)},
        "attention_mask: expected dtype bool or a floating point one, got torch.int32",
    ),
    "lengths": (
        {"attention_mask": huggingface.WindowMask((None, 0), 0, None, (2, 1, 4, 5))},
        r"attention_mask: expected one for \(Nq, Nk\) = \(3, 5\), got \(4, 5\)",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**arguments)
