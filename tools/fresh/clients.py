"""How this machine's apt and pip are configured, as far as a bare root needs it to reach the same registries."""

import configparser
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")  # Debian's, and where apt looks
CA_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
_REACH = re.compile(r"Acquire::(https?|Check-|Max-|Min-|Retries|ForceIPv)[^ ]*(?<!::) ")  # no entries of lists ("::")

PipSettings = dict[str, dict[str, str]]  # section -> option -> value


def pip_config_files(env: Mapping[str, str]) -> list[Path]:
    """Where pip reads, by its documentation; the last one counts most."""
    home = Path(env.get("HOME", "/root"))
    user = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    system = [Path(folder) / "pip/pip.conf" for folder in env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    files = [*system, Path("/etc/pip.conf"), home / ".pip/pip.conf", user / "pip/pip.conf"]
    chosen = env.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return []
    return [*files, Path(chosen)] if chosen else files


def pip_settings(files: Iterable[Path]) -> PipSettings:
    """What those of `files` that exist say together."""
    parser = configparser.RawConfigParser()
    parser.read(files)
    return {name: dict(parser.items(name)) for name in parser.sections()}


def pip_conf(settings: PipSettings) -> str:
    """The text of one pip.conf with all of `settings`."""
    lines: list[str] = []
    for section, options in settings.items():
        lines += [f"[{section}]", *(f"{name} = {' '.join(value.split())}" for name, value in options.items())]
    return "\n".join([*lines, ""])


def pip_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that pip reads (but for those that name files of this machine), and proxies."""
    skipped = ("PIP_CONFIG_FILE", "PIP_CACHE_DIR", *CA_VARIABLES)
    return {
        name: value
        for name, value in env.items()
        if name not in skipped and (name.startswith("PIP_") or name.lower() in PROXIES)
    }


def local_folders(values: Iterable[str]) -> list[Path]:
    """The folders of this machine that settings point to; none inside another.

    Of an index by a file: URL it is the parent: the index's pages link to files beside it.
    """
    found = {path.resolve() for value in values for word in value.split() if (path := _path(word)) and path.is_dir()}
    return sorted(path for path in found if not any(parent in found for parent in path.parents))


def local_files(values: Iterable[str]) -> list[Path]:
    """The files of this machine that settings name, as a file of constraints."""
    return sorted(
        {Path(word) for value in values for word in value.split() if word.startswith("/") and Path(word).is_file()}
    )


def ca_bundle(env: Mapping[str, str], settings: PipSettings) -> Path | None:
    """The certificates that this machine trusts, or None where it has no such file."""
    named = [env[name] for name in CA_VARIABLES if env.get(name)]
    named += [options["cert"] for options in settings.values() if "cert" in options]
    return next((path for path in (*map(Path, named), CA_BUNDLE) if path.is_file()), None)


def pip_cache(env: Mapping[str, str]) -> Path:
    """Where pip keeps what it fetched."""
    caches = Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME", "/root")) / ".cache")
    return Path(env.get("PIP_CACHE_DIR") or caches / "pip")


def apt_settings() -> str:
    """How apt reaches its archives (proxies, checks of dates), as an apt.conf."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    return "".join(f"{line}\n" for line in dump.splitlines() if _REACH.match(line))


def apt_sources(codename: str, folder: Path = Path("/etc/apt")) -> list[Path]:
    """The files that name Debian's own archives of the suite `codename`, not only third-party packages for it."""
    suite = re.compile(rf"(?:^|\s){codename}(?:-security|-updates)(?:\s|$|/)")
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    return [f for f in files if f.suffix in (".list", ".sources") and f.is_file() and suite.search(f.read_text())]


def _path(word: str) -> Path | None:
    if word.startswith("file:"):
        return Path(unquote(urlsplit(word).path)).parent
    return Path(word) if word.startswith("/") else None
