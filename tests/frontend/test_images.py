"""Requests with images, through every API of a worker whose model sees; and a worker whose model does not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from engine.images import ImageInput
from engine.messages import GenerateRequest
from service.flags import ConfigError
from tests.frontend.conftest import CONTEXT, ROOT, Worker, start_worker
from tests.frontend.vision import (
    END,
    IMAGE,
    START,
    VIDEO,
    base64_of,
    file_of,
    frames_url,
    picture,
    tokenizer,
    url_of,
    write_vision_checkpoint,
)

CHAT, GENERATE, MESSAGES, RESPONSES = "/v1/chat/completions", "/generate", "/v1/messages", "/v1/responses"
FOUR, SIX = file_of(picture(56, 56, seed=4)), file_of(picture(84, 56, seed=6))  # tokens
ONE_TOKEN = {"sampling_params": {"max_new_tokens": 1}}


def asked(worker: Worker, path: str, body: dict[str, Any]) -> tuple[str, list[ImageInput]]:
    """What the scheduler gets: the last prompt, and its images."""
    request = worker.sent(path, body)[-1]
    return shown(request), request.images


def chat(worker: Worker, *parts: dict[str, Any], **more: Any) -> tuple[str, list[ImageInput]]:
    return asked(worker, CHAT, {"messages": user(*parts), "max_tokens": 1, **more})


def shown(request: GenerateRequest) -> str:
    """Its tokens as text; of a run of tokens for an image "<N>"."""
    text, at = "", 0
    for image in request.images:
        assert set(request.input_ids[image.start : image.end]) <= {IMAGE, VIDEO}
        text += tokenizer().decode(request.input_ids[at : image.start], skip_special_tokens=False)
        text, at = f"{text}<{image.num_tokens}>", image.end
    return text + str(tokenizer().decode(request.input_ids[at:], skip_special_tokens=False))


def last(worker: Worker) -> tuple[str, list[ImageInput]]:
    request = worker.scheduler.seen[-1]
    return shown(request), request.images


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


SEEN = "<|user|>a<|vision_start|><4><|vision_end|>b<|vision_start|><6><|vision_end|><|assistant|>"


def test_chat(seeing: Worker) -> None:
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        parts = [text("a"), image_part(url_of(FOUR)), text("b"), {"type": "image_url", "image_url": url_of(SIX)}]
        answer = client.chat.completions.create(model="tiny", messages=user(*parts), max_tokens=1)  # type: ignore[call-overload]
    said, (four, six) = last(seeing)
    assert said == SEEN
    assert four.pixels == picture(56, 56, seed=4).tobytes() and four.size == (1, 56, 56) and four.grid == (1, 4, 4)
    assert six.pixels == picture(84, 56, seed=6).tobytes() and six.grid == (1, 4, 6) and four.key != six.key
    assert answer.usage.prompt_tokens == len(seeing.scheduler.seen[-1].input_ids)


def test_a_rendered_chat_says_where_its_images_stand(seeing: Worker) -> None:
    body = {"messages": user(text("a"), image_part(url_of(FOUR)), image_part(url_of(SIX))), "max_tokens": 1}
    _, images = asked(seeing, CHAT, body)
    rendered = seeing.post(f"{CHAT}/render", body).json()
    assert rendered["token_ids"] == seeing.scheduler.seen[-1].input_ids
    assert rendered["features"] == {
        "mm_hashes": {"image": [image.key.hex() for image in images]},
        "mm_placeholders": {"image": [{"offset": image.start, "length": image.num_tokens} for image in images]},
    }


def test_messages(seeing: Worker) -> None:
    with anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0) as client:
        png = {"type": "base64", "media_type": "image/png", "data": base64_of(FOUR)}
        parts: list[Any] = [text("a"), {"type": "image", "source": png}, text("b")]
        parts.append({"type": "image", "source": {"type": "url", "url": url_of(SIX)}})
        answer = client.messages.create(model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=1)
        count = client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": parts}])
    assert last(seeing)[0] == SEEN
    assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_results_of_tools_hold_images(seeing: Worker) -> None:
    png = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(FOUR)}}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("there"), png]}
    turns = [*user(text("q")), {"role": "assistant", "content": [call]}, *user(result)]
    said, _ = asked(seeing, MESSAGES, {"model": "tiny", "messages": turns, "max_tokens": 1})
    assert said.endswith("<|tool|>there<|vision_start|><4><|vision_end|><|assistant|>")


def test_responses(seeing: Worker) -> None:
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        parts = [
            {"type": "input_text", "text": "a"},
            {"type": "input_image", "image_url": url_of(FOUR), "detail": "auto"},
            {"type": "input_text", "text": "b"},
            {"type": "input_image", "image_url": url_of(SIX)},
        ]
        first = client.responses.create(model="tiny", input=[{"role": "user", "content": parts}], max_output_tokens=1)  # type: ignore[arg-type, list-item, misc]
        assert last(seeing)[0] == SEEN
        client.responses.create(model="tiny", input="c", previous_response_id=first.id, max_output_tokens=1)
    said, images = last(seeing)
    assert said.startswith(SEEN) and len(images) == 2


def test_a_conversation_with_images_is_cut_to_fit(seeing: Worker) -> None:
    image = {"type": "input_image", "image_url": url_of(FOUR)}
    turns = [turn for c in "xy" for turn in user(image, {"type": "input_text", "text": c * 300})]
    said, images = asked(seeing, RESPONSES, {"input": turns, "truncation": "auto", "max_output_tokens": 1})
    assert "x" not in said and "y" * 300 in said and len(images) == 1


def test_ollama(seeing: Worker) -> None:
    with ollama.Client(host=seeing.url) as client:
        message = {"role": "user", "content": "ab", "images": [FOUR, SIX]}
        client.chat("tiny", [message], options={"num_predict": 1})
        wanted = "<|user|><|vision_start|><4><|vision_end|><|vision_start|><6><|vision_end|>ab<|assistant|>"
        assert last(seeing)[0] == wanted
        client.generate("tiny", "ab", images=[FOUR, SIX], options={"num_predict": 1})
        assert last(seeing)[0] == wanted
        assert client.show("tiny").capabilities == ["completion", "vision"]


@pytest.mark.parametrize("of", [url_of, base64_of])
def test_generate_with_text(seeing: Worker, of: Any) -> None:
    place = "<|image_pad|>"
    body = {"text": f"a{place}b{place}c", "image_data": [of(FOUR), of(SIX)], **ONE_TOKEN}
    answer = seeing.post(GENERATE, body).json()
    assert last(seeing)[0] == "a<4>b<6>c" and answer["meta_info"]["prompt_tokens"] == 13
    for data in (of(FOUR), [[of(FOUR)]]):
        assert asked(seeing, GENERATE, {"text": f"a{place}", "image_data": data, **ONE_TOKEN})[0] == "a<4>"


def test_generate_with_ids(seeing: Worker) -> None:
    ids = [65, START, IMAGE, END, 66]
    (request,) = seeing.sent(GENERATE, {"input_ids": ids, "image_data": url_of(FOUR), **ONE_TOKEN})
    assert request.input_ids == [65, START, *[IMAGE] * 4, END, 66] and request.images[0].start == 2


def test_generate_in_batches(seeing: Worker) -> None:
    place, four, six = "<|image_pad|>", url_of(FOUR), url_of(SIX)
    texts = [f"a{place}{place}", "b", f"c{place}"]
    body = {"text": texts, "image_data": [[four, six], None, six], "sampling_params": {"max_new_tokens": 1, "n": 2}}
    assert [shown(r) for r in seeing.sent(GENERATE, body)] == ["a<4><6>"] * 2 + ["b"] * 2 + ["c<6>"] * 2
    body = {"text": [f"a{place}", f"b{place}"], "image_data": four, **ONE_TOKEN}
    assert [shown(r) for r in seeing.sent(GENERATE, body)] == ["a<4>", "b<4>"]


def test_samples_share_their_image(seeing: Worker) -> None:
    body = {"messages": user(image_part(url_of(FOUR))), "n": 3, "max_tokens": 1}
    shown = [request.images[0] for request in seeing.sent(CHAT, body)]
    assert len({one.key for one in shown}) == 1
    assert [bool(one.pixels) for one in shown] == [True, False, False], "the scheduler gets them once"


def test_tools_and_constraints(seeing: Worker) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {"messages": user(image_part(url_of(FOUR))), "tools": [tool], "tool_choice": "required", "max_tokens": 4}
    (request,) = seeing.sent(CHAT, body)
    assert request.sampling.grammar is not None and len(request.images) == 1


def test_an_answer_goes_on_behind_an_image(seeing: Worker) -> None:
    messages = [*user(image_part(url_of(FOUR))), {"role": "assistant", "content": "It is"}]
    said, _ = asked(seeing, CHAT, {"messages": messages, "continue_final_message": True, "max_tokens": 1})
    assert said.endswith("<4><|vision_end|><|assistant|>It is")


def test_a_template_that_loops_over_parts_joins_their_texts_itself(seeing: Worker) -> None:
    assert chat(seeing, text("a "), text("b")) == ("<|user|>a b<|assistant|>", [])


def test_an_image_that_comes_again_is_decoded_once(seeing: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.frontend.images import pixels

    decoded = []
    real = pixels.decode
    monkeypatch.setattr(pixels, "decode", lambda data, **limits: decoded.append(data) or real(data, **limits))
    again = url_of(file_of(picture(56, 84, seed=77)))
    for _ in range(3):
        chat(seeing, image_part(again))
    assert len(decoded) == 1


def test_a_video(seeing: Worker) -> None:
    url = frames_url(*(file_of(picture(56, 84, seed=seed)) for seed in range(4)))
    part = {"type": "video_url", "video_url": {"url": url, "fps": 1}}
    said, (video, _) = chat(seeing, text("a"), part, image_part(url_of(FOUR)))
    count = video.num_tokens
    assert said == f"<|user|>a<|vision_start|><{count}><|vision_end|><|vision_start|><4><|vision_end|><|assistant|>"
    assert video.time_step == 4 and video.size[0] == 4 and video.grid[0] == 2
    assert set(seeing.scheduler.seen[-1].input_ids[video.start : video.end]) == {VIDEO}
    said, (video,) = asked(seeing, GENERATE, {"text": "a<|video_pad|>", "video_data": [url], **ONE_TOKEN})
    assert said == f"a<{count}>" and video.time_step == 2


def test_times_of_a_video_are_text(tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path / "tiny", "qwen3")
    url = frames_url(*(file_of(picture(56, 56, seed=seed)) for seed in range(3)))
    with start_worker(tmp_path) as w:
        said, images = chat(w, {"type": "video_url", "video_url": url})
        place = f"<|vision_start|><{images[0].num_tokens}><|vision_end|>"
        assert said == f"<|user|><0.2 seconds>{place}<1.0 seconds>{place}<|assistant|>"


def test_a_template_that_knows_no_images_gets_the_tokens(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    write_vision_checkpoint(tmp_path / "tiny", "llava", template=template)
    with start_worker(tmp_path) as w:
        assert chat(w, image_part(url_of(FOUR)), text("a"))[0] == "[user]<16>\na"
        error = w.error(CHAT, {"messages": user({"type": "video_url", "video_url": frames_url(FOUR)})})
        assert error["param"] == "messages[0].content[0].video_url" and "no videos; send frames" in error["message"]
        assert w.http.get("/model_info").json()["has_image_understanding"] is True
        assert w.http.get("/v1/models").json()["data"][0]["has_image_understanding"] is True


def test_a_worker_without_a_tokenizer_takes_images_with_ids(tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path / "tiny")
    with start_worker(tmp_path, engine={"skip_tokenizer_init": True}) as w:
        (request,) = w.sent(GENERATE, {"input_ids": [65, IMAGE], "image_data": url_of(FOUR), **ONE_TOKEN})
        assert request.input_ids == [65, *[IMAGE] * 4]
        named, message = error_of(w, GENERATE, {"input_ids": [65], "image_data": url_of(FOUR)})
        assert (
            named == "input_ids" and f"has 0 placeholders for images, and needs 1: write one token {IMAGE}" in message
        )


def test_a_wrong_rule_ends_the_start(tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path / "tiny")
    wrong = start_worker(tmp_path, server={"allowed_media_domains": ("http://a.org",)})
    with pytest.raises(ConfigError, match="--allowed-media-domains"), wrong:
        pass


def error_of(worker: Worker, path: str, body: dict[str, Any]) -> tuple[str, str]:
    error = worker.error(path, body)
    return (error, error) if isinstance(error, str) else (str(error.get("param")), str(error["message"]))


BAD = "data:image/png;base64," + base64_of(b"no image")
WRONG_CHATS: list[tuple[list[dict[str, Any]], str, str]] = [
    ([image_part(BAD)], "messages[0].content[0].image_url", "no image that can be read; send JPEG"),
    ([text("a"), image_part("data:image/png;base64,!!!!")], "messages[0].content[1].image_url", "is not base64"),
    ([image_part("data:image/png;base64")], "messages[0].content[0].image_url", "without a comma"),
    ([image_part("data:image/png;base64,")], "messages[0].content[0].image_url", "is empty"),
    ([image_part("file:///etc/passwd")], "messages[0].content[0].image_url", "only http and https"),
    ([image_part("/etc/passwd")], "messages[0].content[0].image_url", "only http and https"),
    ([image_part("http://127.0.0.1:1/x.png")], "messages[0].content[0].image_url", "no public address"),
    ([{"type": "image_url"}], "messages[0].content[0]", "with a field of that name"),
    ([{"type": "file"}], "messages[0].content[0]", "text, image_url, video_url"),
    *(([{"type": "text", "text": "hear"}, {"type": kind, kind: {"data": "AAAA", "format": "wav"}}],
        f"messages[0].content[1].{kind}", "audio is not served here: leave it out, or send what is said as text")
        for kind in ("input_audio", "audio_url")),
    ([image_part(url_of(file_of(picture(300, 1))))], "messages[0].content[0].image_url", "cut it"),
    ([image_part(url_of(FOUR)), text("<|image_pad|>")], "messages", "has 2 placeholders for images, and needs 1"),
    ([{"type": "video_url", "video_url": "https://example.org/a.mp4"}], "messages[0].content[0].video_url",
     "take frames out"),
    ([{"type": "video_url", "video_url": {"url": frames_url(FOUR), "fps": 0}}], "messages[0].content[0].video_url",
     "fps"),
    ([{"type": "video_url", "video_url": frames_url(FOUR, SIX)}], "messages[0].content[0].video_url", "frame 1"),
    ([image_part(url_of(FOUR))] * 65, "messages[0].content[64].image_url", "--max-images-per-request"),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "field", "why"), WRONG_CHATS)
def test_what_is_wrong_is_named(seeing: Worker, parts: list[dict[str, Any]], field: str, why: str) -> None:
    before = len(seeing.scheduler.seen)
    named, message = error_of(seeing, CHAT, {"messages": user(*parts)})
    assert named == field and why in message and message.startswith(f"{field}: ")
    assert len(seeing.scheduler.seen) == before


def test_other_apis_name_their_own_fields(seeing: Worker) -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "!"}}
    messages = [{"role": "user", "content": "a", "images": [base64_of(FOUR), "!"]}]
    prompt = {"model": "tiny", "prompt": "a", "raw": True, "images": [base64_of(FOUR)]}
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    bad, by_id = ({"type": "input_image", **more} for more in ({"image_url": BAD}, {"file_id": "f"}))
    two = ["<|image_pad|>"] * 2
    for path, body, field, why in (
        (MESSAGES, {"max_tokens": 1, "system": "s", "messages": user(text("a"), block)}, "messages[0].content[1].source", ""),
        (RESPONSES, {"instructions": "s", "input": user(bad)}, "input[0].content[0].image_url", ""),
        (RESPONSES, {"input": user(by_id)}, "input[0].content[0].file_id", ""),
        (RESPONSES, {"input": user(audio)}, "input[0].content[0].type", "'input_audio' is not supported"),
        (GENERATE, {"text": "a", "audio_data": "AAAA"}, "audio_data", "audio is not served here"),
        ("/api/chat", {"model": "tiny", "messages": messages}, "messages[0].images[1]", ""),
        ("/api/generate", prompt, "images", "needs a chat template"),
        (GENERATE, {"text": two, "image_data": [[url_of(FOUR)], [BAD]]}, "image_data[1][0]", ""),
        (GENERATE, {"text": two, "image_data": [url_of(FOUR)]}, "image_data", "has 1 entries for 2 prompts"),
        (GENERATE, {"text": "a", "image_data": url_of(FOUR)}, "text", ""),
        (GENERATE, {"text": "a", "image_data": "./etc/passwd"}, "image_data", "base64"),
    ):  # fmt: skip
        named, message = error_of(seeing, path, body)
        assert message.startswith(f"{field}: ") and why in message and named in (field, "None", message), message


def test_the_length_counts_all_tokens(seeing: Worker) -> None:
    big = url_of(file_of(picture(224, 224)))  # 64 tokens
    chat(seeing, *[image_part(big)] * 7)
    named, message = error_of(seeing, CHAT, {"messages": user(*[image_part(big)] * 9)})
    assert named == "messages[0].content[8].image_url" and f"576 tokens, and the context holds {CONTEXT}" in message
    many = user(*[image_part(big)] * 7, text("x" * 60))
    assert seeing.error(CHAT, {"messages": many, "max_tokens": 1})["code"] == "context_length_exceeded"


def test_the_length_counts_the_time_of_videos(seeing: Worker) -> None:
    """A slow video's positions go on by more than its tokens: they must be in the table of RoPE."""
    frame = file_of(picture(56, 56))

    def video(fps: float) -> dict[str, Any]:
        return {"type": "video_url", "video_url": {"url": frames_url(*[frame] * 16), "fps": fps}}

    _, (shown,) = chat(seeing, video(0.125))
    assert shown.span > shown.num_tokens
    error = seeing.error(CHAT, {"messages": user(video(0.03125))})
    assert error["code"] == "context_length_exceeded" and "by the time of their videos" in error["message"]


