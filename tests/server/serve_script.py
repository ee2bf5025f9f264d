"""`longturn serve` without a model, for tests that need a whole server process: PORT FACTORY DRAIN_S [SETTINGS].

SETTINGS is a JSON object of more server settings.
"""

from __future__ import annotations

import json
import sys

from longturn.config import EngineConfig, ServerConfig
from longturn.errors import LongturnError
from longturn.frontend.remote_engine import RemoteEngine
from longturn.server.ports import ServedModel
from longturn.server.run import serve
from tests.server.byte_service import ByteService


def text_side(config: EngineConfig, engine: RemoteEngine) -> tuple[ByteService, ServedModel]:
    return ByteService(engine), ServedModel("mock", 2000)


if __name__ == "__main__":
    more = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    config = EngineConfig(server=ServerConfig(port=int(sys.argv[1]), drain_s=float(sys.argv[3]), **more))
    try:
        serve(config, build_service=text_side, engine_factory=sys.argv[2])
    except LongturnError as error:
        print(f"longturn: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
