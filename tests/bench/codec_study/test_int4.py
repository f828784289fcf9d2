"""hiqcache's codec int4 stores what the study measured under its name."""

from __future__ import annotations

import pytest
import torch

from bench.codec_study.candidates import CANDIDATES, FOUR_BITS, Candidate
from bench.codec_study.quantisers import Place
from hiqcache.codecs.int4 import Int4Keys, Int4Values

TOKENS, HEADS, WIDTH = 128, 3, 64


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[tokens, heads, width]``, bf16. K has a constant, and some tokens a small norm."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, TOKENS, HEADS, WIDTH, generator=generator)
    k += 3 * torch.randn(HEADS, WIDTH, generator=generator)
    k[[0, 1, 70]] /= 50
    return k.bfloat16(), v.bfloat16()


def restored(codec: Int4Keys | Int4Values, part: torch.Tensor) -> torch.Tensor:
    pages = part.unflatten(0, (-1, 64))
    return codec.decode(*codec.encode(pages), torch.bfloat16).flatten(0, 1).float()


def disagreement(candidate: Candidate) -> float:
    """How far the codec's rows lie from the scheme's: the largest share of the scheme's error."""
    k, v = rows()
    place = Place(layer=0, layers=1, rope_theta=10_000.0)
    studied = candidate(k.float().transpose(0, 1), v.float().transpose(0, 1), place)
    found = []
    for codec, part, scheme in zip((Int4Keys(), Int4Values()), (k, v), studied, strict=True):
        scheme = scheme.transpose(0, 1)
        # By quarters of a head: K's slow channels are finer than its fast ones.
        apart, error = (
            (scheme - other).unflatten(-1, (4, -1)).square().sum(dim=(0, 1, 3)).sqrt()
            for other in (restored(codec, part), part.float())
        )
        found.append((apart / error).max().item())
    return max(found)


def test_the_codec_is_the_scheme_up_to_rounding_to_bf16() -> None:
    # A value between two codes may go to either: each moves by a whole step.
    assert disagreement(FOUR_BITS) < 0.4


@pytest.mark.parametrize(
    "candidate",
    [one for one in CANDIDATES if one.block > 1 and one.name.startswith("K ") and one != FOUR_BITS],
    ids=lambda one: one.name,
)
def test_its_neighbours_are_other_schemes(candidate: Candidate) -> None:
    assert disagreement(candidate) > 0.45
