"""Which blocks of a model are computed again in backward, and what of them is kept."""

from __future__ import annotations

from dataclasses import dataclass

from dskernels.checks import is_integer, wrong_type, wrong_value

KINDS = ("none", "full", "selective")
_FORMS = "'none', 'full', 'selective', 'every:k' or 'selective:k' with a positive integer k"
_COUNTED = {"every": "full", "selective": "selective"}


@dataclass(frozen=True)
class BlockPolicy:
    """What `checkpoint_blocks` does; ``str(policy)`` gives the text that `parse` reads.

    ==============  ================================================  ==================================
    text            kept from forward to backward                     computed twice
    ==============  ================================================  ==================================
    ``none``        all that autograd saves                           nothing
    ``selective``   each block's input, and what the operators of     the blocks, without the operators
                    `dskernels.kept_ops` return                       of `dskernels.kept_ops`
    ``every:k``     of each k-th block its input, of others all       each k-th block
    ``full``        each block's input                                the blocks
    ==============  ================================================  ==================================

    ``selective:k`` is ``selective`` for each k-th block.

    Args:
        kind: ``"none"``, ``"full"`` or ``"selective"``.
        every: ``k``: the blocks 0, k, 2 * k, ... are recomputed, the others left as they are. Default: 1, all.

    Raises:
        TypeError: ``every`` is no integer.
        ValueError: ``kind`` is none of the three, or ``every`` is below 1.

    Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4 (segments); Korthikanti et
    al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 5 (selective).
    """

    kind: str
    every: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise wrong_value("kind", f"one of {', '.join(map(repr, KINDS))}", repr(self.kind))
        if not is_integer(self.every):
            raise wrong_type("every", "an integer", self.every)
        if self.every < 1:
            raise wrong_value("every", "at least 1", self.every)

    @classmethod
    def parse(cls, policy: str | BlockPolicy) -> BlockPolicy:
        """The policy that a text such as ``"every:2"`` names; a policy is returned as it is.

        Raises:
            TypeError: ``policy`` is neither of the two.
            ValueError: it names no policy.
        """
        if isinstance(policy, BlockPolicy):
            return policy
        if not isinstance(policy, str):
            raise wrong_type("policy", _FORMS, policy)
        kind, colon, every = policy.partition(":")
        if kind in _COUNTED and every.isdecimal() and int(every) >= 1:
            return cls(_COUNTED[kind], int(every))
        if kind in KINDS and not colon:
            return cls(kind)
        raise wrong_value("policy", _FORMS, repr(policy))

    def __str__(self) -> str:
        if self.every == 1 or self.kind == "none":
            return self.kind
        return f"{'every' if self.kind == 'full' else self.kind}:{self.every}"
