"""lm-evaluation-harness as this package uses it: imported late, without bars and logs of its own."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import Sequence

from hybrid_jax.errors import UserError

_HUB_SECONDS = 10
_QUIET = {
    "TQDM_DISABLE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DATASETS_VERBOSITY": "critical",  # what matters is raised, and told in one line
    "TRANSFORMERS_VERBOSITY": "critical",
    "HF_HUB_VERBOSITY": "critical",
    "TOKENIZERS_PARALLELISM": "false",
    "DISABLE_MULTIPROC": "1",  # of its bootstrap, which would fork a process that runs jax
}


def require(option: str, *packages: str) -> None:
    """Raises UserError, one line with the remedy, unless lm_eval and `packages` are installed."""
    missing = [name for name in ("lm_eval", *packages) if importlib.util.find_spec(name) is None]
    if "lm_eval" in missing:
        raise UserError(
            f"{option}: needs lm-evaluation-harness, which is not installed for {sys.executable}: "
            'pip install "hybrid_jax[eval]"'
        )
    if missing:
        raise UserError(f"{option}: needs packages that are not installed: pip install {' '.join(missing)}")


def prepare(names: Sequence[str]) -> None:
    """Call before anything imports lm_eval or datasets, which read their environment once. names: of tasks.

    Where nothing has to come from the Hugging Face hub, or it cannot be reached, only what is on this machine is looked
    for: else every file of every task would be asked for half a minute long. Raises UserError for a task file that is
    none.
    """
    from hybrid_jax.evaluation import tasks

    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if "HF_HUB_OFFLINE" not in os.environ and not (tasks.needs_hub(names) and _hub_answers()):
        os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    logging.getLogger("lm_eval").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module=r"(lm_eval|datasets|evaluate|transformers|huggingface_hub)\b")


def _hub_answers() -> bool:
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_HUB_SECONDS).close()
    except urllib.error.HTTPError:  # it answers
        return True
    except (OSError, ValueError):
        return False
    return True
