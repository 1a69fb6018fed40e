"""`tandem up` on one GPU, as a user starts it: a prefill and a decode worker share it, and KV crosses by NIXL.

Asks the shipped model, whose answers are right only if KV crossed, and says what the transfer engine took.
"""

import json
import random
import urllib.request
from typing import Any

from benchmarks.cluster import tandem_up
from benchmarks.gpu.target import Target
from tools.recall import vocab
from tools.recall.oracle import continuation

NUM_PROMPTS = 32
ANSWER = 16


def measure(target: Target) -> dict[str, Any]:
    """Raises where an answer is wrong."""
    flags = target.pick(("--device", "cuda", "--share-gpus"), ("--device", "cpu"))
    with tandem_up(*flags) as cluster:
        ids = [_prompt(seed, words=40 + 40 * seed) for seed in range(target.pick(NUM_PROMPTS, 2))]
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True},
        }
        answers = _post(cluster.url + "/generate", body)
        wrong = [i for i, answer in enumerate(answers) if answer["output_ids"] != _expected(ids[i])]
        if wrong:
            raise AssertionError(f"wrong answers: {wrong}")
        workers = {role: _server_info(url) for role, url in cluster.workers}
    return {"answers": len(ids), "ready_s": cluster.ready_s, "workers": workers}


def _prompt(seed: int, *, words: int) -> list[int]:
    """Pairs of a key and a value, then a key again: `words` tokens or as many as there are keys."""
    draw = random.Random(seed)
    known = draw.sample(range(16, vocab.VOCAB_SIZE), min(words, vocab.VOCAB_SIZE - 16))
    return [vocab.BOS, *known, known[0]]


def _expected(ids: list[int]) -> list[int]:
    return continuation(ids, ANSWER, ignore_eos=True)


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def _server_info(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/server_info", timeout=10) as response:
        info = json.load(response)
    return {key: value for key, value in info.items() if key.startswith(("memory_", "transfer", "kv_", "device"))}
