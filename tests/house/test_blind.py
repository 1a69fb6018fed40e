"""The base path names no feature: red on a planted file that does."""

from pathlib import Path

from tests.house.planted import plant
from tools.house.register import FILE, lines_naming_features

REGISTER = """
[feature.lora]
flag = ""
rooms = ["engine/executor/passes.py"]
words = ["adapters?"]
hardware = [{ what = "CPU" }]
gain = "none on record"
tests = []

[feature.ranks]
base = true
flag = ""
rooms = []
words = ["ranks?"]
hardware = [{ what = "CPU" }]
gain = "none on record"
tests = []
"""
NAMING = "from a import AdapterBank\n\nx = AdapterBank(adapter)\nranks = 1\n"


def test_a_line_of_the_base_path_that_names_a_feature_is_counted(tmp_path: Path) -> None:
    files = dict.fromkeys(("engine/core/memory.py", "engine/core/other.py", "engine/executor/passes.py"), NAMING)
    found = lines_naming_features(plant(tmp_path, {**files, FILE: REGISTER}))
    assert found == {"engine/core/memory.py": 2, "engine/executor/passes.py": 0, "all base path": 2}


def test_a_base_path_without_features_counts_nothing(tmp_path: Path) -> None:
    found = lines_naming_features(plant(tmp_path, {"engine/core/memory.py": "ranks = 1\n", FILE: REGISTER}))
    assert set(found.values()) == {0}
