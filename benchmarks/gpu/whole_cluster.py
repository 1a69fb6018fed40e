"""A cluster on one GPU, whose answers show that KV crossed."""

import random
from typing import Any

import requests

from benchmarks.cluster import post, tandem_up
from benchmarks.gpu.target import Target
from tools.recall import vocab
from tools.recall.oracle import continuation

ANSWER = 16


def cluster(target: Target) -> dict[str, Any]:
    """`tandem up` on one GPU, as a user starts it: a prefill and a decode worker share it, and KV crosses by NIXL.

    Asks the shipped model, whose answers are right only if KV crossed, and says what the transfer engine took.
    """
    with tandem_up(*target.pick(("--device", "cuda", "--share-gpus"), ("--device", "cpu"))) as up:
        ids = [_prompt(seed, words=40 + 40 * seed) for seed in range(target.pick(32, 2))]
        sampling = {"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        answers = post(up.url, {"input_ids": ids, "sampling_params": sampling})
        right = [continuation(prompt, ANSWER, ignore_eos=True) for prompt in ids]
        wrong = [i for i, answer in enumerate(answers) if answer["output_ids"] != right[i]]
        if wrong:
            raise AssertionError(f"wrong answers: {wrong}")
        workers = {role: _server_info(url) for role, url in up.workers}
    return {"answers": len(ids), "ready_s": up.ready_s, "workers": workers}


def _prompt(seed: int, *, words: int) -> list[int]:
    """Pairs of a key and a value, then a key again: `words` tokens or as many as there are keys."""
    known = random.Random(seed).sample(range(16, vocab.VOCAB_SIZE), min(words, vocab.VOCAB_SIZE - 16))
    return [vocab.BOS, *known, known[0]]


def _server_info(url: str) -> dict[str, Any]:
    info = requests.get(url + "/server_info", timeout=10).json()
    return {key: value for key, value in info.items() if key.startswith(("memory_", "transfer", "kv_", "device"))}
