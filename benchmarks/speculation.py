"""Measures speculation by n-grams beside plain decoding: two unified workers in turns, output tokens a second, the same tokens.

    edit     a file of this project, and its first lines again: the answer repeats it, as a code edit does
    quote    passages, and the beginning of one as a quotation: the answer quotes on
    foreign  another text than the prompt's, sampled at temperature 1: nothing repeats

Prompts are cached: the first round, which is not counted, has computed them.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.cluster import ROOT, post, tandem_up
from benchmarks.measures import Row, Tables, in_turns

CODE, PASSAGES = "engine/core", "docs"  # folders of the texts
BEGIN_LINES, BEGIN_CHARS, MOST_CHARS, LEAST_CHARS = 3, 60, 4000, 1500
KINDS = ("edit", "quote", "foreign")


def measure(
    *,
    model_path: str = "smollm2",
    tokens: int = 256,
    rounds: int = 5,
    batches: Sequence[int] = (1, 8),
    flags: Sequence[str] = (),
) -> Tables:
    """`flags`: of the worker that speculates; (): by n-grams."""
    common = ("--unified", "--model-path", model_path, "--num-threads", "1")
    rows: list[Row] = []
    with tandem_up(*common) as off, tandem_up(*common, *(flags or ("--speculative-algorithm", "NGRAM"))) as on:
        for kind in KINDS:
            for batch in batches:
                rows.append(_row(off.url, on.url, kind, [_body(kind, i, tokens=tokens) for i in range(batch)], rounds))
    return {"": rows}


def _row(off: str, on: str, kind: str, asked: list[dict[str, Any]], rounds: int) -> Row:
    answers: dict[str, list[list[int]]] = {}
    found = in_turns({url: partial(_rate, url, asked, answers) for url in (off, on)}, rounds, warm_up=1)
    same = "yes" if answers[off] == answers[on] else "NO"
    row: Row = {"answers": kind, "batch": len(asked), "off, tokens/s": found[off]["rate"], "on": found[on]["rate"]}
    return row | {
        "ratio": found[on]["rate"] / found[off]["rate"],
        "tokens a step": found[on]["accepted"],
        "same tokens": same,
    }


def _rate(url: str, asked: list[dict[str, Any]], answers: dict[str, list[list[int]]]) -> dict[str, float]:
    """Return output tokens a second of requests sent at once; their tokens go to `answers`."""
    begin_s = time.monotonic()
    with ThreadPoolExecutor(len(asked)) as threads:
        found = list(threads.map(partial(post, url), asked))
    taken_s, infos = time.monotonic() - begin_s, [one["meta_info"] for one in found]
    answers[url] = [one["output_ids"] for one in found]
    accepted = sum(info.get("spec_accept_length", 1.0) for info in infos) / len(infos)
    return {"rate": sum(info["completion_tokens"] for info in infos) / taken_s, "accepted": accepted}


def _body(kind: str, number: int, *, tokens: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    text = _text(number, *((PASSAGES, "*.md") if kind == "quote" else (CODE, "*.py")))
    if kind == "edit":
        begin = "\n".join(text.splitlines()[:BEGIN_LINES])
        prompt = f"{text}\n\n# The same file, once more:\n\n{begin}\n"
    elif kind == "quote":
        begin = text[len(text) // 3 :][:BEGIN_CHARS]
        prompt = f"{text}\n\nQuestion: what does the passage say? Answer, as a quotation:\n\n{begin}"
    else:
        prompt = f"{text}\n\nA story about the sea. Once upon a time,"
        sampling |= {"temperature": 1.0, "seed": number}
    return {"text": prompt, "sampling_params": sampling}


def _text(number: int, folder: str, pattern: str) -> str:
    texts = [path.read_text() for path in sorted((ROOT / folder).glob(pattern))]
    long = [text for text in texts if len(text) >= LEAST_CHARS]
    return long[number % len(long)][:MOST_CHARS]
