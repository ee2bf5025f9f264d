from __future__ import annotations

import pytest

from longturn.config import ModelConfig
from longturn.errors import ModelError
from longturn.frontend.tokenizer import Tokenizer, load_tokenizer
from longturn.source import ModelSource, resolve_source


@pytest.fixture(scope="session")
def embedded_source() -> ModelSource:
    try:
        return resolve_source(ModelConfig())
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm(embedded_source: ModelSource) -> Tokenizer:
    return load_tokenizer(embedded_source)
