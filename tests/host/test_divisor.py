"""core/divisor.hpp."""

from __future__ import annotations

from problems import given, st


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_divisor(host, value, number):
    divisor = host.Divisor(value)
    for dividend in {number, 0, value - 1, value, 2**31 - 1, number // value * value}:
        if dividend < 2**31:
            assert (divisor.quotient(dividend), divisor.remainder(dividend)) == divmod(dividend, value)
