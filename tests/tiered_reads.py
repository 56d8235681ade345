"""Head-reads over pages that are really quantized, in float64: what the tests of the tiered rules are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_witcert.ops.certificate import code_radius
from torch_witcert.ops.formats import StoreFormat
from torch_witcert.ops.quantize import QuantizedPage, dequantize_keys, dequantize_values, quantize_page

PAGE, DIM = 16, 64
FORMAT = StoreFormat.parse("int8/asymmetric/0/none+int4/none")


@dataclass
class HeadRead:
    """One query over J pages and a group of exact tokens, softmax scale 1; everything float64 but the stored pages."""

    q: torch.Tensor  # [D]
    keys: torch.Tensor  # bf16 [J, P, D], the originals
    values: torch.Tensor  # bf16 [J, P, D]
    stored: QuantizedPage  # [J, 1, ..]
    rest: float  # ln of the sum of e^score over the exact tokens

    @classmethod
    def of(cls, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rest: float) -> HeadRead:
        keys, values = keys.to(torch.bfloat16), values.to(torch.bfloat16)
        return cls(q.double(), keys, values, quantize_page(keys[:, None], values[:, None], FORMAT), rest)

    @property
    def exact_scores(self) -> torch.Tensor:
        return self.keys.double() @ self.q

    @property
    def code_scores(self) -> torch.Tensor:
        part = self.stored
        return dequantize_keys(part.k_codes, part.k_scale, part.k_zero, store_format=FORMAT)[:, 0] @ self.q

    @property
    def code_values(self) -> torch.Tensor:
        """V^ [J, P, D]."""
        part = self.stored
        return dequantize_values(part.v_codes, part.v_scale, part.v_zero, FORMAT)[:, 0]

    @property
    def radius(self) -> torch.Tensor:
        """Deterministic radius of the scores of each page [J]."""
        part = self.stored
        zero = part.k_zero.transpose(0, 1)
        found = code_radius(
            self.q[None, None], part.k_scale.transpose(0, 1), zero, part.page_notes.transpose(0, 1), 1.0
        )
        return found.total()[0, 0]

    def masses(self, scores: torch.Tensor) -> torch.Tensor:
        """Masses [J + 1] of pages with these scores and of the exact tokens."""
        return torch.cat([scores.logsumexp(-1), torch.tensor([self.rest], dtype=torch.float64)]).softmax(-1)


def keys_of_scores(scores: list[list[float]]) -> torch.Tensor:
    """Keys [J, P, D] whose channel 0 holds the scores for :func:`first_channels`; a page's last score is repeated."""
    keys = torch.zeros(len(scores), PAGE, DIM)
    for page, row in enumerate(scores):
        keys[page, :, 0] = torch.tensor(row + row[-1:] * (PAGE - len(row)))
    return keys


def first_channels() -> torch.Tensor:
    """A query that adds channels 0 and 1 of a key."""
    return (torch.arange(DIM) < 2).double()


def random_read(seed: int, pages: int, level: float = 1.0) -> HeadRead:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(pages, PAGE, DIM, generator=generator) * (
        0.2 + 2 * torch.rand(pages, 1, DIM, generator=generator)
    )
    values = torch.randn(pages, PAGE, DIM, generator=generator)
    q = torch.randn(DIM, generator=generator) * level
    return HeadRead.of(q, keys, values, rest=2 * level)
