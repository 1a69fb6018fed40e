"""What is wrong with the source of an image. An API adds which part of the request it is (`with_field`)."""

from service.http.errors import ApiError, bad_field


class BadImage(ValueError):
    """The text says why, and the remedy; it reads on behind "FIELD: "."""


def with_field(error: BadImage, field: str) -> ApiError:
    """Return the 400 that names the part of the request."""
    return bad_field(field, str(error))
