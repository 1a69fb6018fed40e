"""Flags of image fetching, for workers and routers."""

from dataclasses import dataclass

from service.flags import FlagSet, flag


@dataclass(frozen=True, kw_only=True)
class ImageFlags(FlagSet):
    disable_image_fetch: bool = flag(
        False, "fetch no images that requests name by http(s) URL: they bring data URLs or base64"
    )
    allowed_media_domains: tuple[str, ...] = flag(
        (),
        "hosts that images may be fetched from: HOST, *.DOMAIN, or HOST:PORT; default: any, at ports 80 and 443",
    )
    allowed_media_networks: tuple[str, ...] = flag(
        (),
        "addresses that images may be fetched from although they are not public, at any port or one: 10.0.0.0/8, 10.1.2.3:9000",
    )
    max_images_per_request: int = flag(64, "most images and frames of videos of a request", least=1, most=4096)
