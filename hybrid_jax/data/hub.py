"""What is asked of the Hugging Face hub: the revision of a data set or model, whether it may be read, and a model's
tokenizer.json. `huggingface_hub` is imported here only, and comes with `tokenizers`."""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from hybrid_jax.data.streams import one_line
from hybrid_jax.errors import UserError

_TIMEOUT = 4.0  # seconds, for the first answer: without network the package itself asks six times in 23 s
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_PATHS = {"dataset": "datasets/", "model": ""}


def is_name(text: str) -> bool:
    """Whether this can be OWNER/NAME, or NAME, of the hub."""
    return _NAME.fullmatch(text) is not None and not text.endswith(".json")


def revision(kind: str, name: str, instead: str) -> str:
    """The commit (40 hex digits) that the hub now has of a "dataset" or "model", which may be read.

    Raises UserError, whose line begins with the name, for what is not there, gated or private, and without network;
    `instead` is what else can be done then.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    ask = hub.dataset_info if kind == "dataset" else hub.model_info
    try:
        with quiet():
            found = ask(name, timeout=_TIMEOUT)
            if found.gated:  # for everyone to see, but not to read
                hub.auth_check(name, repo_type=kind)
    except Exception as error:  # of the hub, or of the HTTP package below it
        raise refusal(kind, name, error, instead) from None
    return str(found.sha)


def tokenizer(name: str) -> tuple[Path, str]:
    """(tokenizer.json, commit) of a model: of the hub's cache on this machine if it is there, else downloaded.

    Raises UserError as `revision` does, and for a model without one.
    """
    import huggingface_hub

    with quiet():
        cached = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
    if not isinstance(cached, str):
        instead = "give a tokenizer.json or a folder with one"
        revision("model", name, instead)
        try:
            with quiet():
                cached = huggingface_hub.HfApi().hf_hub_download(name, "tokenizer.json")
        except Exception as error:
            raise refusal("model", name, error, instead) from None
    return Path(cached), Path(cached).parent.name  # snapshots/COMMIT/tokenizer.json


def refusal(kind: str, name: str, error: Exception, instead: str) -> UserError:
    """The line for what the hub, or the way to it, raised."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{_PATHS[kind]}{name}"
    if isinstance(error, errors.GatedRepoError):
        return UserError(f"{name}: is gated; accept its terms at {page} and run `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(f"{name}: the hub has no such {kind}, or it is private: mend the name or run `hf auth login`")
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return UserError(
            f"{name}: has no tokenizer.json; name a model that has one, or save its tokenizer as one with transformers "
            "(AutoTokenizer.from_pretrained, save_pretrained) and give the folder"
        )
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{name}: is no name of the hub (OWNER/NAME)")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(f"{name}: HF_HUB_OFFLINE is set, so the hub is not asked; unset it, or {instead}")
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status in (401, 403):
        return UserError(f"{name}: the hub refuses access (status {status}): mend the name or run `hf auth login`")
    if status:
        return UserError(f"{name}: the hub answers with status {status}; give the command again later, or {instead}")
    return UserError(f"{name}: no connection to the hub ({one_line(error)}); {instead}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leaves what fails to the exception: no lines about retries."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets", "fsspec")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
