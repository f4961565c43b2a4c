"""vLLM's scheduler, which ends a request whose numbers broke, and no other."""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput

logger = init_logger("vllm.kvfold")

BROKEN = "the model computed a NaN or an infinity for this request"


class FoldedScheduler(Scheduler):  # type: ignore[misc]
    """Ends requests that the worker reports as broken (`ModelRunnerOutput.num_nans_in_logits`) with an error.

    None of the step's numbers reaches their clients, and the blocks that they wrote are not offered to others.
    """

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
        return outputs

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
