"""Unknown body fields, ignored but reported in a header and the log."""

import logging
import re
from collections.abc import Sequence

log = logging.getLogger(__name__)

IGNORED_HEADER = "X-Tandem-Ignored-Fields"
MAX_SHOWN = 16  # names in a header
MAX_NOTED = 64  # lines in the log

_NAME = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)


def shown(names: Sequence[str]) -> str:
    """Names for a header; odd ones become "?", because clients choose them."""
    texts = [name if _NAME.fullmatch(name) else "?" for name in names[:MAX_SHOWN]]
    return ", ".join(texts + (["..."] if len(names) > MAX_SHOWN else []))


class IgnoredFields:
    """Logs each field once, a bounded number."""

    def __init__(self) -> None:
        self._noted: set[tuple[str, str]] = set()

    def note(self, path: str, names: Sequence[str]) -> None:
        for name in map(shown, zip(names)):
            if len(self._noted) == MAX_NOTED:
                return
            if (path, name) not in self._noted:
                self._noted.add((path, name))
                log.warning("%s: a request has the unknown field %s, which is ignored (not logged again)", path, name)
