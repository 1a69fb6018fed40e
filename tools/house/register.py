"""The register of features, features.toml: what each owns, where others name it, what has run it and what it gains."""

import datetime
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from tools.house.seams import BASE_PATH
from tools.house.tree import Tree, area_of
from tools.house.words import NAME, spaced

FILE = "features.toml"
CODE = (".py", ".c", ".h", ".cu", ".js")
SOURCE = (*CODE, ".css", ".html", ".sh", ".yaml", "Dockerfile")


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hardware that has run a feature. Only "CPU", where the tests run every day, needs no date and no report."""

    what: str
    date: datetime.date | None = None
    report: str = ""


class Gain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    figure: str
    report: str


class Feature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of features.toml, which says what its fields are."""

    flag: str
    rooms: list[str]
    words: list[str]
    hardware: list[Run]
    gain: Gain | Literal["none on record"]
    tests: list[str]
    base: bool = False


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    base: list[str] = []
    feature: dict[str, Feature] = {}


class Register:
    """features.toml beside the files of a tree. Raises msgspec.ValidationError where a field is wrong."""

    def __init__(self, tree: Tree) -> None:
        contents = msgspec.toml.decode(tree.text(FILE), type=Contents)
        self.base, self.features = contents.base, contents.feature
        self.texts: dict[str, str] = {module.path: module.text for module in tree.of("product", "tests")}
        self.product = [path for path in tree.files if area_of(path) == "product" and path.endswith(SOURCE)]
        self.texts.update((path, tree.text(path)) for path in self.product if path not in self.texts)
        self._tree = tree
        self._named_by: dict[str, frozenset[str]] = {}

    def files(self, pattern: str) -> Sequence[str]:
        """Files of the product or of the tests: "a/" is all below a folder, "*" a part of one name."""
        if pattern in self.texts:
            return [pattern]
        start = pattern.partition("*")[0]
        if start == pattern and not pattern.endswith("/"):
            return []
        matches = re.compile(re.escape(pattern).replace(r"\*", "[^/]*") + (".*" if pattern.endswith("/") else ""))
        return [path for path in self.texts if path.startswith(start) and matches.fullmatch(path)]

    @cached_property
    def owners(self) -> Mapping[str, Sequence[str]]:
        """File -> the features that own it. A feature takes its files out of those of the base path."""
        found: dict[str, list[str]] = {}
        for base in (False, True):
            taken = frozenset(found)
            for name, feature in self.features.items():
                if feature.base == base:
                    for path in self._all(feature.rooms) - taken:
                        found.setdefault(path, []).append(name)
        return found

    def _all(self, patterns: Sequence[str]) -> set[str]:
        return {path for pattern in patterns for path in self.files(pattern)}

    def own(self, name: str) -> int:
        """Lines of its rooms."""
        return sum(self.texts[path].count("\n") for path, names in self.owners.items() if name in names)

    def tests(self, name: str) -> int:
        """Lines of its tests."""
        return sum(self.texts[path].count("\n") for path in self._all(self.features[name].tests))

    def mentions(self, path: str) -> Iterator[frozenset[str]]:
        """The features that a line of a file names, its owners left out; lines that name none are skipped."""
        own = frozenset(self.owners.get(path, ()))
        for line in self.texts[path].split("\n"):
            named = frozenset[str]().union(*map(self._features_named, NAME.findall(line))) - own
            if named:
                yield named

    @cached_property
    def woven(self) -> Mapping[str, Counter[str]]:
        """Feature -> lines outside its rooms that name it, by file."""
        found: dict[str, Counter[str]] = {name: Counter() for name in self.features}
        for path in (path for path in self.product if path.endswith(CODE)):
            for named in self.mentions(path):
                for name in named:
                    found[name][path] += 1
        return found

    def _features_named(self, token: str) -> frozenset[str]:
        if (found := self._named_by.get(token)) is None:
            words = spaced(token)
            hits = self._patterns.items() if self._any_word.search(words) else ()
            found = self._named_by[token] = frozenset(name for name, pattern in hits if pattern.search(words))
        return found

    @cached_property
    def _patterns(self) -> Mapping[str, re.Pattern[str]]:
        return {name: _words(feature.words) for name, feature in self.features.items()}

    @cached_property
    def _any_word(self) -> re.Pattern[str]:
        return _words([word for feature in self.features.values() for word in feature.words])

    def problems(self) -> Iterator[str]:
        """What is wrong with the register, a sentence each."""
        for path, names in self.owners.items():
            if len(names) > 1:
                yield f"{path} is owned twice: by {' and '.join(names)}"
        for path in sorted(set(self.product) - set(self.owners) - self._all(self.base)):
            yield f"{path} belongs to no feature and to no folder of the base path"
        patterns = [("base", self.base)]
        patterns += [(f"{name}: rooms", feature.rooms) for name, feature in self.features.items()]
        patterns += [(f"{name}: tests", feature.tests) for name, feature in self.features.items()]
        for where, listed in patterns:
            yield from (f"{where}: {pattern} matches no file" for pattern in listed if not self.files(pattern))
        for name, feature in self.features.items():
            idle = (word for word in feature.words if not _words([word]).search(self._vocabulary))
            yield from (f"{name}: words: {word} is in no name of the product" for word in idle)
            yield from self._unproven(name, feature)

    @cached_property
    def _vocabulary(self) -> str:
        """The words of each name of the product, a line a name."""
        names = {name for path in self.product for name in NAME.findall(self.texts[path])}
        return "\n".join(map(spaced, names))

    def _unproven(self, name: str, feature: Feature) -> Iterator[str]:
        if not feature.hardware:
            yield f"{name}: hardware names nothing that has run it"
        for run in feature.hardware:
            if run.what != "CPU" and not (run.date and run.report):
                yield f"{name}: hardware {run.what} needs a date and a report"
        reports = [run.report for run in feature.hardware if run.report]
        reports += [feature.gain.report] if isinstance(feature.gain, Gain) else []
        yield from (f"{name}: there is no report {path}" for path in reports if path not in self._tree.files)

    def table(self) -> str:
        """The register in Markdown, the largest features first."""
        head = "| feature | own | woven (files) | tests | tests / own, % | hardware | gain |"
        rows = []
        for name, feature in sorted(self.features.items(), key=lambda item: -self.own(item[0])):
            own, tests, woven = self.own(name), self.tests(name), self.woven[name]
            ran = ", ".join(f"{run.what} {run.date or ''}".strip() for run in feature.hardware)
            gain = feature.gain if isinstance(feature.gain, str) else f"{feature.gain.figure} ({feature.gain.report})"
            ratio = round(100 * tests / max(own, 1))
            cells = (name, own, f"{woven.total()} ({len(woven)})", tests, ratio, ran, gain)
            rows.append("| " + " | ".join(map(str, cells)) + " |")
        return "\n".join([head, "|---|---:|---:|---:|---:|---|---|", *rows]) + "\n"


def _words(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(patterns)})\b" if patterns else "(?!)")


def inconsistencies(tree: Tree) -> Mapping[str, int]:
    return dict.fromkeys(Register(tree).problems(), 1)


def woven(tree: Tree) -> Mapping[str, int]:
    """Feature -> lines of the product outside its rooms that name it. What belongs to the base path may be named."""
    register = Register(tree)
    return {name: files.total() for name, files in register.woven.items() if not register.features[name].base}


def weight_of_tests(tree: Tree) -> Mapping[str, int]:
    """Feature -> lines of its tests, in percent of its own."""
    register = Register(tree)
    return {name: 100 * register.tests(name) // max(1, register.own(name)) for name in register.features}


def lines_naming_features(tree: Tree) -> Mapping[str, int]:
    """File of the base path -> its lines that name a feature which neither owns the file nor belongs to the base path."""
    register = Register(tree)
    base = {name for name, feature in register.features.items() if feature.base}
    there = [path for path in BASE_PATH if path in register.texts]
    found = {path: sum(bool(named - base) for named in register.mentions(path)) for path in there}
    return {"all base path": sum(found.values()), **found}
