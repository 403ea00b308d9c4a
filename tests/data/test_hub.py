"""What is asked of the Hugging Face hub: revisions, access, tokenizers; of one on this machine, without network."""

import logging
import time

import huggingface_hub
import pytest
from huggingface_hub import constants

from hybrid_jax.data import hub
from hybrid_jax.data.hub import is_name, revision
from hybrid_jax.errors import UserError
from tests.data.hub_server import COMMIT, Repository


def message(*arguments):
    with pytest.raises(UserError) as caught:
        revision(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["dataset", "model"])
def test_revision_is_the_newest_commit(server, kind):
    server.repositories[f"{kind}s", "owner/name"] = Repository({})
    assert revision(kind, "owner/name", "") == COMMIT


@pytest.mark.parametrize("kind, page", [("dataset", "datasets/owner/name"), ("model", "owner/name")])
def test_what_may_not_be_read_is_one_line(server, kind, page):
    assert message(kind, "owner/none", "") == (
        f"owner/none: the hub has no such {kind}, or it is private: mend the name or run `hf auth login`"
    )
    server.repositories[f"{kind}s", "owner/name"] = Repository({}, gated=True)
    assert message(kind, "owner/name", "") == (
        f"owner/name: is gated; accept its terms at https://huggingface.co/{page} and run `hf auth login`"
    )
    assert message(kind, "a/b/c", "") == "a/b/c: is no name of the hub (OWNER/NAME)"
    server.status = 401
    assert message(kind, "owner/name", "") == (
        "owner/name: the hub refuses access (status 401): mend the name or run `hf auth login`"
    )
    server.status = 503
    assert message(kind, "owner/name", "wait") == (
        "owner/name: the hub answers with status 503; give the command again later, or wait"
    )


def test_without_network_it_is_one_line_at_once(server, monkeypatch, caplog):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        found = message("dataset", "owner/name", "give files")
    assert time.monotonic() - began < 4
    assert found.startswith("owner/name: no connection to the hub (") and found.endswith("); give files")
    assert not caplog.records
    huggingface_hub.close_session()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert message("model", "owner/name", "give files") == (
        "owner/name: HF_HUB_OFFLINE is set, so the hub is not asked; unset it, or give files"
    )


def test_tokenizer_is_downloaded_once_and_alone(server):
    server.repositories["models", "owner/name"] = Repository({"tokenizer.json": b"{}", "model.bin": b"large"})
    path, commit = hub.tokenizer("owner/name")
    assert path.read_bytes() == b"{}" and commit == COMMIT
    assert [path for method, path in server.asked if method == "GET" and "resolve" in path] == [
        "/owner/name/resolve/main/tokenizer.json"
    ]
    server.status = 503
    assert hub.tokenizer("owner/name") == (path, commit)


def test_names_of_the_hub():
    for name in ("gpt2", "Qwen/Qwen3-0.6B", "o_o/a.b"):
        assert is_name(name)
    for name in ("", "a/b/c", "./gpt2", "/gpt2", "~/gpt2", "models/tokenizer.json", "a b", "a/", "owner/-x"):
        assert not is_name(name)