def test_a_model_that_reads_text_says_so(worker: Worker) -> None:
    assert worker.http.get("/model_info").json()["has_image_understanding"] is False
    assert worker.http.get("/v1/models").json()["data"][0]["has_image_understanding"] is False
    named, message = error_of(worker, CHAT, {"messages": user(text("a"), image_part(url_of(FOUR)))})
    assert named == "messages[0].content[1].image_url" and "reads text alone; leave it out, or serve a model" in message
    assert error_of(worker, GENERATE, {"text": "a", "image_data": url_of(FOUR)})[0] == "image_data"
    assert error_of(worker, GENERATE, {"text": "a", "video_data": [frames_url(FOUR)]})[0] == "video_data[0]"


def test_embeddings_refuse_images(seeing: Worker) -> None:
    answer = seeing.post("/encode", {"text": "a", "image_data": url_of(FOUR)})
    assert answer.status_code == 400 and "image_data" in answer.text


def test_workers_for_text_load_no_pillow() -> None:
    code = "import engine.frontend.server, sys; print({'PIL'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=60) == "set()\n"


def test_streams(seeing: Worker) -> None:
    body = {"messages": user(image_part(url_of(FOUR)), text("ab")), "max_tokens": 2, "stream": True}
    body["stream_options"] = {"include_usage": True}
    (*_, usage) = seeing.events(CHAT, body)
    assert usage["usage"]["prompt_tokens"] == len(seeing.scheduler.seen[-1].input_ids)
    assert json.dumps(usage)
