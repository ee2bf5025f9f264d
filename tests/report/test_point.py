from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longturn.report.point import (
    Speculation,
    is_point,
    load_point,
    point_from_json,
    point_id,
    point_to_json,
    save_point,
)
from longturn.report.schema import ResultError, to_json
from longturn.report.series import differences, group
from tests.report.points import changed, point, server, sweep, timeline
from tests.report.samples import result


def test_round_trip(tmp_path: Path) -> None:
    for original in [*sweep(), changed(sweep()[0], timeline=timeline(), server=server())]:
        data = point_to_json(original)
        assert point_from_json(data) == original
        assert point_to_json(point_from_json(data)) == data
    save_point(sweep()[0], tmp_path / "new" / "p.json")
    assert load_point(tmp_path / "new" / "p.json") == sweep()[0]
    assert len({point_id(point_to_json(p)) for p in sweep()}) == len(sweep())


def test_what_may_be_left_out_has_its_default() -> None:
    data = json.loads(point_to_json(point("c", 1, 10.0, 5.0)))
    for field in ("layout", "flags", "speculation", "quality", "client", "environment"):
        del data[field]
    read = point_from_json(json.dumps(data).encode())
    assert (read.speculation.mode, read.layout.tensor, read.quality) == ("off", 1, None)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 99, "schema version 99"),
        (("kind",), "longturn-replay", "not a longturn-point file"),
        (("extra",), 1, "unknown field `extra`"),
        (("metrics", "ttft_ms", "p90"), "fast", r"\$.metrics.ttft_ms.p90"),
        (("source",), "guessed", "guessed"),
        (("speculation", "mode"), "some", "some"),
        (("concurrency",), 0, "concurrency must be at least 1, not 0"),
        (("platform", "chips"), -4, "platform.chips must be at least 1"),
        (("platform", "price_per_chip_hour"), -1.0, "platform.price_per_chip_hour must be 0 or more"),
        (("metrics", "interactivity", "p90"), -3.0, "metrics.interactivity.p90 must be 0 or more"),
        (("metrics", "hit_rate"), 1.5, "metrics.hit_rate must be between 0 and 1"),
        (("configuration",), "  ", "configuration is empty"),
        (("validity", "valid"), False, "validity.reasons is empty"),
    ],
)
def test_a_reader_refuses_what_it_does_not_know(path: tuple[str, ...], value: Any, message: str) -> None:
    data = json.loads(point_to_json(point("c", 1, 10.0, 5.0)))
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(ResultError, match=message) as caught:
        point_from_json(json.dumps(data).encode(), "p.json")
    assert str(caught.value).startswith("p.json: ")
    assert "\n" not in str(caught.value)


def test_other_files_are_no_points(tmp_path: Path) -> None:
    assert is_point(point_to_json(sweep()[0]))
    for data in (to_json(result()), b"", b"[1]", b"{\xff", b"{}"):
        assert not is_point(data)
        with pytest.raises(ResultError):
            point_from_json(data)
    with pytest.raises(ResultError, match=r"missing\.json"):
        load_point(tmp_path / "missing.json")


def test_points_of_one_name_share_a_curve_only_under_the_same_conditions() -> None:
    points = [
        point("a", 4, 10.0, 5.0),
        point("b", 1, 10.0, 5.0),
        point("a", 1, 10.0, 5.0, quantisation="bf16"),
        point("a", 2, 10.0, 5.0, flags={"other": "flag"}),
        point("a", 1, 10.0, 5.0, source="simulated"),
    ]
    assert [(one.name, one.points) for one in group(points)] == [
        ("a · nvfp4", (3, 0)),
        ("b", (1,)),
        ("a · bf16", (2,)),
        ("a · simulated · nvfp4", (4,)),
    ]
    assert differences(points) == {"source": ["measured", "simulated"], "quantisation": ["nvfp4", "bf16"]}
    assert differences(points[:2]) == {}


def test_price_client_and_trace_limits_part_curves_too() -> None:
    one = point("a", 1, 10.0, 5.0)
    platform = msgspec.structs.replace(one.platform, price_per_chip_hour=1.6)
    others = [
        changed(one, platform=platform),
        changed(one, client="other 1.0"),
        changed(one, traces=msgspec.structs.replace(one.traces, max_context=32768)),
    ]
    plain = changed(one, speculation=Speculation())
    for other in (*others, plain):
        assert len(group([one, other])) == 2
    assert [series.name for series in group([one, plain])] == ["a · synthetic speculation", "a · no speculation"]
    assert group([one, others[0]])[1].name == "a · 1.6 USD per chip-hour"
    assert group([one, others[2]])[1].name == "a · weka-062126, at most 32,768 tokens"
