"""vLLM's CPU worker, which knows what requests are live and sound, how much memory there is, and the weights."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.parallel_state import get_tp_group, get_world_group
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from kvfold.cache.calibration import Calibration
from kvfold.cache.sketch import check_same
from kvfold.eviction import Eviction
from kvfold.integrations.text import standard_text
from kvfold.integrations.vllm.backend import FoldedBuilder, FoldedImpl
from kvfold.integrations.vllm.counters import count
from kvfold.integrations.vllm.forgetting import NULL, Forgetting, policy_for
from kvfold.integrations.vllm.identity import Identity
from kvfold.integrations.vllm.options import FEWEST, Options, drafts_of
from kvfold.integrations.weights import sketch_of

logger = init_logger("vllm.kvfold")

PASSAGES, PASSAGE = 4, 1_024
"""How much text the engine reads at its start to measure keys, as `kvfold calibrate` does."""


class FoldedWorker(CPUWorker):  # type: ignore[misc]
    """Gives tails back when their requests end, tells which requests broke, counts tails, and fits formats.

    Where requests forget, it chooses what, and tells.
    """

    _policy: Eviction | None = None  # by which requests forget
    _forgetting: Forgetting | None = None  # once the pool is in use
    _scheduled: SchedulerOutput | None = None  # the step that `sample_tokens` ends

    def determine_available_memory(self) -> int:
        """Bytes for the pool: what the user granted, less the tails."""
        granted = super().determine_available_memory()
        options, drafts = Options.of(self.vllm_config.additional_config), drafts_of(self.vllm_config)
        assert options is not None
        each = self.model_config.dtype.itemsize, drafts
        tails = self.scheduler_config.max_num_seqs * sum(
            options.tail_bytes(impl.head_size, impl.num_kv_heads, *each) for _, impl in self._layers()
        )
        if not tails and self.parallel_config.pipeline_parallel_size == 1:
            raise ValueError("kvfold: no layer of this model folds, as all have sliding windows: leave kvfold out")
        sequences = self.scheduler_config.max_num_seqs
        if 2 * tails > granted:
            raise ValueError(
                f"kvfold: unfinished pages of max_num_seqs = {sequences} sequences take {tails / 2**20:,.0f} MiB of "
                f"the {granted / 2**20:,.0f} MiB for the KV cache: lower --max-num-seqs, or raise "
                "--kv-cache-memory-bytes"
            )
        logger.info(
            "kvfold: of %.0f MiB, unfinished pages and first tokens of up to %d sequences take %.0f MiB "
            "(--max-num-seqs lowers that).",
            granted / 2**20, sequences, tails / 2**20,
        )  # fmt: skip
        return granted - tails

    def compile_or_warm_up_model(self) -> Any:
        """Fit formats once the model runs and the pool is not in use yet."""
        from vllm.model_executor.models.utils import extract_layer_index

        times = super().compile_or_warm_up_model()
        layers = {extract_layer_index(name): impl for name, impl in self._layers()}
        for index, impl in layers.items():
            impl.formats = impl.formats.at(index, None)
        options = Options.of(self.vllm_config.additional_config)
        assert options is not None
        formats = options.formats(self.model_config.get_head_size())
        if options.eviction is not None:
            ranks = self.parallel_config.tensor_parallel_size
            own = self.model_config.hf_text_config, sorted(layers), self.rank % ranks, ranks
            self._policy = policy_for(options, *own)
        identity = Identity(self.vllm_config, self.rank)
        if formats.awaits_fit or formats.needs_calibration:  # the same in all stages, which read together
            if options.calibration is not None:
                self._load(options.calibration, layers)
            else:
                self._fit(layers, identity, formats.needs_calibration)
        if has_kv_transfer_group():
            statistics = {index: impl.statistics for index, impl in layers.items()}
            slot = max((impl.layout.slot_bytes(1) for impl in layers.values()), default=0)
            kind = identity.kind(options, statistics, self.cache_config.block_size, slot)
            get_kv_transfer_group().begin(kind, dict(self._layers()), next(self._builders(), None))
        return times

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """A step; requests that ended or lost their blocks give their tails back first."""
        self._scheduled = scheduler_output
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        for request in gone & self.model_runner.requests.keys():
            if self._forgetting is not None:
                self._forgetting.end(request)
            for group, blocks in enumerate(self.model_runner.requests[request].block_ids):
                for builder in self._builders(group):
                    builder.release(blocks)
                blocks.clear()  # they belong to others now, and a preempted request may end before it gets new ones
        if has_kv_transfer_group():
            get_kv_transfer_group().prepare(scheduler_output.kv_connector_metadata)
        result = super().execute_model(scheduler_output)
        if self.rank % self.parallel_config.tensor_parallel_size == 0:  # other ranks fold other heads of the same pages
            folds = sum(builder.pages_folded * len(builder.layer_names) for builder in self._builders())
            forgotten = 0 if self._forgetting is None else self._forgetting.tokens
            count(folds, forgotten, self.parallel_config.data_parallel_index, self.rank)
        return result

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The step's tokens; requests whose last hidden state is not finite are named in `num_nans_in_logits`."""
        broken = self._broken(self.model_runner.execute_model_state)
        output = super().sample_tokens(grammar_output)
        if broken:
            output.num_nans_in_logits = broken
        if forgotten := dict(self._forget(broken)):
            output.forgotten = forgotten
        return output

    def _forget(self, broken: dict[str, int]) -> Iterator[tuple[str, list[int]]]:
        """Which blocks sound requests of the step forget at its end."""
        step, runner = self._scheduled, self.model_runner
        if self._policy is None or step is None:
            return
        if self._forgetting is None:
            self._forgetting = self._begin_to_forget(self._policy)
        for request, new in step.num_scheduled_tokens.items():
            if request in broken or request not in runner.requests:
                continue
            state, drafts = runner.requests[request], len(step.scheduled_spec_decode_tokens.get(request, ()))
            places = self._forgetting.after(request, state, state.num_computed_tokens + new - drafts)
            if not places:
                continue
            row = runner.input_batch.req_id_to_index[request]
            for group in self._forgetting.groups:
                runner.input_batch.block_table[group].get_numpy_array()[row, places] = NULL
            yield request, places

    def _begin_to_forget(self, policy: Eviction) -> Forgetting:
        from vllm.model_executor.models.utils import extract_layer_index

        impls, layers = dict(self._layers()), {}
        for group, spec in enumerate(self.model_runner.kv_cache_config.kv_cache_groups):
            for name in spec.layer_names:
                if name in impls and (paged := impls[name].paged) is not None:
                    layers[extract_layer_index(name)] = group, paged
        options = Options.of(self.vllm_config.additional_config)
        assert options is not None
        across = _highest if self.parallel_config.tensor_parallel_size > 1 else None
        return Forgetting(policy, options.keep_prompt, layers, across)

    def _broken(self, state: Any) -> dict[str, int]:
        """How many of each request's hidden states are not finite, of those that logits are computed from."""
        if state is None or (sound := state.sample_hidden_states.isfinite().all(-1)).all():
            return {}
        requests = self.model_runner.input_batch.req_ids
        drafts = state.spec_decode_metadata
        counts = [1] * len(requests) if drafts is None else [1 + each for each in drafts.num_draft_tokens]
        of_each = zip(requests, (~sound).split(counts), strict=True)
        return {name: int(broken.sum()) for name, broken in of_each if broken.any()}

    def _layers(self) -> Iterator[tuple[str, FoldedImpl]]:
        """Folded layers with their names."""
        for name, layer in self.compilation_config.static_forward_context.items():
            if isinstance(impl := getattr(layer, "impl", None), FoldedImpl):
                yield name, impl

    def _builders(self, only_group: int | None = None) -> Iterator[FoldedBuilder]:
        for number, groups in enumerate(self.model_runner.attn_groups):
            for group in groups:
                for builder in group.metadata_builders:
                    if isinstance(builder, FoldedBuilder) and only_group in (None, number):
                        yield builder

    def _load(self, path: str, layers: dict[int, FoldedImpl]) -> None:
        """Fit layers to a calibration file, each to the KV heads that this worker has."""
        calibration = Calibration.of(path, None, self.model_config.hf_text_config.num_hidden_layers)
        assert calibration is not None
        if calibration.losses:
            logger.warning(
                "kvfold: %s has costs by which layers would get bits of their own, but all pages of the engine's pool "
                "have one size: each layer gets as many as the format names",
                path,
            )
        ranks, rank = self.parallel_config.tensor_parallel_size, self.rank % self.parallel_config.tensor_parallel_size
        check_same(calibration.sketch, sketch_of(self.get_model(), first_shard=rank == 0))
        for index, impl in layers.items():
            if index not in calibration.layers:
                raise ValueError(f"calibration = {path!r} has no layer {index}: calibrate this model")
            whole = calibration.layers[index]
            heads, dim = whole.key_variance.shape
            own = impl.num_kv_heads
            if dim != impl.head_size or own != max(1, heads // ranks):
                raise ValueError(
                    f"calibration = {path!r} is of {heads} heads of {dim}, layer {index} has {own} of {impl.head_size} "
                    f"in each of {ranks} workers: calibrate this model"
                )
            first = rank * heads // ranks
            impl.fit(whole.of_heads(slice(first, first + own)))

    def _fit(self, layers: dict[int, FoldedImpl], identity: Identity, values: bool) -> None:
        """Fit layers to what an earlier start measured of this model; if none has, measure, and keep it."""
        length = self._length_to_read()
        try:
            path = identity.fitted(values, length)
            kept = Calibration.load(path).layers if path.is_file() else {}
        except (OSError, ValueError) as error:
            logger.warning("kvfold: what an earlier start measured is not used: %s", error)
            path, kept = None, {}
        everywhere = torch.tensor(int(kept.keys() == layers.keys()))
        if (world := get_world_group()).world_size > 1:  # all of them read, or none
            torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MIN, world.cpu_group)
        if everywhere:
            for index, impl in layers.items():
                impl.fit(kept[index])
            logger.info("kvfold: fitted %d layers to what an earlier start measured (%s).", len(layers), path)
            return
        self._measure(layers, length)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            Calibration({index: impl.statistics for index, impl in layers.items() if impl.statistics}).save(path)
        except OSError as error:
            logger.warning("kvfold: what was measured is not kept: %s", error)

    def _length_to_read(self) -> int:
        """Tokens of each passage that the engine can read to measure keys."""
        pool = self.model_runner.kv_cache_config
        block = min(group.kv_cache_spec.block_size for group in pool.kv_cache_groups)
        held = (pool.num_blocks - 1) // len(pool.kv_cache_groups) * block  # groups take their blocks from one pool
        longest = min(self.scheduler_config.max_num_batched_tokens, self.model_config.max_model_len - 1)
        length = min(PASSAGE, held, longest)
        if length < FEWEST:
            raise ValueError(
                f"kvfold: the engine takes {length} tokens at a time, formats are fitted to at least {FEWEST}: raise "
                "--max-num-batched-tokens or --max-model-len, or give a calibration"
            )
        return length

    def _measure(self, layers: dict[int, FoldedImpl], length: int) -> None:
        """Let the model read a text, with dense attention, and fit layers to statistics of their keys and queries."""
        from vllm.tokenizers.registry import cached_tokenizer_from_config

        start = time.perf_counter()
        tokenizer = cached_tokenizer_from_config(self.model_config)
        if tokenizer is None:
            raise ValueError(
                "kvfold: without a tokenizer the engine cannot read the text that formats are fitted to: give "
                'calibration, a file of kvfold calibrate, in --additional-config \'{"kvfold": {"calibration": …}}\''
            )
        ids = tokenizer.encode(standard_text(), add_special_tokens=False)
        for builder in self._builders():
            builder.observing = True
        for passage in range(PASSAGES):
            first = passage * (len(ids) - length) // PASSAGES
            self._read(ids[first : first + length], f"kvfold-{passage}")
        for builder in self._builders():
            builder.observing = False
        for index, impl in layers.items():
            statistics = impl.observed.statistics()
            if not (statistics.query_energy.isfinite().all() and statistics.key_variance.isfinite().all()):
                raise ValueError(
                    f"kvfold: layer {index} computes NaN or infinity from plain text in {self.model_config.dtype}, "
                    "so no format can be fitted to it: take another --dtype, or give a calibration"
                )
            impl.fit(statistics)
        logger.info(
            "kvfold: fitted %d layers to %d tokens in %.1f s.", len(layers), PASSAGES * length,
            time.perf_counter() - start,
        )  # fmt: skip

    def _read(self, ids: list[int], name: str) -> None:
        """Run one prompt through the model as a request that ends at once."""
        blocks, next_block = [], 1
        for group in self.model_runner.kv_cache_config.kv_cache_groups:
            count = -(-len(ids) // group.kv_cache_spec.block_size)
            blocks.append(list(range(next_block, next_block + count)))
            next_block += count
        request = NewRequestData(
            req_id=name, prompt_token_ids=ids, mm_features=[], pooling_params=None, block_ids=tuple(blocks),
            sampling_params=SamplingParams(temperature=0, max_tokens=1), num_computed_tokens=0, lora_request=None,
        )  # fmt: skip
        for requests, ended in (([request], set()), ([], {name})):
            number = {one.req_id: len(ids) for one in requests}
            super().execute_model(
                SchedulerOutput(
                    scheduled_new_reqs=requests, scheduled_cached_reqs=CachedRequestData.make_empty(),
                    num_scheduled_tokens=number, total_num_scheduled_tokens=sum(number.values()),
                    scheduled_spec_decode_tokens={}, scheduled_encoder_inputs={}, finished_req_ids=ended,
                    free_encoder_mm_hashes=[], num_common_prefix_blocks=[0] * len(blocks),
                    kv_connector_metadata=get_kv_transfer_group().nothing() if has_kv_transfer_group() else None,
                )
            )  # fmt: skip
            if requests:
                super().sample_tokens(None)


def _highest(scores: torch.Tensor) -> torch.Tensor:
    """The highest of all tensor parallel workers' scores."""
    highest = scores.contiguous()
    torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, get_tp_group().cpu_group)
    return highest
