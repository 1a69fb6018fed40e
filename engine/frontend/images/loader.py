"""Loads images of a request: fetches, counts tokens by headers, decodes in threads."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from engine.frontend.images.pixels import PixelMaker
from engine.frontend.images.placeholders import LoadedMedia, MediaSource
from engine.model_files.vision_config import VisionConfig
from service.http.errors import ApiError, bad_field
from service.images.bodies import BadImage, data_of, frames_of, from_base64, is_data_url, with_field
from service.images.fetch import MAX_IMAGE_BYTES, ImageFetcher
from service.images.hosts import ImageFlags

THREADS = 2
DEFAULT_FPS = 2.0  # the default of these models' processors
MAX_KEPT_BYTES = 256 << 20  # of pixels, for repeated images in conversations

T = TypeVar("T")


class ImageLoader:
    """One per frontend. `most_bytes`: fetched per request."""

    def __init__(self, vision: VisionConfig, flags: ImageFlags, *, most_bytes: int) -> None:
        self.vision = vision
        self._maker = PixelMaker(vision)
        self._flags = flags
        self._most_bytes = most_bytes
        self._fetcher = ImageFetcher(flags)
        self._pool = ThreadPoolExecutor(THREADS, "images")
        self._kept = _Kept(MAX_KEPT_BYTES)

    async def load(self, sources: Sequence[MediaSource], *, most_tokens: int) -> list[LoadedMedia]:
        """Raises ApiError(400) that names the first bad or excessive part."""
        self._check_kinds(sources)
        files = await self._files(sources)
        self._check_count(sources, files)
        counts = await self._each(sources, files, self._count)
        self._check_tokens(sources, counts, most_tokens)
        return await self._each(sources, files, self._made)

    async def _files(self, sources: Sequence[MediaSource]) -> list[list[bytes]]:
        remote = [one.url for one in sources if one.is_remote]
        fetched = await self._fetcher.fetch_all(remote, most_bytes=self._most_bytes) if remote else {}
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._pool, lambda: [self._read(one, fetched) for one in sources])

    def _read(self, source: MediaSource, fetched: Mapping[str, bytes | BadImage]) -> list[bytes]:
        found = fetched.get(source.url)
        if isinstance(found, bytes):
            return [found]
        try:
            if found is not None:
                raise found
            if source.is_video:
                files = frames_of(source.url)
            else:
                files = [data_of(source.url) if is_data_url(source.url) else from_base64(source.url)]
            if (size := max(map(len, files))) > MAX_IMAGE_BYTES:
                raise BadImage(f"has {size} bytes, more than {MAX_IMAGE_BYTES}; send a smaller one")
        except BadImage as error:
            raise with_field(error, source.field) from None
        return files

    async def _each(
        self, sources: Sequence[MediaSource], files: list[list[bytes]], work: Callable[[MediaSource, list[bytes]], T]
    ) -> list[T]:
        """Use threads; raise the first error by part."""
        run = asyncio.get_running_loop().run_in_executor
        jobs = [run(self._pool, partial(work, *one)) for one in zip(sources, files, strict=True)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        done: list[T] = []
        for source, result in zip(sources, results, strict=True):
            if isinstance(result, BadImage):
                raise with_field(result, source.field)
            if isinstance(result, BaseException):
                raise result
            done.append(result)
        return done

    def _count(self, source: MediaSource, files: list[bytes]) -> int:
        return self._maker.count_video(files) if source.is_video else self._maker.count_image(files[0])

    def _made(self, source: MediaSource, files: list[bytes]) -> LoadedMedia:
        maker, fps = self._maker, source.fps or DEFAULT_FPS
        key = maker.video_key(files, fps) if source.is_video else maker.image_key(files[0])
        found = self._kept.get(key)
        if found is None:
            found = maker.video(files, fps, key) if source.is_video else maker.image(files[0], key)
            self._kept.put(key, found)
        return found

    def _check_kinds(self, sources: Sequence[MediaSource]) -> None:
        for source in sources:
            if source.is_video and self.vision.processing.video is None:
                raise bad_field(source.field, "this model takes images, no videos; send frames as images")
            if source.fps is not None and not 0 < source.fps < 1000:
                raise bad_field(source.field, f"fps must be above 0 and below 1000, got {source.fps:g}")

    def _check_count(self, sources: Sequence[MediaSource], files: list[list[bytes]]) -> None:
        count, most = 0, self._flags.max_images_per_request
        for source, own in zip(sources, files, strict=True):
            count += len(own)
            if count > most:
                text = f"is more than the {most} images and frames of a request (--max-images-per-request); send fewer"
                raise bad_field(source.field, text)

    def _check_tokens(self, sources: Sequence[MediaSource], counts: Sequence[int], most: int) -> None:
        total = 0
        for source, count in zip(sources, counts, strict=True):
            total += count
            if total > most:
                text = f"with it the images stand for {total} tokens, and the context holds {most}; send fewer or smaller ones"
                raise ApiError(400, f"{source.field}: {text}", field=source.field, code="context_length_exceeded")


class _Kept:
    """An LRU of images by key. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._size = most_bytes, 0
        self._loaded: OrderedDict[bytes, LoadedMedia] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> LoadedMedia | None:
        with self._lock:
            if key in self._loaded:
                self._loaded.move_to_end(key)
            return self._loaded.get(key)

    def put(self, key: bytes, loaded: LoadedMedia) -> None:
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = loaded
                self._size += loaded.num_bytes
            while self._size > self._most:
                _, oldest = self._loaded.popitem(last=False)
                self._size -= oldest.num_bytes
