"""What sentence-transformers writes beside a checkpoint; what is not served is refused by the name of its file."""

from pathlib import Path
from typing import Any

import pytest

from engine.model_files.head_config import read_pooling
from service.flags import ConfigError
from tests.models.headless import write_modules
from tests.models.tiny_checkpoints import write_json

MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}


def pooling(folder: Path, modules: dict[str, str], mode: dict[str, Any]) -> tuple[str, bool] | None:
    folder.mkdir(exist_ok=True)
    write_modules(folder, modules)
    if "1_Pooling" in modules:
        write_json(folder / "1_Pooling" / "config.json", mode)
    return read_pooling(folder)


def test_old_and_new_files_name_the_mode(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None, "no modules.json"
    assert pooling(tmp_path, {"": "Transformer"}, {}) is None
    assert pooling(tmp_path, MODULES, {"pooling_mode": "mean"}) == ("mean", True)
    old = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    assert pooling(tmp_path, {"": "Transformer", "1_Pooling": "Pooling"}, old) == ("last", False)


@pytest.mark.parametrize(
    ("modules", "mode", "message"),
    [
        (MODULES, {"pooling_mode": "cls"}, "cls is not supported"),
        (MODULES, {"pooling_mode": ["mean", "lasttoken"]}, "mean, lasttoken is not supported"),
        (MODULES, {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not supported"),
        (MODULES, {}, "pooling_mode: none is not supported"),
        ({**MODULES, "3_Dense": "Dense"}, {}, "modules.json: module Dense is not supported"),
        ({"": "Transformer", "2_Normalize": "Normalize", "1_Pooling": "Pooling"}, {}, "in this order"),
        ({"": "Transformer", "../else": "Pooling"}, {}, "must be the name of a folder"),
        ({"": "Transformer", "2_Pooling": "Pooling"}, {}, "config.json: is not readable JSON"),
    ],
)
def test_what_is_not_served_is_named(
    modules: dict[str, str], mode: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        pooling(tmp_path / "model", modules, mode)
    assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "{}", "[1]", "[" * 100000])
def test_broken_modules_are_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ConfigError, match=r"modules\.json: .*download the file again"):
        read_pooling(tmp_path)
