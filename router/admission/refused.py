"""The answer to a request that may not run."""

from service.http.errors import ApiError


class RequestRefused(ApiError):
    """`why`: in metrics, and the error's code."""

    def __init__(self, message: str, *, why: str, status: int = 429, retry_after_s: int = 1) -> None:
        super().__init__(status, message, code=why, retry_after_s=retry_after_s)
        self.why = why
