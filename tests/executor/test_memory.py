from __future__ import annotations

from pathlib import Path

import pytest

from longturn.errors import ConfigError
from longturn.executor.memory import check_weights_fit, usable_memory_bytes


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        ("MemFree: 1 kB\nMemTotal:  1000 kB\n", None, 1_024_000),
        ("MemTotal:  1000 kB\n", "max\n", 1_024_000),
        ("MemTotal:  1000 kB\n", "500000\n", 500_000),
        ("MemTotal:  1000 kB\n", "5000000\n", 1_024_000),
        (None, "500000\n", 500_000),
        (None, None, None),
        ("MemTotal:\n", None, None),
    ],
)
def test_the_smaller_of_machine_and_container(
    tmp_path: Path, meminfo: str | None, limit: str | None, expected: int | None
) -> None:
    for name, text in (("proc/meminfo", meminfo), ("sys/fs/cgroup/memory.max", limit)):
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).write_text(text)
    assert usable_memory_bytes(tmp_path) == expected


BF16 = [("bf16", 10_000_000_000, 20_000_000_000)]
EXPERTS = [("nvfp4", 100_000_000_000, 57_000_000_000), ("bf16", 1_000_000_000, 2_000_000_000)]


@pytest.mark.parametrize(
    ("sizes", "usable_gb", "packable", "says"),
    [
        (BF16, 41, True, None),
        (
            BF16,
            40.9,
            False,
            r"40\.0 GB of weights.* 1\.0 GB of cache\.memory_bytes, of 40\.9 GB here \(10\.0B parameters",
        ),
        (BF16, 30, True, r"of 30\.0 GB here \(model\.weights 'packed' fits with 10\.6 GB\)"),
        (BF16, 9.5, True, r"\(2\.1B parameters fit, 8\.0B with model\.weights 'packed'\)"),
        ([("q8_0", 8_000_000_000, 8_500_000_000)], 20, True, r"'packed' fits with 8\.5 GB"),
        (EXPERTS, 62, False, None),
        (EXPERTS, 61, False, r"61\.0 GB of weights, fp32 but for quantised experts"),
        (BF16, None, True, None),
        (BF16, 0.5, True, None),  # the page pool alone is too large
    ],
)
def test_weights_that_do_not_fit_are_refused(
    sizes: list[tuple[str, int, int]], usable_gb: float | None, packable: bool, says: str | None
) -> None:
    def check() -> None:
        usable_bytes = None if usable_gb is None else int(usable_gb * 1e9)
        check_weights_fit(Path("models/m"), sizes, cache_bytes=10**9, usable_bytes=usable_bytes, packable=packable)

    if says is None:
        check()
        return
    with pytest.raises(ConfigError, match=says) as caught:
        check()
    assert str(caught.value).startswith("models/m does not fit in memory: ") and "\n" not in str(caught.value)
