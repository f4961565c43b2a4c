"""Pages that outlive vLLM's engine: a KV connector that keeps them in a folder, and takes them from there.

The scheduler's half asks the folder which pages of a prompt are there, by the prompt's tokens. The worker's half copies
them into the pool before a step, and takes pages that a step completed out of it. Each worker has files of its own, as
each has other layers or heads.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvfold.cache.files.pages import PageFolder
from kvfold.integrations.vllm.backend import FoldedBuilder, FoldedImpl
from kvfold.integrations.vllm.options import Options

logger = logging.getLogger("kvfold")

WAITING = 64
"""Blocks that wait to be written. Beyond that, steps wait for the disk, so that memory is bounded."""


class Move(NamedTuple):
    """A block that goes to the folder, or comes from it."""

    key: str
    block: int  # its number in the pool
    begins: bool  # whether it has a request's first token, which goes with it


@dataclass
class KeptBlocks(KVConnectorMetadata):  # type: ignore[misc]
    """What a step moves."""

    loads: list[Move] = field(default_factory=list)
    stores: list[Move] = field(default_factory=list)


@dataclass
class Kind(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one worker's pages are of (`PageFolder.kind`)."""

    name: str


class KeptPages(KVConnectorBase_V1):  # type: ignore[misc]
    """Both halves; vLLM makes one in each process."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = Options.of(vllm_config.additional_config)
        assert options is not None
        assert options.keep is not None
        self.folder, self.limit = Path(options.keep), options.keep_limit
        self.block_size = vllm_config.cache_config.block_size
        # The scheduler's half.
        self.folders: list[PageFolder] = []  # of all workers
        self.keys: dict[str, Keys] = {}  # of requests that are not finished
        self.loading: dict[str, range] = {}  # blocks of a request that the next step loads
        # The worker's half.
        self.kind: Kind | None = None
        self.layers: list[FoldedImpl] = []
        self.pools: dict[str, Tensor] = {}  # by layer
        self.builder: FoldedBuilder | None = None  # None if no layer of this worker folds
        self.failed: set[int] = set()
        self.writer: Writer | None = None

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Know the pool's tensors, by layer."""
        self.pools = {name: kv_caches[name] for name in sorted(kv_caches)}

    def begin(self, kind: str, layers: Mapping[str, FoldedImpl], builder: FoldedBuilder | None) -> None:
        """Called by the worker once its formats are fitted."""
        self.kind, self.builder = Kind(kind), builder
        self.layers = [layers[name] for name in self.pools if name in layers]
        for name, layer in layers.items():
            layer.begin(self.pools[name])
        self.writer = Writer(PageFolder(self.folder, kind, self.limit))

    def get_handshake_metadata(self) -> Kind | None:
        """What the scheduler's half must know of this worker."""
        return self.kind

    def prepare(self, moves: KeptBlocks) -> None:
        """Called by the worker before a step is planned: blocks that it loads lose what was known of them."""
        if self.builder is not None:
            self.builder.replace([move.block for move in moves.loads], self.layers)
            for move in moves.loads:
                if move.begins:
                    self.builder.slots.firsts.begin(self._first_page(move))

    def nothing(self) -> KeptBlocks:
        """What a step moves that moves nothing."""
        return KeptBlocks()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy pages into the pool before the step reads them."""
        if self.writer is None:
            return
        for move in self._moves().loads:
            page, parts = self.writer.folder.load(move.key), self._parts(move)
            if page is None or len(page) != sum(part.nbytes for part in parts):
                self.failed.add(move.block)
                continue
            content, at = torch.frombuffer(bytearray(page), dtype=torch.uint8), 0
            for part in parts:
                own = part.view(torch.uint8)
                own.copy_(content[at : at + own.numel()].view(own.shape))
                at += own.numel()

    def wait_for_save(self) -> None:
        """Take pages that the step completed out of the pool; they are written while the next steps run."""
        if self.writer is None:
            return
        for move in self._moves().stores:
            parts = [] if any(layer.is_broken(move.block) for layer in self.layers) else self._parts(move)
            if parts:
                self.writer.put(move.key, b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in parts))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded; the scheduler has them computed."""
        failed, self.failed = self.failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all layers are there when a step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: all layers are taken when a step ends."""

    def shutdown(self) -> None:
        """Write what waits."""
        if self.writer is not None:
            self.writer.finish()

    def _parts(self, move: Move) -> list[Tensor]:
        """What a block holds, layer by layer, and then the first token of each layer, if one is in it.

        Nothing, if that has lost its place.
        """
        parts = [pool[move.block] for pool in self.pools.values()]
        if move.begins and self.builder is not None:
            place = self.builder.slots.firsts.of(self._first_page(move))
            if place < 0:
                return []
            for layer in self.layers:
                assert layer.paged is not None
                parts += [layer.paged.first_keys[place], layer.paged.first_values[place]]
        return parts

    def _first_page(self, move: Move) -> int:
        assert self.builder is not None
        return move.block * self.builder.pages_a_block

    def _moves(self) -> KeptBlocks:
        moves = self._get_connector_metadata()
        assert isinstance(moves, KeptBlocks)
        return moves

    # The scheduler's half.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Know what all workers keep."""
        self.folders = [PageFolder(self.folder, kind.name) for kind in metadata.values()]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens behind those that the engine has are kept; at least one token is left to compute."""
        first, stop = num_computed_tokens // self.block_size, (request.num_tokens - 1) // self.block_size
        last = first
        for key in self._keys(request).of(range(first, stop)):
            if not self._kept(key):
                break
            last += 1
        self.loading[request.request_id] = range(first, last)
        return (last - first) * self.block_size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load in the next step, if the engine has found room."""
        if not num_external_tokens:
            self.loading.pop(request.request_id, None)

    def build_connector_meta(self, scheduler_output: Any) -> KeptBlocks:
        """What the next step loads, and which of the blocks that it completes are new to the folder."""
        moves = KeptBlocks()
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            keys, blocks = self.keys[name], self._blocks(name)
            done = keys.request.num_computed_tokens
            confirmed = min(done + tokens, keys.request.num_tokens)  # the others are drafts
            loads = self.loading.pop(name, range(0))
            completed = range(done // self.block_size, confirmed // self.block_size)
            moves.loads += keys.moves(loads, blocks)
            moves.stores += [move for move in keys.moves(completed, blocks) if not self._kept(move.key)]
        self.loading.clear()
        return moves

    def on_new_request(self, request: Any) -> None:
        """Know a request."""
        self._keys(request)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks are free at once."""
        self.keys.pop(request.request_id, None)
        self.loading.pop(request.request_id, None)
        return False, None

    def _keys(self, request: Any) -> "Keys":
        return self.keys.setdefault(request.request_id, Keys(request, self.block_size))

    def _kept(self, key: str) -> bool:
        return bool(self.folders) and all(folder.has(key) for folder in self.folders)

    def _blocks(self, name: str) -> list[int]:
        assert self._kv_cache_manager is not None
        (blocks,) = self._kv_cache_manager.get_block_ids(name)
        return list(blocks)


class Keys:
    """Keys of a request's blocks: each depends on all tokens up to its end.

    Requests whose tokens do not say all have none: those with images, embeddings or adapters.
    """

    def __init__(self, request: Any, block_size: int) -> None:
        self.request, self.block_size = request, block_size
        self.plain = not (request.mm_features or request.lora_request or request.prompt_embeds is not None)
        self.known = [hashlib.sha256((request.cache_salt or "").encode()).hexdigest()]

    def of(self, blocks: range) -> Iterator[str]:
        """Keys of some blocks, which are complete."""
        for block in blocks if self.plain else ():
            while len(self.known) < block + 2:
                first = (len(self.known) - 1) * self.block_size
                tokens = np.array(self.request.all_token_ids[first : first + self.block_size], dtype=np.int64)
                self.known.append(hashlib.sha256(self.known[-1].encode() + tokens.tobytes()).hexdigest())
            yield self.known[block + 1]

    def moves(self, blocks: range, numbers: Sequence[int]) -> Iterator[Move]:
        """Moves of some blocks, which are complete, by the numbers of all blocks in the pool."""
        for block, key in zip(blocks, self.of(blocks), strict=self.plain):
            yield Move(key, numbers[block], block == 0)


class Writer:
    """Writes pages in a thread of its own."""

    def __init__(self, folder: PageFolder) -> None:
        self.folder = folder
        self.waiting: Queue[tuple[str, bytes] | None] = Queue(WAITING)
        self.thread = Thread(target=self._run, name="kvfold-pages", daemon=True)
        self.thread.start()

    def put(self, key: str, page: bytes) -> None:
        """Write a page soon; waits while too many do."""
        self.waiting.put((key, page))

    def finish(self) -> None:
        """Write what waits, and stop."""
        if self.thread.is_alive():
            self.waiting.put(None)
            self.thread.join()

    def _run(self) -> None:
        while (each := self.waiting.get()) is not None:
            self.folder.store(*each)
