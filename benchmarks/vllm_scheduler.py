"""vLLM's scheduler alone, under the same load as ours: run by vLLM's own Python, driven by benchmarks/scheduler_step.py.

usage: PEERS/vllm/bin/python benchmarks/vllm_scheduler.py MODEL_PATH RUNNING

    in   one line for each turn: how many decode steps
    out  one JSON line first ({"ready": version}), then one for each turn: CPU microseconds of each step
         {"schedule_us": [...], "collect_us": [...]}

Its `Scheduler` (v1) with prefix caching, blocks of 16, as vLLM's own tests/v1/core/utils.py builds it; no model runs, and
`ModelRunnerOutput` is made outside the time that is taken. Imports nothing of Tandem: this environment has none of it.
"""

import json
import os
import random
import sys
import time
from typing import Any

PROMPT_TOKENS = 512
NEW_TOKENS = 16_384
BLOCK = 16
MAX_LEN = 32_768


def make_scheduler(model: str, running: int) -> Any:
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float16", seed=0, skip_tokenizer_init=True, max_model_len=MAX_LEN),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=8192,
            max_model_len=MAX_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
    )
    num_blocks = running * (PROMPT_TOKENS + 4096) // BLOCK
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)]
    cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    config.cache_config.num_gpu_blocks = num_blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


def add_requests(scheduler: Any, running: int) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    rng = random.Random(0)
    for i in range(running):
        request = Request(
            request_id=f"r{i}",
            prompt_token_ids=[rng.randrange(1000) for _ in range(PROMPT_TOKENS)],
            sampling_params=SamplingParams(ignore_eos=True, max_tokens=NEW_TOKENS),
            pooling_params=None,
            block_hasher=hasher,
        )
        scheduler.add_request(request)


def step(scheduler: Any) -> tuple[float, float, int]:
    """CPU microseconds of schedule() and of update_from_output(); how many requests ran."""
    from vllm.v1.outputs import ModelRunnerOutput

    started_s = time.process_time()
    plan = scheduler.schedule()
    planned_s = time.process_time()
    rids = list(plan.num_scheduled_tokens)
    prefilling = {r.request_id for r in scheduler.running if r.num_computed_tokens < r.num_prompt_tokens}
    result = ModelRunnerOutput(
        req_ids=rids,
        req_id_to_index={rid: i for i, rid in enumerate(rids)},
        sampled_token_ids=[[] if rid in prefilling else [7] for rid in rids],
    )
    computed_s = time.process_time()
    scheduler.update_from_output(plan, result)
    return (planned_s - started_s) * 1e6, (time.process_time() - computed_s) * 1e6, len(rids)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    import vllm

    model, running = sys.argv[1], int(sys.argv[2])
    scheduler = make_scheduler(model, running)
    add_requests(scheduler, running)
    while scheduler.waiting or any(r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.running):
        step(scheduler)
    print(json.dumps({"ready": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        steps = [step(scheduler) for _ in range(int(line))]
        assert all(count == running for _, _, count in steps), "some did not run"
        answer = {"schedule_us": [one[0] for one in steps], "collect_us": [one[1] for one in steps]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
