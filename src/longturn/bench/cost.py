"""What tokens cost in money and energy.

These are not interpolated: between two measured points, interpolate the throughput and divide then. The reciprocal of a
curve through rates is not a curve through reciprocals.
"""

from __future__ import annotations

SECONDS_PER_HOUR = 3600.0


def cost_per_million_tokens(tokens_per_s_per_chip: float, price_per_chip_hour: float) -> float:
    """Money for a million tokens, in the currency of the price.

    Args:
        tokens_per_s_per_chip: total, input or output tokens: the cost is that of what was counted.
        price_per_chip_hour: whatever the price includes (rent, or owning with its power) is the caller's to say.

    Raises:
        ValueError: no throughput, or a negative price.
    """
    _check_rate(tokens_per_s_per_chip)
    if not price_per_chip_hour >= 0:
        raise ValueError(f"the price must be 0 or more, not {price_per_chip_hour}")
    return price_per_chip_hour * 1e6 / (SECONDS_PER_HOUR * tokens_per_s_per_chip)


def tokens_per_joule(tokens_per_s_per_chip: float, power_w_per_chip: float) -> float:
    """Tokens for one joule of the power that a chip is given, its share of the host, network and cooling included.

    Raises:
        ValueError: no throughput, or no power.
    """
    _check_rate(tokens_per_s_per_chip)
    if not power_w_per_chip > 0:
        raise ValueError(f"the power must be more than 0, not {power_w_per_chip}")
    return tokens_per_s_per_chip / power_w_per_chip


def _check_rate(tokens_per_s_per_chip: float) -> None:
    if not tokens_per_s_per_chip > 0:
        raise ValueError(f"the throughput must be more than 0, not {tokens_per_s_per_chip}")
