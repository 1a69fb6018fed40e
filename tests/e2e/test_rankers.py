"""A reranker and a classifier behind a router: transformers' numbers in the shapes of Cohere, vLLM and OpenAI."""

import math
from pathlib import Path
from typing import Any

import httpx2 as httpx
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.frontend.apis.openai.ranking import INSTRUCTION, question
from engine.text.tokenizer import load_tokenizer
from tests.e2e.cluster import Cluster, cluster
from tests.models.headless import make_classifier, make_embedding_model
from tests.models.tiny_checkpoints import make_tiny_checkpoint

FLAGS = ("--unified", "--max-total-tokens", "4096", "--log-level", "warning")
QUERY, TEXTS = "what is red", ["the sky is blue", "roses", "a red rose is red", ""]


def post(c: Cluster, path: str, body: dict[str, Any], *, status: int = 200) -> Any:
    answer = httpx.post(f"{c.router}{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def close(found: list[float], wanted: list[float]) -> bool:
    return len(found) == len(wanted) and all(
        math.isclose(a, b, abs_tol=1e-4) for a, b in zip(found, wanted, strict=True)
    )


def make_reranker(folder: Path) -> str:
    """Of Qwen3-Reranker's kind: its tokenizer has the four tokens that are asked for."""
    path = make_tiny_checkpoint(folder, "qwen3")
    names = {"<special_3>": "<|im_start|>", "<special_4>": "<|im_end|>", "<special_5>": "yes", "<special_6>": "no"}
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        text = file.read_text(encoding="utf-8")
        for old, new in names.items():
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")
    return path


@torch.inference_mode()
def test_a_reranker_says_how_probable_yes_is(tmp_path: Path) -> None:
    path = make_reranker(tmp_path / "model")
    tokenizer, theirs = load_tokenizer(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))

    def wanted(text: str, instruction: str) -> float:
        ids = tokenizer.encode(question(QUERY, text, instruction))
        logits = theirs(torch.tensor([ids])).logits[0, -1]
        return float(torch.sigmoid(logits[yes] - logits[no]))

    scores = [wanted(text, INSTRUCTION) for text in TEXTS]
    best = sorted(range(len(TEXTS)), key=lambda i: -scores[i])
    with cluster(tmp_path / "run", *FLAGS, "--model-path", path) as c:
        answer = post(c, "/v1/rerank", {"query": QUERY, "documents": TEXTS})
        assert [one["index"] for one in answer["results"]] == best
        assert close([one["relevance_score"] for one in answer["results"]], [scores[i] for i in best])
        assert [one["document"]["text"] for one in answer["results"]] == [TEXTS[i] for i in best]
        asked = {"query": QUERY, "documents": [{"text": text} for text in TEXTS], "top_n": 2, "return_documents": False}
        (first, _) = post(c, "/rerank", asked)["results"]
        assert first.keys() == {"index", "relevance_score"} and first["index"] == best[0]
        body = {"text_1": QUERY, "text_2": TEXTS, "instruct": "Find flowers"}
        found = [one["score"] for one in post(c, "/score", body)["data"]]
        assert close(found, [wanted(text, "Find flowers") for text in TEXTS])
        whole = post(c, "/v1/embeddings", {"input": "a"})["data"][0]["embedding"]
        short = post(c, "/v1/embeddings", {"input": "a", "dimensions": 8})["data"][0]["embedding"]
        norm = math.sqrt(sum(x * x for x in whole[:8]))
        assert close(short, [x / norm for x in whole[:8]])
        assert "64" in post(c, "/v1/embeddings", {"input": "a", "dimensions": 65}, status=400)["error"]["message"]
        refused = post(c, "/classify", {"input": "a"}, status=404)
        assert refused["error"]["code"] == "model_has_no_head"


@torch.inference_mode()
def test_a_classifier_names_classes_and_generates_nothing(tmp_path: Path) -> None:
    path = make_classifier(tmp_path / "model", "qwen3", labels=("bad", "good", "odd"))
    tokenizer, theirs = (
        load_tokenizer(path),
        AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32),
    )
    texts = TEXTS[:3]
    logits = torch.stack([theirs(torch.tensor([tokenizer.encode(text)])).logits[0] for text in texts])
    with cluster(tmp_path / "run", *FLAGS, "--model-path", path) as c:
        rows = post(c, "/v1/classify", {"input": texts})["data"]
        assert [row["label"] for row in rows] == [("bad", "good", "odd")[i] for i in logits.argmax(1)]
        for row, probs in zip(rows, logits.softmax(-1).tolist(), strict=True):
            assert close(row["probs"], probs) and row["num_classes"] == 3
        assert len(post(c, "/v1/embeddings", {"input": "a"})["data"][0]["embedding"]) == 64
        for asked, body in (
            ("/generate", {"text": "a"}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [20]}),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),  # three classes score no pairs
        ):
            assert post(c, asked, body, status=404)["error"]["code"] == "model_has_no_head"
        assert httpx.get(f"{c.router}/model_info", timeout=60).json()["is_generation"] is False


@torch.inference_mode()
def test_an_embedding_model_pools_as_its_files_say(tmp_path: Path) -> None:
    path = make_embedding_model(tmp_path / "model", bare=False, pooling="mean", unit=False)
    states = AutoModel.from_pretrained(path, dtype=torch.float32)(
        torch.tensor([load_tokenizer(path).encode(QUERY)])
    ).last_hidden_state[0]
    mean = states.mean(0).tolist()
    assert not close(mean, (states.mean(0) / states.mean(0).norm()).tolist())
    with cluster(tmp_path / "run", *FLAGS, "--model-path", path, "--is-embedding") as c:
        found = post(c, "/v1/embeddings", {"input": QUERY})["data"][0]["embedding"]
        assert close(found, mean), "no Normalize in modules.json"
        short = post(c, "/v1/embeddings", {"input": QUERY, "dimensions": 8})["data"][0]["embedding"]
        assert close(short, mean[:8])
        assert post(c, "/generate", {"text": "a"}, status=404)["error"]["code"] == "model_has_no_head"
