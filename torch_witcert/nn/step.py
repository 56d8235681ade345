"""What all layers of a cache share: row lengths, the plan of the current forward, counters and last certificates.

The first layer of a forward makes the plan from the validity of the new columns; the last one adds up the certificates and
advances the lengths. Until then nothing that a reader looks at has changed, so a forward that fails half-way is undone.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch

from ..config import Recipe
from ..ops.certificate import Field
from ..ops.storage import POSITION_OVERFLOW, POSITION_PADDING
from ..policy.budget import log_risk, spend
from ..policy.counters import Counters, Summary, summarize, tensor_attributes
from ..policy.gate import Flag, make_limits
from .masks import may_synchronize
from .pages import PageGroup


@dataclass
class StepPlan:
    """Tensors of one forward over T new columns, the same for every layer."""

    new_tokens: int
    prefill: bool  # the cache was empty and T > 1: the layers attend exactly
    ragged: bool  # some column may be padding, or find no room
    positions: torch.Tensor  # int32 [B, T]
    columns: torch.Tensor  # int32 [B, T]
    counts: torch.Tensor  # int32 [B]
    overflow: torch.Tensor | None  # bool [B], the row has no room: nothing is written for it; None where all have
    page_tables: dict[int, torch.Tensor]  # int32 [B, M] of the layers of each window, as their reads need it
    source_maps: dict[int, torch.Tensor]  # int8 [B, Hkv, M] likewise
    overwrites_tail: bool  # writing it may destroy exact tokens that are still needed
    longest_after: int | None  # upper bound on the lengths after it, where the host knows
    log_risk: torch.Tensor  # float32 [B, T], ln(2 / delta) of the reads; empty where no radius is probabilistic
    spent: torch.Tensor | None  # int64 [B], query tokens of the request after it; None where it spends nothing
    certificates: list[torch.Tensor] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)


class CacheState:
    """Tensors and host-side knowledge that the layers of one cache share.

    Args:
        batch_size: rows B.
        pages_per_row: M.
        page_size: P.
        num_heads: H, query heads of a certified layer.
        num_kv_heads: Hkv.
        certified_layers: model indices of the certified layers.
        num_layers: attention layers of the model, dense ones included.
        config: recipe; its limits and its budget are used here.
        seeds: of each row's dither; None for a recipe without dither.
        windows: sliding windows of the certified layers, 0 for none: a group of pages for each.
        num_pages: pages of the group without a window; 0 for as many as the rows can hold.
        device: of every tensor.
    """

    def __init__(
        self,
        batch_size: int,
        pages_per_row: int,
        page_size: int,
        num_heads: int,
        num_kv_heads: int,
        certified_layers: tuple[int, ...],
        num_layers: int,
        config: Recipe,
        seeds: tuple[int, ...] | None,
        windows: frozenset[int],
        num_pages: int,
        device: torch.device,
    ) -> None:
        self.batch_size = batch_size
        self.page_size = page_size
        self.pages_per_row = pages_per_row
        self.capacity = pages_per_row * page_size
        self.num_kv_heads = num_kv_heads
        self.num_layers = num_layers
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.column_count = torch.zeros((), dtype=torch.int64, device=device)
        self.groups = {
            window: PageGroup(batch_size, pages_per_row, page_size, window, 0 if window else num_pages, device)
            for window in sorted(windows)
        }
        # Longest that each row has been before a crop: the ring holds no exact token of an earlier page.
        self.peak = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.limits = make_limits(config.limits.tau, config.limits.output_limit, device)
        self.budget = config.budget
        self.num_heads = num_heads
        # Seeds of the requests in the rows, and those that new requests get.
        self.seeds = torch.tensor(seeds or (), dtype=torch.int64, device=device)
        self.own_seeds = self.seeds.clone()
        # Query tokens that certified reads of each row's request have used.
        self.spent = torch.zeros(batch_size if self.budget else 0, dtype=torch.int64, device=device)
        # What the operators take in the place of tensors that a recipe or a model does not have.
        self.no_floats = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = Counters(certified_layers, num_kv_heads, device)
        reads = (len(certified_layers), batch_size, num_heads)
        self.total_variation = torch.zeros(reads, dtype=torch.float32, device=device)
        self.output = torch.zeros(reads, dtype=torch.float32, device=device)
        self.flags = torch.full(reads, Flag.IDLE, dtype=torch.int32, device=device)
        self.plan: StepPlan | None = None
        self.empty = True
        # No forward has ever written here; reset() does not bring that back.
        self.untouched = True
        # Upper bound on the lengths as far as the host knows; None once a compiled or captured step may have run.
        self.longest: int | None = 0
        # A captured graph can be replayed behind the host's back, so what the host knew is never trusted again.
        self.captured = False

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, by a name of its own; without the plan of a forward."""
        tensors = tensor_attributes(self)
        tensors |= {f"counters.{name}": tensor for name, tensor in tensor_attributes(self.counters).items()}
        for window, group in self.groups.items():
            tensors |= {f"groups.{window}.{name}": tensor for name, tensor in tensor_attributes(group).items()}
        return tensors

    def __getstate__(self) -> dict:
        """What a copy or a pickle gets: the state as if a forward that is under way, or has failed, had not been."""
        return self.__dict__ | {"peak": self.settled_peak(), "plan": None}

    def reset(self) -> None:
        """Forget every token, certificate and query token of the requests, in place; the counters go on."""
        self.lengths.zero_()
        self.peak.zero_()
        self.spent.zero_()
        self.seeds.copy_(self.own_seeds)
        self.column_count.zero_()
        for group in self.groups.values():
            group.reset()
        self.total_variation.zero_()
        self.output.zero_()
        self.flags.fill_(Flag.IDLE)
        self.plan = None
        self.empty = True
        self.longest = None if self.captured else 0

    def take_rows(self, index: torch.Tensor) -> None:
        """Row b becomes a copy of row index[b], in place: tokens, seed and budget of its request, and its last certificates.

        Args:
            index: int64 [B].
        """
        for tensor in (self.lengths, self.peak, self.spent, self.seeds):
            if tensor.numel():
                tensor.copy_(tensor[index])
        for tensor in (self.total_variation, self.output, self.flags):
            tensor.copy_(tensor[:, index])
        for group in self.groups.values():
            group.take_rows(index, self.lengths)

    def resize(self, index: torch.Tensor) -> dict[int, torch.Tensor]:
        """Allocate anew for len(index) rows, copies of the rows index (int64 [B']); returns each window's pages in the old pool."""
        sources = {}
        for window, group in self.groups.items():
            self.groups[window], sources[window] = group.resized(index, self.lengths)
        self.batch_size = len(index)
        self.lengths, self.peak = self.lengths[index], self.peak[index]
        self.spent = self.spent[index] if self.budget else self.spent
        if self.seeds.numel():
            self.seeds, self.own_seeds = self.seeds[index], self.own_seeds[index]
        self.total_variation, self.output, self.flags = (
            tensor[:, index] for tensor in (self.total_variation, self.output, self.flags)
        )
        return sources

    def exact_from(self) -> torch.Tensor:
        """Position of the oldest token of each row that the exact tail still holds, int32 [B]."""
        newest = torch.maximum(self.lengths, self.peak) // self.page_size
        return (newest - 1).clamp_min(0) * self.page_size

    def set_lengths(self, lengths: torch.Tensor) -> None:
        """Shorten rows in place; the pages beyond are free. Synchronizes."""
        self.peak.copy_(torch.where(lengths > 0, torch.maximum(self.peak, self.lengths), 0))
        for group in self.groups.values():
            group.release(lengths)
        self.lengths.copy_(lengths)
        self.empty = not bool(lengths.any())

    def enter(self, layer: int, valid: torch.Tensor | None, new_tokens: int) -> StepPlan:
        """Plan of the current forward; the first layer makes it.

        Args:
            layer: position of the layer among the cache's layers.
            valid: bool [B, T], which new columns are real tokens; None for all.
            new_tokens: T.

        Raises:
            ValueError: a row has no room for its tokens and the host can know.
            RuntimeError: the last forward failed half-way and may have destroyed tokens, or the layers run out of order.
        """
        if layer == 0:
            self.settle()
            self.plan = self._plan(valid, new_tokens)
        return self._current()

    def leave(self, layer: int) -> None:
        """The last layer completes the forward: counters, certificates, lengths."""
        if layer < self.num_layers - 1:
            return
        plan = self._current()
        summary = self._summary(plan)
        self.counters.add(summary)
        self.total_variation.copy_(summary.worst[..., Field.TV])
        self.output.copy_(summary.worst[..., Field.OUTPUT])
        self.flags.copy_(summary.flags)
        self.lengths.add_(plan.counts)
        if plan.spent is not None:
            self.spent.copy_(plan.spent)
        self.column_count.add_(plan.new_tokens)
        self.empty = False
        if not may_synchronize(plan.counts):
            self.untouched = False  # not read before it is set: a compiled step would need one graph for each value
        elif self.untouched:
            # A forward of padding only has stored nothing. Looked at until a token is there, so once as a rule.
            self.untouched = not bool(plan.counts.any())
        self.longest = plan.longest_after
        self.plan = None

    def add_certificate(self, certificate: torch.Tensor) -> None:
        """Take a layer's certificate [B, H, T, Field.COUNT]; one-token steps are summed up once, by the last layer."""
        plan = self._current()
        if plan.new_tokens == 1:
            plan.certificates.append(certificate)
        else:
            plan.summaries.append(summarize(certificate[None], self.limits, self.num_kv_heads))

    def _current(self) -> StepPlan:
        if self.plan is None:
            raise RuntimeError("a layer of the cache ran before layer 0 of the same forward")
        return self.plan

    def _summary(self, plan: StepPlan) -> Summary:
        if plan.summaries:
            return Summary.concatenate(plan.summaries)
        return summarize(torch.stack(plan.certificates), self.limits, self.num_kv_heads)

    def settle(self) -> None:
        """Take note of what a forward that failed half-way has overwritten; errors of :meth:`settled_peak`."""
        if self.plan is None:
            return
        self.peak.copy_(self.settled_peak())
        if not torch.compiler.is_compiling():
            # An exception has told of it already; a model that lost its last layers ends as quietly as a complete one.
            warnings.warn(
                f"the last forward did not reach the last of the CertifiedCache's {self.num_layers} layers: it failed, or the model "
                f"has fewer layers than when the cache was made. Its {self.plan.new_tokens} columns are not in the cache",
                stacklevel=2,
            )
        self.plan = None

    def settled_peak(self) -> torch.Tensor:
        """`peak`, int32 [B], once a forward that failed half-way is given up; in place of nothing.

        Raises:
            RuntimeError: that forward may have overwritten tokens that are still needed.
        """
        if self.plan is None:
            return self.peak
        if self.plan.overwrites_tail:
            raise RuntimeError(
                f"the last forward failed half-way; its {self.plan.new_tokens} new tokens may have overwritten exact tokens that "
                "are still needed. Call reset() on the cache and start again"
            )
        # It wrote into the ring as if the rows had grown, so that a crop reaches back less far.
        grown = torch.maximum(self.peak, self.lengths + self.plan.counts)
        return torch.where(self.lengths > 0, grown, 0)

    def _plan(self, valid: torch.Tensor | None, new_tokens: int) -> StepPlan:
        lengths, batch = self.lengths, self.batch_size
        if valid is None:
            steps = torch.arange(new_tokens, dtype=torch.int32, device=lengths.device)
            columns = steps.expand(batch, new_tokens)
            counts = torch.full_like(lengths, new_tokens)
            positions = lengths[:, None] + steps
        else:
            ranks = valid.cumsum(1, dtype=torch.int32)
            counts = ranks[:, -1].contiguous()
            if new_tokens == 1:
                columns = torch.zeros_like(ranks)
            else:
                columns = torch.argsort(valid.logical_not().to(torch.int8), dim=1, stable=True).to(torch.int32)
            positions = torch.where(valid, lengths[:, None] + ranks - 1, POSITION_PADDING)
        looked, longest_after = self._check_room(counts, new_tokens)
        overflow = None
        if not looked:
            overflow = lengths + counts > self.capacity
            counts = torch.where(overflow, 0, counts)
            positions = torch.where(overflow[:, None] & (positions != POSITION_PADDING), POSITION_OVERFLOW, positions)
        # Pages that a window leaves behind in this forward are read once more before another token is written there.
        page_tables = {
            window: group.page_table.clone() if window and group.on_demand else group.page_table
            for window, group in self.groups.items()
        }
        exhausted = self._reserve_pages(counts, looked)
        if exhausted is not None:
            counts = torch.where(exhausted, 0, counts)
            positions = torch.where(exhausted[:, None] & (positions >= 0), POSITION_OVERFLOW, positions)
            overflow = exhausted if overflow is None else overflow | exhausted
        prefill = new_tokens > 1 and self.is_empty()
        risk, spent = self.no_floats, None
        if self.budget is not None and not prefill:
            spent = self.spent.clone()
            # Padding before the first token would have number 0; its certificate is 0 whatever it may spend.
            step = spend(spent, positions >= 0).clamp_min(1)
            risk = log_risk(self.budget, len(self.counters.layers), self.num_heads, step)
        return StepPlan(
            new_tokens=new_tokens,
            prefill=prefill,
            ragged=valid is not None or overflow is not None,
            positions=positions,
            columns=columns.contiguous(),
            counts=counts,
            overflow=overflow,
            page_tables=page_tables,
            source_maps={window: group.source_map(lengths, self.num_kv_heads) for window, group in self.groups.items()},
            overwrites_tail=new_tokens > self.page_size and not prefill,
            longest_after=longest_after,
            log_risk=risk,
            spent=spent,
        )

    def _reserve_pages(self, counts: torch.Tensor, looked: bool) -> torch.Tensor | None:
        """Pages for the slots that this forward fills; bool [B], rows without room in the pool, or None where all have.

        Raises:
            ValueError: the pool is exhausted and the host may know.
        """
        exhausted = None
        # The group without a window comes first: a row that finds no page there moves no window on.
        for group in self.groups.values():
            if not group.on_demand:
                continue
            table, missing = group.reserved(self.lengths, counts)
            # The pool of a window has a page for every slot that it keeps.
            if not group.window and not looked:
                exhausted = missing
                counts = torch.where(exhausted, 0, counts)
            elif not group.window and bool(missing.any()):
                raise ValueError(
                    f"the pool of {group.num_pages} pages is exhausted: row {int(missing.int().argmax())} needs one more; make the "
                    "CertifiedCache with more num_pages, or release() rows. Nothing was written"
                )
            group.page_table.copy_(table)
        return exhausted

    def is_empty(self) -> bool:
        """Whether the next forward of several tokens is a prefill."""
        if not self.captured:
            return self.empty
        return may_synchronize(self.lengths) and not bool(self.lengths.any())

    def _check_room(self, counts: torch.Tensor, new_tokens: int) -> tuple[bool, int | None]:
        """Whether the host knows that every row has room, and then a bound on the lengths afterwards.

        A one-token step on the GPU does not look at the lengths unless the host's own bound says that a row may be full.
        """
        if torch.compiler.is_compiling():
            return False, None
        if not may_synchronize(self.lengths):
            self.captured = True
            return False, None
        if self.longest is not None and self.longest + new_tokens <= self.capacity:
            return True, self.longest + new_tokens
        if self.longest is None and new_tokens == 1 and self.lengths.is_cuda:
            return False, None
        needed = self.lengths + counts
        longest_after = int(needed.max())
        if longest_after > self.capacity:
            row = int(needed.argmax())
            raise ValueError(
                f"the cache is full: row {row} holds {int(self.lengths[row])} of {self.capacity} tokens and cannot take "
                f"{int(counts[row])} more; make the CertifiedCache with a larger max_length. Nothing was written"
            )
        return True, None if self.captured else longest_after
