"""What quantization was said to do, beside what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsaccel.examples.report import Row, markdown_table


@dataclass(frozen=True)
class Claim:
    """At most ``loss`` is lost where things get ``factor`` times as small or as fast: the claim does not say which."""

    name: str
    loss: float
    factor: float


DYNAMIC = Claim("dynamic", 0.02, 2.0)
STATIC = Claim("static", 0.01, 3.0)
QAT = Claim("QAT", 0.005, 2.5)

COLUMNS = {
    "claim": ("Claim", ""),
    "label": ("Scheme", ""),
    "loss": ("Lost", ".2%"),
    "smaller_layers": ("Layers smaller", ".2f"),
    "smaller": ("Model smaller", ".2f"),
    "faster_one": ("Faster, one by one", ".2f"),
    "faster_many": ("Faster, many at once", ".2f"),
    "kept": ("Loss kept", ""),
    "reached": ("Factor reached in", ""),
}
FACTORS = {
    "smaller_layers": "size of layers",
    "smaller": "size of model",
    "faster_one": "speed one by one",
    "faster_many": "speed many at once",
}


def judged(claim: Claim, row: Row, loss: float) -> dict[str, object]:
    """A row of `COLUMNS`: what ``row`` of the results says about ``claim``."""
    reached = [name for key, name in FACTORS.items() if row[key] >= claim.factor]
    return {
        "claim": f"{claim.name}: < {claim.loss:.1%} at {claim.factor:g}x",
        "label": row["label"],
        "loss": loss,
        **{key: row[key] for key in FACTORS},
        "kept": "yes" if loss < claim.loss else "no",
        "reached": ", ".join(reached) or "nothing",
    }


def claims_table(rows: Sequence[Row]) -> str:
    """Rows of `judged` as a table in Markdown."""
    return markdown_table(COLUMNS, rows)
