"""vLLM's scheduler, which ends a request whose numbers broke, and gives back what requests forget."""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from kvfold.integrations.vllm.forgetting import folds, most_blocks
from kvfold.integrations.vllm.options import Options

logger = init_logger("vllm.kvfold")

BROKEN = "the model computed a NaN or an infinity for this request"


class FoldedScheduler(Scheduler):  # type: ignore[misc]
    """Ends requests that the worker reports as broken (`ModelRunnerOutput.num_nans_in_logits`) with an error.

    None of the step's numbers reaches their clients, and the blocks that they wrote are not offered to others.

    Blocks that the worker reports as forgotten (`forgotten`) go back to the pool, unless other requests have them, too.
    What a request writes from then on depends on what it has forgotten, so no later block of it is offered to others.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = Options.of(self.vllm_config.additional_config)
        self._forgetful: set[str] = set()  # running requests that have forgotten something
        if options is None or options.eviction is None:
            return
        coordinator = self.kv_cache_manager.coordinator
        groups = zip(coordinator.single_type_managers, self.kv_cache_config.kv_cache_groups, strict=True)
        self._folded = [manager for manager, group in groups if folds(group.kv_cache_spec)]
        for manager in self._folded:
            manager.max_admission_blocks_per_request = most_blocks(options, self.vllm_config, manager.block_size)
        cache_blocks = coordinator.cache_blocks

        # What a request finds comes on top of the step that reads the rest. Beyond a budget it might fit no more.
        most = self.max_model_len if options.keep_prompt else options.budget

        def cache_if_whole(request: Request, num_computed_tokens: int) -> None:
            if request.request_id not in self._forgetful:
                cache_blocks(request, min(num_computed_tokens, most))

        coordinator.cache_blocks = cache_if_whole

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        """Update requests by what a step computed; what their clients get."""
        broken = set(model_runner_output.num_nans_in_logits or ()) & self.requests.keys()
        for name in broken:
            self._discard(name, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for output in (each for client in outputs.values() for each in client.outputs):
            if output.request_id in broken and output.finish_reason == FinishReason.ERROR:
                output.stop_reason = f"kvfold: {BROKEN}"
        for name, places in getattr(model_runner_output, "forgotten", {}).items():
            if name in self.requests:  # else it ended with this step
                self._forget(name, places)
        return outputs

    def _forget(self, name: str, places: list[int]) -> None:
        """Give blocks of a request back, from the last to the first, and put the null block in their places."""
        self._forgetful.add(name)
        for manager in self._folded:
            for place in reversed(places):
                manager._remove_blocks_in_range(name, place, place + 1)

    def _free_request_blocks(self, request: Request) -> None:
        self._forgetful.discard(request.request_id)  # a preempted one begins again
        super()._free_request_blocks(request)

    def _discard(self, name: str, computed: ModelRunnerOutput) -> None:
        """Take a request's part out of what a step computed, and let the request end in this update."""
        request = self.requests[name]
        logger.error("kvfold: %s (%s), which ends with an error; others go on.", BROKEN, name)
        if computed.sampled_token_ids:
            computed.sampled_token_ids[computed.req_id_to_index[name]] = []
        computed.prompt_logprobs_dict.pop(name, None)
        computed.prompt_token_id_logprobs_dict.pop(name, None)
        sound = request.num_computed_tokens - request.num_in_flight_tokens
        groups = self.kv_cache_config.kv_cache_groups
        for group, blocks in zip(groups, self.kv_cache_manager.get_block_ids(name), strict=True):
            self.kv_cache_manager.evict_blocks(set(blocks[sound // group.kv_cache_spec.block_size :]))
        self.grammar_compile_error_reqs.add(name)  # requests that the base class ends with an error in this update
