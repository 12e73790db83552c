"""Routing replay: the trainer's routers follow the generator's (R3, arXiv 2510.11370).

Trainer and engine round differently, so a token's experts sometimes differ, and with them its
log-prob. Under replay a router takes the generator's experts, with its own probabilities and
gradient. A token whose experts are unknown (padding, and the last token of a sequence, which
predicts nothing) is routed live. A Megatron router calls its `router_replay`, if one is set.

Shape legend: R tokens of a micro-batch on this rank, position-major, E experts of a layer, K
experts of a token, L layers with experts.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_rl.models.base import Architecture
from megatron_rl.models.routed_experts import UNKNOWN, check_experts
from megatron_rl.trainer import world

COUNTS = ("routes", "routes_differing", "routes_differing_live")
"""Known routes (one expert of one token in one layer); those of them that the trainer did not take;
those that its own routers would not have taken."""


class Routing:
    """The routers of this rank's model chunks, wrapped or not.

    ValueError: a model without experts, or routers that are not top-k.
    """

    def __init__(
        self, chunks: Sequence[Any], architecture: Architecture, mode: Literal["compare", "replay"]
    ) -> None:
        check_experts(architecture, mode)
        place = {layer: i for i, layer in enumerate(sorted(architecture.moe_layers))}
        self._followers: dict[int, list[tuple[int, _Follower]]] = {}
        for chunk in unwrap_model(list(chunks)):
            self._followers[id(chunk)] = [
                (place[router.layer_number - 1], _Follower(router, mode == "replay"))
                for router in chunk.modules()
                if isinstance(router, TopKRouter)
            ]

    @contextmanager
    def following(self, chunk: Any, experts_RLK: Tensor | None) -> Iterator[None]:
        """Follow or compare the generator's experts during a forward pass of one of the chunks.

        `experts_RLK` has the generator's choices for the positions of this context-parallel rank;
        None: every token is routed live.
        """
        module, own = unwrap_model(chunk), experts_RLK
        if own is not None:
            if module.config.sequence_parallel:
                rank = parallel_state.get_tensor_model_parallel_rank()
                own = own.chunk(parallel_state.get_tensor_model_parallel_world_size())[rank]
            own = own.to(world.device(), torch.int64)
        followers = self._followers[id(module)]
        for place, follower in followers:
            follower.begin(None if own is None else own[:, place])
        try:
            yield
        finally:
            for _, follower in followers:
                follower.end()

    def take_counts(self) -> Tensor:
        """Return `COUNTS` [3], fp64, of this rank's passes with a gradient since the last call.

        Ranks hold different tokens or layers: sums over the world count every route once.
        """
        # A pipeline stage may have no layer with experts.
        total = torch.zeros(len(COUNTS), dtype=torch.float64)
        for _, follower in itertools.chain(*self._followers.values()):
            total += follower.counts.cpu()
            follower.forget()
        return total


class _Follower:
    """Expert choice of one router, with the interface of Megatron's `RouterReplay`."""

    layer_number: int | None = None  # set by Megatron

    def __init__(self, router: Any, replays: bool) -> None:
        config = router.config
        if config.moe_router_fusion or router.routing_type in ("sinkhorn", "quantile_balancing"):
            raise ValueError(
                f"algorithm.routing_replay: layer {router.layer_number - 1} chooses its experts by"
                f" moe_router_fusion = {config.moe_router_fusion},"
                f" moe_router_load_balancing_type = {router.routing_type!r}, which cannot replay"
                " experts; leave both out"
            )
        self.router, self._replays = router, replays
        # Recomputation runs a layer again before its backward pass, in micro-batch order.
        self._recomputes = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        )
        self._given_RK: Tensor | None = None
        self._recomputed: deque[Tensor | None] = deque()
        self.end()
        self.forget()
        router.router_replay = self
        router.register_forward_hook(self._count_taken)

    def begin(self, given_RK: Tensor | None) -> None:
        self._forward, self._given_RK = True, given_RK
        self._counting = torch.is_grad_enabled() and given_RK is not None
        if self._recomputes and torch.is_grad_enabled():
            self._recomputed.append(given_RK)

    def end(self) -> None:
        self._forward, self._counting, self._given_RK = False, False, None

    def forget(self) -> None:
        self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=world.device())
        self._recomputed.clear()

    def get_replay_topk(
        self,
        scores_RE: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (scores [R, K] with their gradient, experts [R, K]) of a pass."""
        assert default_compute_topk is not None
        scores_RK, live_RK = default_compute_topk(
            scores_RE, topk, num_groups=num_groups, group_topk=group_topk
        )
        if not self._forward and not self._recomputed:
            raise RuntimeError(
                f"layer {self.router.layer_number - 1} was called outside of `Routing.following`,"
                " so the experts of its tokens are unknown; run the model through"
                " trainer.model.forward, or set algorithm.routing_replay = none"
            )
        given_RK = self._given_RK if self._forward else self._recomputed.popleft()
        if given_RK is None:
            return scores_RK, live_RK
        known_R = given_RK[:, :1] != UNKNOWN
        if self._counting:
            taken_RE = torch.zeros_like(scores_RE, dtype=torch.bool).scatter_(1, live_RK, True)
            self.counts[2] += _missing(taken_RE, given_RK, known_R)
        if not self._replays:
            return scores_RK, live_RK
        experts_RK = torch.where(known_R, given_RK, live_RK)
        return scores_RE.gather(1, experts_RK), experts_RK

    def _count_taken(self, _: Any, __: Any, output: tuple[Tensor, Tensor]) -> None:
        # Counted from the dispatch map, so that it covers every way of choosing.
        if self._counting and self._given_RK is not None:
            known_R = self._given_RK[:, :1] != UNKNOWN
            self.counts[0] += known_R.sum() * self._given_RK.shape[1]
            self.counts[1] += _missing(output[1], self._given_RK, known_R)


def _missing(taken_RE: Tensor, given_RK: Tensor, known_R: Tensor) -> Tensor:
    return (~taken_RE.gather(1, given_RK.clamp(min=0)) & known_R).sum()
