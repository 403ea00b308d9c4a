import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.data.hub_server import serving


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A Hugging Face hub on this machine with nothing on it, which huggingface_hub asks, and an empty cache."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    with serving() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield found
    huggingface_hub.close_session()
