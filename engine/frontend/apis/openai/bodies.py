"""Body of /v1/completions, and its checks. Pure."""

from engine.frontend.apis.shared.body_reader import BodyReader
from engine.frontend.apis.shared.refused import COMPLETION
from engine.frontend.apis.shared.request import RequestFields, check_range, check_request
from service.http.errors import bad_field

MAX_COMPLETION_LOGPROBS = 5
DEFAULT_COMPLETION_TOKENS = 16


class CompletionBody(RequestFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


READER = BodyReader(body=CompletionBody, refused=COMPLETION, looked_into=("stream_options", "response_format"))


def check_completion(body: CompletionBody) -> None:
    check_request(body)
    check_range("logprobs", body.logprobs, MAX_COMPLETION_LOGPROBS)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_field(
            "best_of",
            "must equal n: this server returns every sample, and sampling more to keep the best is not supported",
        )
