"""A Hugging Face folder, such as an export, as a model of lm-evaluation-harness, through torch and transformers.

Import after library.prepare.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from hybrid_jax import progress
from hybrid_jax.errors import UserError
from hybrid_jax.evaluation.harness import Watched

CPU_ROWS = 8  # of a batch, where no batch size is given: the harness's search for one takes minutes on a CPU


class FolderLM(Watched, HFLM):
    """The harness's own adapter. Code in the folder is run, as an export's modeling file has to be."""

    def __init__(self, folder: Path, line: progress.Line, batch_size: int, max_length: int, dtype: str):
        on_gpu = torch.cuda.is_available()
        super().__init__(
            pretrained=str(folder),
            trust_remote_code=True,
            device="cuda" if on_gpu else "cpu",
            batch_size=batch_size or ("auto" if on_gpu else CPU_ROWS),
            max_length=max_length or None,
            dtype=dtype or "auto",
        )
        self.line = line

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None) -> Any:
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def open(folder: Path, line: progress.Line, **options: Any) -> FolderLM:
    """Raises UserError, one line, for a folder that transformers cannot open."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return FolderLM(folder, line, **options)
    except Exception as error:  # of transformers, of the folder's code
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"--model: {folder} cannot be opened: {said[:400]} ({type(error).__name__})") from error
