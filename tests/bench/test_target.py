from __future__ import annotations

from typing import Any

import pytest

from longturn.bench.client import ChatClient
from longturn.bench.target import TargetModel, target_model
from tests.bench.fake_server import FakeServer, running

LONGTURN = {"version": "1.2", "quantisation": "q4_1", "weights": "packed", "kv_cache": "fp16", "device": "cpu"}


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"id": "m"}, TargetModel("m")),
        ({"id": "m", "owned_by": "vllm", "max_model_len": 4096}, TargetModel("m", 4096, "vllm")),
        ({"id": "m", "owned_by": "someone", "max_model_len": "many"}, TargetModel("m")),
        (
            {"id": "m", "owned_by": "longturn", "max_model_len": 8, "longturn": LONGTURN},
            TargetModel("m", 8, "longturn", "1.2", "q4_1", "packed", "fp16"),
        ),
        (
            {"id": "m", "owned_by": "longturn", "longturn": {"device": "cuda (NVIDIA H200)"}},
            TargetModel("m", engine="longturn", chip="NVIDIA H200"),
        ),
        (
            {"id": "m", "owned_by": "longturn", "longturn": {"quantisation": "unknown", "weights": 4}},
            TargetModel("m", None, "longturn"),
        ),
        ({"id": "m", "owned_by": "longturn", "longturn": "yes"}, TargetModel("m", None, "longturn")),
    ],
)
def test_what_an_entry_of_a_model_list_tells(entry: dict[str, Any], told: TargetModel) -> None:
    assert target_model(entry) == told


async def test_the_client_asks_for_it() -> None:
    with running(FakeServer(max_model_len=77)) as url:
        async with ChatClient(url) as client:
            assert await client.served_models() == {"fake-1": TargetModel("fake-1", 77)}
            assert await client.context_limits() == {"fake-1": 77}
