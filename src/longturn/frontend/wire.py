"""What a server and its engine process say to each other: two ZeroMQ frames, a tag and a msgpack payload.

Records are encoded as they are (msgspec knows frozen dataclasses); token ids are already bytes in them. A union
never crosses: the tag frame says which record follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import EngineRequest, StepOutputs
from longturn.frontend.engine_pump import Abort, CacheReset, Command, Rejection, ResetCache, Stop


@dataclass(frozen=True, slots=True)
class StartupError:
    """The engine could not be built: the line for people, and the exit code that goes with it."""

    line: str
    exit_code: int


Event = ExecutorInfo | StartupError | StepOutputs | Rejection | CacheReset
"""From the engine process. `ExecutorInfo` means that it is ready."""

_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS: dict[bytes, msgspec.msgpack.Decoder[Command]] = {
    b"add": msgspec.msgpack.Decoder(EngineRequest),
    b"abort": msgspec.msgpack.Decoder(Abort),
    b"reset_cache": msgspec.msgpack.Decoder(ResetCache),
    b"stop": msgspec.msgpack.Decoder(Stop),
}
_EVENTS: dict[bytes, msgspec.msgpack.Decoder[Event]] = {
    b"ready": msgspec.msgpack.Decoder(ExecutorInfo),
    b"startup_error": msgspec.msgpack.Decoder(StartupError),
    b"outputs": msgspec.msgpack.Decoder(StepOutputs),
    b"rejection": msgspec.msgpack.Decoder(Rejection),
    b"cache_reset": msgspec.msgpack.Decoder(CacheReset),
}
_TAGS: dict[type[object], bytes] = {
    EngineRequest: b"add",
    Abort: b"abort",
    ResetCache: b"reset_cache",
    Stop: b"stop",
    ExecutorInfo: b"ready",
    StartupError: b"startup_error",
    StepOutputs: b"outputs",
    Rejection: b"rejection",
    CacheReset: b"cache_reset",
}


def encode_message(message: Command | Event) -> list[bytes]:
    """Frames of one message."""
    return [_TAGS[type(message)], _ENCODER.encode(message)]


def decode_command(frames: list[bytes]) -> Command:
    """A message to the engine process. Raises KeyError or msgspec.DecodeError when it is none."""
    tag, payload = frames
    return _COMMANDS[tag].decode(payload)


def decode_event(frames: list[bytes]) -> Event:
    """A message from the engine process. Raises KeyError or msgspec.DecodeError when it is none."""
    tag, payload = frames
    return _EVENTS[tag].decode(payload)
