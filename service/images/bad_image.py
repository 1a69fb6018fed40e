"""Errors of image sources. The API adds the field (`with_field`)."""

from service.http.errors import ApiError, bad_field


class BadImage(ValueError):
    """An unusable image. The text continues "FIELD: "."""


def with_field(error: BadImage, field: str) -> ApiError:
    return bad_field(field, str(error))
