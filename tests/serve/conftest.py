"""One server for each module of tests, and OpenAI's client of it."""
from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def model():
    from tests.serve.client import language_model
    return language_model()


@pytest.fixture(scope="module")
def server(model):
    from tests.serve.client import running, wait_for
    with running(model) as found:
        yield found
    assert wait_for(found.nothing_left)


@pytest.fixture(scope="module")
def client(server):
    from tests.serve.client import openai_client
    return openai_client(server)
