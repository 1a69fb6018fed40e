"""Images and videos of a request, from parts to prompt."""

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

from engine.frontend.apis.shared.fields import prompts_ids
from engine.frontend.images.placeholders import LoadedMedia, MediaSource, expanded, with_times
from engine.frontend.services import Services
from engine.images import ImageInput
from service.http.errors import unsupported

TEXT_ALONE = "this model reads text alone; leave it out, or serve a model that sees images (docs/models.md)"

MOST_TOKENS = 1 << 20  # of the images of a truncated conversation


class Prompt(NamedTuple):
    """`images`: at their places in `ids`."""

    ids: list[int]
    images: list[ImageInput]


async def load_media(
    s: Services, sources: Sequence[MediaSource], known: MutableMapping[MediaSource, LoadedMedia] | None = None
) -> list[LoadedMedia]:
    """`known`: loaded in an earlier try. Raises ApiError(400)."""
    if not sources:
        return []
    if s.images is None:
        raise unsupported(sources[0].field, TEXT_ALONE)
    if known is None:
        return await s.images.load(sources, most_tokens=s.context_length)
    if any(one not in known for one in sources):
        loaded = await s.images.load(sources, most_tokens=MOST_TOKENS)
        known.update(zip(sources, loaded, strict=True))
    return [known[one] for one in sources]


async def media_prompt(
    s: Services,
    prompt: str | list[int],
    loaded: Sequence[LoadedMedia],
    *,
    field: str,
    limit_field: str = "",
    add_special_tokens: bool = True,
    fits: bool = True,
) -> Prompt:
    """Tokenize (`prompts_ids`), insert media. Raises ApiError(400) if their number differs."""
    marks = s.model.marks
    if loaded and isinstance(prompt, str):
        prompt = with_times(prompt, loaded, marks)
    (ids,) = await prompts_ids(
        s, [prompt], field=field, limit_field=limit_field, add_special_tokens=add_special_tokens, fits=fits
    )
    if not loaded:
        return Prompt(ids, [])
    assert s.images is not None, "nothing was loaded without it"
    return Prompt(*expanded(ids, loaded, s.images.vision, marks=marks, field=field))
