"""vLLM's NIXL connector over folded pages: one engine reads prompts, another takes their pages and decodes.

Whole pages travel, of engines with the same weights, format and statistics. What comes behind them, a page at most, the
engine that decodes reads itself. A prompt's first token, which lies beside its page, is read folded there.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

from kvfold.integrations.vllm.backend import FoldedBuilder, FoldedImpl


class WholePages(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Asks for whole pages only, and leaves at least one token to compute."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens behind those that the engine has are to come, and whether they come between steps."""
        count, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        known = min(num_computed_tokens + count, request.num_tokens - 1) // self.block_size * self.block_size
        count = max(known - num_computed_tokens, 0)
        return count, later and count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Name the other engine's blocks that are to come: its last one may be unfinished."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill") and params.get("remote_block_ids"):
            whole = (request.num_tokens - 1) // self.block_size
            params["remote_block_ids"] = [group[:whole] for group in params["remote_block_ids"]]
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class FoldedNixl(NixlPullConnector):  # type: ignore[misc]
    """Both halves; vLLM makes one in each process."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = WholePages(vllm_config, self.engine_id, kv_cache_config)
        self.layers: Mapping[str, FoldedImpl] = {}
        self.builder: FoldedBuilder | None = None

    def begin(self, kind: str, layers: Mapping[str, FoldedImpl], builder: FoldedBuilder | None) -> None:
        """Called by the worker once its formats are fitted: engines of another kind refuse each other."""
        self.layers, self.builder, worker = layers, builder, self.connector_worker
        assert worker is not None
        worker.compat_hash = hashlib.sha256(f"{worker.compat_hash} {kind}".encode()).hexdigest()
        worker.xfer_handshake_metadata = replace(worker.xfer_handshake_metadata, compatibility_hash=worker.compat_hash)

    def prepare(self, moves: NixlConnectorMetadata) -> None:
        """Called by the worker before a step is planned: blocks that are to come lose what was known of them."""
        if self.builder is None:
            return
        for request in moves.reqs_to_recv.values():
            for group in request.local_block_ids:
                self.builder.replace(group, self.layers.values())

    def nothing(self) -> NixlConnectorMetadata:
        """What a step moves that moves nothing."""
        return NixlConnectorMetadata()
