"""Policies are read from text and written back."""

from __future__ import annotations

import dataclasses

import pytest

from dsaccel.checkpoint import BlockPolicy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("none", BlockPolicy("none")),
        ("full", BlockPolicy("full")),
        ("every:1", BlockPolicy("full", 1)),
        ("every:12", BlockPolicy("full", 12)),
        ("selective", BlockPolicy("selective")),
        ("selective:3", BlockPolicy("selective", 3)),
    ],
)
def test_texts_and_policies(text: str, policy: BlockPolicy) -> None:
    assert BlockPolicy.parse(text) == policy
    assert BlockPolicy.parse(policy) is policy
    assert BlockPolicy.parse(str(policy)) == policy
    assert str(policy) == ("full" if text == "every:1" else text)


def test_policies_are_frozen_and_can_be_keys() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BlockPolicy("full").every = 2
    assert {BlockPolicy("full"): 1}[BlockPolicy.parse("full")] == 1


@pytest.mark.parametrize("text", ["", "Full", "every", "every:", "every:0", "every:-1", "every:2.5", "full:2"])
def test_unknown_texts(text: str) -> None:
    with pytest.raises(ValueError, match=r"policy: expected 'none', 'full', .*'every:k' or .*, got '"):
        BlockPolicy.parse(text)


def test_other_errors() -> None:
    with pytest.raises(TypeError, match=r"policy: expected .*, got 3 \(int\)"):
        BlockPolicy.parse(3)
    with pytest.raises(ValueError, match="kind: expected one of 'none', 'full', 'selective', got 'every'"):
        BlockPolicy("every", 2)
    with pytest.raises(TypeError, match="every: expected an integer, got True"):
        BlockPolicy("full", True)
    with pytest.raises(ValueError, match="every: expected at least 1, got 0"):
        BlockPolicy("full", 0)
