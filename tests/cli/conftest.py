from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench.fake_server import FakeServer, running


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
def fake_url(fake: FakeServer) -> Iterator[str]:
    with running(fake) as url:
        yield url
